"""The schema: what round-trips, and that every damaged field is refused with its place."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from kiln.runtime.errors import SchemaError
from kiln.runtime.manifest import (
    canonical_json,
    dump,
    parse_index,
    parse_kernel,
    parse_manifest,
    parse_plan,
    parse_signature,
)
from kiln.tests.runtime.trees import (
    EXACT,
    MN,
    OPS,
    PARAMS,
    PLAN,
    cpu_manifest,
    dim,
    kernel,
    manifest,
    scalar,
    tensor,
)
from kiln.tests.support.cost import check_cost

Json = Any
DATA = b"not looked at here"


def good() -> Json:
    return cpu_manifest(DATA)


def small() -> Json:
    """One plan and the two kernels it calls: enough to have every kind of field."""
    names = ("negate", "scale_add")
    entries = [kernel(op, "base", PARAMS[op], DATA) for op in names]
    return manifest(entries, ops={op: OPS[op] for op in (*names, "scale_negate")})


def text_of(document: Json) -> bytes:
    """Compact JSON: what a document says does not depend on its spaces."""
    return json.dumps(document).encode()


def test_round_trip() -> None:
    document = canonical_json(good())
    parsed = parse_manifest(document, "cpu-x86_64")
    assert canonical_json(dump(parsed)) == document
    assert parse_manifest(canonical_json(dump(parsed))) == parsed
    assert parsed.files()["ops.so"].bytes == len(DATA)


def test_every_kind_of_parameter_round_trips() -> None:
    params = [
        *PARAMS["negate"],
        {"name": "g", "kind": "null", "dtype": "ptr"},
        {"name": "one", "kind": "dropped", "dtype": "i32", "value": dim("M"), "equals": 1},
    ]
    entry = kernel("negate", "v", params, DATA)
    assert dump(parse_kernel(entry)) == entry
    assert dump(parse_plan(PLAN)) == PLAN
    sig = {
        **OPS["negate"],
        "operands": [
            tensor("x", "in", MN, {"var": "T", "choices": ["bf16", "f32"]}),
            tensor("out", "out", MN, {"var": "T", "choices": ["bf16", "f32"]}),
            scalar("eps", default=1e-06, minimum=0.0, positive=True),
        ],
        "attrs": [{"name": "gemma", "choices": [False, True], "default": False, "doc": ""}],
        "constraints": [[["gt", dim("N"), 0], "N must be positive"]],
    }
    assert dump(parse_signature(sig)) == sig


def places(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a document."""
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))


def parent(document: Json, path: tuple[Any, ...]) -> Json:
    for step in path[:-1]:
        document = document[step]
    return document


_FREE_MAPS = (
    "specialization",
    "resources",
    "budget",
    "toolchain",
    "launch",
    "args",
    "attrs",
    "shape",
    "sources",
    "bind",
)
"""Objects whose fields are data."""


def test_every_missing_field_is_refused() -> None:
    document, refused = small(), 0
    for path in list(places(document)):
        if isinstance(path[-1], int) or (len(path) > 1 and path[-2] in (*_FREE_MAPS, "ops")):
            continue
        damaged = copy.deepcopy(document)
        del parent(damaged, path)[path[-1]]
        with pytest.raises(SchemaError, match=str(path[-1])):
            parse_manifest(text_of(damaged))
        refused += 1
    assert refused > 100


def test_every_unknown_field_is_refused() -> None:
    document = small()
    for path in [(), *places(document)]:
        damaged = copy.deepcopy(document)
        target = parent(damaged, path)[path[-1]] if path else damaged
        if not isinstance(target, dict) or (path and path[-1] in (*_FREE_MAPS, "ops")):
            continue
        target["surprise"] = 1
        with pytest.raises(SchemaError, match="surprise"):
            parse_manifest(text_of(damaged))


@pytest.mark.parametrize("wrong", [None, True, -1.5, "Wrong Type!", {"a": 1}, [[["x"]]]], ids=repr)
def test_every_field_of_another_type_is_refused(wrong: Json) -> None:
    document, refused = small(), 0
    for path in list(places(document)):
        original = parent(document, path)[path[-1]]
        free = path[-1] == "doc" or any(p in ("toolchain", "specialization") for p in path)
        nullable = path[-1] in ("default", "minimum", "isa")
        expression = isinstance(original, list | int | float) and not isinstance(original, bool)
        if free or nullable or type(wrong) is type(original) or (isinstance(wrong, float) and expression):
            continue
        if wrong is True and path[-1] in ("when", "optional"):
            continue
        damaged = copy.deepcopy(document)
        parent(damaged, path)[path[-1]] = wrong
        with pytest.raises(SchemaError):
            parse_manifest(text_of(damaged), "cpu-x86_64")
        refused += 1
    assert refused > 100


def edit(*path: Any, to: Json) -> Callable[[Json], None]:
    """A change of one value."""

    def change(document: Json) -> None:
        parent(document, path)[path[-1]] = to

    return change


K = ("kernels", 0)

DAMAGE: dict[str, tuple[Callable[[Json], None], str]] = {
    "future schema": (edit("schema", to=3), "schema 3, this version reads 1 and 2"),
    "schema 1.0": (edit("schema", to=1.0), "/schema"),
    "schema true": (edit("schema", to=True), "/schema"),
    "future abi": (edit("abi", to=2), "ABI 2"),
    "other target": (edit("target", to="cpu-aarch64"), "target cpu-aarch64, expected cpu-x86_64"),
    "target of no kind": (edit("target", to="sm_90x"), "/target"),
    "no kernels": (edit("kernels", to=[]), "/kernels"),
    "unknown dtype": (edit(*K, "params", 0, "dtype", to="f31"), "/kernels/0/params/0/dtype"),
    "unknown kind": (edit(*K, "params", 0, "kind", to="texture"), "/kernels/0/params/0/kind"),
    "unknown tier": (edit(*K, "tier", to="turbo"), "/kernels/0/tier"),
    "unknown launch attribute": (edit(*K, "launch", to={"warp": True}), "/kernels/0/launch/warp"),
    "bytes 1.0": (edit(*K, "bytes", to=1.0), "/kernels/0/bytes"),
    "bytes as text": (edit(*K, "bytes", to="12"), "/kernels/0/bytes"),
    "bytes true": (edit(*K, "bytes", to=True), "/kernels/0/bytes"),
    "bytes -1": (edit(*K, "bytes", to=-1), "/kernels/0/bytes"),
    "bytes 0": (edit(*K, "bytes", to=0), "/kernels/0/bytes"),
    "bytes 5 GiB": (edit(*K, "bytes", to=5 << 30), "/kernels/0/bytes"),
    "bytes 2^63-1": (edit(*K, "bytes", to=2**63 - 1), "/kernels/0/bytes"),
    "digest in upper case": (edit(*K, "sha256", to="A" * 64), "/kernels/0/sha256"),
    "digest of 63": (edit(*K, "sha256", to="a" * 63), "/kernels/0/sha256"),
    "digest of 65": (edit(*K, "sha256", to="a" * 65), "/kernels/0/sha256"),
    "digest not hex": (edit(*K, "sha256", to="g" * 64), "/kernels/0/sha256"),
    "md5": (edit(*K, "sha256", to="a" * 32), "/kernels/0/sha256"),
    "two sizes of one file": (edit(*K, "bytes", to=7), "two sizes or digests"),
    "two digests of one file": (edit(*K, "sha256", to="a" * 64), "two sizes or digests"),
    "source is an artifact": (
        edit("sources", to={"ops.so": {"bytes": 1, "sha256": "a" * 64}}),
        "both an artifact",
    ),
    "op not declared": (edit(*K, "op", to="absent"), "its op is not declared"),
    "isa tier of no name": (edit(*K, "isa", "tier", to="x86-64-v9"), "x86-64-v9"),
    "isa missing on a CPU": (edit(*K, "isa", to=None), "isa is missing"),
    "operand not declared": (edit(*K, "params", 0, "operand", to="z"), "'z', which is no tensor"),
    "write of an input": (edit(*K, "params", 0, "access", to="write"), "write of the in operand"),
    "dim not declared": (edit(*K, "grid", 0, to=dim("Q")), "'Q', which is no dim"),
    "arg not declared": (edit(*K, "when", to=["eq", ["arg", "q"], 1]), "'q', which is no arg"),
    "stride of nothing": (edit(*K, "when", to=["eq", ["stride", "q"], 1]), "'q', which is no operand"),
    "plan step of no op": (edit("recipes", 0, "steps", 0, "op", to="absent"), "step 0 calls 'absent'"),
    "plan calls itself": (
        edit("recipes", 0, "steps", 0, "op", to="scale_negate"),
        "in a circle",
    ),
    "plan binds nothing": (edit("recipes", 0, "steps", 0, "bind", "x", to=None), "binds x to nothing"),
    "plan binds the unknown": (
        edit("recipes", 0, "steps", 0, "bind", "x", to="temp:q"),
        "'temp:q', which is no",
    ),
    "plan binds too little": (
        edit("recipes", 0, "steps", 1, "bind", to={"x": "x"}),
        "expected the tensors of negate",
    ),
    "plan writes an input": (
        edit("recipes", 0, "steps", 0, "bind", "out", to="x"),
        "writes x, which is an input",
    ),
    "plan gives the unknown": (edit("recipes", 0, "steps", 1, "args", to={"eps": 1}), "gives 'eps'"),
    "attribute with NUL": (
        edit("recipes", 0, "steps", 0, "attrs", to={"a": "x\0"}),
        "/recipes/0/steps/0/attrs/a",
    ),
    "returns too little": (edit("ops", "negate", "returns", to=["x"]), "expected each written operand"),
    "reserved operand": (edit("ops", "negate", "operands", 0, "name", to="stream"), "stream"),
    "kernel that is no object": (edit("kernels", to=["x"]), "/kernels/0"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_contradiction_is_refused(name: str) -> None:
    document = good()
    change, why = DAMAGE[name]
    change(document)
    with pytest.raises(SchemaError) as e:
        parse_manifest(canonical_json(document), "cpu-x86_64")
    assert why in str(e.value)


@pytest.mark.parametrize("document", [[], None, 1, "x", True], ids=repr)
def test_other_top_types_are_refused(document: Json) -> None:
    with pytest.raises(SchemaError, match="expected an object"):
        parse_manifest(canonical_json(document))
    with pytest.raises(SchemaError, match="expected an object"):
        parse_index(canonical_json(document))


def test_duplicates_are_refused() -> None:
    twice = good()
    twice["kernels"].insert(0, twice["kernels"][0])
    with pytest.raises(SchemaError, match="declared twice"):
        parse_manifest(canonical_json(twice))
    shuffled = good()
    shuffled["kernels"].reverse()
    with pytest.raises(SchemaError, match="not sorted"):
        parse_manifest(canonical_json(shuffled))
    unit = {"bind": {"x": "x", "out": "out"}, "args": {}, "attrs": {}}
    circle = manifest(
        [kernel("negate", "v", PARAMS["negate"], DATA)],
        ops={"negate": OPS["negate"], "a": OPS["negate"], "b": OPS["negate"]},
        recipes=[
            {**PLAN, "op": "a", "temps": [], "steps": [{"op": "b", **unit}]},
            {**PLAN, "op": "b", "temps": [], "steps": [{"op": "a", **unit}]},
        ],
    )
    with pytest.raises(SchemaError, match="a, b call each other in a circle"):
        parse_manifest(canonical_json(circle))


NAMES = [
    "../x", "a/../../x", "/abs", "//x", "\\x", "C:\\x", "C:x", ".", "..", "", "x/", "a//b", "x\0y",
    "x\ny", "\x1b[2J", "x\u202ey", "x" * 300, "x" * 5000, "CON", "con", "nul.cubin", "com1.so", "x.",
    "x ", " x", "e\u0301.so", "\xe9.so", "--help", "-rf", "*.so", "$(id)", "`id`", "~root", "a;b",
    "a|b", "%2e%2e", "{0}", "A.cubin", ".hidden", "a..b", "MANIFEST.json", "EVIDENCE.json",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_hostile_file_names_are_refused(name: str) -> None:
    document = good()
    for entry in document["kernels"]:
        entry["file"] = name
    with pytest.raises(SchemaError, match="/kernels/0/file"):
        parse_manifest(canonical_json(document))
    sources = good()
    sources["sources"] = {name: {"bytes": 1, "sha256": "a" * 64}}
    with pytest.raises(SchemaError, match="/sources"):
        parse_manifest(canonical_json(sources))


@pytest.mark.parametrize("name", ["../x", "a/b", "", "{0}", "a b", "x\0"], ids=ascii)
def test_hostile_kernel_names_are_refused(name: str) -> None:
    for field in ("op", "variant", "entry"):
        document = good()
        document["kernels"][0][field] = name
        with pytest.raises(SchemaError, match=f"/kernels/0/{field}"):
            parse_manifest(canonical_json(document))


def test_good_file_names_pass() -> None:
    for name in ("a", "rms_norm.x86-64-v4.so", "a+b.cubin", "0.so", "control.so"):
        document = good()
        for entry in document["kernels"]:
            entry["file"] = name
        assert parse_manifest(canonical_json(document)).kernels[0].file == name


def index() -> Json:
    entry = {"manifest": "sm_90a/MANIFEST.json", "bytes": 10, "sha256": "a" * 64}
    return {"schema": 1, "generation": 3, "targets": {"sm_90a": entry}}


def test_index() -> None:
    document = canonical_json(index())
    assert canonical_json(dump(parse_index(document))) == document
    for path, wrong in (
        (("generation",), -1),
        (("generation",), True),
        (("schema",), 2),
        (("targets", "sm_90a", "manifest"), "../MANIFEST.json"),
        (("targets", "sm_90a", "manifest"), "sm_80/MANIFEST.json"),
        (("targets", "sm_90a", "bytes"), 1 << 40),
        (("targets", "sm_90a", "sha256"), "x"),
        (("targets",), {"../sm_90a": index()["targets"]["sm_90a"]}),
    ):
        damaged = index()
        parent(damaged, path)[path[-1]] = wrong
        with pytest.raises(SchemaError):
            parse_index(canonical_json(damaged))


def test_contract_is_read() -> None:
    assert dump(parse_manifest(canonical_json(good())).ops["negate"].contract) == EXACT


def test_random_damage_is_refused_or_harmless() -> None:
    """No untyped error comes out of any bytes."""
    document = canonical_json(good())
    random = Random(5)
    for _ in range(400):
        data = bytearray(document)
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(data))
            kind = random.randrange(3)
            if kind == 0:
                data[at] = random.randrange(256)
            elif kind == 1:
                del data[at : at + random.randint(1, 40)]
            else:
                data[at:at] = document[at : at + random.randint(1, 40)]
        with suppress(SchemaError):
            parse_manifest(bytes(data))


def test_a_thousand_kernels_are_read_quickly() -> None:
    entries = [kernel("negate", f"v{i:04}", PARAMS["negate"], DATA) for i in range(1000)]
    document = canonical_json(manifest(entries))
    assert len(parse_manifest(document).kernels) == 1000
    check_cost(lambda: parse_manifest(document), 50)  # 5 where nothing else runs
