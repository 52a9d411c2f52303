"""Schema 1 as tables: one reader per kind of object, built from `kiln.runtime.fields`."""

from typing import Any

from kiln.runtime import entities as e
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.expr import ALIGNMENTS, parse_expr, parse_pred
from kiln.runtime.fields import (
    Mismatch,
    Reader,
    array,
    attr_value,
    boolean,
    choice,
    integer,
    mapping,
    nullable,
    number,
    once,
    record,
    tagged,
    text,
)
from kiln.runtime.targets import TARGET_PATTERN

MAX_INDEX_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 16 << 20
MAX_ARTIFACT_BYTES = 64 << 20
MAX_KERNELS = 20_000
_MAX_COUNT = (1 << 63) - 1
_MAX_GRID_SHARED = 1 << 20

_RESERVED_STEMS = frozenset(
    {"con", "prn", "aux", "nul", *(f"com{i}" for i in range(10)), *(f"lpt{i}" for i in range(10))}
)
_FILE_TEXT = text(r"[a-z0-9_+][a-z0-9_.+-]*", "a plain lower-case file name of letters, digits and _ . + -")


def file_name(value: Any) -> str:
    """A name that is one plain file on every file system: no path, no link trick, no case clash, no device
    name."""
    name = _FILE_TEXT(value)
    if name.endswith(".") or ".." in name or name.split(".")[0] in _RESERVED_STEMS:
        raise Mismatch("a file name that is legal on every system", value)
    return name


TARGET = text(TARGET_PATTERN, "a target such as sm_90a or cpu-x86_64")
_IDENT = text(r"[A-Za-z_][A-Za-z0-9_]*", "an identifier", 128)
_OP = text(r"[a-z][a-z0-9_]*", "a snake_case op name", 128)
_VARIANT = text(r"[a-z0-9_][a-z0-9_.+-]*", "a variant name of lower-case letters, digits and _ . + -")
_SYMBOL = text(r"[A-Za-z_$][A-Za-z0-9_$.]*", "a symbol name", 512)
_SHA256 = text(r"[0-9a-f]{64}", "a SHA-256 digest of 64 lower-case hex digits", 64)
_WORD = text(r"[!-~]+", "a printable word", 128)
_DOC = text(r"[^\x00]*", "text", 1 << 16)
_COUNT = integer(0, _MAX_COUNT)
_SIZE = integer(1, MAX_ARTIFACT_BYTES)
_DTYPE = choice(*DTYPES)
_PRIORITY = integer(-(1 << 31), (1 << 31) - 1)
_TOOLCHAIN = mapping(_WORD, text(r"[ -~]+", "a version"), 64)
_EXPR: Reader[Any] = parse_expr
_PRED: Reader[Any] = once(parse_pred)
_ALIGN = choice(*ALIGNMENTS)


def _json(value: Any) -> Any:
    return value


def _true(value: Any) -> bool:
    if value is not True:
        raise Mismatch("true, or no such field", value)
    return True


def _attr_values(most: int) -> Reader[dict[str, bool | int | str]]:
    return mapping(_IDENT, attr_value, most)


_DTYPE_VAR = record(e.DTypeVar, {"var": _IDENT, "choices": array(_DTYPE, 16, 1)})
_LIKE = record(e.Like, {"like": _WORD})


def _dtype_or(alternative: Reader[Any]) -> Reader[Any]:
    return lambda value: alternative(value) if type(value) is dict else _DTYPE(value)


_TENSOR: Reader[e.Operand] = record(
    e.Tensor,
    {
        "kind": choice("tensor"),
        "name": _IDENT,
        "role": choice("in", "inout", "out"),
        "dtype": _dtype_or(_DTYPE_VAR),
        "shape": array(_EXPR, 8),
        "layout": choice("rows", "dense", "strided", "nvfp4_128x4"),
        "optional": boolean,
        "doc": _DOC,
    },
)
_SCALAR: Reader[e.Operand] = record(
    e.Scalar,
    {
        "kind": choice("scalar"),
        "name": _IDENT,
        "dtype": choice("i32", "i64", "f32", "f64", "bool"),
        "default": nullable(number),
        "minimum": nullable(number),
        "positive": boolean,
        "doc": _DOC,
    },
)
_ATTR = record(
    e.Attr, {"name": _IDENT, "choices": array(attr_value, 64, 1), "default": attr_value, "doc": _DOC}
)
_CONTRACT = record(
    e.Contract, {"kind": choice("exact", "exact_on_target", "envelope"), "rel_l2": number, "max_eps": number}
)


def _constraint(value: Any) -> tuple[Any, str]:
    if type(value) not in (list, tuple) or len(value) != 2:
        raise Mismatch("a predicate and a sentence", value)
    return parse_pred(value[0]), _DOC(value[1])


SIGNATURE = record(
    e.Signature,
    {
        "family": _WORD,
        "kind": choice("op", "recipe"),
        "rows": _IDENT,
        "width": _IDENT,
        "operands": array(tagged("kind", {"tensor": _TENSOR, "scalar": _SCALAR}), 64, 1),
        "returns": array(_IDENT, 64, 1),
        "attrs": array(_ATTR, 32),
        "constraints": array(_constraint, 64),
        "contract": _CONTRACT,
        "doc": _DOC,
    },
)

_PARAM = tagged(
    "kind",
    {
        "ptr": record(
            e.Param,
            {
                "kind": choice("ptr"),
                "name": _IDENT,
                "dtype": _DTYPE,
                "operand": text(r"(scratch:)?[A-Za-z_][A-Za-z0-9_]*", "an operand or scratch:NAME"),
                "access": choice("read", "write"),
                "align": _ALIGN,
            },
        ),
        "scalar": record(
            e.Param,
            {
                "kind": choice("scalar"),
                "name": _IDENT,
                "dtype": choice("i32", "i64", "f32", "f64"),
                "value": _EXPR,
                "divisible_by": integer(1, 1 << 16),
            },
        ),
        "null": record(e.Param, {"kind": choice("null"), "name": _IDENT, "dtype": choice("ptr")}),
        "dropped": record(
            e.Param,
            {
                "kind": choice("dropped"),
                "name": _IDENT,
                "dtype": choice("i32", "i64", "f32", "f64"),
                "value": _EXPR,
                "equals": integer(-(1 << 31), (1 << 31) - 1),
            },
        ),
    },
)
_SCRATCH = record(
    e.Scratch, {"name": _IDENT, "bytes": _EXPR, "align": _ALIGN}, optional={"zeroed": _true}
)
_ISA = record(e.Isa, {"tier": _WORD, "features": array(_WORD, 64)})
_SELFTEST = record(e.Selftest, {"seed": _COUNT, "shape": mapping(_IDENT, _COUNT, 16)})
_RESOURCES = mapping(_IDENT, _COUNT, 32)
_MODE = choice("exact", "fast")

KERNEL = record(
    e.Kernel,
    {
        "op": _OP,
        "variant": _VARIANT,
        "tier": choice("fused", "fast", "generated", "primitive"),
        "mode": _MODE,
        "entry": _SYMBOL,
        "file": file_name,
        "bytes": _SIZE,
        "sha256": _SHA256,
        "inputs_digest": _SHA256,
        "toolchain": _TOOLCHAIN,
        "params": once(array(_PARAM, 512)),
        "grid": array(_EXPR, 3, 3),
        "block": array(integer(1, 1024), 3, 3),
        "cluster": array(integer(1, 16), 3, 3),
        "shared_bytes": integer(0, _MAX_GRID_SHARED),
        "launch": mapping(choice("pdl", "cooperative"), boolean, 8),
        "scratch": array(_SCRATCH, 16),
        "when": _PRED,
        "priority": _PRIORITY,
        "isa": nullable(_ISA),
        "resources": _RESOURCES,
        "budget": _RESOURCES,
        "numerics": record(e.Numerics, {"contract": _CONTRACT, "selftest": _SELFTEST}),
        "specialization": once(mapping(_WORD, _json, 128)),
    },
    alike=(
        "tier", "mode", "toolchain", "grid", "block", "cluster", "launch", "scratch", "isa", "budget",
        "numerics",
    ),
)  # fmt: skip

_TEMP = record(e.Temp, {"name": _IDENT, "dtype": _dtype_or(_LIKE), "shape": array(_EXPR, 8)})
_STEP = record(
    e.Step,
    {
        "op": _OP,
        "bind": mapping(
            _IDENT, nullable(text(r"(temp:)?[A-Za-z_][A-Za-z0-9_]*", "an operand or temp:NAME")), 64
        ),
        "args": mapping(_IDENT, _EXPR, 64),
        "attrs": _attr_values(32),
    },
)
PLAN = record(
    e.Plan,
    {
        "op": _OP,
        "variant": _VARIANT,
        "tier": choice("composite", "primitive"),
        "mode": _MODE,
        "when": _PRED,
        "priority": _PRIORITY,
        "temps": array(_TEMP, 64),
        "steps": array(_STEP, 64, 1),
    },
)

MANIFEST = record(
    e.Manifest,
    {
        "schema": choice(1),
        "abi": _COUNT,
        "target": TARGET,
        "toolchain": _TOOLCHAIN,
        "ops": mapping(_OP, once(SIGNATURE), 4096),
        "kernels": array(KERNEL, MAX_KERNELS, 1),
        "recipes": array(once(PLAN), MAX_KERNELS),
        "sources": mapping(
            file_name,
            record(e.Source, {"bytes": integer(0, MAX_ARTIFACT_BYTES), "sha256": _SHA256}),
            MAX_KERNELS,
        ),
    },
)

INDEX = record(
    e.Index,
    {
        "schema": choice(1),
        "generation": _COUNT,
        "targets": mapping(
            TARGET,
            record(
                e.IndexEntry, {"manifest": _WORD, "bytes": integer(1, MAX_MANIFEST_BYTES), "sha256": _SHA256}
            ),
            64,
        ),
    },
)
