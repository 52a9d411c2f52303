"""What takes more than one device: the same calls on all of them at once, a thread and a context each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack

from kiln.runtime.errors import ContractError, KilnError
from kiln.runtime.load import Library
from kiln.runtime.scratch import ScratchPolicy
from kiln.tools.graphs import ROUNDS, Check, Open, Selected, Stage, Subject, cuda, eager, run_call, subjects


class Place:
    """A device, a call of every kernel and plan on its memory, and what each must leave there."""

    def __init__(self, library: Library, target: str, selected: Selected) -> None:
        self.lib, self.stage = library, Stage(cuda(library))
        self.found = subjects(library, target, selected)[0]
        self.expected = [eager(library, self.stage, s, 1) for s in self.found]
        for s in self.found:
            self.stage.put(s, s.block(library, 1))

    def work(self, start: threading.Barrier, faults: list[str]) -> None:
        """Every call, again and again where that changes nothing, once all devices are ready."""
        start.wait()
        for turn in range(ROUNDS):
            for s in self.found:
                if turn and s.in_place:
                    continue
                try:
                    run_call(self.lib, s, self.stage.stream)
                except KilnError as e:
                    faults.append(f"{self.lib.device.label}: {s.case}: {e}")
                    return

    def faults(self) -> list[str]:
        """Calls that did not leave what they must."""
        return [
            f"{self.lib.device.label}: {s.case}: its bits change beside another device"
            for s, wanted in zip(self.found, self.expected, strict=True)
            if self.stage.get(s) != wanted
        ]


def devices(opens: Sequence[Open], target: str, selected: Selected) -> list[Check]:
    """Calls on all devices at once, and operands of another device refused by name."""
    together, strangers = Check("several devices at once"), Check("operands of another device refused")
    with ExitStack() as stack:
        places = [Place(stack.enter_context(o(ScratchPolicy())), target, selected) for o in opens]
        start = threading.Barrier(len(places))
        threads = [threading.Thread(target=p.work, args=(start, together.faults)) for p in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for place in places:
            together.count += len(place.found)
            together.faults += place.faults()
        for here, there in zip(places, [*places[1:], places[0]], strict=True):
            for s in there.found:
                strangers.count += 1
                strangers.faults += _taken(here, s)
    return [together, strangers]


def _taken(here: Place, s: Subject) -> list[str]:
    try:
        run_call(here.lib, s, here.stage.stream)
    except ContractError:
        return []
    return [f"{here.lib.device.label}: {s.case}: operands of another device were taken"]
