"""Manifests that the schema accepts and no compiler writes: calls are refused by name, or run right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.arrays import aligned_bytes
from kiln.runtime.errors import ContractError, KilnError, SelectionError
from kiln.tests.runtime.trees import (
    MN,
    OPS,
    PARAMS,
    cpu_manifest,
    dim,
    kernel,
    manifest,
    pointer,
    tensor,
    write_tree,
)

Json = Any
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def load(root: Path, document: Json, data: bytes) -> kiln.Library:
    return kiln.load(write_tree(root / "t", {"cpu-x86_64": document}, {"ops.so": data}))


def at(offset: int) -> Any:
    """A [3, 4] array that starts so many bytes after a multiple of 64."""
    return aligned_bytes(64 + 48)[offset : offset + 48].view(np.float32).reshape(3, 4)


def test_both_sides_of_an_in_place_operand_are_aligned(tmp_path: Path, ops_so: bytes) -> None:
    x, total, bias, written = PARAMS["accumulate"][:4]
    rest = PARAMS["accumulate"][4:]
    by_param = kernel("accumulate", "param", [x, total, bias, {**written, "align": 64}, *rest], ops_so)
    by_when = kernel("accumulate", "when", PARAMS["accumulate"], ops_so, when=["aligned", "sum", 64])
    with load(tmp_path, manifest([by_param, by_when], recipes=[]), ops_so) as lib:
        for read, write in ((0, 0), (0, 4), (4, 0)):
            total, out = at(read), at(write)
            total[:] = 1
            if read == write == 0:
                lib.accumulate(X, total, out=out)
                assert np.array_equal(out, X + 1)
                continue
            for variant in ("param", "when"):
                with pytest.raises(SelectionError, match="needs sum aligned to 64 bytes, found it 4 bytes"):
                    lib.accumulate(X, total, out=out, variant=variant)


def with_temps(*temps: tuple[str, str]) -> Json:
    """The tree of the test ops whose plan computes its first step into the first of these temps."""
    document = cpu_manifest(b"")
    (plan,) = document["recipes"]
    plan["temps"] = [{"name": n, "dtype": {"like": like}, "shape": MN} for n, like in temps]
    first, second = plan["steps"]
    first["bind"]["out"] = second["bind"]["x"] = f"temp:{temps[0][0]}"
    return document


def planned(root: Path, document: Json, data: bytes) -> kiln.Library:
    digests = cpu_manifest(data)["kernels"]
    return load(root, {**document, "kernels": digests}, data)


def test_a_temp_like_an_earlier_one(tmp_path: Path, ops_so: bytes) -> None:
    document = with_temps(("a", "x"), ("b", "temp:a"))
    document["recipes"][0]["steps"][1]["bind"]["x"] = "temp:b"
    document["recipes"][0]["steps"].insert(
        1, {"op": "negate", "bind": {"x": "temp:a", "out": "temp:b"}, "args": {}, "attrs": {}}
    )
    with planned(tmp_path, document, ops_so) as lib:
        assert np.array_equal(lib.scale_negate(X, X, alpha=2.0), 3 * X)


@pytest.mark.parametrize(
    "temps",
    [(("a", "temp:a"),), (("a", "temp:b"), ("b", "x")), (("a", "temp:b"), ("b", "temp:a"))],
    ids=["itself", "a later one", "each other"],
)
def test_a_temp_like_no_earlier_one(tmp_path: Path, ops_so: bytes, temps: Any) -> None:
    with planned(tmp_path, with_temps(*temps), ops_so) as lib:
        with pytest.raises(SelectionError, match="the temporary a is like an operand that is absent"):
            lib.scale_negate(X, X)


def test_a_temp_like_an_absent_operand(tmp_path: Path, ops_so: bytes) -> None:
    document = with_temps(("a", "bias"))
    bias = tensor("bias", "in", [dim("N")], optional=True)
    operands = document["ops"]["scale_negate"]["operands"]
    document["ops"]["scale_negate"]["operands"] = [*operands[:2], bias, *operands[2:]]
    with planned(tmp_path, document, ops_so) as lib:
        assert np.array_equal(lib.scale_negate(X, X, X[0], alpha=2.0), -3 * X)
        with pytest.raises(SelectionError, match="the temporary a is like an operand that is absent"):
            lib.scale_negate(X, X)


HUGE = ["mul", dim("M"), 1e308]
INFINITE = ["mul", HUGE, 10]
SIZES: dict[str, tuple[Json, str]] = {
    "infinite": (INFINITE, "the temporary a would be too big"),
    "no number": (["sub", INFINITE, INFINITE], "the temporary a would be too big"),
    "negative": (["sub", 0, dim("M")], "the temporary a would be too big"),
    "many": (["mul", dim("M"), 1 << 42], "the temporary a would be too big"),
    "over 64 bits": (["mul", dim("M"), 1 << 62], "leaves the range of 64-bit integers"),
    "power of a fraction": (["next_pow2", 1.5], "leaves the range of 64-bit integers"),
    "text": (["add", ["attr", "kind"], 1], "needs 'kind', which this call does not determine"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_temps(tmp_path: Path, ops_so: bytes, name: str) -> None:
    size, why = SIZES[name]
    document = with_temps(("a", "x"))
    attr = {"name": "kind", "choices": ["b"], "default": "b", "doc": ""}
    document["ops"]["scale_negate"]["attrs"] = [attr]
    document["recipes"][0]["temps"][0]["shape"] = [size, dim("N")]
    with planned(tmp_path, document, ops_so) as lib, pytest.raises(SelectionError, match=why):
        lib.scale_negate(X, X)


@pytest.mark.parametrize("name", ["infinite", "no number", "over 64 bits", "power of a fraction"])
def test_sizes_of_outputs(tmp_path: Path, ops_so: bytes, name: str) -> None:
    document = manifest([kernel("negate", "v", PARAMS["negate"], ops_so)], recipes=[])
    operands = [tensor("x", "in", MN), tensor("out", "out", [SIZES[name][0], dim("N")])]
    document["ops"] = {"negate": {**OPS["negate"], "operands": operands}}
    with load(tmp_path, document, ops_so) as lib:
        with pytest.raises(ContractError, match=r"would have shape|leaves the range of 64-bit"):
            lib.negate(X)


@pytest.mark.parametrize("value", [INFINITE, ["sub", INFINITE, INFINITE], 1e19])
def test_numbers_that_a_step_cannot_pass(tmp_path: Path, ops_so: bytes, value: Json) -> None:
    document = with_temps(("a", "x"))
    scalar = {**document["ops"]["scale_add"]["operands"][-1], "dtype": "i64"}
    operands = document["ops"]["scale_add"]["operands"][:-1]
    document["ops"]["scale_add"]["operands"] = [*operands, scalar]
    document["recipes"][0]["steps"][0]["args"]["alpha"] = value
    with planned(tmp_path, document, ops_so) as lib:
        with pytest.raises(KilnError, match="passes alpha as i64, which cannot hold its value"):
            lib.scale_negate(X, X)


@pytest.mark.parametrize("where", ["grid", "scratch", "when"])
def test_no_expression_leaves_as_anything_else(tmp_path: Path, ops_so: bytes, where: str) -> None:
    for size, _ in (s for n, s in SIZES.items() if n not in ("text", "many")):
        more: Json = {
            "grid": {"grid": [size, 1, 1]},
            "scratch": {"scratch": [{"name": "s", "bytes": size, "align": 16}]},
            "when": {"when": ["eq", ["mod", size, 7], 100]},
        }[where]
        params = [pointer("x"), *PARAMS["negate"][1:]]
        document = manifest([kernel("negate", "v", params, ops_so, **more)], recipes=[])
        with load(tmp_path, document, ops_so) as lib, pytest.raises(KilnError, match=r"negate|64-bit"):
            lib.negate(X)
