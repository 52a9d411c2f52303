"""Kernels that are written as what differs from an earlier one: what they mean, what is refused, what they
cost."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from kiln.runtime.errors import SchemaError
from kiln.runtime.like import NEAR
from kiln.runtime.manifest import canonical_json, dump, parse_manifest
from kiln.tests.runtime.mapped import tensor_map
from kiln.tests.runtime.test_manifest import text_of
from kiln.tests.runtime.trees import OPS, PARAMS, dim, kernel, manifest, pointer, value

Json = Any
SCRATCH = [{"name": "work", "bytes": ["mul", dim("M"), 4], "align": 16}]
LINKED = [*PARAMS["negate"], pointer("scratch:work", "write", "f32", 4, name="work")]


def entries() -> list[Json]:
    """A kernel, one like it, one like that one, one of another op."""
    return [
        kernel("negate", "a", PARAMS["negate"], b"x", toolchain={"zig": "1"}, resources={"stack": 1}),
        {"op": "negate", "variant": "b", "like": "a", "when": ["gt", dim("M"), 1], "priority": 7},
        {"op": "negate", "variant": "c", "like": "b", "params": LINKED, "scratch": SCRATCH, "toolchain": {}},
        kernel("scale_add", "a", PARAMS["scale_add"], b"x"),
    ]


def alike(kernels: list[Json] | None = None) -> Json:
    """A manifest of these kernels."""
    return manifest(kernels or entries(), schema=2)


def test_a_kernel_has_what_it_does_not_give_of_the_one_it_is_like() -> None:
    a, b, c, _ = parse_manifest(canonical_json(alike()), "cpu-x86_64").kernels
    first = entries()[0]
    assert dump(b) == {**first, "variant": "b", "when": ["gt", dim("M"), 1], "priority": 7}
    assert dump(c) == {**dump(b), "variant": "c", "params": LINKED, "scratch": SCRATCH, "toolchain": {}}
    assert b.params is a.params


def test_parameters_that_differ_are_given_by_name() -> None:
    kernels = entries()
    first = [
        *PARAMS["negate"],
        {"name": "g", "kind": "null", "dtype": "ptr"},
        {"name": "one", "kind": "dropped", "dtype": "i32", "value": dim("M"), "equals": 1},
    ]
    kernels[0]["params"] = first
    changes = {
        "x_read": {"align": 2, "dtype": "bf16"},
        "n": {"value": dim("M")},
        "one": {"equals": 2},
        "g": {},
    }
    kernels[1]["params"] = changes
    a, b, _, _ = parse_manifest(canonical_json(alike(kernels)), "cpu-x86_64").kernels
    assert dump(a)["params"] == first
    assert dump(b)["params"] == [{**p, **changes.get(p["name"], {})} for p in first]


def test_the_file_is_what_a_kernel_is_stored_as() -> None:
    kernels = entries()
    kernels[0] |= {"file": "own.so", "stored_as": "other.so"}
    kernels[2]["file"] = "third.so"
    parsed = parse_manifest(canonical_json(alike(kernels)), "cpu-x86_64")
    assert [k.file for k in parsed.kernels[:3]] == ["other.so", "other.so", "third.so"]
    assert parsed.files().keys() == {"other.so", "third.so", "ops.so"}
    assert "stored_as" not in dump(parsed.kernels[0])


def change(at: int, **values: Json) -> Callable[[list[Json]], None]:
    """Other values in an entry; None takes a field out."""

    def edit(kernels: list[Json]) -> None:
        kernels[at] = {k: v for k, v in {**kernels[at], **values}.items() if v is not None}

    return edit


def far(kernels: list[Json]) -> None:
    """The kernel that the last one is like stands one entry too far before."""
    others = [{**kernels[0], "variant": f"b{i:03}"} for i in range(NEAR)]
    kernels[1:3] = [*others, {**kernels[1], "variant": "c"}]


def many(kernels: list[Json]) -> None:
    """More parameters than a kernel may have of which another one changes some."""
    kernels[0]["params"] = [*PARAMS["negate"], *(value(f"p{i}", 1, "i64", 1) for i in range(64))]
    kernels[1]["params"] = {"x_read": {}}


def mapped(kernels: list[Json]) -> None:
    """A tensor map among parameters of which another kernel changes some."""
    kernels[0]["params"] = [*PARAMS["negate"], tensor_map("x")]
    kernels[1]["params"] = {"x_read": {}}


BASE = "a variant of the same op among the 256 entries before"
DAMAGE: dict[str, tuple[Callable[[list[Json]], None], str, str]] = {
    "like none": (change(1, like="z"), "/kernels/1/like", BASE),
    "like itself": (change(1, like="b"), "/kernels/1/like", BASE),
    "like a later one": (change(1, like="c"), "/kernels/1/like", BASE),
    "like another op's": (change(3, like="b"), "/kernels/3/like", BASE),
    "like one too far before": (far, f"/kernels/{NEAR + 1}/like", BASE),
    "like a number": (change(1, like=0), "/kernels/1/like", BASE),
    "another's parameter": (change(1, params={"z": {}}), "/kernels/1/params/z", "a parameter of the kernel"),
    "parameter that is no object": (change(1, params={"x_read": 4}), "/kernels/1/params/x_read", "an object"),
    "parameter's name": (
        change(1, params={"x_read": {"name": "z"}}),
        "/kernels/1/params/x_read",
        "unknown field name",
    ),
    "parameter's kind": (
        change(1, params={"x_read": {"kind": "null"}}),
        "/kernels/1/params/x_read",
        "unknown field kind",
    ),
    "field of another kind": (
        change(1, params={"x_read": {"equals": 1}}),
        "/kernels/1/params/x_read",
        "unknown field equals",
    ),
    "parameter's wrong value": (
        change(1, params={"x_read": {"align": 3}}),
        "/kernels/1/params/x_read/align",
        "found 3, expected",
    ),
    "parameter of nothing": (
        change(1, params={"x_read": {"operand": "q"}}),
        "",
        "param x_read points to 'q'",
    ),
    "written input": (change(1, params={"x_read": {"access": "write"}}), "", "write of the in operand x"),
    "value of nothing": (change(1, params={"n": {"value": dim("Q")}}), "", "param n names 'Q'"),
    "changes of a whole kernel": (change(0, params={"x_read": {}}), "/kernels/0/params", "a list"),
    "changes of too many": (many, "/kernels/1/params", "has more than 64 parameters"),
    "changes beside a tensor map": (mapped, "/kernels/1/params", "has tensor maps"),
    "without op": (change(1, op=None), "/kernels/1", "the field 'op'"),
    "op of another kind": (change(1, op=[]), "/kernels/1/op", "a snake_case op name"),
    "without variant": (change(1, variant=None), "/kernels/1", "the field 'variant'"),
    "parameters without scratch": (change(2, scratch=None), "/kernels/2", "the field 'scratch'"),
    "scratch without parameters": (change(2, params=None), "/kernels/2", "the field 'params'"),
    "unknown field": (change(1, surprise=1), "/kernels/1", "surprise"),
    "wrong value": (change(1, priority="7"), "/kernels/1/priority", "an integer"),
    "null for what is no null": (change(1, params=0, scratch=[]), "/kernels/1/params", "a list"),
    "isa of another target": (change(1, isa={"tier": "neon", "features": []}), "", "isa tier 'neon'"),
    "condition on nothing": (change(2, when=["present", "q"]), "", "kernel negate.c: when names 'q'"),
    "grid of nothing": (change(1, grid=[dim("Q"), 1, 1]), "", "kernel negate.b: grid names 'Q'"),
    "scratch of nothing": (change(2, scratch=[]), "", "kernel negate.c: param work points to"),
    "stored as a path": (change(1, stored_as="../x"), "/kernels/1/stored_as", "a plain lower-case file name"),
    "stored as other bytes": (
        change(1, stored_as="ops.so", sha256="b" * 64),
        "",
        "ops.so has two sizes or digests",
    ),
    "declared twice": (change(2, variant="b"), "", "declared twice"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_contradictions_are_refused(name: str) -> None:
    kernels = entries()
    edit, place, why = DAMAGE[name]
    edit(kernels)
    with pytest.raises(SchemaError) as e:
        parse_manifest(text_of({**alike(), "kernels": kernels}), "cpu-x86_64")
    assert why in str(e.value)
    assert f" at {place}:" in str(e.value) or not place


def test_the_last_place_that_is_near_enough_counts() -> None:
    kernels = entries()
    far(kernels)
    del kernels[1]
    assert len(parse_manifest(canonical_json(alike(kernels))).kernels) == NEAR + 2


def crowd(count: int = 20_000) -> Json:
    """As many kernels as a manifest may hold, all like one whose lists are as long as they may be."""
    params = [value(f"p{i}", ["add", dim("M"), i], "i64", 1) for i in range(512)]
    when = ["or", *([["gt", dim("M"), 1]] * 1000)]
    size: Json = dim("M")
    for _ in range(10):
        size = ["add", size, size]
    first = kernel("negate", "v00000", params, b"x", when=when, grid=[size] * 3)
    near = [f"v{i - i % NEAR:05}" for i in range(count)]
    others = [{"op": "negate", "variant": f"v{i:05}", "like": near[i - 1]} for i in range(1, count)]
    return manifest([first, *others], ops={"negate": OPS["negate"]}, recipes=[], schema=2)


def test_lists_that_many_share_are_read_and_checked_once() -> None:
    document = text_of(crowd())
    start = time.process_time()
    kernels = parse_manifest(document).kernels
    assert kernels[-1].params is kernels[0].params
    assert time.process_time() - start < 3
