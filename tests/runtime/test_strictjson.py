"""Strict JSON: what is refused, and that each refusal says why."""

import json

import pytest

from kiln.runtime.errors import SchemaError
from kiln.runtime.strictjson import MAX_DEPTH, canonical, parse, tabular
from kiln.tests.support.cost import check_cost

BAD = {
    "not json": (b"hello", "not JSON"),
    "empty": (b"", "not JSON"),
    "blank": (b"  \n", "not JSON"),
    "truncated": (b'{"a": 1', "not JSON"),
    "trailing": (b'{"a": 1} x', "not JSON"),
    "second document": (b"{}{}", "not JSON"),
    "comment": (b"{} // no", "not JSON"),
    "single quotes": (b"{'a': 1}", "not JSON"),
    "trailing comma": (b"[1,]", "not JSON"),
    "utf-8 mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "byte order mark"),
    "utf-16 without mark": ('{"a": 1}'.encode("utf-16-le"), "NUL"),
    "utf-32": ('{"a": 1}'.encode("utf-32-be"), "NUL"),
    "latin-1": ('{"a": "é"}'.encode("latin-1"), "not UTF-8"),
    "bad utf-8": (b'{"a": "\xff"}', "not UTF-8"),
    "overlong utf-8": (b'{"a": "\xc0\xaf"}', "not UTF-8"),
    "nul": (b'{"a": 1}\0', "NUL"),
    "carriage return": (b'{"a": 1}\r\n', "carriage return"),
    "lone surrogate": (rb'{"a": "\ud800"}', "surrogate"),
    "lone low surrogate": (rb'{"\udc00": 1}', "surrogate"),
    "control character": (b'{"a": "\x01"}', "not JSON"),
    "duplicate": (b'{"a": 1, "b": 2, "a": 1}', "'a' stands twice"),
    "duplicate escaped": (rb'{"a": 1, "\u0061": 1}', "'a' stands twice"),
    "duplicate inside": (b'[{"x": {"a": 1, "a": 2}}]', "'a' stands twice"),
    "duplicate after spaces": (b'{"a" : 1, "a"\t:\n1}', "'a' stands twice"),
    "duplicate made up for by a string": (rb'{"a" :1,"a" :"\":"}', "'a' stands twice"),
    "duplicate beside colons in strings": (rb'{"a": "\":", "a": ":"}', "'a' stands twice"),
    "duplicate of a field that is empty": (b'{"a":{},"a":{}}', "'a' stands twice"),
    "nan": (b"[NaN]", "NaN"),
    "infinity": (b"[-Infinity]", "-Infinity"),
    "1e999": (b"[1e999]", "no finite double"),
    "5000 digits": (b"[" + b"1" * 5000 + b"]", "64 bits"),
    "2^63": (b"[9223372036854775808]", "64 bits"),
    "2^64": (b"[18446744073709551616]", "64 bits"),
    "2^63 in an object": (b'{"a":9223372036854775808}', "64 bits"),
    "2^63 after a space": (b"[1, 9223372036854775808]", "64 bits"),
    "2^63 on a line": (b"[\n9223372036854775808]", "64 bits"),
    "2^63 after a tab": (b"[\t9223372036854775808]", "64 bits"),
    "2^63 after a comma": (b"[1,9223372036854775808]", "64 bits"),
    "2^63 alone": (b"9223372036854775808", "64 bits"),
    "-2^63-1": (b"[-9223372036854775809]", "64 bits"),
    "long fraction": (b"[0." + b"1" * 5000 + b"]", "no finite double"),
    "1e5 nested lists": (b"[" * 100_000 + b"]" * 100_000, "nested deeper"),
    "1e5 open lists": (b"[" * 100_000, "JSON|nested"),
    "nested objects": (b'{"a":' * 100 + b"1" + b"}" * 100, "nested deeper"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    data, why = BAD[name]
    with pytest.raises(SchemaError, match=why) as e:
        parse(data, "X.json")
    assert str(e.value).startswith("X.json")


def test_accepts_what_json_is() -> None:
    data = '{"a": [1, -2, 2.5, true, false, null, "é😀\\ud83d\\ude00"], "b": {}}\n'.encode()
    assert parse(data, "x") == json.loads(data)
    assert parse(b"[9223372036854775807, -9223372036854775808]", "x") == [2**63 - 1, -(2**63)]
    odd = rb'{"a" : ":", "b": "\":", "c":9223372036854775807, "d": "x 12345678901234567890123"}'
    assert parse(odd, "x") == json.loads(odd)
    deep: object = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert parse(canonical(deep), "x") == deep


def test_size_and_count_caps() -> None:
    assert parse(b'"1234"', "x", 6) == "1234"
    with pytest.raises(SchemaError, match="found 7 bytes, expected at most 6"):
        parse(b'"12345"', "x", 6)
    row = b"0," * 1_000_000 + b"0]"
    keys = b",".join(b'"%d":0' % i for i in range(1_000_000))
    many = [b"[" + 2 * row[:-2] + row, b"{" + keys + b',"z":[' + row + b"}"]

    def refuse() -> None:
        for data in many:
            with pytest.raises(SchemaError, match="values"):
                parse(data, "x")

    check_cost(refuse, 200)  # 16 where nothing else runs


def test_canonical_is_one_form() -> None:
    data = canonical({"b": (1, 2), "a": "é"})
    assert data == b'{"a": "\\u00e9", "b": [1, 2]}\n'
    assert canonical(parse(data, "x")) == data
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))


def test_entries_of_tables_are_lines() -> None:
    value = {"t": [{"b": [1, {"x": 2}], "a": "é"}, {}], "n": 1, "o": {"k": {"v": None}}, "e": {}, "f": [1, 2]}
    data = tabular(value)
    assert data.decode().splitlines() == [
        "{", '  "e": {},', '  "f": [1, 2],', '  "n": 1,', '  "o": {', '    "k": {"v":null}', "  },",
        '  "t": [', '    {"a":"\\u00e9","b":[1,{"x":2}]},', "    {}", "  ]", "}",
    ]  # fmt: skip
    assert parse(data, "x") == value
    assert data.endswith(b"}\n")
    with pytest.raises(ValueError, match="JSON"):
        tabular({"t": [{"a": float("inf")}]})
