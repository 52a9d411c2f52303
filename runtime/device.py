"""What a device offers the loader, and a device that is only pretended, to ask what would run where."""

from collections.abc import Iterable
from typing import Any, Protocol

from kiln.runtime.arrays import CPU
from kiln.runtime.entities import Kernel
from kiln.runtime.errors import TargetError, UnavailableError
from kiln.runtime.providers import Capabilities
from kiln.runtime.recipe import Recipe
from kiln.runtime.targets import capability, missing_features, runs_on


class Launcher(Protocol):
    """A kernel with everything of one call's shape fixed."""

    def run(self, pointers: list[int], args: tuple[int | float, ...], stream: int) -> None:
        """Launch it: read pointers of every tensor operand, then written ones; scalar values; a stream
        handle."""


class Device(Protocol):
    """A place where kernels run."""

    ordinal: int
    """CPU, or the CUDA ordinal."""

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

    def allocate(self, example: Any, shape: tuple[int, ...], dtype: str, stream: int) -> Any:
        """An uninitialized output array, of the framework of `example` where it can be asked."""

    def synchronize(self, stream: int) -> None:
        """Wait for what was queued on a stream."""

    def reserve(self, sizes: list[int], stream: int) -> "Temporaries":
        """Temporary memory of these sizes (bytes), valid for work queued on the stream until it is
        released."""

    def close(self) -> None:
        """Give everything back; closing twice is fine."""


class Temporaries(Protocol):
    """Memory of one call."""

    pointers: list[int]

    def release(self) -> None:
        """Give it back, after the work queued so far."""


class PretendDevice:
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

    def run(self, pointers: list[int], args: tuple[int | float, ...], stream: int) -> None:
        """Refuse."""
        raise UnavailableError(f"{self.label} device cannot run kernels; load the library for a real one.")

    def stream(self, stream: Any, example: Any) -> int:
        """No stream."""
        return 0

    def synchronize(self, stream: int) -> None:
        """Nothing is ever queued."""

    def allocate(self, example: Any, shape: tuple[int, ...], dtype: str, stream: int) -> Any:
        """Refuse."""
        raise UnavailableError(f"{self.label} device has no memory; use explain, or load for a real device.")

    def reserve(self, sizes: list[int], stream: int) -> Temporaries:
        """Refuse."""
        raise UnavailableError(f"{self.label} device has no memory; use explain, or load for a real device.")

    def close(self) -> None:
        """Nothing to give back."""


def no_target(device: Device, available: Iterable[str]) -> TargetError:
    """The error for a tree that holds nothing for a device."""
    listed = ", ".join(sorted(available)) or "no target at all"
    return TargetError(
        f"the tree has nothing that {device.label} may run; it holds {listed}. Build that device's target."
    )
