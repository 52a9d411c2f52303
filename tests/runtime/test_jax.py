"""JAX's arrays on the CPU: taken as they are, the same bits as NumPy's, and never written."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.arrays import CPU, View, view
from kiln.runtime.errors import ContractError

jax: Any = pytest.importorskip("jax", reason="needs JAX: pip install 'jax[cpu]'")
jnp: Any = jax.numpy

TREE = Path(__file__).parents[2] / "aot_artifacts"
TYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2", "u8": "uint8",
    "i8": "int8", "i16": "int16", "i32": "int32", "u32": "uint32", "bool": "bool",
}  # fmt: skip


def normal(*shape: int) -> Any:
    return np.random.default_rng(11).standard_normal(shape).astype(ml_dtypes.bfloat16)


def same(a: Any, b: Any) -> bool:
    """Whether two arrays have the same type, shape and bits."""
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.mark.parametrize("name", TYPES)
def test_views(name: str) -> None:
    x = jnp.ones((3, 5), TYPES[name])
    found = view(x)
    assert found[:6] == View(x.unsafe_buffer_pointer(), (3, 5), (5, 1), name, CPU, True, None)[:6]


def test_calls_give_the_bits_of_numpy() -> None:
    x, weight, gate = normal(5, 256), normal(256), normal(5, 256)
    scores = normal(4, 3000).astype(np.float32)
    with kiln.load(TREE) as lib:
        calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("rms_norm", (x, weight), {"eps": 1e-6}),
            ("silu_mul", (gate, x), {}),
            ("silu_mul_quant_fp8", (gate, x), {"scale": 0.5}),
            ("quant_fp8_per_token", (x,), {}),
            ("top_k_pairs", (scores,), {"k": 16}),
        ]
        for name, operands, more in calls:
            op = lib.op(name)
            expected = op(*operands, **more)
            for _ in range(2):
                found = op(*(jnp.asarray(a) for a in operands), **more)
                pairs = zip(_each(found), _each(expected), strict=True)
                assert all(same(a, b) for a, b in pairs), name
                assert all(
                    same(jnp.asarray(a), b) for a, b in zip(_each(found), _each(expected), strict=True)
                )


def _each(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def test_bound_calls_take_other_arrays() -> None:
    x, weight = normal(5, 256), normal(256)
    with kiln.load(TREE) as lib:
        bound = lib.rms_norm.bind(jnp.asarray(x), jnp.asarray(weight), eps=1e-6)
        assert same(bound(), lib.rms_norm(x, weight, eps=1e-6))
        bound.update(x=jnp.asarray(x[::-1].copy()))
        assert same(bound(), lib.rms_norm(x[::-1].copy(), weight, eps=1e-6))


def test_they_are_never_written() -> None:
    x, weight = normal(5, 256), normal(256)
    out = jnp.zeros((5, 256), jnp.bfloat16)
    with kiln.load(TREE) as lib:
        with pytest.raises(ContractError, match="out is written but its array is read-only"):
            lib.rms_norm(x, weight, eps=1e-6, out=out)
        residual = jnp.asarray(normal(5, 256))
        with pytest.raises(ContractError, match="residual is written but its array is read-only"):
            lib.fused_add_rms_norm(x=x, residual=residual, weight=weight, eps=1e-6)
    assert not np.asarray(out).any()
    assert same(residual, normal(5, 256))


def test_an_array_on_another_device_is_refused() -> None:
    described = kiln.load(TREE, "sm_90a")
    with pytest.raises(ContractError, match="x is on the CPU, expected cuda:0"):
        described.explain(
            "rms_norm", jnp.zeros((4, 256), jnp.bfloat16), jnp.zeros(256, jnp.bfloat16), eps=1e-6
        )
