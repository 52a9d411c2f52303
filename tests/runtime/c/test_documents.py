"""libkiln's reading of indices and manifests: what Python accepts it accepts and understands alike, what
Python refuses it refuses at the same place."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kiln.runtime.manifest import canonical_json, parse_index, parse_manifest
from kiln.tests.runtime.c.core_build import ACCEPTED, Core, python_verdict
from kiln.tests.runtime.c.documents import agrees, index_agrees, rich
from kiln.tests.runtime.c.manifest_text import index_text, manifest_text
from kiln.tests.runtime.test_expr import BAD_EXPRS, BAD_PREDS, HOLDS, VALUES
from kiln.tests.runtime.test_manifest import DAMAGE, NAMES, good, index, parent, places, small, text_of
from kiln.tests.runtime.trees import OPS, PARAMS, kernel, manifest
from kiln.tests.support.cost import check_cost

TREE = Path(__file__).parents[3] / "aot_artifacts"
Json = Any


@pytest.mark.parametrize("target", sorted(p.parent.name for p in TREE.glob("*/MANIFEST.json")))
def test_committed_manifests_are_understood_alike(libkiln_core: Core, target: str) -> None:
    data = (TREE / target / "MANIFEST.json").read_bytes()
    assert libkiln_core.manifest_dump(data, target) == manifest_text(parse_manifest(data, target))


def test_committed_index_is_understood_alike(libkiln_core: Core) -> None:
    data = (TREE / "INDEX.json").read_bytes()
    assert libkiln_core.index(data) == (ACCEPTED, index_text(parse_index(data)))


def test_every_kind_of_field_is_understood_alike(libkiln_core: Core) -> None:
    assert agrees(libkiln_core, canonical_json(rich())) == ACCEPTED
    assert agrees(libkiln_core, canonical_json(good())) == ACCEPTED
    assert agrees(libkiln_core, text_of(small()), None) == ACCEPTED


@pytest.mark.parametrize("name", DAMAGE)
def test_contradictions_are_refused_with_the_same_words(libkiln_core: Core, name: str) -> None:
    document = good()
    change, why = DAMAGE[name]
    change(document)
    found = libkiln_core.manifest_verdict(canonical_json(document), "cpu-x86_64")
    assert found.code == "SchemaError"
    assert why in found.message


WRONG: list[Json] = [None, True, -1, 0, 1.0, 2**63 - 1, "Wrong Type!", [], {"a": 1}, ["dim", "M"]]


def damaged(document: Json) -> Iterator[bytes]:
    """The document with each of its values gone, doubled, added to, or replaced by a wrong one."""
    for path in list(places(document)):
        inside, key = parent(document, path), path[-1]
        original = inside[key]
        more = {**original, "surprise": 1} if isinstance(original, dict) else original
        more = original + original[-1:] if isinstance(original, list) else more
        for wrong in (*WRONG, more):
            inside[key] = wrong
            yield text_of(document)
        inside[key] = original
        del inside[key]
        yield text_of(document)
        if isinstance(inside, dict):
            inside[key] = original
        else:
            inside.insert(key, original)


def test_every_value_of_another_kind_has_the_same_verdict(libkiln_core: Core) -> None:
    refused = sum(agrees(libkiln_core, data) != ACCEPTED for data in damaged(rich()))
    assert refused > 2000


@pytest.mark.parametrize(
    "name",
    [*NAMES, "a", "rms_norm.x86-64-v4.so", "a+b.cubin", "0.so", "control.so", "com.so", "lpt10"],
    ids=ascii,
)
def test_file_names_have_the_same_verdict(libkiln_core: Core, name: str) -> None:
    document = good()
    for entry in document["kernels"]:
        entry["file"] = name
    sources = good()
    sources["sources"] = {name: {"bytes": 1, "sha256": "a" * 64}}
    for changed in (document, sources):
        agrees(libkiln_core, canonical_json(changed))


@pytest.mark.parametrize("tree", [*BAD_EXPRS, *(e for e, _ in VALUES)], ids=repr)
def test_expressions_have_the_same_verdict(libkiln_core: Core, tree: Json) -> None:
    document = rich()
    document["kernels"][0]["grid"][0] = tree
    found = agrees(libkiln_core, text_of(document))
    assert (found != ACCEPTED) >= (tree in BAD_EXPRS)


@pytest.mark.parametrize("tree", BAD_PREDS + HOLDS, ids=repr)
def test_predicates_have_the_same_verdict(libkiln_core: Core, tree: Json) -> None:
    document = rich()
    document["kernels"][0]["when"] = tree
    agrees(libkiln_core, text_of(document))


def nested(depth: int) -> Json:
    return ["add", 1, nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("field", "tree", "accepted"),
    [
        ("grid", nested(32), True),
        ("grid", nested(33), False),
        ("when", ["or", *([True] * 4095)], True),
        ("when", ["or", *([True] * 4096)], False),
        ("when", ["or", *([["and", True]] * 2047)], True),
        ("when", ["or", *([["and", True]] * 2048)], False),
    ],
    ids=str,
)  # fmt: skip
def test_caps_of_expressions(libkiln_core: Core, field: str, tree: Json, accepted: bool) -> None:
    document = rich()
    document["kernels"][0][field] = [tree, 1, 1] if field == "grid" else tree
    assert (agrees(libkiln_core, text_of(document)) == ACCEPTED) == accepted


def chain(length: int, closed: bool) -> Json:
    """Plans that call each other in a row, or in a circle."""
    names = [f"op{i:04}" for i in range(length)]
    plan = {"variant": "v", "tier": "composite", "mode": "exact", "when": True, "priority": 0, "temps": []}
    step = {"bind": {"x": "x", "out": "out"}, "args": {}, "attrs": {}}
    calls = [*pairwise(names), *[(names[-1], names[0])] * closed]
    recipes = [{**plan, "op": a, "steps": [{**step, "op": b}, {**step, "op": "negate"}]} for a, b in calls]
    ops = {n: OPS["negate"] for n in (*names, "negate")}
    return manifest([kernel("negate", "v", PARAMS["negate"], b"x")], ops=ops, recipes=recipes)


@pytest.mark.parametrize("length", [2, 3, 400])
def test_circles_are_found_at_any_length(libkiln_core: Core, length: int) -> None:
    assert agrees(libkiln_core, text_of(chain(length, False))) == ACCEPTED
    found = agrees(libkiln_core, text_of(chain(length, True)))
    assert "op0000" in found.message
    assert "in a circle" in found.message


def test_order_and_identity_have_the_same_verdict(libkiln_core: Core) -> None:
    shuffled, twice = good(), good()
    shuffled["kernels"].reverse()
    twice["kernels"].insert(0, twice["kernels"][0])
    assert "not sorted" in agrees(libkiln_core, text_of(shuffled)).message
    assert "declared twice" in agrees(libkiln_core, text_of(twice)).message
    backwards = rich()
    backwards["ops"] = dict(reversed(backwards["ops"].items()))
    assert agrees(libkiln_core, text_of(backwards)) == ACCEPTED


@pytest.mark.parametrize("document", [[], None, 1, "x", True, {}, {"schema": 3}, {"schema": "1"}], ids=repr)
def test_other_top_types_have_the_same_verdict(libkiln_core: Core, document: Json) -> None:
    data = json.dumps(document).encode()
    assert agrees(libkiln_core, data).code == "SchemaError"
    assert libkiln_core.index(data)[0].code == python_verdict(lambda: parse_index(data)).code


def test_every_value_of_an_index_has_the_same_verdict(libkiln_core: Core) -> None:
    others: list[Json] = [{"../x": {}}, {}]
    more = [text_of({**index(), "targets": targets}) for targets in others]
    verdicts = [index_agrees(libkiln_core, data) for data in (*damaged(index()), *more)]
    assert sum(v != ACCEPTED for v in verdicts) > 60


def test_an_index_has_a_cap_of_its_own(libkiln_core: Core) -> None:
    big = canonical_json(index())
    assert libkiln_core.index(big + b" " * ((1 << 20) - len(big)))[0] == ACCEPTED
    assert (
        "expected at most 1048576" in libkiln_core.index(big + b" " * ((1 << 20) - len(big) + 1))[0].message
    )


def test_many_kernels_are_read_quickly(libkiln_core: Core) -> None:
    data = canonical_json(
        manifest([kernel("negate", f"v{i:04}", PARAMS["negate"], b"x") for i in range(5000)])
    )
    assert libkiln_core.manifest_verdict(data) == ACCEPTED
    check_cost(lambda: libkiln_core.manifest_verdict(data), 50)  # 5 where nothing else runs
