"""`triton_op`: what a declaration matches, and what it refuses, with the kernel's file and line."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiln.backends.cuda.declare import Launch, TritonOp, triton_kernels, triton_op
from kiln.backends.cuda.kernel_source import MISSING, read_kernel
from kiln.ir.diagnostics import DeclarationError
from kiln.ir.dtypes import BF16, F32, I32
from kiln.ir.spec import Attr, DTypeVar, Op, Scalar, Ship, Tensor

T = DTypeVar("T", (BF16, F32))
X, OUT = Tensor("x", T, ("M", "N")), Tensor("out", T, ("M", "N"), "out")
OPERANDS = (X, Scalar("factor", F32), OUT)
HEAD = "import triton\nimport triton.language as tl\n\n\n"
KERNEL = "@triton.jit\ndef scale(x, out, x_stride, out_stride, factor, N, BLOCK: tl.constexpr):\n    pass\n"

Source = Callable[[str], str]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Write a kernel module; its name is `k`, plus a number that makes it new."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"k{len(list(tmp_path.iterdir()))}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(HEAD + text)
        importlib.invalidate_caches()
        return name

    return write


def _reference(**_: Any) -> None:
    """Never run."""


def _declare(kernel: str, operands: Any = OPERANDS, **fields: Any) -> TritonOp:
    given: dict[str, Any] = {
        "family": "MINE", "reference": _reference, "grid": ("M",), "launches": (Launch({"BLOCK": 128}),),
        "ship": (Ship({"T": BF16}),),
    }  # fmt: skip
    return triton_op("scaled", kernel, operands, **{**given, **fields})


def _refusal(kernel: str, *args: Any, **fields: Any) -> str:
    with pytest.raises(DeclarationError) as caught:
        _declare(kernel, *args, **fields)
    return str(caught.value)


def test_parameters_are_matched_by_name(source: Source) -> None:
    made = _declare(f"{source(KERNEL)}:scale")
    aligned, unaligned = made.realizations
    assert [(p.name, p.json()["kind"]) for p in aligned.params] == [
        ("x", "ptr"), ("out", "ptr"), ("x_stride", "scalar"), ("out_stride", "scalar"), ("factor", "scalar"),
        ("N", "scalar"),
    ]  # fmt: skip
    assert [p.json().get("value") for p in aligned.params[2:]] == [
        ["stride", "x"], ["stride", "out"], ["arg", "factor"], ["dim", "N"],
    ]  # fmt: skip
    assert [p.json()["dtype"] for p in aligned.params] == ["bf16", "bf16", "i64", "i64", "f32", "i32"]
    assert [p.json().get("access") for p in aligned.params[:2]] == ["read", "write"]
    assert aligned.constants == {"BLOCK": 128}
    assert (aligned.variant, unaligned.variant) == ("bf16_block128", "bf16_block128_unaligned")
    assert aligned.priority > unaligned.priority


def test_hints_are_conditions(source: Source) -> None:
    aligned, unaligned = _declare(f"{source(KERNEL)}:scale").realizations
    for p in aligned.params:
        if p.hinted:
            name = p.json().get("operand")
            want = ["aligned", name, 16] if name else ["divisible", p.json()["value"], 16]
            assert want in aligned.when
    assert [p.name for p in aligned.params if p.hinted] == ["x", "out", "x_stride", "out_stride", "N"]
    assert not any(p.hinted for p in unaligned.params)
    assert unaligned.when == ["and", ["dtype", "x", "bf16"], ["dtype", "out", "bf16"]]


def test_narrow_rows_are_not_promised_to_be_multiples_of_16(source: Source) -> None:
    text = "@triton.jit\ndef k(x, scales, scales_stride, M, out):\n    pass\n"
    scales = Tensor("scales", F32, ("M", ["floordiv", ["dim", "N"], 128]))
    aligned, _ = _declare(f"{source(text)}:k", (X, scales, OUT), launches=(Launch(),)).realizations
    assert [p.name for p in aligned.params if p.hinted] == ["x", "scales", "out"]


def test_other_names_are_mapped(source: Source) -> None:
    text = "@triton.jit\ndef k(a, b, sa, half, total):\n    pass\n"
    arguments = {
        "a": "x", "b": "out", "sa": "x_stride", "half": ["floordiv", "N", 2],
        "total": ["mul", ["dim", "M"], "N"],
    }  # fmt: skip
    made = _declare(f"{source(text)}:k", (X, OUT), arguments=arguments, launches=(Launch(hints=(False,)),))
    (row,) = made.realizations
    assert [p.json().get("operand") or p.json()["value"] for p in row.params] == [
        "x", "out", ["stride", "x"], ["floordiv", ["dim", "N"], 2], ["mul", ["dim", "M"], ["dim", "N"]],
    ]  # fmt: skip
    assert row.json_params()[3]["dtype"] == "i64"


def test_grid_and_when_name_sizes_and_constants(source: Source) -> None:
    launch = Launch({"BLOCK": 64}, when=["le", "N", ["mul", "BLOCK", 2]], hints=(False,))
    (row,) = _declare(
        f"{source(KERNEL)}:scale", grid=(["cdiv", "N", "BLOCK"], "M"), launches=(launch,)
    ).realizations
    assert row.grid == (["cdiv", ["dim", "N"], 64], ["dim", "M"], 1)
    assert row.when[-1] == ["le", ["dim", "N"], ["mul", 64, 2]]


def test_a_size_made_a_constant_is_a_condition(source: Source) -> None:
    launch = Launch({"BLOCK": 64, "N": 4096}, hints=(False,))
    (row,) = _declare(f"{source(KERNEL)}:scale", launches=(launch,)).realizations
    assert ["eq", ["dim", "N"], 4096] in row.when
    assert [p.name for p in row.params] == ["x", "out", "x_stride", "out_stride", "factor"]


def test_attributes_and_defaults_become_constants(source: Source) -> None:
    text = (
        "@triton.jit\n"
        "def k(x, gemma: tl.constexpr, MODE: 'tl.constexpr', out, B: triton.language.constexpr = 32):\n"
        "    pass\n"
    )
    attrs = (Attr("gemma", (False, True), False), Attr("mode", ("a", "b"), "a"))
    made = _declare(
        f"{source(text)}:k", (X, OUT), attrs=attrs, arguments={"MODE": ["attr", "mode"]},
        launches=(Launch(hints=(False,)),),
        ship=(Ship({"T": BF16}), Ship({"T": BF16}, {"gemma": True, "mode": "b"})),
    )  # fmt: skip
    assert [r.constants for r in made.realizations] == [
        {"gemma": False, "MODE": "a", "B": 32}, {"gemma": True, "MODE": "b", "B": 32},
    ]  # fmt: skip
    assert ["attr", "gemma", True] in made.realizations[1].when


def test_an_absent_operand_is_none(source: Source) -> None:
    text = "@triton.jit\ndef k(x, bias, bias_stride, HAS: tl.constexpr, out):\n    pass\n"
    bias = Tensor("bias", T, ("M", "N"), optional=True)
    ships = (Ship({"T": BF16}), Ship({"T": BF16}, absent=("bias",)))
    launch = Launch(hints=(False,))
    with_bias, without = _declare(
        f"{source(text)}:k",
        (X, bias, OUT),
        ship=ships,
        launches=(launch,),
        arguments={"HAS": ["present", "bias"]},
    ).realizations
    assert (with_bias.constants, without.constants) == (
        {"HAS": True}, {"bias": None, "bias_stride": None, "HAS": False},
    )  # fmt: skip
    assert ["absent", "bias"] in without.when
    assert ["present", "bias"] in with_bias.when


def test_an_in_out_operand_has_two_pointers(source: Source) -> None:
    text = "@triton.jit\ndef k(x, acc, acc_out, acc_stride, acc_out_stride):\n    pass\n"
    acc = Tensor("acc", F32, ("M", "N"), "inout")
    row, _ = _declare(f"{source(text)}:k", (X, acc), launches=(Launch(),)).realizations
    assert [(p.json().get("operand"), p.json().get("access")) for p in row.params[:3]] == [
        ("x", "read"), ("acc", "read"), ("acc", "write"),
    ]  # fmt: skip


def test_a_kernel_for_an_op_that_is_declared_already(source: Source) -> None:
    op = Op(
        "scaled", "MINE", (X, Scalar("factor", F32), OUT), ship=(Ship({"T": F32}),), body=lambda x, factor: x
    )
    rows = triton_kernels(
        op, f"{source(KERNEL)}:scale", grid=("M",), launches=(Launch({"BLOCK": 8}, name="mine"),)
    )
    assert [r.variant for r in rows] == ["f32_mine", "f32_mine_unaligned"]


def test_a_parameter_that_matches_nothing(source: Source) -> None:
    module = source("@triton.jit\ndef k(\n    x,\n    out,\n    x_strid,\n):\n    pass\n")
    message = _refusal(f"{module}:k", (X, OUT), launches=(Launch(),))
    assert f"{module}.py:9: op scaled: parameter 'x_strid' is no operand" in message
    assert "did you mean x_stride" in message
    assert "arguments={'x_strid': …}" in message


@pytest.mark.parametrize(
    ("kernel", "operands", "message"),
    [
        ("def k(x):", (X, OUT), "operand out is written by no parameter; name one out"),
        ("def k(out):", (X, OUT), "operand x is read by no parameter; name one x"),
        (
            "def k(x, out):",
            (X, Tensor("out", T, ("M", "N"), "inout")),
            "operand out is written by no parameter; name one out_out",
        ),
        (
            "def k(x, out, B: tl.constexpr):",
            (X, OUT),
            "constant B has no value; give Launch(constants={'B': …})",
        ),
    ],
)
def test_an_operand_or_constant_that_is_missing(
    source: Source, kernel: str, operands: Any, message: str
) -> None:
    module = source(f"@triton.jit\n{kernel}\n    pass\n")
    assert message in _refusal(f"{module}:k", operands, launches=(Launch(),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"launches": (Launch({"BLOCKS": 128}),)},
            "'BLOCKS' is no parameter of the kernel; it has BLOCK, N, factor",
        ),
        ({"arguments": {"stride": "x_stride"}}, "'stride' is no parameter of the kernel"),
        ({"arguments": {"factor": "fact"}}, "parameter 'fact' is no operand"),
        (
            {"arguments": {"factor": ["arg", "fact"]}},
            "factor is mapped to 'fact', which is no scalar operand",
        ),
        ({"arguments": {"N": ["dim", "K"]}}, "N has ['dim', 'K']; legal are M, N"),
        (
            {"grid": ("BLOKS",)},
            "grid has 'BLOKS', expected a number or an expression list; names here are M, N, BLOCK",
        ),
        ({"grid": (["dim", "K"],)}, "grid has ['dim', 'K']; legal are M, N"),
        ({"grid": ()}, "the grid has 0 expressions, expected one to three"),
        ({"grid": (1, 1, 1, 1)}, "the grid has 4 expressions, expected one to three"),
        ({"launches": (Launch({"BLOCK": 1}, when=["less", "N", 3]),)}, "when has 'less', expected"),
        (
            {"launches": (Launch({"BLOCK": 1}, when=["aligned", "y", 16]),)},
            "when has ['aligned', 'y']; legal are x, out",
        ),
        (
            {"launches": (Launch({"BLOCK": 1}, name="a"), Launch({"BLOCK": 2}, name="a"))},
            "two launches make the variant bf16_a",
        ),
    ],
)
def test_what_a_declaration_may_not_say(source: Source, fields: dict[str, Any], message: str) -> None:
    assert message in _refusal(f"{source(KERNEL)}:scale", **fields)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def k(x):\n    pass\n", "k", "k is no kernel; decorate it with @triton.jit"),
        ("@triton.jit\ndef k(x):\n    pass\n", "l", "no function named l; the file's functions are k"),
        (
            "@triton.autotune(configs=[], key=[])\n@triton.jit\ndef k(x):\n    pass\n",
            "k",
            "decorated with autotune",
        ),
        ("@triton.heuristics({})\n@triton.jit\ndef k(x):\n    pass\n", "k", "decorated with heuristics"),
        ("@triton.jit\ndef k(x, *rest):\n    pass\n", "k", "takes * arguments; name each parameter"),
    ],
)
def test_what_is_no_kernel(source: Source, text: str, name: str, message: str) -> None:
    module = source(text)
    found = _refusal(f"{module}:{name}")
    assert message in found
    assert f"{module}.py:" in found


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("no_such_module:k", "there is no Python module no_such_module"),
        ("math:k", "no Python module math"),
        ("k", "is no module:function"),
    ],
)
def test_a_module_that_is_not_there(kernel: str, message: str) -> None:
    assert message in _refusal(kernel)


@pytest.mark.parametrize(
    "decorator", ["@triton.jit", "@triton.jit()", "@jit", "@triton.jit(do_not_specialize=['n'])"]
)
def test_every_way_to_decorate(source: Source, decorator: str) -> None:
    parameters = read_kernel(
        f"{source(f'{decorator}{chr(10)}def k(x, /, y=2, *, B: tl.constexpr = None):{chr(10)}    pass')}:k"
    ).parameters
    assert [(p.name, p.is_constexpr, p.default) for p in parameters] == [
        ("x", False, MISSING), ("y", False, 2), ("B", True, None),
    ]  # fmt: skip


def test_an_integer_scalar_keeps_its_type(source: Source) -> None:
    text = "@triton.jit\ndef k(x, top, out):\n    pass\n"
    row, _ = _declare(f"{source(text)}:k", (X, Scalar("top", I32), OUT), launches=(Launch(),)).realizations
    assert row.json_params()[1] == {
        "name": "top",
        "kind": "scalar",
        "dtype": "i32",
        "value": ["arg", "top"],
        "divisible_by": 1,
    }
