"""What the rows of the matrix without ops are proved by: the kernels that exercise a capability."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kiln.runtime.manifest import Kernel

Exercises = Callable[[str, Kernel], bool]
"""Whether loading and launching this kernel on this target goes through the capability."""

EXERCISES: Mapping[str, Exercises] = {
    # Selected by its manifest, proved, loaded into a context and launched on a stream.
    "cuda_dispatch": lambda target, _: target.startswith("sm_"),
}
