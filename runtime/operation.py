"""One op of a loaded library: the call, its cache of decisions, and its explanation.

The first call of a shape checks everything, selects a candidate and lays out its launch; later ones find
that by a key of
shapes, strides, types and alignments, and only check what depends on addresses and values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kiln.runtime.alias import Overlap
from kiln.runtime.arguments import Arguments, Given
from kiln.runtime.arrays import is_torch, view
from kiln.runtime.bind import Binder, Bound, Output
from kiln.runtime.bound import BoundCall
from kiln.runtime.consistency import RESERVED_NAMES
from kiln.runtime.decision import Decision
from kiln.runtime.device import Args, Device, Launcher
from kiln.runtime.entities import Kernel, Plan, Signature
from kiln.runtime.errors import ContractError, KilnError, ProviderError, UnavailableError
from kiln.runtime.expr import names
from kiln.runtime.plan import Attrs, Place, PlanLauncher, Views
from kiln.runtime.provided import CountingLauncher, ProviderLauncher
from kiln.runtime.providers import Provider, Providers
from kiln.runtime.recipe import make_recipe, shape_args
from kiln.runtime.scratch import ABSENT, Block, BlockPool
from kiln.runtime.select import (
    Asked,
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
from kiln.runtime.shortcut import UNKNOWN, Miss, ShortWay, Values

MAX_DECISIONS = 4096
"""Decisions an op remembers; a workload with more shapes than this starts over."""


class Host(Protocol):
    """What an operation needs of its library."""

    device: Device
    providers: Providers

    @property
    def sealed(self) -> bool:
        """Whether nothing may be loaded or allocated any more."""

    @property
    def disabled(self) -> Mapping[str, str]:
        """Names that must not run -> who said so."""

    def function(self, target: str, kernel: Kernel, stream: Callable[[], int] | None = None) -> Any:
        """The loaded entry of a kernel; `stream` tells whose call needs it, if one does."""

    def operation(self, target: str, name: str) -> "Operation":
        """Another op of the same manifest."""

    def check_open(self) -> None:
        """Refuse a closed library."""


class Operation(ShortWay):
    """An op or recipe of a library; call it with operands by position or by name."""

    _bound = BoundCall

    def __init__(
        self, name: str, sig: Signature, target: str, candidates: list[Kernel | Plan], host: Host
    ) -> None:
        super().__init__()
        self.name = name
        self.sig = sig
        self.target = target
        self.candidates = ordered(candidates, target)
        self.counts: dict[str, list[int]] = {c.variant: [0] for c in self.candidates}
        self.__doc__ = sig.doc
        self.device = host.device
        self._host = host
        self._arguments = Arguments(name, sig)
        self._binder = Binder(name, sig, host.device.ordinal)
        self._size = len(sig.tensors)
        positions = {t.name: i for i, t in enumerate(sig.tensors)}
        self._returned = [positions[n] for n in sig.returns]
        self._shaping: list[int] | None = None
        self._decisions: dict[tuple[Any, ...], Decision] = {}

    def __repr__(self) -> str:
        operands = ", ".join(o.name for o in self.sig.operands)
        return f"<{self.name}({operands}) on {self.device.label}>"

    def __str__(self) -> str:
        """The op in words: its operands, types, attributes, numerics and what it refuses."""
        from kiln.runtime.sheet import sheet

        return sheet(self.name, self.sig)

    @property
    def key_scalars(self) -> list[int]:
        """Positions of the scalars on whose values the choice or the shape of a launch depends."""
        if self._shaping is None:
            self._shaping = self._shaping_scalars()
        return self._shaping

    def _shaping_scalars(self) -> list[int]:
        trees: list[Any] = [p for p, _ in self.sig.constraints] + [
            e for t in self.sig.tensors for e in t.shape
        ]
        for c in self.candidates:
            if isinstance(c, Plan):
                trees += [c.when, *(e for t in c.temps for e in t.shape), *self._shaping_of_steps(c)]
        found = {name for tree in trees for head, name in names(tree) if head == "arg"}
        found |= {name for c in self.candidates if isinstance(c, Kernel) for name in shape_args(self.sig, c)}
        binding = {i for i, _ in self._binder.dim_scalars}
        return [i for i, o in enumerate(self.sig.scalars) if o.name in found or i in binding]

    def _shaping_of_steps(self, plan: Plan) -> Iterator[Any]:
        """The expressions of the scalars on which the choice of a step's kernel depends."""
        for step in plan.steps:
            callee = self.callee(step.op)
            for i in callee.key_scalars:
                name = callee.sig.scalars[i].name
                if name in step.args:
                    yield step.args[name]

    def _long(self, operands: Values, named: dict[str, Any], out: Any, stream: Any, miss: Miss) -> Any:
        given, decision, pointers, handle, _ = self._ready(operands, named, out, stream)
        self._launch(decision, pointers, given.scalars, handle)
        if miss is UNKNOWN:
            self.learn(operands, named)
        else:
            self.keep(miss, operands, named, out, decision)
        return self.results(given)

    def _launch(self, decision: Decision, pointers: Sequence[int], args: Args, handle: int) -> None:
        launcher = decision.launcher
        if launcher is None:
            return
        if launcher.scratch_bytes or launcher.zeroed_bytes:
            scratch, zeroed = self.blocks(decision, launcher, handle)
            try:
                launcher.run(pointers, args, handle, scratch.address, zeroed.address)
            finally:
                self.device.scratch.end(scratch, zeroed)
        else:
            launcher.run(pointers, args, handle)
        decision.count[0] += 1

    def blocks(self, decision: Decision, launcher: Launcher, stream: int) -> tuple[Block, Block]:
        """Blocks of the stream's scratch for one launch, of arbitrary content and all zeros, ABSENT where it
        needs none; to be given to `ScratchPool.end`.

        Raises:
            UnavailableError: it would have to grow on a sealed library or while the stream is captured.
            DriverError: there is no more memory.
        """
        pool = self.device.scratch
        scratch = zeroed = ABSENT
        size = launcher.scratch_bytes
        if size:
            scratch = pool.take(size, stream) or self._grown(pool, size, decision, stream)
        size = launcher.zeroed_bytes
        if size:
            try:
                zeroed = pool.zeroed.take(size, stream) or self._grown(pool.zeroed, size, decision, stream)
            except BaseException:
                pool.end(scratch, ABSENT)
                raise
        return scratch, zeroed

    def _grown(self, pool: BlockPool, size: int, decision: Decision, stream: int) -> Block:
        if self._host.sealed:
            raise UnavailableError(
                f"{decision.label} needs {size} bytes of {pool.kind} on this stream and the library is "
                "sealed; reserve() the call on the stream before sealing."
            )
        return pool.grow(size, stream, decision.label)

    def bind(self, *operands: Any, out: Any = None, stream: Any = None, **named: Any) -> BoundCall:
        """A call that is checked now and launched later, again and again. Arguments as for a call; outputs
        that are not given are allocated once.

        Raises:
            ContractError, SelectionError: as a call.
        """
        return self._bound(self, *self._ready(operands, named, out, stream))

    def reserve(
        self, *operands: Any, out: Any = None, stream: Any = None, threads: int = 1, **named: Any
    ) -> int:
        """Load what a call would run, and make sure that it finds its scratch on the stream.

        Args:
            operands: arrays, or `kiln.runtime.arrays.described(shape, dtype, device)` of arrays that are not
                there yet. Others as for a call.
            threads: how many will make such calls on this stream at once.

        Returns:
            Bytes of scratch of the call, whether or not its providers decline it; without zeroed scratch,
            which is reserved too (`BoundCall.zeroed_bytes` tells how much).

        Raises:
            ContractError, SelectionError: as a call.
            UnavailableError: the stream is being captured, or the caller's buffer is too small.
        """
        named, wanted = _parted(named)
        given = self._arguments.sort(operands, named, out)
        reads, writes = self._views(given)
        handle = self.device.stream(stream, _example(given))
        decision = self._decide(reads, writes, given.scalars, given.attrs, wanted, None)
        sizes = decision.blocks(given.scalars, "scratch_bytes")
        zeroed = decision.blocks(given.scalars, "zeroed_bytes")
        size, pool = max(sizes, default=0), self.device.scratch
        pool.reserve(size, handle, decision.label, threads * len(sizes))
        pool.zeroed.reserve(max(zeroed, default=0), handle, decision.label, threads * len(zeroed))
        return size

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

    def decide(
        self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Wanted, place: Place | None
    ) -> Decision:
        """What a call whose outputs are all given does, for a plan's step."""
        return self._decide(reads, writes, args, attrs, wanted, place)

    def fall_back(
        self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Wanted, stream: int
    ) -> None:
        """Run a call that a provider declined; its outputs are all given."""
        decision = self._decide(reads, writes, args, attrs, wanted, lambda: stream)
        pointers = _pointers(reads) + _pointers(writes)
        if decision.checks:
            decision.check(pointers)
        self._launch(decision, pointers, args, stream)

    def decided(self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Asked) -> Decision:
        """What a call does whose arrays were replaced."""
        return self._decide(reads, writes, args, attrs, wanted, None)

    def _ready(
        self, operands: tuple[Any, ...], named: dict[str, Any], out: Any, stream: Any
    ) -> tuple[Given, Decision, list[int], int, Asked]:
        named, wanted = _parted(named)
        self._host.check_open()
        given = self._arguments.sort(operands, named, out)
        reads, writes = self._views(given)
        for v in (*reads, *writes):
            if v is not None and not v[0] and 0 not in v[1]:
                raise ContractError(f"{self.name}: an operand has a null address; pass an array with memory.")
        example = _example(given)
        decision = self._decide(
            reads, writes, given.scalars, given.attrs, wanted, lambda: self.device.stream(stream, example)
        )
        pointers = _pointers(reads) + _pointers(writes)
        handle = self.device.stream(stream, example)
        for i, o in decision.outputs:
            self._check_allocation(decision, self.sig.tensors[i].name, example, o)
            make = self.device.maker(example, o.shape, o.dtype)
            array = given.writes[i] = make(example) if is_torch(example) else make(example, handle)
            pointers[self._size + i] = view(array).ptr
        if decision.checks:
            decision.check(pointers)
        return given, decision, pointers, handle, wanted

    def _check_allocation(self, decision: Decision, name: str, example: Any, o: Output) -> None:
        if self._host.sealed and 0 not in o.shape and self.device.allocates(example):
            raise UnavailableError(
                f"{decision.label}: the output {name} would be allocated from the driver and the library is "
                "sealed; pass out=, or torch tensors, whose outputs torch allocates."
            )

    def results(self, given: Given) -> Any:
        """What a call returns."""
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

    def _decide(
        self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Asked, place: Place | None
    ) -> Decision:
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
        key += [args[i] for i in self.key_scalars]
        whole = tuple(key)
        # Those that a change of providers or disabled names throws away while a new one is made.
        decisions = self._decisions
        found = decisions.get(whole)
        if found is None:
            found = self._decide_anew(reads, writes, args, attrs, wanted, place)
            if len(decisions) >= MAX_DECISIONS:
                decisions.clear()
            decisions[whole] = found
        return found

    def _decide_anew(
        self, reads: Views, writes: Views, args: Args, attrs: Attrs, wanted: Asked, place: Place | None
    ) -> Decision:
        bound = self._bind(reads, writes, args, attrs)
        outputs = tuple(bound.outputs.items())
        if bound.empty:
            return Decision(self.name, None, None, outputs, (), [0])
        candidate, launcher = self._choose(bound, reads, writes, args, Wanted(*wanted))
        if isinstance(candidate, Kernel):
            function = self._host.function(self.target, candidate, place)
            launcher = self.device.launcher(candidate, function, make_recipe(candidate, bound, self.sig))
        elif isinstance(launcher, PlanLauncher):
            launcher.link(args, place)
        pairs = Overlap.pairs(self.sig, bound, reads, writes, candidate, self.callee)
        if launcher is not None and self._host.providers.counting and Wanted(*wanted).below is None:
            launcher = CountingLauncher(launcher, candidate.variant, self._host.providers.tally(self.name))
        # A provider counts for itself: it may decline.
        count = [0] if isinstance(candidate, Provider) else self.counts[candidate.variant]
        return Decision(self.name, candidate, launcher, outputs, pairs, count)

    def function(self, kernel: Kernel) -> Any:
        """The loaded entry of one of its kernels."""
        return self._host.function(self.target, kernel)

    def undecide(self) -> None:
        """Decide anew from the next call on: providers or disabled names have changed."""
        # What plans call comes first: a plan that is decided meanwhile must not keep an old step.
        for c in self.candidates:
            if isinstance(c, Plan):
                for step in c.steps:
                    self.callee(step.op).undecide()
        self._decisions = {}
        self.forget()

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


def _parted(named: dict[str, Any]) -> tuple[dict[str, Any], Asked]:
    """A call's operands by name, and what it asks for beyond them."""
    if RESERVED_NAMES.isdisjoint(named):
        return named, ("exact", None, None, None, None)
    rest = {n: v for n, v in named.items() if n not in RESERVED_NAMES}
    asked = (named.get("mode", "exact"), named.get("tier"), named.get("variant"), named.get("isa"), None)
    return rest, asked


def _example(given: Given) -> Any:
    """The first array that is read."""
    return next((x for x in given.reads if x is not None), None)


def _pointers(views: Views) -> list[int]:
    return [0 if v is None else v.ptr for v in views]
