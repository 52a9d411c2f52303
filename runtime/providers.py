"""What else may run an op: providers of the caller's, in one total order with what the tree holds.

The candidates of a tree stand at priority 0 under the name `kiln`. A provider with a higher priority is asked
before them, one with a lower priority after them; equal priorities are ordered by name, byte by byte. The
order in which providers were registered never matters. A provider may decline a call, which then goes to the
next candidate below it.
"""

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from kiln.runtime.errors import ContractError, KilnError, ProviderError
from kiln.runtime.record import record

NATIVE, NATIVE_PRIORITY = "kiln", 0
"""What the candidates of the tree are called in the order of providers, and where they stand."""
REFERENCE, REFERENCE_PRIORITY = "reference", -1000
"""The CPU's kernels, run on the memory of a device that shares it: below everything else."""
DEFAULT_PRIORITY = 100
DEFAULT_CAPACITY = 64
"""Providers of one op; the C runtime has the same limit."""

Arrays = Literal["numpy", "torch", "view"]
"""What a provider gets its operands as."""


@record
class Capabilities:
    """What a device says of itself.

    Attributes:
        valid: whether the device was asked at all; everything else is 0 if not.
        major: of the compute capability; 0 on a CPU.
        minor: of the compute capability; 0 on a CPU.
        unit_count: streaming multiprocessors, or processors this process may use.
        features: names of CPU features, as /proc/cpuinfo spells them without dots and underscores.
    """

    valid: bool = False
    major: int = 0
    minor: int = 0
    unit_count: int = 0
    features: frozenset[str] = frozenset()


class Decline(KilnError):
    """Raised, or returned, by a provider that does not take a call, before it wrote anything: the next
    candidate below it gets the call."""


Supports = Callable[[Capabilities], bool]


@record
class Provider:
    """A way to run an op that is the caller's own.

    Attributes:
        op: what it runs.
        variant: its name.
        priority: higher is asked first; the tree's candidates have 0.
        fn: called with every operand and attribute by name; writes the outputs.
        supports: whether it may be used on a device; None where it always may.
        mode: "exact" for one that keeps the op's numerics contract.
        arrays: what it gets its operands as.
        stream: whether it takes the handle of the call's stream as well.
        tier: "provider", or "reference" for the CPU's kernels.
    """

    op: str
    variant: str
    priority: int
    fn: Callable[..., Any]
    supports: Supports | None = None
    mode: Literal["exact", "fast"] = "exact"
    arrays: Arrays = "view"
    stream: bool = False
    tier: Literal["provider", "reference"] = "provider"

    @property
    def order(self) -> tuple[int, bytes]:
        """Sorts the first one to be asked first."""
        return -self.priority, self.variant.encode()


@record
class ProviderStats:
    """What happened to the calls of one op.

    Attributes:
        last_selected: the candidate that the last counted call went to first; None before one.
        selections: counted calls; see `Library.count_calls`.
        declines: calls that a provider declined; always counted.
        fallbacks: declined calls that a candidate below took.
        misses: declined calls that nothing below could take.
    """

    last_selected: str | None = None
    selections: int = 0
    declines: int = 0
    fallbacks: int = 0
    misses: int = 0


class Tally:
    """The counters of one op; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = ProviderStats()

    def add(self, selected: str | None = None, **counts: int) -> None:
        """Count events by the names of ProviderStats."""
        with self._lock:
            s = self._stats
            found = {n: getattr(s, n) + counts.get(n, 0) for n in _COUNTS}
            self._stats = ProviderStats(selected or s.last_selected, **found)

    def read(self) -> ProviderStats:
        """The counts so far, all of one moment."""
        return self._stats

    def reset(self) -> None:
        """Start over."""
        with self._lock:
            self._stats = ProviderStats()


_COUNTS = ("selections", "declines", "fallbacks", "misses")
_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,63}", re.ASCII)


class Providers:
    """The providers of one library's ops. Readers take no lock: every change publishes new tuples, then tells
    `changed`, which forgets what was decided before."""

    def __init__(self, probe: Callable[[], Capabilities], changed: Callable[[], None]) -> None:
        self.capacity = DEFAULT_CAPACITY
        self._probe = probe
        self._changed = changed
        self._lock = threading.Lock()
        self._of: dict[str, tuple[Provider, ...]] = {}
        self._capabilities: Capabilities | None = None
        self._counting = False
        self._tallies: dict[str, Tally] = {}

    def tally(self, op: str) -> Tally:
        """The counters of an op."""
        with self._lock:
            return self._tallies.setdefault(op, Tally())

    @property
    def counting(self) -> bool:
        """Whether calls are counted; off by default, because every call then takes a lock."""
        return self._counting

    @counting.setter
    def counting(self, on: bool) -> None:
        self._counting = on
        self._changed()

    def of(self, op: str) -> tuple[Provider, ...]:
        """The providers of an op, the first one to be asked first."""
        return self._of.get(op, ())

    def register(self, provider: Provider, taken: Iterable[str] = ()) -> None:
        """Add a provider.

        Args:
            provider: what to add.
            taken: names that the tree's own candidates have.

        Raises:
            ContractError: a name that is empty, malformed, reserved or taken, a priority out of range, or one
                provider too many for this op. Nothing changes.
        """
        where = f"{provider.op}: the provider {provider.variant!r}"
        _check(provider, where)
        with self._lock:
            there = self._of.get(provider.op, ())
            if provider.variant in (*taken, *(p.variant for p in there)):
                raise ContractError(
                    f"{where} is registered twice or named like a variant of the tree; expected another name."
                )
            if len(there) >= self.capacity:
                raise ContractError(
                    f"{where} is one too many, {self.capacity} are registered; raise providers.capacity."
                )
            self._of[provider.op] = tuple(sorted((*there, provider), key=lambda p: p.order))
        self._changed()

    def merged(self, op: str, native: Sequence[Any]) -> list[Any]:
        """Every candidate of an op, those of the tree included, the first one to be tried first."""
        providers = self._of.get(op)
        if not providers:
            return list(native)
        place = (-NATIVE_PRIORITY, NATIVE.encode())
        above = [p for p in providers if p.order < place]
        return [*above, *native, *providers[len(above) :]]

    @property
    def capabilities(self) -> Capabilities:
        """What the device says of itself; asked once, when it is first needed."""
        with self._lock:
            if self._capabilities is None:
                self._capabilities = self._probe()
            return self._capabilities

    @capabilities.setter
    def capabilities(self, record: Capabilities) -> None:
        self._capabilities = record
        self._changed()

    def refusal(self, provider: Provider) -> str | None:
        """Why a provider may not be used on this device; None if it may.

        Raises:
            ProviderError: its predicate failed.
        """
        if provider.supports is None:
            return None
        record = self.capabilities
        try:
            fine = provider.supports(record)
        except Exception as e:
            raise ProviderError(
                f"{provider.op}: the predicate of the provider {provider.variant} failed with "
                f"{type(e).__name__}: {e}; expected true or false for {record}."
            ) from e
        return None if fine else "its predicate does not hold on this device"


def _check(provider: Provider, where: str) -> None:
    if _NAME.fullmatch(provider.variant) is None:
        raise ContractError(f"{where}: expected a name of up to 63 letters, digits, dots, dashes or _+.")
    is_reference = provider.tier == "reference"
    if provider.variant in ({NATIVE} if is_reference else {NATIVE, REFERENCE}):
        raise ContractError(f"{where}: this name is reserved; expected another one.")
    least = REFERENCE_PRIORITY + (not is_reference)
    if type(provider.priority) is not int or not least <= provider.priority < 1 << 31:
        raise ContractError(
            f"{where}: priority {provider.priority!r}, expected an integer from {least} to 2^31 - 1."
        )
    if not callable(provider.fn):
        raise ContractError(f"{where}: found a {type(provider.fn).__name__}, expected something to call.")
    if provider.mode not in ("exact", "fast") or provider.arrays not in ("numpy", "torch", "view"):
        raise ContractError(
            f"{where}: found mode={provider.mode!r}, arrays={provider.arrays!r}; expected exact or fast, and "
            "numpy, torch or view."
        )
