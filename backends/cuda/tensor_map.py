"""A parameter that is a tensor map made by the host: declared in a table row, checked against what Triton
compiled it for, and written into the manifest with the shape and strides that Triton passes behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kiln.backends.cuda.primitive import CudaPrimitive, Expr, Pointer
from kiln.ir.dtypes import DTYPES

Json = dict[str, Any]
RUNNER = "kiln.backends.cuda.compile_maps:run"
"""The worker that compiles kernels with such parameters."""
FILES = ("tensor_map.py", "compile_maps.py")
"""What determines their bytes beside what determines all."""
_ELEMENTS: Mapping[str, int] = {"f8e4m3": 0, "f8e5m2": 0, "u8": 0, "f16": 6, "f32": 7, "bf16": 10}
"""Element type -> Triton's number of it."""


@dataclass(frozen=True, kw_only=True)
class TensorMap(Pointer):
    """An operand as the copy engine (TMA) walks it; outermost dimension first, the innermost stride is 1.

    `when` must imply the driver's rules for shape, strides and address, as those of hints.
    """

    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    """In elements, of all dimensions but the innermost."""
    box: tuple[int, ...]
    """What one copy takes: the kernel's block, whose rows are no wider than the swizzle."""
    swizzle: Literal[32, 64, 128] = 128
    """Bytes, in shared memory."""

    @property
    def layout(self) -> str:
        """Its layout in shared memory, as Triton writes it."""
        bits = 8 * DTYPES[self.dtype].bytes
        return (
            f"NVMMASharedLayout(swizzle_byte_width={self.swizzle}, element_bitwidth={bits}, "
            f"rank={len(self.box)}, transposed=False, fp4_padded=False, cga_layout=[])"
        )

    @property
    def triton(self) -> str:
        """Its type in a Triton signature."""
        box = ",".join(map(str, self.box))
        return f"tensordesc<{DTYPES[self.dtype].triton}[{box}],{self.layout}>"

    @property
    def hinted(self) -> bool:
        """Triton takes a map's alignment for granted."""
        return False

    def json(self) -> Json:
        """The manifest's PARAM entry of the map itself."""
        walked = {
            "shape": list(self.shape), "strides": list(self.strides), "box": list(self.box),
            "swizzle": f"{self.swizzle}b", "interleave": "none", "l2": "128b", "fill": "zeros",
        }  # fmt: skip
        return {
            "name": self.name, "kind": "tensor_map", "dtype": self.dtype, "operand": self.operand,
            "access": self.access, "map": walked,
        }  # fmt: skip

    def passed(self) -> list[Json]:
        """The entries of all that Triton passes for it: the map, its shape, its strides."""
        sizes = [("size", i, "i32", e) for i, e in enumerate(self.shape)]
        steps = [("step", i, "i64", e) for i, e in enumerate((*self.strides, 1))]
        return [self.json(), *(_number(f"{self.name}_{what}{i}", t, e) for what, i, t, e in sizes + steps)]

    def compiled(self) -> Json:
        """What Triton's metadata says of it, if it was compiled as declared."""
        return {
            "swizzle": self.swizzle.bit_length() - 5, "elem_size": DTYPES[self.dtype].bytes,
            "elem_type": _ELEMENTS[self.dtype], "block_size": list(self.box), "fp4_padded": False,
            "is_im2col": False,
        }  # fmt: skip


def _number(name: str, dtype: str, value: Expr) -> Json:
    return {"name": name, "kind": "scalar", "dtype": dtype, "value": value, "divisible_by": 1}


def takes_maps(row: CudaPrimitive) -> bool:
    """Whether a row has such a parameter."""
    return any(isinstance(p, TensorMap) for p in row.params)
