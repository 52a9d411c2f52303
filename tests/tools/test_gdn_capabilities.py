"""Which kernels carry the capabilities of gated-delta-rule layers."""

from typing import Any, cast

import pytest

from kiln.runtime.entities import Kernel, Param
from kiln.tools.capabilities import EXERCISES


class _Kernel:
    """What a capability reads of a kernel."""

    def __init__(self, pointers: dict[str, str], strides: tuple[str, ...] = ()) -> None:
        read = [Param("ptr", n, d, operand=n, access="read", align=4) for n, d in pointers.items()]
        numbers = [Param("scalar", f"{n}_stride", "i64", value=("stride", n)) for n in strides]
        self.params: tuple[Any, ...] = (*read, *numbers)


def _exercises(name: str, kernel: _Kernel) -> bool:
    return EXERCISES[name]("sm_90a", cast(Kernel, kernel))


@pytest.mark.parametrize(("strides", "carried"), [(("a", "b", "out"), True), (("a",), False), ((), False)])
def test_gates_are_views_where_both_have_strides(strides: tuple[str, ...], carried: bool) -> None:
    assert _exercises("packed_ba", _Kernel({"a": "bf16", "b": "bf16"}, strides)) == carried


@pytest.mark.parametrize(
    ("types", "carried"),
    [
        (("bf16", "bf16", "bf16", "bf16"), True),
        (("f32", "f32", "f32", "bf16"), False),
        (("bf16", "bf16", "f32", "bf16"), False),
        (("bf16", "bf16", "bf16"), False),
    ],
)
def test_a_gated_norm_of_one_type(types: tuple[str, ...], carried: bool) -> None:
    names = ("x", "gate", "weight", "out")
    assert _exercises("model_dtype", _Kernel(dict(zip(names, types, strict=False)))) == carried
