"""Calls with real torch tensors on the CPU: the short way, outputs, layouts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.errors import ContractError

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: pip install kernel-kiln[torch]")
SHIPPED = Path(__file__).resolve().parents[2] / "aot_artifacts"


@pytest.fixture(scope="module")
def lib(way: str) -> Iterator[kiln.Library]:
    """The committed tree on this CPU."""
    with kiln.load(SHIPPED) as library:
        yield library


def made(*shape: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype or torch.bfloat16)


def bits(x: Any) -> Any:
    return x.contiguous().view(torch.int16).numpy()


@pytest.mark.parametrize("kind", ["tensor", "parameter", "strided", "leading dims", "no rows", "one row"])
def test_every_turn_gives_the_same(lib: kiln.Library, kind: str) -> None:
    x = {
        "strided": made(6, 200)[::2, 8:136],
        "leading dims": made(2, 3, 128),
        "no rows": made(0, 128),
        "one row": made(9, 128)[4:5],
    }.get(kind, made(3, 128))
    weight = torch.nn.Parameter(made(128), requires_grad=False) if kind == "parameter" else made(128)
    first = lib.rms_norm(x, weight)
    out = torch.empty_like(first)
    assert type(first) is torch.Tensor
    assert (first.shape, first.dtype, first.is_contiguous()) == (x.shape, x.dtype, True)
    for _ in range(4):
        assert np.array_equal(bits(lib.rms_norm(x, weight)), bits(first))
        assert np.array_equal(bits(lib.rms_norm(x=x, weight=weight, eps=1e-6)), bits(first))
        assert lib.rms_norm(x, weight, out=out) is out
        assert np.array_equal(bits(out), bits(first))


def test_layouts_are_told_apart(lib: kiln.Library) -> None:
    x, weight = made(4, 128), made(128)
    for _ in range(3):
        lib.rms_norm(x, weight)
    wide = made(4, 256)
    again = lib.rms_norm(wide[:, 128:], weight)
    assert np.array_equal(bits(again), bits(lib.rms_norm(wide[:, 128:].contiguous(), weight)))
    square, weight = made(128, 128), made(128)
    for _ in range(3):
        lib.rms_norm(square, weight)
    with pytest.raises(ContractError, match="elements of a row of x are 128 apart"):
        lib.rms_norm(square.T, weight)
    with pytest.raises(ContractError, match="device meta"):
        lib.rms_norm(square.to("meta"), weight)
    with pytest.raises(kiln.KilnError, match="f64"):
        lib.rms_norm(square.double(), weight)


def test_outputs_of_another_type_or_shape(lib: kiln.Library) -> None:
    x = made(4, 128)
    gate, up = made(4, 128), made(4, 128)
    for _ in range(3):
        assert lib.silu_mul(gate, up).dtype == torch.bfloat16
        codes, scales = lib.quant_fp8_per_token(x)[:2]
        assert (codes.dtype, codes.shape, scales.dtype) == (torch.uint8, x.shape, torch.float32)


def test_in_place(lib: kiln.Library) -> None:
    x, weight, residual = made(4, 128), made(128), made(4, 128)
    for _ in range(3):
        kept = residual.clone()
        out, written = lib.fused_add_rms_norm(x, weight, residual)
        assert written is residual
        assert np.array_equal(bits(residual), bits(lib.add(x, kept)))
        assert out.shape == x.shape
    with pytest.raises(ContractError, match="overlaps"):
        lib.fused_add_rms_norm(residual[1:], weight, residual[:3])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_tensors_without_plain_memory_are_refused_by_name(lib: kiln.Library) -> None:
    x, weight = made(3, 128), made(128)
    lib.rms_norm(x, weight)
    for _ in range(2):
        for bad in (x.to_sparse(), x.to_sparse_csr()):
            with pytest.raises(ContractError, match="rms_norm: x: found a tensor without plain memory"):
                lib.rms_norm(bad, weight)
        with pytest.raises(ContractError, match="call outside of transformations"):
            torch.vmap(lambda row: lib.rms_norm(row, weight))(made(2, 3, 128))
        assert lib.rms_norm(x, weight).shape == x.shape


def test_a_tensor_whose_storage_was_freed_is_refused(lib: kiln.Library) -> None:
    x, weight, out = made(3, 128), made(128), made(3, 128)
    lib.rms_norm(x, weight, out=out)
    lib.rms_norm(x, weight, out=out)
    out.untyped_storage().resize_(0)
    with pytest.raises(ContractError, match="an operand has a null address"):
        lib.rms_norm(x, weight, out=out)
