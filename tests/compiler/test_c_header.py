"""Typed calls in C: what they pass, which trees they refuse, and that every compiler takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kiln.compiler.c_header import c_header, how_called
from kiln.compiler.c_names import RESERVED
from kiln.compiler.errors import BuildError
from kiln.runtime.entities import Attr, Contract, DTypeVar, Manifest, Scalar, Signature, Tensor
from kiln.tests.support.compilers import CXX, C, build, first_of, run
from kiln.tools.trees import read_tree, shipped

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "runtime" / "c" / "include"
EXACT = Contract("exact", 0.0, 0.0)


def tensor(name: str, role: Any = "in", **changes: Any) -> Tensor:
    made = Tensor("tensor", name, role, "f32", (("dim", "M"), ("dim", "N")), "rows", False, "")
    return replace(made, **changes)


def scalar(name: str, dtype: str, default: float | None = None) -> Scalar:
    return Scalar("scalar", name, dtype, default, None, False, "")


def signature(*operands: Tensor | Scalar, attrs: tuple[Attr, ...] = (), doc: str = "") -> Signature:
    returns = tuple(o.name for o in operands if isinstance(o, Tensor) and o.role == "out")
    return Signature("F", "op", "M", "N", operands, returns, attrs, (), EXACT, doc)


def manifest(ops: Mapping[str, Signature]) -> Manifest:
    shipped_one = read_tree(shipped(), ["sm_90a"]).manifests["sm_90a"]
    return replace(shipped_one, ops=ops)


MIX = signature(
    tensor("x", dtype=DTypeVar("T", ("bf16", "f32")), doc="rows */ of it"),
    tensor("residual", "inout", optional=True),
    scalar("eps", "f32", 1e-6),
    scalar("k", "i32", 3),
    scalar("big", "i64", -(1 << 63)),
    scalar("flag", "bool", 1.0),
    tensor("out", "out"),
    attrs=(
        Attr("gemma", (False, True), True, ""),
        Attr("group", (64, 128), 128, "neighbours"),
        Attr("kind", ("silu", "a-b", "a_b", 'q"\\?'), "silu", ""),
    ),
    doc="mixes /* everything */",
)
AWKWARD = signature(
    *(tensor(n) for n in sorted(RESERVED - {"NULL", "I"})[:40]),
    tensor("new"),
    tensor("new_"),
    tensor("error"),
    tensor("ops"),
    tensor("_x"),
    tensor("arg_x"),
    tensor("linux", "out"),
    attrs=(Attr("class", (True, 1, "true"), "true", ""),),
)
OPS = {"mix": MIX, "awkward": AWKWARD, "count": signature(tensor("x"), tensor("out", "out"))}

STUB = Path(__file__).with_name("c_header_stub.c").read_text("ascii")


def write(folder: Path, manifests: Mapping[str, Manifest], source: str = STUB) -> None:
    (folder / "kiln_ops.h").write_text(c_header(manifests, "0" * 64), "utf-8")
    (folder / "main.c").write_text(source, "ascii")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("header")
    without_count = {name: s for name, s in OPS.items() if name != "count"}
    write(folder, {"sm_80": manifest(without_count), "sm_90a": manifest(OPS)})
    build(first_of(*C), folder, f"-I{INCLUDE}", "main.c", "-o", "main")
    return folder / "main"


def called(program: Path, ops: Mapping[str, Signature]) -> list[str]:
    said = run([program, *(f"{n}={how_called(n, s)}" for n, s in ops.items())], program.parent)
    return said.splitlines()


def test_how_an_op_is_called() -> None:
    assert how_called("mix", MIX) == (
        "mix(in x, inout? residual, f32 eps, i32 k, i64 big, bool flag, out out; gemma, group, kind)"
    )


def test_arguments_arrive_with_their_names_kinds_and_values(program: Path) -> None:
    lines = called(program, OPS)
    assert lines[:12] == [
        "run mix 1",
        "x tensor 0 0 0 -",
        "residual tensor 1 0 0 -",
        "residual written 2 0 0 -",
        "eps number -1 0.5 0 -",
        "k integer -1 0 3 -",
        "big integer -1 0 -9223372036854775808 -",
        "flag bool -1 0 1 -",
        "out tensor 3 0 0 -",
        "gemma bool -1 0 1 -",
        "group integer -1 0 128 -",
        "kind text -1 0 0 a_b",
    ]
    assert lines[12] == "bind cou fast"
    assert lines[-1].startswith("kind text -1 0 0 no choice of")


def test_an_op_that_this_device_has_not_is_refused_when_it_is_called(program: Path) -> None:
    lines = called(program, {"mix": MIX, "awkward": AWKWARD, "more": MIX})
    assert "4 the tree has no op count for this device." in lines


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"mix": MIX}, "1 the tree has no op awkward; run kiln header on this tree and compile again."),
        (
            {"mix": replace(MIX, attrs=MIX.attrs[1:]), "awkward": AWKWARD},
            "for another; run kiln header again.",
        ),
        (
            {"mix": replace(MIX, operands=MIX.operands[::-1]), "awkward": AWKWARD},
            "1 the tree has mix(out out, ",
        ),
    ],
    ids=["missing", "attribute", "order"],
)
def test_a_tree_of_other_ops_is_refused(program: Path, changed: dict[str, Signature], told: str) -> None:
    (line,) = called(program, changed)
    assert told in line


def test_targets_that_disagree_are_refused() -> None:
    other = {"mix": replace(MIX, operands=MIX.operands[1:])}
    with pytest.raises(BuildError, match=r"sm_90a has mix\(inout\? residual, .*, sm_80 has mix\(in x, "):
        c_header({"sm_90a": manifest(other), "sm_80": manifest({"mix": MIX})}, "0" * 64)


def test_the_text_does_not_depend_on_the_order_of_its_input() -> None:
    backwards = dict(reversed(OPS.items()))
    manifests = {"sm_80": manifest(OPS), "sm_90a": manifest(OPS)}
    turned = {"sm_90a": manifest(backwards), "sm_80": manifest(backwards)}
    assert c_header(manifests, "0" * 64) == c_header(turned, "0" * 64)


def test_two_headers_with_prefixes_of_their_own_go_together(tmp_path: Path) -> None:
    for prefix in ("kiln", "acme"):
        (tmp_path / f"{prefix}.h").write_text(c_header({"sm_80": manifest(OPS)}, "0" * 64, prefix), "utf-8")
    (tmp_path / "both.c").write_text('#include "kiln.h"\n#include "./acme.h"\n#include "./kiln_ops.h"\n')
    (tmp_path / "kiln.h").rename(tmp_path / "kiln_ops.h")
    build(first_of(*C), tmp_path, f"-I{INCLUDE}", "-c", "both.c", "-o", "both.o")


@pytest.mark.parametrize("compiler", [*C, *CXX])
def test_every_compiler_takes_the_header(tmp_path: Path, compiler: str) -> None:
    tree = read_tree(shipped())
    (tmp_path / "shipped.h").write_text(c_header(tree.manifests, tree.digest, "shipped"), "utf-8")
    write(tmp_path, {"sm_90a": manifest(OPS)}, '#include "kiln_ops.h"\n#include "shipped.h"\n')
    source = tmp_path / ("main.cc" if compiler in CXX else "main.c")
    (tmp_path / "main.c").rename(source)
    build(compiler, tmp_path, f"-I{INCLUDE}", "-c", source.name, "-o", "main.o")
