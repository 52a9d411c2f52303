"""libkiln's reading of JSON, indices and manifests: what Python accepts it accepts and understands alike, what Python refuses it refuses
at the same place."""

import copy
import ctypes
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kiln.runtime import strictjson
from kiln.runtime.manifest import canonical_json, parse_index, parse_manifest
from kiln.tests.runtime.c.core_build import ACCEPTED, Core, Verdict, python_verdict
from kiln.tests.runtime.c.manifest_text import index_text, manifest_text
from kiln.tests.runtime.test_expr import BAD_EXPRS, BAD_PREDS, HOLDS, VALUES
from kiln.tests.runtime.test_manifest import DAMAGE, NAMES, good, index, parent, places, small, text_of
from kiln.tests.runtime.test_strictjson import BAD
from kiln.tests.runtime.trees import MN, OPS, PARAMS, dim, kernel, manifest, scalar, tensor

TREE = Path(__file__).parents[3] / "aot_artifacts"
Json = Any


# ---- JSON ----


@pytest.mark.parametrize("name", BAD)
def test_bad_json_is_refused(libkiln_core: Core, name: str) -> None:
    verdict = libkiln_core.json(BAD[name][0])
    assert verdict.code == "SchemaError"
    assert verdict.message.startswith("X.json: ")


GOOD = [
    *('{"a": [1, -2, 2.5, true, false, null, "é😀\\ud83d\\ude00"], "b": {}}\n', "[9223372036854775807]"),
    *("[-9223372036854775808, 0, -0, 0.0, -0.0, 1e5, 1E-5, 1.5e+3, 1e-999]", '"\\"\\\\\\/\\b\\f\\n\\r\\t"'),
    *("[" * 64 + "]" * 64, '{"a":' * 63 + "[1]" + "}" * 63, ' \t\n[ \t\n1 , \n2 ]\n ', '"\x7f"', '"\\u0000"', "0", "{}"),
    '{"a\\u0000b": 1, "a\\u0000c": 2}',
]

EDGES = [
    *("[01]", "[1.]", "[.5]", "[1e]", "[1e+]", "[-]", "[+1]", "[0x1]", "[1,,2]", "[,1]", "{,}", '{"a" 1}', '{"a":}'),
    *('{1: 2}', '"\\x41"', '"\\u12"', '"\\u123g"', '"\\ud800\\u0041"', '"\\ud800\\ud800\\udc00"', '"\\ud83d\\u12"', '"a', '"\\'),
    *('"\\udc00\\ud800"', "[" * 65 + "]" * 65, "tru", "nul", "True", "[1 2]", "[1}", '{"a": 1]', '"\t"', '"\n"', "\x0b[]", "\xa0[]"),
    *("[9223372036854775808]", "[-9223372036854775809]", "[1" + "0" * 25 + "]", "[1" + "0" * 63 + ".0]", "[0." + "1" * 63 + "]"),
    *("[1e308]", "[1.7976931348623157e308]", "[1.7976931348623159e308]", "[-1e309]", "[0." + "1" * 62 + "]", "[" * 100, "{" * 100),
]


@pytest.mark.parametrize("text", GOOD + EDGES, ids=lambda t: ascii(t)[:40])
def test_json_is_accepted_and_refused_alike(libkiln_core: Core, text: str) -> None:
    data = text.encode()
    expected = python_verdict(lambda: strictjson.parse(data, "X.json"))
    assert libkiln_core.json(data).code == expected.code
    assert (expected == ACCEPTED) >= (text in GOOD)


def test_json_caps(libkiln_core: Core) -> None:
    many = b"[" + b"0," * 1_999_998 + b"0]"
    assert libkiln_core.json(many) == ACCEPTED
    assert "values" in libkiln_core.json(b"[0," + many[1:]).message
    keys = b"{" + b",".join(b'"%d":0' % i for i in range(700_000)) + b"}"
    began = time.process_time()
    assert libkiln_core.json(keys) == ACCEPTED
    assert "'699999' stands twice" in libkiln_core.json(keys[:-1] + b',"699999":1}').message
    assert time.process_time() - began < 5
    assert libkiln_core.json(b'"' + bytes(16 << 20).replace(b"\0", b"x") + b'"').code == "SchemaError"
    big = canonical_json(index())
    assert libkiln_core.index(big + b" " * ((1 << 20) - len(big)))[0] == ACCEPTED
    assert "expected at most 1048576" in libkiln_core.index(big + b" " * ((1 << 20) - len(big) + 1))[0].message


# ---- numbers ----


def c_double(core: Core, text: str) -> bytes | None:
    """The bits that the core makes of a number; None: infinite."""
    out = ctypes.c_double()
    good = core.lib.kiln_decimal(text.encode(), ctypes.c_size_t(len(text)), ctypes.byref(out))
    return struct.pack("<d", out.value) if good else None


HARD = [
    *("0.0", "-0.0", "0e5", "1e-400", "5e-324", "2.4703282292062327e-324", "2.4703282292062328e-324", "4.9e-324", "1e-323"),
    *("2.2250738585072011e-308", "2.2250738585072014e-308", "2.2250738585072012e-308", "1.7976931348623157e308"),
    *("1.7976931348623158e308", "1.7976931348623159e308", "9007199254740993.0", "9007199254740992.999", "1e22", "1e23", "8.5e-323"),
    *("0.1", "0.30000000000000004", "123456789012345678901234567890.0", "1e400", "1e99999999999999999999", "1e-99999999999999999999"),
    *("6.0221e23", "0." + "0" * 40 + "1e41", "1" * 40 + "e-80", "9" * 60 + "e3"),
]


@pytest.mark.parametrize("text", HARD)
def test_hard_numbers_are_rounded_correctly(libkiln_core: Core, text: str) -> None:
    value = float(text)
    assert c_double(libkiln_core, text) == (None if value in (float("inf"), -float("inf")) else struct.pack("<d", value))


def test_random_numbers_are_rounded_correctly(libkiln_core: Core) -> None:
    random = Random(1)
    for _ in range(20_000):
        bits = random.getrandbits(64)
        value = struct.unpack("<d", struct.pack("<Q", bits))[0]
        if value != value or value in (float("inf"), -float("inf")):
            continue
        assert c_double(libkiln_core, repr(value).replace("e+", "e")) == struct.pack("<d", value)
        digits = "".join(random.choices("0123456789", k=random.randint(1, 40)))
        text = f"{digits[0]}.{digits}e{random.randint(-345, 310)}"
        expected = float(text)
        assert c_double(libkiln_core, text) == (None if expected == float("inf") else struct.pack("<d", expected)), text


# ---- manifests ----


def agrees(core: Core, data: bytes, target: str | None = "cpu-x86_64") -> Verdict:
    """Both readers' verdict on a manifest, which must be one: the same place of a mismatch, the same meaning of a good document."""
    expected = python_verdict(lambda: parse_manifest(data, target))
    found = core.manifest_verdict(data, target)
    assert (found.code, found.place) == (expected.code, expected.place), (expected, found)
    if found == ACCEPTED:
        assert core.manifest_dump(data, target) == manifest_text(parse_manifest(data, target))
    return found


@pytest.mark.parametrize("target", sorted(p.parent.name for p in TREE.glob("*/MANIFEST.json")))
def test_committed_manifests_are_understood_alike(libkiln_core: Core, target: str) -> None:
    data = (TREE / target / "MANIFEST.json").read_bytes()
    assert libkiln_core.manifest_dump(data, target) == manifest_text(parse_manifest(data, target))


def test_committed_index_is_understood_alike(libkiln_core: Core) -> None:
    data = (TREE / "INDEX.json").read_bytes()
    assert libkiln_core.index(data) == (ACCEPTED, index_text(parse_index(data)))


def rich() -> Json:
    """A manifest with every kind of field: parameters, scratch, attributes, variables of type, floats, launch flags."""
    t = {"var": "T", "choices": ["bf16", "f32", "f8e4m3"]}
    attrs = [
        {"name": "gemma", "choices": [False, True, 0, 1, "x"], "default": False, "doc": "d"},
        {"name": "size", "choices": [16, -(2**63)], "default": 16, "doc": ""},
    ]
    operands = [
        *(tensor("x", "in", [["add", dim("M"), ["mul", 2, dim("K")]], dim("N")], t), scalar("eps", default=1e-06, minimum=-1)),
        *(tensor("b", "in", [["next_pow2", dim("Z")]], "u8", optional=True, layout="strided"), tensor("out", "out", MN, t)),
        scalar("k", "i64", minimum=0.1, positive=True),
    ]
    when = ["or", ["not", ["attr", "gemma", True]], ["aligned", "x", 16], ["dtype", "x", "f31"], ["absent", "b"], ["present", "b"],
            ["and"], ["divisible", ["colstride", "x"], 8], ["ge", ["arg", "eps"], 2.5e-3], ["ne", ["attr", "size"], -3]]  # fmt: skip
    params = [
        {"kind": "ptr", "name": "x", "dtype": "bf16", "operand": "x", "access": "read", "align": 256},
        {"kind": "ptr", "name": "w", "dtype": "u8", "operand": "scratch:work", "access": "write", "align": 1},
        {"kind": "ptr", "name": "o", "dtype": "f32", "operand": "out", "access": "write", "align": 4},
        {"kind": "scalar", "name": "n", "dtype": "i32", "value": ["cdiv", dim("K"), 3], "divisible_by": 65536},
        {"kind": "null", "name": "g", "dtype": "ptr"},
        {"kind": "dropped", "name": "one", "dtype": "f64", "value": 1.5, "equals": -1},
    ]
    entry = kernel("big", "v.1+x-y", params, b"data", when=when, launch={"pdl": True, "cooperative": False}, block=[32, 4, 1],
                   scratch=[{"name": "work", "bytes": ["roundup", ["mul", dim("M"), 7], 256], "align": 64}], cluster=[2, 1, 1],
                   resources={"registers": 3, "stack": 0}, budget={"registers": 9}, specialization={"deep": [{"a\0b": [1e-300]}]},
                   toolchain={"zig": "1", "ptxas": "13.4.59"}, priority=-(2**31))  # fmt: skip
    call = {"bind": {"x": "a", "b": None, "out": "temp:t"}, "args": {"eps": ["arg", "s"], "k": 3}, "attrs": {"gemma": "x"}, "op": "big"}
    plan = {"op": "whole", "variant": "composite", "tier": "composite", "mode": "fast", "when": ["lt", dim("M"), 4], "priority": 7,
            "temps": [{"name": "t", "dtype": {"like": "a"}, "shape": [dim("N")]}, {"name": "u", "dtype": "i8", "shape": []},
                      {"name": "t", "dtype": {"like": "temp:u"}, "shape": [3]}], "steps": [call]}  # fmt: skip
    ops = {
        "whole": {**OPS["negate"], "kind": "recipe", "operands": [tensor("a", "in", MN), tensor("out", "out", MN), scalar("s")]},
        "big": {**OPS["negate"], "operands": operands, "attrs": attrs, "doc": "two\nlines é",
                "contract": {"kind": "envelope", "rel_l2": 1e-3, "max_eps": 4},
                "constraints": [[["gt", dim("K"), 0], "K must be positive"]]},
    }  # fmt: skip
    return manifest([entry], ops=ops, recipes=[plan], sources={"big.c": {"bytes": 0, "sha256": "a" * 64}})


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


WRONG: list[Json] = [None, True, -1, 0, 1.0, 2**63 - 1, "", "Wrong Type!", "x", [], {}, {"a": 1}, ["dim", "M"]]


def damaged(document: Json) -> Iterator[Json]:
    """The document with each of its values gone, renamed, doubled or replaced by a wrong one."""
    for path in list(places(document)):
        for wrong in WRONG:
            changed = copy.deepcopy(document)
            parent(changed, path)[path[-1]] = wrong
            yield changed
        missing = copy.deepcopy(document)
        del parent(missing, path)[path[-1]]
        yield missing
        more = copy.deepcopy(document)
        target = parent(more, path)[path[-1]]
        if isinstance(target, dict):
            target["surprise"] = 1
        elif isinstance(target, list):
            target.extend(target[-1:])
        else:
            continue
        yield more


def test_every_value_of_another_kind_has_the_same_verdict(libkiln_core: Core) -> None:
    refused = sum(agrees(libkiln_core, text_of(d)) != ACCEPTED for d in damaged(rich()))
    assert refused > 3000


@pytest.mark.parametrize("name", NAMES + ["a", "rms_norm.x86-64-v4.so", "a+b.cubin", "0.so", "control.so", "com.so", "lpt10"], ids=ascii)
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
    calls = list(zip(names, names[1:], strict=False)) + [(names[-1], names[0])] * closed
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


@pytest.mark.parametrize("document", [[], None, 1, "x", True, {}, {"schema": 2}, {"schema": "1"}], ids=repr)
def test_other_top_types_have_the_same_verdict(libkiln_core: Core, document: Json) -> None:
    data = json.dumps(document).encode()
    assert agrees(libkiln_core, data).code == "SchemaError"
    assert libkiln_core.index(data)[0].code == python_verdict(lambda: parse_index(data)).code


def test_every_value_of_an_index_has_the_same_verdict(libkiln_core: Core) -> None:
    refused = 0
    for document in [*damaged(index()), {**index(), "targets": {"../x": {}}}, {**index(), "targets": {}}]:
        data = text_of(document)
        expected = python_verdict(lambda data=data: parse_index(data))
        found, text = libkiln_core.index(data)
        assert (found.code, found.place) == (expected.code, expected.place)
        assert text == (index_text(parse_index(data)) if found == ACCEPTED else "")
        refused += found != ACCEPTED
    assert refused > 80


def test_many_kernels_are_read_quickly(libkiln_core: Core) -> None:
    data = canonical_json(manifest([kernel("negate", f"v{i:04}", PARAMS["negate"], b"x") for i in range(5000)]))
    began = time.process_time()
    assert libkiln_core.manifest_verdict(data) == ACCEPTED
    assert time.process_time() - began < 2
