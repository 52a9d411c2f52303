"""What a device offers the loader, and a device that is only pretended, to ask what would run where."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Protocol

from kiln.runtime.arrays import CPU
from kiln.runtime.entities import Kernel
from kiln.runtime.errors import TargetError, UnavailableError
from kiln.runtime.providers import Capabilities
from kiln.runtime.recipe import Recipe
from kiln.runtime.scratch import HostMemory, ScratchPolicy, ScratchPool
from kiln.runtime.targets import capability, missing_features, runs_on

Args = tuple[int | float, ...]


Route = Callable[[Sequence[int], Args, int], None]
"""Runs a launch: addresses, scalar values, a stream handle."""


class Call(Protocol):
    """A launch that is ready to go again and again."""

    run: Callable[[], Any]
    """Launch; a tuple whose first item is false where that went well."""

    def update(self, pointers: Sequence[int], scratch: int = 0, zeroed: int = 0) -> None:
        """Use other addresses from the next launch on."""

    def failed(self, status: Any) -> None:
        """Save what can be saved after a bad status, else raise what it means."""


class Launcher(Protocol):
    """A kernel with everything of one call's shape fixed."""

    scratch_bytes: int
    """Size of the block of scratch that a run needs; 0 for none."""
    zeroed_bytes: int
    """The same of scratch that is all zeros between launches."""

    def run(
        self, pointers: Sequence[int], args: Args, stream: int, scratch: int = 0, zeroed: int = 0
    ) -> None:
        """Launch it.

        Args:
            pointers: read addresses of every tensor operand, then written ones; 0 where there is none.
            args: scalar values.
            stream: its handle.
            scratch: address of a block of `scratch_bytes`, a multiple of 256.
            zeroed: address of one of `zeroed_bytes`, all zeros when the work before on the stream is done.
        """

    def bind(self, pointers: Sequence[int], args: Args, stream: int) -> Call:
        """The same launch, ready to go again and again."""

    def via(self, order: Sequence[int]) -> Route:
        """`run` of addresses that are still to be brought in order: the i-th is the `order[i]`-th of those
        given. For launches without scratch."""


class PlainCall:
    """A launcher and its arguments."""

    def __init__(self, launcher: "Runs", pointers: Sequence[int], args: Args, stream: int) -> None:
        self._launcher, self._args, self._stream = launcher, args, stream
        self.run: Callable[[], Any] = self._run
        self.update(pointers)

    def update(self, pointers: Sequence[int], scratch: int = 0, zeroed: int = 0) -> None:
        """See Call."""
        self._pointers, self._blocks = tuple(pointers), (scratch, zeroed)

    def launch(self, scratch: int, zeroed: int) -> tuple[int]:
        """Run with these blocks, whatever blocks other threads use at the same time."""
        self._launcher.run(self._pointers, self._args, self._stream, scratch, zeroed)
        return (0,)

    def _run(self) -> tuple[int]:
        return self.launch(*self._blocks)

    def failed(self, status: Any) -> None:
        """Never called: a plain launcher raises."""


class Runs(Protocol):
    """The half of a launcher that runs it."""

    def run(
        self, pointers: Sequence[int], args: Args, stream: int, scratch: int = 0, zeroed: int = 0
    ) -> None:
        """See Launcher."""


class PlainLauncher(ABC):
    """A launcher that needs no scratch and keeps nothing ready between runs."""

    scratch_bytes = zeroed_bytes = 0

    @abstractmethod
    def run(
        self, pointers: Sequence[int], args: Args, stream: int, scratch: int = 0, zeroed: int = 0
    ) -> None:
        """See Launcher."""

    def bind(self, pointers: Sequence[int], args: Args, stream: int) -> Call:
        """See Launcher."""
        return PlainCall(self, pointers, args, stream)

    def via(self, order: Sequence[int]) -> Route:
        """See Launcher."""
        pick = itemgetter(*order)
        return lambda pointers, args, stream: self.run(pick(pointers), args, stream)


class Device(Protocol):
    """A place where kernels run."""

    ordinal: int
    """CPU, or the CUDA ordinal."""
    gone: bool
    """Closed, or of another process: nothing can be launched."""
    scratch: ScratchPool
    """Memory that calls take for the time they run."""

    unified_memory: bool
    """Whether the CPU may use this device's memory, whatever allocated it, by the same addresses."""

    @property
    def label(self) -> str:
        """How messages call it."""

    def capabilities(self) -> Capabilities:
        """What predicates of providers may ask."""

    def targets(self, available: Iterable[str]) -> list[str]:
        """The targets of `available` that it may run, best first."""

    def refusal(self, kernel: Kernel) -> str | None:
        """Why this device cannot run the kernel at all; None if it can."""

    def check_toolchain(self, versions: Iterable[str]) -> None:
        """Refuse a tree that was assembled for newer drivers than this device's; `versions` are those of
        ptxas."""

    def load(self, kernel: Kernel, data: bytes) -> Any:
        """The entry of a kernel, from the verified bytes of its file."""

    def launcher(self, kernel: Kernel, function: Any, recipe: Recipe) -> Launcher:
        """A launcher of a loaded entry."""

    def stream(self, stream: Any, example: Any) -> int:
        """The handle of a call's stream; `example` is its first array, `stream` what the caller passed."""

    def default_stream(self, example: Any) -> Callable[[], int] | None:
        """What tells the stream of calls that name none; None where that is always 0."""

    def synchronize(self, stream: int) -> None:
        """Wait for what was queued on a stream."""

    def maker(self, example: Any, shape: tuple[int, ...], dtype: str) -> Callable[..., Any]:
        """What makes uninitialized output arrays, given an array like `example`: torch tensors where that is
        one; else given a stream handle too, what the device has."""

    def allocates(self, example: Any) -> bool:
        """Whether making an output asks the device's driver for memory, and not the caller's framework."""

    def check_capture(self, kernel: Kernel, stream: int) -> None:
        """Refuse to load a kernel now if the stream of the call that needs it is being captured."""

    def check_usable(self) -> None:
        """Refuse a device that is gone, with the reason."""

    def close(self) -> None:
        """Give everything back; closing twice is fine."""


class PretendDevice(PlainLauncher):
    """A device that cannot run anything: for `explain` on machines that lack the real one."""

    unified_memory = False

    def __init__(
        self, target: str, cc: tuple[int, int] | None = None, features: Iterable[str] | None = None
    ) -> None:
        """A device that runs `target` at its best.

        Args:
            target: such as sm_90a or cpu-x86_64.
            cc: compute capability, if another than the target's own.
            features: CPU features; every one by default.
        """
        self.target = target
        self.ordinal = CPU if target.startswith("cpu-") else 0
        self.gone = False
        self.scratch = ScratchPool(HostMemory(), ScratchPolicy())
        self._features = None if features is None else frozenset(features)
        self._cc = None if self.ordinal == CPU else cc or capability(target)[:2]

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"a pretended {self.target}"

    def capabilities(self) -> Capabilities:
        """Its compute capability or its features; how many units it has is not known."""
        return Capabilities(True, *(self._cc or (0, 0)), 0, self._features or frozenset())

    def targets(self, available: Iterable[str]) -> list[str]:
        """The pretended target alone."""
        legal = self._cc is None or runs_on(self.target, self._cc)
        return [t for t in available if t == self.target and legal]

    def refusal(self, kernel: Kernel) -> str | None:
        """Missing CPU features, where they were given."""
        if kernel.isa is None or self._features is None:
            return None
        missing = missing_features(self.target, kernel.isa.features, self._features)
        return f"the CPU lacks {', '.join(missing)}" if missing else None

    def check_toolchain(self, versions: Iterable[str]) -> None:
        """Any will do."""

    def load(self, kernel: Kernel, data: bytes) -> Any:
        """Nothing: the bytes were verified, and that is all that can be done here."""
        return None

    def launcher(self, kernel: Kernel, function: Any, recipe: Recipe) -> Launcher:
        """A launcher that refuses to run."""
        return self

    def run(
        self, pointers: Sequence[int], args: Args, stream: int, scratch: int = 0, zeroed: int = 0
    ) -> None:
        """Refuse."""
        raise UnavailableError(f"{self.label} device cannot run kernels; load the library for a real one.")

    def stream(self, stream: Any, example: Any) -> int:
        """No stream."""
        return 0

    def synchronize(self, stream: int) -> None:
        """Nothing is ever queued."""

    def default_stream(self, example: Any) -> Callable[[], int] | None:
        """No stream."""
        return None

    def maker(self, example: Any, shape: tuple[int, ...], dtype: str) -> Callable[..., Any]:
        """Refuse."""
        raise UnavailableError(f"{self.label} device has no memory; use explain, or load for a real device.")

    def allocates(self, example: Any) -> bool:
        """Nothing is made."""
        return False

    def check_capture(self, kernel: Kernel, stream: int) -> None:
        """Nothing is captured."""

    def check_usable(self) -> None:
        """It is never gone."""

    def close(self) -> None:
        """Nothing to give back."""


def no_target(device: Device, available: Iterable[str]) -> TargetError:
    """The error for a tree that holds nothing for a device."""
    listed = ", ".join(sorted(available)) or "no target at all"
    return TargetError(
        f"the tree has nothing that {device.label} may run; it holds {listed}. Build that device's target."
    )
