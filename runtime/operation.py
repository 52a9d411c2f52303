"""One op of a loaded library: the call, its cache of decisions, and its explanation.

The first call of a shape checks everything, selects a candidate and lays out its launch; later ones find
that by a key of
shapes, strides, types and alignments, and only check what depends on addresses and values.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kiln.runtime.alias import Overlap, check_overlaps
from kiln.runtime.arguments import Arguments, Given
from kiln.runtime.arrays import view
from kiln.runtime.bind import Binder, Bound, Output
from kiln.runtime.device import Device, Launcher
from kiln.runtime.entities import Kernel, Plan, Signature
from kiln.runtime.errors import ContractError, KilnError, ProviderError, UnavailableError
from kiln.runtime.expr import names
from kiln.runtime.plan import Args, Attrs, PlanLauncher, Views
from kiln.runtime.provided import CountingLauncher, ProviderLauncher
from kiln.runtime.providers import Provider, Providers
from kiln.runtime.recipe import make_recipe, shape_args
from kiln.runtime.select import (
    Candidate,
    Explanation,
    Verdict,
    Wanted,
    in_mode,
    nothing_runs,
    ordered,
    verdict,
    why_not_call,
    why_passed,
)

Asked = tuple[str, str | None, str | None, str | None] | Wanted
"""The fields of a Wanted, not yet made one: most calls only look a decision up."""

MAX_DECISIONS = 4096
"""Decisions an op remembers; a workload with more shapes than this starts over."""


class Host(Protocol):
    """What an operation needs of its library."""

    device: Device
    providers: Providers

    @property
    def disabled(self) -> Mapping[str, str]:
        """Names that must not run -> who said so."""

    def function(self, target: str, kernel: Kernel) -> Any:
        """The loaded entry of a kernel."""

    def operation(self, target: str, name: str) -> "Operation":
        """Another op of the same manifest."""

    def check_open(self) -> None:
        """Refuse a closed library."""


@dataclass(slots=True)
class Decision:
    """What a call of one shape does.

    Attributes:
        candidate: what runs; None where there is nothing to compute.
        launcher: how.
        outputs: (tensor position, what to allocate).
        overlaps: pairs of operands whose addresses must be compared at each call.
        count: the counter of the candidate.
    """

    candidate: Candidate | None
    launcher: Launcher | None
    outputs: tuple[tuple[int, Output], ...]
    overlaps: tuple[Overlap, ...]
    count: list[int]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A call that is ready to run again and again.

    Attributes:
        candidate: the kernel or plan that runs; None for a call without rows.
        launch: queue it (CUDA) or run it (CPU) on the same arrays; nothing is checked again.
        outputs: the arrays it writes, as the call would return them.
        pointers: addresses read, then written, per tensor operand.
    """

    candidate: Candidate | None
    launch: Callable[[], None]
    outputs: Any
    pointers: tuple[int, ...]


class Operation:
    """An op or recipe of a library; call it with operands by position or by name."""

    def __init__(
        self, name: str, sig: Signature, target: str, candidates: list[Kernel | Plan], host: Host
    ) -> None:
        self.name = name
        self.sig = sig
        self.target = target
        self.candidates = ordered(candidates, target)
        self.counts: dict[str, list[int]] = {c.variant: [0] for c in self.candidates}
        self.__doc__ = sig.doc
        self._host = host
        self.device = host.device
        self._arguments = Arguments(name, sig)
        self._binder = Binder(name, sig, host.device.ordinal)
        self._size = len(sig.tensors)
        positions = {t.name: i for i, t in enumerate(sig.tensors)}
        self._returned = [positions[n] for n in sig.returns]
        self._key_scalars = self._shaping_scalars()
        self._decisions: dict[tuple[Any, ...], Decision] = {}

    def __repr__(self) -> str:
        operands = ", ".join(o.name for o in self.sig.operands)
        return f"<{self.name}({operands}) on {self.device.label}>"

    def _shaping_scalars(self) -> list[int]:
        trees: list[Any] = [p for p, _ in self.sig.constraints] + [
            e for t in self.sig.tensors for e in t.shape
        ]
        for c in self.candidates:
            trees += [] if isinstance(c, Kernel) else [c.when, *(e for t in c.temps for e in t.shape)]
        found = {name for tree in trees for head, name in names(tree) if head == "arg"}
        found |= {name for c in self.candidates if isinstance(c, Kernel) for name in shape_args(self.sig, c)}
        binding = {i for i, _ in self._binder.dim_scalars}
        return [i for i, o in enumerate(self.sig.scalars) if o.name in found or i in binding]

    def __call__(
        self,
        *operands: Any,
        out: Any = None,
        stream: Any = None,
        mode: str = "exact",
        tier: str | None = None,
        variant: str | None = None,
        isa: str | None = None,
        **named: Any,
    ) -> Any:
        """Run the op.

        Args:
            operands: in declared order, outputs left out.
            out: the array to write, or a tuple of them in return order; None allocates (or writes an in/out
                operand in place).
            stream: a CUDA stream: a handle or an object that has one.
            mode: "fast" lets kernels with an envelope contract go first.
            tier: only candidates of this tier.
            variant: only this candidate.
            isa: only kernels of this CPU tier.
            named: operands, scalars and attributes by name.

        Returns:
            The written array, or a tuple of them in return order.

        Raises:
            ContractError: the call breaks the op's contract.
            SelectionError: no candidate may run it.
        """
        given, decision, pointers, handle = self._ready(
            operands, named, out, stream, (mode, tier, variant, isa)
        )
        if decision.launcher is not None:
            decision.launcher.run(pointers, given.scalars, handle)
            decision.count[0] += 1
        return self._results(given)

    def resolve(
        self,
        *operands: Any,
        out: Any = None,
        stream: Any = None,
        mode: str = "exact",
        tier: str | None = None,
        variant: str | None = None,
        isa: str | None = None,
        **named: Any,
    ) -> Resolved:
        """Everything a call does but the launch: for benchmarks and CUDA graphs. Arguments as for a call."""
        given, decision, pointers, handle = self._ready(
            operands, named, out, stream, (mode, tier, variant, isa)
        )
        launcher, scalars = decision.launcher, given.scalars

        def launch() -> None:
            if launcher is not None:
                launcher.run(pointers, scalars, handle)

        return Resolved(decision.candidate, launch, self._results(given), tuple(pointers))

    def explain(
        self,
        *operands: Any,
        out: Any = None,
        mode: str = "exact",
        tier: str | None = None,
        variant: str | None = None,
        isa: str | None = None,
        **named: Any,
    ) -> Explanation:
        """Every candidate in order, why each is passed over, and which runs. Loads and launches nothing."""
        given = self._arguments.sort(operands, named, out)
        reads, writes = self._views(given)
        bound = self._bind(reads, writes, given.scalars, given.attrs)
        wanted = Wanted(mode, tier, variant, isa)
        found = [v for v, _, _ in self._judge(bound, reads, writes, given.scalars, wanted)]
        return Explanation(self.name, self.device.label, tuple(found))

    def shapes(self, *operands: Any, **named: Any) -> dict[str, Output]:
        """Shape and element type of each output that a call would allocate; operands may be views of no
        memory. Loads and launches nothing.

        Raises:
            ContractError: the call breaks the op's contract.
        """
        given = self._arguments.sort(operands, named, None)
        reads, writes = self._views(given)
        bound = self._bind(reads, writes, given.scalars, given.attrs)
        return {self.sig.tensors[i].name: o for i, o in bound.outputs.items()}

    def check(self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Wanted) -> None:
        """Refuse a call that no candidate may run; nothing is loaded."""
        bound = self._bind(reads, writes, args, attrs)
        if not bound.empty:
            self._choose(bound, reads, writes, args, wanted)

    def launch(
        self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Wanted, stream: int
    ) -> None:
        """Run a call whose outputs are all given, for a plan's step."""
        decision = self._decide(reads, writes, args, attrs, wanted)
        pointers = _pointers(reads) + _pointers(writes)
        if decision.overlaps:
            check_overlaps(self.name, decision.overlaps, pointers)
        if decision.launcher is not None:
            decision.launcher.run(pointers, args, stream)
            decision.count[0] += 1

    def _ready(
        self,
        operands: tuple[Any, ...],
        named: dict[str, Any],
        out: Any,
        stream: Any,
        wanted: Asked,
    ) -> tuple[Given, Decision, list[int], int]:
        self._host.check_open()
        given = self._arguments.sort(operands, named, out)
        reads, writes = self._views(given)
        for v in reads:
            if v is not None and not v[0] and 0 not in v[1]:
                raise ContractError(f"{self.name}: an operand has a null address; pass an array with memory.")
        decision = self._decide(reads, writes, given.scalars, given.attrs, wanted)
        pointers = _pointers(reads) + _pointers(writes)
        example = None
        for example in given.reads:
            if example is not None:
                break
        handle = self.device.stream(stream, example)
        for i, o in decision.outputs:
            array = given.writes[i] = self.device.allocate(example, o.shape, o.dtype, handle)
            pointers[self._size + i] = view(array).ptr
        if decision.overlaps:
            check_overlaps(self.name, decision.overlaps, pointers)
        return given, decision, pointers, handle

    def _results(self, given: Given) -> Any:
        if len(self._returned) == 1:
            return given.writes[self._returned[0]]
        return tuple(given.writes[i] for i in self._returned)

    def _views(self, given: Given) -> tuple[Views, Views]:
        reads: Views = []
        writes: Views = []
        try:
            for r, w in zip(given.reads, given.writes, strict=True):
                read = None if r is None else view(r)
                reads.append(read)
                writes.append(None if w is None else read if w is r else view(w))
        except ContractError as e:
            raise ContractError(f"{self.name}: {self.sig.tensors[len(writes)].name}: {e}") from None
        return reads, writes

    def _bind(self, reads: Views, writes: Views, args: Args, attrs: Attrs) -> Bound:
        named = {a.name: v for a, v in zip(self.sig.attrs, attrs, strict=True)}
        return self._binder.bind(reads, writes, args, named)

    def _decide(self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Asked) -> Decision:
        key: list[Any] = [attrs, wanted]
        for v in reads:
            if v is None:
                key.append(None)
            else:
                key += (v.shape, v.strides, v.dtype, v.device, v.ptr & -v.ptr & 255)
        for v in writes:
            if v is None:
                key.append(None)
            else:
                key += (
                    v.shape,
                    v.strides,
                    v.dtype,
                    v.device,
                    v.ptr & -v.ptr & 255,
                    v.readonly,
                )
        key += [args[i] for i in self._key_scalars]
        found = self._decisions.get(tuple(key))
        return (
            found if found is not None else self._decide_anew(tuple(key), reads, writes, args, attrs, wanted)
        )

    def _decide_anew(
        self, key: tuple[Any, ...], reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Asked
    ) -> Decision:
        # Those that a change of providers or disabled names throws away while this one is made.
        decisions = self._decisions
        bound = self._bind(reads, writes, args, attrs)
        outputs = tuple(bound.outputs.items())
        if bound.empty:
            decision = Decision(None, None, outputs, (), [0])
        else:
            candidate, launcher = self._choose(bound, reads, writes, args, Wanted(*wanted))
            if isinstance(candidate, Kernel):
                recipe = make_recipe(candidate, bound, self.sig)
                launcher = self.device.launcher(candidate, self.function(candidate), recipe)
            pairs = Overlap.pairs(self.sig, bound, reads, writes, candidate, self.callee)
            providers = self._host.providers
            if launcher is not None and providers.counting and Wanted(*wanted).below is None:
                launcher = CountingLauncher(launcher, candidate.variant, providers.tally(self.name))
            # A provider counts for itself: it may decline.
            count = [0] if isinstance(candidate, Provider) else self.counts[candidate.variant]
            decision = Decision(candidate, launcher, outputs, pairs, count)
        if len(decisions) >= MAX_DECISIONS:
            decisions.clear()
        decisions[key] = decision
        return decision

    def function(self, kernel: Kernel) -> Any:
        """The loaded entry of one of its kernels."""
        return self._host.function(self.target, kernel)

    def forget(self) -> None:
        """Decide anew from the next call on: providers or disabled names have changed."""
        self._decisions = {}

    def callee(self, name: str) -> "Operation":
        """The op that a step of a plan calls."""
        return self._host.operation(self.target, name)

    def _choose(
        self, bound: Bound, reads: Views, writes: Views, args: Args, wanted: Wanted
    ) -> tuple[Candidate, Launcher | None]:
        found: list[Verdict] = []
        for v, candidate, launcher in self._judge(bound, reads, writes, args, wanted):
            if v.why is None:
                return candidate, launcher
            found.append(v)
        raise nothing_runs(self.name, self.device.label, found)

    def _judge(
        self, bound: Bound, reads: Views, writes: Views, args: Args, wanted: Wanted
    ) -> Iterator[tuple[Verdict, Candidate, Launcher | None]]:
        """Every candidate with its verdict, in the order in which they are tried."""
        if wanted.mode not in ("exact", "fast"):
            raise ContractError(f"{self.name}: found mode={wanted.mode!r}, expected 'exact' or 'fast'.")
        providers = self._host.providers
        for c in in_mode(providers.merged(self.name, self.candidates), wanted):
            launchers: list[Launcher] = []

            def check(other: Plan | Provider, launchers: list[Launcher] = launchers) -> str | None:
                views = reads, writes
                if isinstance(other, Provider):
                    tally = providers.tally(self.name)
                    launchers.append(ProviderLauncher(other, self, bound, views, wanted, tally))
                    return None
                try:
                    launchers.append(
                        PlanLauncher(other, self.sig, bound, views, args, self.callee, self.device, wanted)
                    )
                except (UnavailableError, ProviderError):
                    raise
                except KilnError as e:
                    return str(e)
                return None

            why = why_passed(c, wanted, self._host.disabled, self._refusal)
            why = why if why is not None else why_not_call(c, bound, check)
            yield verdict(c, why), c, launchers[0] if launchers else None

    def _refusal(self, c: Candidate) -> str | None:
        if isinstance(c, Provider):
            return self._host.providers.refusal(c)
        return self.device.refusal(c) if isinstance(c, Kernel) else None


def _pointers(views: Views) -> list[int]:
    return [0 if v is None else v.ptr for v in views]
