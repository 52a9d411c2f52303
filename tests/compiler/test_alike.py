"""How kernels are written: no word is lost, and the least is said."""

import json
from typing import Any

import pytest

from kiln.compiler.alike import brief, whole
from kiln.runtime.like import MOST_PARAMS, NEAR

Json = Any


PARAMS: list[Json] = [
    {"name": "x", "kind": "ptr", "dtype": "bf16", "align": 16},
    {"name": "n", "kind": "scalar", "dtype": "i64", "value": ["dim", "N"]},
]


def entry(variant: str, op: str = "f", **more: Json) -> Json:
    """Some fields of a kernel."""
    base = {"op": op, "variant": variant, "params": PARAMS, "scratch": [], "when": True, "grid": [1, 1, 1]}
    return {**base, "file": f"{op}.{variant}.cubin", **more}


def test_an_entry_gives_what_differs_from_the_nearest_in_meaning() -> None:
    a, b, c = entry("a"), entry("b", when=["gt", 5, 4]), entry("c", when=["gt", 5, 4], grid=[2, 1, 1])
    assert brief([a, b, c]) == [
        a,
        {"op": "f", "variant": "b", "like": "a", "file": "f.b.cubin", "when": ["gt", 5, 4]},
        {"op": "f", "variant": "c", "like": "b", "file": "f.c.cubin", "grid": [2, 1, 1]},
    ]


def test_of_equally_near_ones_the_first_is_named() -> None:
    found = brief([entry("a"), entry("b"), entry("c")])
    assert [e.get("like") for e in found] == [None, "a", "a"]


def test_parameters_and_scratch_stay_together() -> None:
    found = brief([entry("a"), entry("b", scratch=[7])])[1]
    assert {name: found[name] for name in found if name in ("params", "scratch", "when")} == {
        "params": PARAMS,
        "scratch": [7],
    }


def test_parameters_that_differ_are_named() -> None:
    wide = [{**PARAMS[0], "dtype": "f32", "align": 4}, PARAMS[1]]
    kernels = [entry("a"), entry("b", params=wide)]
    found = brief(kernels)
    assert found[1]["params"] == {"x": {"dtype": "f32", "align": 4}}
    assert "scratch" not in found[1]
    assert whole(found) == kernels


@pytest.mark.parametrize(
    "params",
    [
        PARAMS[:1],
        PARAMS[::-1],
        [{**PARAMS[0], "name": "y"}, PARAMS[1]],
        [{"name": "x", "kind": "null", "dtype": "ptr"}, PARAMS[1]],
    ],
)
def test_other_parameters_are_a_list(params: list[Json]) -> None:
    kernels = [entry("a"), entry("b", params=params)]
    found = brief(kernels)
    assert (found[1]["params"], found[1]["scratch"]) == (params, [])
    assert whole(found) == kernels


def test_parameters_of_one_name_too_many_and_maps_are_a_list() -> None:
    twice, many = PARAMS[:1] * 2, [{**PARAMS[0], "name": f"p{i}"} for i in range(MOST_PARAMS + 1)]
    mapped = [*PARAMS, {"name": "map", "kind": "tensor_map"}]
    for params in (twice, many, mapped):
        other = [{**params[0], "align": 2}, *params[1:]]
        assert brief([entry("a", params=params), entry("b", params=other)])[1]["params"] == other


def test_what_it_is_stored_as_stays_with_the_file() -> None:
    stored, own = {"file": "b", "stored_as": "a"}, {"file": "c"}
    kernels = [entry(v, **more) for v, more in (("a", stored), ("b", stored), ("c", own), ("d", stored))]
    found = brief(kernels)
    assert found[1] == {"op": "f", "variant": "b", "like": "a"}
    assert found[2] == {"op": "f", "variant": "c", "like": "a", "file": "c"}
    assert whole(found) == kernels
    third = brief([kernels[0], entry("x", file="x", stored_as="a")])
    assert third[1]["stored_as"] == "a"


def test_true_and_1_differ() -> None:
    assert brief([entry("a", when=1), entry("b")])[1]["when"] is True


def test_another_op_and_a_far_one_are_named_by_none() -> None:
    crowd = [
        entry(f"b{i:03}", params=[{**PARAMS[0], "align": i}] * 9, grid=[i, i, i], when=["is", i])
        for i in range(NEAR)
    ]
    found = brief([entry("a"), *crowd, entry("c")])
    assert found[-1]["like"] != "a"
    assert brief([entry("a"), *crowd[1:], entry("c")])[-1]["like"] == "a"
    assert brief([entry("a"), entry("a", "g")])[1] == entry("a", "g")


def test_what_shares_nothing_is_written_whole() -> None:
    other = {"op": "f", "variant": "b", "params": [], "scratch": [9], "when": 9, "grid": 9, "file": 9}
    assert brief([entry("a"), other])[1] == other


def test_whole_undoes_brief() -> None:
    kernels = [
        entry(f"v{i}", op, grid=[i % 3, 1, 1], when=i % 5, scratch=[i % 2])
        for op in "fg"
        for i in range(40)
    ]  # fmt: skip
    written = brief(kernels)
    assert whole(written) == kernels
    assert whole(kernels) == kernels
    assert len(json.dumps(written)) < 0.8 * len(json.dumps(kernels))
