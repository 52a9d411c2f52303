"""What Triton adds to a kernel behind its declared parameters: two pointers, to memory for tensor maps that
the kernel makes itself (`tl.make_tensor_descriptor`) and for its profiler; and CTAs of a cluster, which it
counts along x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NAME = "global_scratch"
"""Of the first pointer, and of the scratch that it points to."""
ALIGNMENTS = tuple(1 << i for i in range(9))
"""Those that a manifest can name."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Hidden:
    """What a kernel asks for, by Triton's metadata."""

    bytes: int = 0
    """Of memory for each CTA; its content need not be kept."""
    align: int = 1
    ctas: int = 1
    """CTAs of a cluster: programs of Triton's grid are clusters."""

    def parameters(self) -> list[Json]:
        """The entries behind those of the declared parameters."""
        nothing = {"kind": "null", "dtype": "ptr"}
        first: Json = {"name": NAME, **nothing}
        if self.bytes:
            memory = {"dtype": "u8", "operand": f"scratch:{NAME}", "access": "write", "align": self.align}
            first = {"name": NAME, "kind": "ptr", **memory}
        return [first, {"name": "profile_scratch", **nothing}]

    def grid(self, programs: Sequence[Any]) -> list[Any]:
        """The grid of CTAs of a grid of programs."""
        return [_product([self.ctas, programs[0]]), *programs[1:]]

    def scratch(self, programs: Sequence[Any]) -> list[Json]:
        """The scratch entry, if any: each CTA's part, by its place in the grid."""
        size = _product([self.bytes, *self.grid(programs)])
        return [{"name": NAME, "bytes": size, "align": self.align}] if self.bytes else []


def _product(factors: Sequence[Any]) -> Any:
    left, *others = factors
    for right in others:
        if isinstance(left, int) and isinstance(right, int):
            left *= right
        else:
            left = left if right == 1 else right if left == 1 else ["mul", left, right]
    return left
