"""A call that is checked once and launched again and again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kiln.runtime.arguments import Given
from kiln.runtime.arrays import View, view
from kiln.runtime.decision import Decision
from kiln.runtime.device import Call, Launcher, PlainCall
from kiln.runtime.errors import ContractError
from kiln.runtime.select import Asked, Candidate

if TYPE_CHECKING:
    from kiln.runtime.operation import Operation


class BoundCall:
    """A call whose operands, outputs and kernel are fixed: `bound()` launches it, on what the arrays hold.

    It keeps its arrays alive. Threads may launch one at the same time, but not while it is updated.

    Attributes:
        outputs: the arrays it writes, as the call would return them.
    """

    def __init__(
        self,
        operation: "Operation",
        given: Given,
        decision: Decision,
        pointers: Sequence[int],
        stream: int,
        wanted: Asked,
    ) -> None:
        """Made by Operation.bind.

        Args:
            pointers: addresses read, then written, per tensor operand.
            stream: handle of the stream of launches that name none.
        """
        self._operation, self._given, self._wanted = operation, given, wanted
        self._device, self._decision, self._count = operation.device, decision, decision.count
        self._pointers, self._stream = list(pointers), stream
        self._views = [None if x is None else view(x) for x in (*given.reads, *given.writes)]
        self._calls: dict[int, Call] = {}
        self._run = self._call(stream).run
        self.outputs = operation.results(given)

    def __call__(self, stream: Any = None) -> Any:
        """Launch it; returns `outputs`. Nothing is checked, loaded, locked or asked of the driver.

        Args:
            stream: the stream of this launch, instead of the one of `bind`.

        Raises:
            DriverError: the driver refuses the launch.
            UnavailableError: the library was closed, this process was forked since it was loaded, or scratch
                is needed and was not reserved on a sealed library.
            ContractError: on the CPU, a row holds an index that is out of range.
        """
        if self._device.gone:
            self._device.check_usable()
        if stream is not None:
            return self._on(self._device.stream(stream, None))
        status = self._run()[0]
        if status:
            self._calls[self._stream].failed(status)
        self._count[0] += 1
        return self.outputs

    @property
    def candidate(self) -> Candidate | None:
        """The kernel or plan that runs; None for a call without rows or columns."""
        return self._decision.candidate

    @property
    def variant(self) -> str | None:
        """Its name."""
        return None if self.candidate is None else self.candidate.variant

    @property
    def scratch_bytes(self) -> int:
        """Scratch that a launch needs: the size of a buffer for `Library.set_scratch`."""
        return 0 if self._decision.launcher is None else self._decision.launcher.scratch_bytes

    @property
    def zeroed_bytes(self) -> int:
        """The same of scratch that is all zeros between launches (`set_scratch(..., zeroed=True)`)."""
        return 0 if self._decision.launcher is None else self._decision.launcher.zeroed_bytes

    @property
    def call(self) -> Call:
        """The launch on the stream it was bound to, without any check."""
        return self._calls[self._stream]

    @property
    def pointers(self) -> tuple[int, ...]:
        """Addresses read, then written, per tensor operand."""
        return tuple(self._pointers)

    def update(self, **arrays: Any) -> None:
        """Use other arrays from the next launch on, of the same layout, type and device as those they
        replace.

        Args:
            arrays: by the operands' names; an in/out operand that is written in place stays so.

        Raises:
            ContractError: no such operand, one that was absent, another layout, memory that is read-only or
                overlaps, or arrays that something else would run now: by their alignment, or by providers and
                disabled names that have changed. Nothing is changed.
        """
        reads, writes = list(self._given.reads), list(self._given.writes)
        views = self._views.copy()
        for name, array in arrays.items():
            self._replace(name, array, reads, writes, views)
        pointers = [0 if v is None else v.ptr for v in views]
        if self._decision.candidate is not None:
            self._check(views, pointers)
        # First, for a driver may refuse to make a tensor map.
        for call in self._calls.values():
            call.update(pointers)
        self._given = self._given._replace(reads=reads, writes=writes)
        self._views, self._pointers = views, pointers
        self.outputs = self._operation.results(self._given)

    def _replace(
        self, name: str, array: Any, reads: list[Any], writes: list[Any], views: list[View | None]
    ) -> None:
        op = self._operation.name
        positions = {t.name: i for i, t in enumerate(self._operation.sig.tensors)}
        if name not in positions:
            raise ContractError(f"{op}: {name} is not a tensor operand; bind again to change it.")
        i, count = positions[name], len(positions)
        in_place = reads[i] is not None and reads[i] is writes[i]
        try:
            new = view(array)
        except ContractError as e:
            raise ContractError(f"{op}: {name}: {e}") from None
        side = i if reads[i] is not None else count + i
        old = views[side]
        if old is None or old[1:6] != new[1:6]:
            raise ContractError(f"{op}: {name}: {_difference(old, new)}; bind again for another layout.")
        if not new.ptr and 0 not in new.shape:
            raise ContractError(f"{op}: an operand has a null address; pass an array with memory.")
        views[side] = new
        (reads if side == i else writes)[i] = array
        if in_place:
            views[count + i], writes[i] = new, array

    def _check(self, views: list[View | None], pointers: list[int]) -> None:
        count = len(views) // 2
        decision = self._operation.decided(
            views[:count], views[count:], self._given.scalars, self._given.attrs, self._wanted
        )
        if decision is not self._decision:
            # Another alignment, or other providers: what the bound launch promises must still hold.
            if decision.candidate is not self._decision.candidate:
                raise ContractError(
                    f"{decision.op}: arrays of this alignment run {decision.label} now, bound is "
                    f"{self._decision.label}; bind again."
                )
        self._decision.check(pointers)

    def _call(self, stream: int) -> Call:
        call = self._calls.get(stream)
        if call is None:
            launcher = self._decision.launcher
            if launcher is None:
                call = _Nothing()
            else:
                call = launcher.bind(self._pointers, self._given.scalars, stream)
                if launcher.scratch_bytes or launcher.zeroed_bytes:
                    call = _WithScratch(
                        self._operation, self._decision, launcher, call, self._pointers, stream
                    )
            self._calls[stream] = call
        return call

    def _on(self, stream: int) -> Any:
        call = self._call(stream)
        status = call.run()[0]
        if status:
            call.failed(status)
        self._count[0] += 1
        return self.outputs


class _Nothing:
    """The launch of a call without rows or columns."""

    def __init__(self) -> None:
        self.run = lambda: (0,)

    def update(self, pointers: Sequence[int], scratch: int = 0, zeroed: int = 0) -> None:
        """Nothing to change."""

    def failed(self, status: Any) -> None:
        """It cannot fail."""


class _WithScratch:
    """A launch that takes blocks of its stream's scratch for the time it runs."""

    def __init__(
        self,
        operation: "Operation",
        decision: Decision,
        launcher: Launcher,
        call: Call,
        pointers: Sequence[int],
        stream: int,
    ) -> None:
        self._operation, self._decision, self._launcher, self._call = operation, decision, launcher, call
        self._pointers, self._stream, self._packed = pointers, stream, (0, 0)
        self._pool = operation.device.scratch
        self._launch = call.launch if isinstance(call, PlainCall) else None
        self.run = self._run
        self.failed = call.failed

    def update(self, pointers: Sequence[int], scratch: int = 0, zeroed: int = 0) -> None:
        """See Call."""
        self._call.update(pointers)
        self._pointers, self._packed = pointers, (0, 0)

    def _run(self) -> Any:
        scratch, zeroed = self._operation.blocks(self._decision, self._launcher, self._stream)
        try:
            at = scratch[0], zeroed[0]
            if self._launch is not None:
                return self._launch(*at)
            # Of threads that launch at once one may use the other's block: a stream's launches are ordered.
            if at != self._packed:
                self._call.update(self._pointers, *at)
                self._packed = at
            return self._call.run()
        finally:
            self._pool.end(scratch, zeroed)


def _difference(old: View | None, new: View) -> str:
    if old is None:
        return "it was absent when the call was bound"
    fields = zip(View._fields[1:6], old[1:6], new[1:6], strict=True)
    return "; ".join(f"its {name} is {b}, bound is {a}" for name, a, b in fields if a != b)
