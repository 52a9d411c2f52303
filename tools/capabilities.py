"""What the rows of the matrix without ops are proved by: the kernels that exercise a capability."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kiln.runtime.manifest import Kernel

Exercises = Callable[[str, Kernel], bool]
"""Whether loading and launching this kernel on this target goes through the capability."""

EXERCISES: Mapping[str, Exercises] = {
    # Selected by its manifest, proved, loaded into a context and launched on a stream.
    "cuda_dispatch": lambda target, _: target.startswith("sm_"),
    # One of several candidates of its op, taken by the one order of providers.
    "provider_selection": lambda target, kernel: True,
    # Its memory came from the stream's pool.
    "scratch": lambda target, kernel: bool(kernel.scratch),
    # Timed as replays of a CUDA graph: chosen from the manifest alone, launched while a stream was captured.
    "capture": lambda target, _: target.startswith("sm_"),
}
