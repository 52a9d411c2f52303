"""PyTorch's door on the CPU: the shipped tree's ops as custom ops, eager, traced, compiled and misused."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="needs PyTorch: kernel-kiln[torch]")

import kiln.runtime as kiln  # noqa: E402
from kiln.runtime import torch as kt  # noqa: E402
from kiln.runtime.errors import ContractError, UnavailableError  # noqa: E402
from kiln.tests.runtime.trees import cpu_manifest, write_tree  # noqa: E402

TREE = Path(__file__).parents[2] / "aot_artifacts"
_serial = itertools.count()


@pytest.fixture(scope="module")
def lib(way: str) -> Iterator[kiln.Library]:
    with kiln.load(TREE) as library:
        yield library


@pytest.fixture(scope="module")
def ops(lib: kiln.Library) -> Iterator[kt.Registration]:
    with kt.register(lib) as registered:
        yield registered


@pytest.fixture
def space() -> str:
    """A namespace that no other test has used."""
    return f"kiln_test_{next(_serial)}"


def tensor(*shape: int, dtype: Any = None, seed: int = 3) -> Any:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype or torch.bfloat16)


def to_numpy(x: Any) -> Any:
    """The same bits as a NumPy array."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return x.numpy()


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(to_numpy(x) if isinstance(x, torch.Tensor) else x).tobytes()


SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor? weight=None, float eps=1e-06, *, bool gemma=False) -> Tensor",
    "fused_add_rms_norm": "(Tensor x, Tensor weight, Tensor(a!) residual, float eps=1e-06) -> Tensor",
    "rms_norm_quant_fp8": "(Tensor x, Tensor weight, Tensor(a!)? residual, float eps, float scale, "
    "Tensor(b!)? normed=None, *, bool gemma=True) -> Tensor",
    "rms_norm_gated": "(Tensor x, Tensor gate, Tensor weight, float eps=1e-06, *, "
    'str activation="silu") -> Tensor',
    "quant_fp8_per_group": "(Tensor x, *, int group=128, bool ue8m0=False) -> (Tensor, Tensor)",
    "top_k_pairs": "(Tensor scores, int k, int num_org_vocab_padding=0) -> (Tensor, Tensor)",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(lib: kiln.Library, name: str) -> None:
    assert kt.schema(lib.op(name)) == name + SCHEMAS[name]


def test_every_op_of_the_tree_is_registered(lib: kiln.Library, ops: kt.Registration) -> None:
    assert ops.names == lib.ops
    for name in ops.names:
        found = torch._C.parse_schema(f"kiln::{kt.schema(lib.op(name))}")
        assert getattr(torch.ops.kiln, name).default._schema == found
    assert ops.rms_norm is torch.ops.kiln.rms_norm
    assert "rms_norm" in dir(ops)
    with pytest.raises(AttributeError, match="no op 'rms_nrom' was registered"):
        ops.rms_nrom  # noqa: B018


X, W = (4, 256), (256,)
NO_GEMMA = {"gemma": False}
CALLS: dict[str, Callable[[], tuple[str, tuple[Any, ...], dict[str, Any]]]] = {
    "plain": lambda: ("rms_norm", (tensor(*X), tensor(*W)), {}),
    "absent": lambda: ("rms_norm", (tensor(*X),), {"eps": 1e-5}),
    "bool": lambda: ("rms_norm", (tensor(*X), tensor(*W)), {"gemma": True}),
    "3-D": lambda: ("rms_norm", (tensor(2, 3, 256), tensor(*W)), {}),
    "strided rows": lambda: ("rms_norm", (tensor(4, 512)[:, :256], tensor(*W)), {}),
    "in place": lambda: ("fused_add_rms_norm", (tensor(*X), tensor(*W), tensor(*X, seed=4)), {}),
    "str": lambda: (
        "rms_norm_gated",
        (tensor(*X), tensor(*X, seed=5), tensor(*W)),
        {"activation": "sigmoid"},
    ),
    "int and two outputs": lambda: ("quant_fp8_per_group", (tensor(*X),), {"group": 64}),
    "a dim": lambda: ("top_k_pairs", (tensor(3, 256, dtype=torch.float32), 8), {}),
    "indices": lambda: ("embedding", (tensor(10, 256), torch.tensor([3, 0, 9], dtype=torch.int32)), {}),
    "nothing optional": lambda: ("rms_norm_quant_fp8", (tensor(*X), tensor(*W), None, 1e-6, 0.5), NO_GEMMA),
    "optional output": lambda: (
        "rms_norm_quant_fp8",
        (tensor(*X), tensor(*W), tensor(*X, seed=6), 1e-6, 0.5, torch.zeros(*X, dtype=torch.bfloat16)),
        {},
    ),
}


def direct(lib: kiln.Library, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, bytes]:
    """What a call on NumPy arrays writes, by operand."""
    order = [o.name for o in kt._arguments(lib.op(name).sig)]
    given = {
        n: to_numpy(a).copy() if isinstance(a, torch.Tensor) else a for n, a in zip(order, args, strict=False)
    }
    given = {n: a for n, a in given.items() if a is not None}
    returned = lib.op(name)(**given, **named)
    results = returned if isinstance(returned, tuple) else (returned,)
    return {n: bits(r) for n, r in zip(lib.op(name).sig.returns, results, strict=True) if r is not None}


@pytest.mark.parametrize("case", CALLS)
def test_eager_calls_give_the_bits_of_the_library(lib: kiln.Library, ops: kt.Registration, case: str) -> None:
    name, args, named = CALLS[case]()
    expected = direct(lib, name, args, named)
    returned = getattr(torch.ops.kiln, name)(*args, **named)
    fresh = returned if isinstance(returned, tuple) else (returned,)
    found = {n: bits(r) for n, r in zip(kt._results(lib.op(name).sig), fresh, strict=True)}
    order = [o.name for o in kt._arguments(lib.op(name).sig)]
    written = {t.name for t in lib.op(name).sig.tensors if t.role != "in"} - found.keys()
    found |= {n: bits(a) for n, a in zip(order, args, strict=False) if n in written and a is not None}
    assert found == expected


@pytest.mark.parametrize("case", CALLS)
def test_opcheck(ops: kt.Registration, case: str) -> None:
    name, args, named = CALLS[case]()
    results = torch.library.opcheck(getattr(torch.ops.kiln, name).default, args, named)
    assert set(results.values()) == {"SUCCESS"}


def block(x: Any, weight: Any, residual: Any) -> Any:
    """A piece of a model: an in/out operand, an attribute, two outputs, and PyTorch's own between."""
    y = torch.ops.kiln.fused_add_rms_norm(x, weight, residual)
    codes, scales = torch.ops.kiln.quant_fp8_per_group(y * 2, group=64)
    return codes, scales.amax(), torch.ops.kiln.rms_norm(residual + y, weight, gemma=True)


def check_compiled(backend: Any, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (4, 7, 9):
        x, weight, residual = tensor(rows, 256), tensor(256), tensor(rows, 256, seed=8)
        once, again = residual.clone(), residual.clone()
        expected, found = block(x, weight, once), compiled(x, weight, again)
        assert [bits(a) for a in found] == [bits(a) for a in expected]
        assert bits(again) == bits(once) != bits(residual)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(ops: kt.Registration, backend: str, dynamic: bool) -> None:
    check_compiled(backend, dynamic)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler for the CPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor(ops: kt.Registration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check_compiled("inductor", dynamic=True)


def test_dynamic_shapes_compile_once(ops: kt.Registration) -> None:
    """An extent that a fake implementation turned into a number would compile for each number of rows."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
    for rows in (4, 7, 9, 33):
        compiled(tensor(rows, 256), tensor(256), tensor(rows, 256))
    assert len(graphs) == 1


def test_tracing_touches_no_memory(lib: kiln.Library, ops: kt.Registration) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = lib.stats()
    with FakeTensorMode():
        x = torch.empty(1 << 20, 1 << 16, dtype=torch.bfloat16)
        codes, scales = torch.ops.kiln.quant_fp8_per_group(x, group=128)
        assert (codes.shape, codes.dtype) == ((1 << 20, 1 << 16), torch.uint8)
        assert (scales.shape, scales.dtype) == ((1 << 20, 512), torch.float32)
        with pytest.raises(ContractError, match="x is f64, expected one of"):
            torch.ops.kiln.rms_norm(x.double())
        with pytest.raises(ContractError, match=r"found a tensor of torch\.complex64"):
            torch.ops.kiln.rms_norm(x.to(torch.complex64))
    assert lib.stats() == before


def test_misuse(ops: kt.Registration) -> None:
    x, w = tensor(*X), tensor(*W)
    with pytest.raises(ContractError, match="weight has N=255 but x gave N=256"):
        torch.ops.kiln.rms_norm(x, w[:255])
    with pytest.raises(ContractError, match="found activation='relu', expected one of"):
        torch.ops.kiln.rms_norm_gated(x, x, w, activation="relu")
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'epsilon'"):
        torch.ops.kiln.rms_norm(x, w, epsilon=1.0)


def test_a_gradient_is_not_silently_wrong(ops: kt.Registration) -> None:
    x = tensor(*X).requires_grad_()
    y = torch.ops.kiln.rms_norm(x, tensor(*W))
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        y.float().sum().backward()


def test_registering_twice(tree: Path, space: str) -> None:
    with kiln.load(tree) as lib, kiln.load(tree) as other:
        first = kt.register(lib, namespace=space, ops=["negate", "scale_add"])
        assert first.names == ("negate", "scale_add")
        with pytest.raises(ContractError, match="negate is registered for this device already"):
            kt.register(other, namespace=space, ops=["gather", "negate"])
        # Nothing of a refused registration stays.
        kt.register(other, namespace=space, ops=["gather"]).close()
        first.close()
        first.close()
        assert not first.names
        with kt.register(other, namespace=space) as again:
            x = torch.ones(2, 3)
            assert torch.equal(again.negate(x), -x)
        with pytest.raises(AttributeError):
            getattr(torch.ops, space).negate(x)


def test_another_signature_needs_another_namespace(
    tmp_path: Path, ops_so: bytes, tree: Path, space: str
) -> None:
    document = cpu_manifest(ops_so)
    document["ops"]["scale_add"]["operands"][3]["default"] = 7.0
    other = write_tree(tmp_path / "other", {"cpu-x86_64": document}, {"ops.so": ops_so})
    with kiln.load(tree) as lib, kiln.load(other) as changed, kt.register(lib, namespace=space):
        with pytest.raises(ContractError, match=r"alpha=2\.0\) -> Tensor, expected .*alpha=7\.0"):
            kt.register(changed, namespace=space, ops=["scale_add"])
        with kt.register(changed, namespace=f"{space}_b", ops=["scale_add"]) as second:
            assert second.scale_add(torch.ones(1, 1), torch.ones(1, 1)).item() == 8.0


def test_names_that_cannot_be_registered(tree: Path, space: str) -> None:
    with kiln.load(tree) as lib:
        for wrong in ("", "a-b", "a::b"):
            with pytest.raises(ContractError, match="expected a name such as kiln"):
                kt.register(lib, namespace=wrong)
        with pytest.raises(ContractError, match="did you mean negate"):
            kt.register(lib, namespace=space, ops=["gather", "negat"])
        # Of someone else's: PyTorch's own aten::gather.
        with pytest.raises(ContractError, match="aten::gather cannot be defined"):
            kt.register(lib, namespace="aten", ops=["gather"])
        kt.register(lib, namespace=space).close()


def test_a_device_without_a_library(tree: Path, space: str) -> None:
    with kiln.load(tree) as lib, kt.register(lib, namespace=space) as ops:
        kt._custom_ops[space, "negate"].operations[5] = kt._custom_ops[space, "negate"].operations.pop(-1)
        with pytest.raises(UnavailableError, match="negate is not registered for the CPU"):
            ops.negate(torch.ones(2, 3))
        kt._custom_ops[space, "negate"].operations[-1] = kt._custom_ops[space, "negate"].operations.pop(5)


def test_a_provider_gets_tensors(tree: Path, space: str) -> None:
    with kiln.load(tree) as lib, kt.register(lib, namespace=space) as ops:
        seen = []

        def negate(x: Any, out: Any) -> None:
            seen.append(type(x))
            torch.neg(x, out=out)

        lib.register_provider("negate", "torch", negate, arrays="torch")
        x = torch.ones(2, 6)[:, :3]
        assert torch.equal(ops.negate(x), -x)
        assert seen == [torch.Tensor]
    with kiln.load(TREE) as lib:

        def rms_norm(x: Any, weight: Any, eps: float, gemma: bool, out: Any) -> Any:
            if gemma:
                return kiln.Decline("gemma")
            out.copy_(torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps))
            return None

        lib.register_provider("rms_norm", "torch", rms_norm, arrays="torch")
        x, w = tensor(*X), tensor(*W)
        expected = torch.nn.functional.rms_norm(x, (256,), w, 1e-6)
        assert torch.equal(lib.rms_norm(x, w), expected)
        assert np.array_equal(lib.rms_norm(to_numpy(x), to_numpy(w)), to_numpy(expected))
        lib.rms_norm(x, w, gemma=True)
        assert lib.provider_stats("rms_norm").fallbacks == 1
