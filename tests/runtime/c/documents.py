"""A manifest with every kind of field, and the comparison of both readers on a document."""

from __future__ import annotations

from typing import Any

from kiln.runtime.manifest import parse_index, parse_manifest
from kiln.tests.runtime.c.core_build import ACCEPTED, Core, Verdict, python_verdict
from kiln.tests.runtime.c.manifest_text import index_text, manifest_text
from kiln.tests.runtime.trees import MN, OPS, dim, kernel, manifest, pointer, scalar, tensor, value

Json = Any


def agrees(core: Core, data: bytes, target: str | None = "cpu-x86_64") -> Verdict:
    """Both readers' verdict on a manifest, which must be one: the same place of a mismatch, the same
    meaning of a good document."""
    expected = python_verdict(lambda: parse_manifest(data, target))
    found = core.manifest_verdict(data, target)
    assert (found.code, found.place) == (expected.code, expected.place), (expected, found, data)
    if found == ACCEPTED:
        assert core.manifest_dump(data, target) == manifest_text(parse_manifest(data, target))
    return found


def index_agrees(core: Core, data: bytes) -> Verdict:
    """The same for an index."""
    expected = python_verdict(lambda: parse_index(data))
    found, text = core.index(data)
    assert (found.code, found.place) == (expected.code, expected.place), (expected, found, data)
    assert text == (index_text(parse_index(data)) if found == ACCEPTED else "")
    return found


VARIABLE = {"var": "T", "choices": ["bf16", "f32", "f8e4m3"]}
OPERANDS = [
    tensor("x", "in", [["add", dim("M"), ["mul", 2, dim("K")]], dim("N")], VARIABLE),
    scalar("eps", default=1e-06, minimum=-1),
    tensor("b", "in", [["next_pow2", dim("Z")]], "u8", optional=True, layout="strided"),
    tensor("out", "out", MN, VARIABLE),
    scalar("k", "i64", minimum=0.1, positive=True),
]
ATTRS = [
    {"name": "gemma", "choices": [False, True, 0, 1, "x"], "default": False, "doc": "d"},
    {"name": "size", "choices": [16, -(2**63)], "default": 16, "doc": ""},
]
WHEN = [
    "or",
    ["not", ["attr", "gemma", True]],
    ["aligned", "x", 16],
    ["dtype", "x", "f31"],
    ["absent", "b"],
    ["present", "b"],
    ["and"],
    ["divisible", ["colstride", "x"], 8],
    ["ge", ["arg", "eps"], 2.5e-3],
    ["ne", ["attr", "size"], -3],
]
PARAMS = [
    pointer("x", dtype="bf16", align=256),
    pointer("scratch:work", "write", "u8", 1, name="w"),
    pointer("out", "write"),
    value("n", ["cdiv", dim("K"), 3], "i32", 65536),
    {"kind": "null", "name": "g", "dtype": "ptr"},
    {"kind": "dropped", "name": "one", "dtype": "f64", "value": 1.5, "equals": -1},
]
ENTRY = {
    "when": WHEN,
    "launch": {"pdl": True, "cooperative": False},
    "block": [32, 4, 1],
    "cluster": [2, 1, 1],
    "scratch": [
        {"name": "work", "bytes": ["roundup", ["mul", dim("M"), 7], 256], "align": 64},
        {"name": "counters", "bytes": 4, "align": 4, "zeroed": True},
    ],
    "resources": {"registers": 3, "stack": 0},
    "budget": {"registers": 9},
    "specialization": {"deep": [{"a\0b": [1e-300]}]},
    "toolchain": {"zig": "1", "ptxas": "13.4.59"},
    "priority": -(2**31),
}
PLAN = {
    "op": "whole",
    "variant": "composite",
    "tier": "composite",
    "mode": "fast",
    "when": ["lt", dim("M"), 4],
    "priority": 7,
    "temps": [
        {"name": "t", "dtype": {"like": "a"}, "shape": [dim("N")]},
        {"name": "u", "dtype": "i8", "shape": []},
        {"name": "t", "dtype": {"like": "temp:u"}, "shape": [3]},
    ],
    "steps": [
        {
            "op": "big",
            "bind": {"x": "a", "b": None, "out": "temp:t"},
            "args": {"eps": ["arg", "s"], "k": 3},
            "attrs": {"gemma": "x"},
        }
    ],
}


def rich() -> Json:
    """Parameters, scratch, attributes, variables of type, floats, launch flags, a temp named twice, and
    kernels that are like another."""
    whole = [tensor("a", "in", MN), tensor("out", "out", MN), scalar("s")]
    big = {
        "operands": OPERANDS,
        "attrs": ATTRS,
        "doc": "two\nlines é",
        "contract": {"kind": "envelope", "rel_l2": 1e-3, "max_eps": 4},
        "constraints": [[["gt", dim("K"), 0], "K must be positive"]],
    }
    ops = {
        "whole": {**OPS["negate"], "kind": "recipe", "operands": whole},
        "big": {**OPS["negate"], **big},
    }
    entry = kernel("big", "v.1+x-y", PARAMS, b"data", **ENTRY)
    sources = {"big.c": {"bytes": 0, "sha256": "a" * 64}}
    like: Json = {"op": "big", "variant": "w", "like": "v.1+x-y", "when": ["present", "b"], "toolchain": {}}
    listed: Json = {"op": "big", "variant": "x", "like": "w", "params": PARAMS[:1], "scratch": []}
    changes = {"x_read": {"align": 1}, "n": {"value": 3}, "one": {"equals": 0, "dtype": "i32"}}
    changed: Json = {"op": "big", "variant": "y", "like": "v.1+x-y", "params": changes, "stored_as": "w.so"}
    return manifest([entry, like, listed, changed], ops=ops, recipes=[PLAN], sources=sources, schema=2)
