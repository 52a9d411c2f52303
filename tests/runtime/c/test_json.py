"""libkiln's strict JSON: the documents that Python's accepts, refused for the same reasons, numbers to
the bit."""

import ctypes
import struct
from random import Random

import pytest

from kiln.runtime import strictjson
from kiln.tests.runtime.c.core_build import ACCEPTED, Core, python_verdict
from kiln.tests.runtime.test_strictjson import BAD
from kiln.tests.support.cost import check_cost


@pytest.mark.parametrize("name", BAD)
def test_bad_json_is_refused(libkiln_core: Core, name: str) -> None:
    verdict = libkiln_core.json(BAD[name][0])
    assert verdict.code == "SchemaError"
    assert verdict.message.startswith("X.json: ")


GOOD = [
    *('{"a": [1, -2, 2.5, true, false, null, "é😀\\ud83d\\ude00"], "b": {}}\n', "[9223372036854775807]"),
    *("[-9223372036854775808, 0, -0, 0.0, -0.0, 1e5, 1E-5, 1.5e+3, 1e-999]", '"\\"\\\\\\/\\b\\f\\n\\r\\t"'),
    *(
        "[" * 64 + "]" * 64,
        '{"a":' * 63 + "[1]" + "}" * 63,
        " \t\n[ \t\n1 , \n2 ]\n ",
        '"\x7f"',
        '"\\u0000"',
        "0",
        "{}",
    ),
    '{"a\\u0000b": 1, "a\\u0000c": 2}',
]

EDGES = [
    *(
        "[01]",
        "[1.]",
        "[.5]",
        "[1e]",
        "[1e+]",
        "[-]",
        "[+1]",
        "[0x1]",
        "[1,,2]",
        "[,1]",
        "{,}",
        '{"a" 1}',
        '{"a":}',
    ),
    *(
        "{1: 2}",
        '"\\x41"',
        '"\\u12"',
        '"\\u123g"',
        '"\\ud800\\u0041"',
        '"\\ud800\\ud800\\udc00"',
        '"\\ud83d\\u12"',
        '"a',
        '"\\',
    ),
    *(
        '"\\udc00\\ud800"',
        "[" * 65 + "]" * 65,
        "tru",
        "nul",
        "True",
        "[1 2]",
        "[1}",
        '{"a": 1]',
        '"\t"',
        '"\n"',
        "\x0b[]",
        "\xa0[]",
    ),
    *(
        "[9223372036854775808]",
        "[-9223372036854775809]",
        "[1" + "0" * 25 + "]",
        "[1" + "0" * 63 + ".0]",
        "[0." + "1" * 63 + "]",
    ),
    *(
        "[1e308]",
        "[1.7976931348623157e308]",
        "[1.7976931348623159e308]",
        "[-1e309]",
        "[0." + "1" * 62 + "]",
        "[" * 100,
        "{" * 100,
    ),
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

    def read() -> None:
        assert libkiln_core.json(keys) == ACCEPTED
        assert "'699999' stands twice" in libkiln_core.json(keys[:-1] + b',"699999":1}').message

    check_cost(read, 200)  # 22 where nothing else runs
    assert libkiln_core.json(b'"' + bytes(16 << 20).replace(b"\0", b"x") + b'"').code == "SchemaError"


# ---- numbers ----


def c_double(core: Core, text: str) -> bytes | None:
    """The bits that the core makes of a number; None: infinite."""
    out = ctypes.c_double()
    good = core.lib.kiln_decimal(text.encode(), ctypes.c_size_t(len(text)), ctypes.byref(out))
    return struct.pack("<d", out.value) if good else None


HARD = [
    *(
        "0.0",
        "-0.0",
        "0e5",
        "1e-400",
        "5e-324",
        "2.4703282292062327e-324",
        "2.4703282292062328e-324",
        "4.9e-324",
        "1e-323",
    ),
    *(
        "2.2250738585072011e-308",
        "2.2250738585072014e-308",
        "2.2250738585072012e-308",
        "1.7976931348623157e308",
    ),
    *(
        "1.7976931348623158e308",
        "1.7976931348623159e308",
        "9007199254740993.0",
        "9007199254740992.999",
        "1e22",
        "1e23",
        "8.5e-323",
    ),
    *(
        "0.1",
        "0.30000000000000004",
        "123456789012345678901234567890.0",
        "1e400",
        "1e99999999999999999999",
        "1e-99999999999999999999",
    ),
    *("6.0221e23", "0." + "0" * 40 + "1e41", "1" * 40 + "e-80", "9" * 60 + "e3"),
]


@pytest.mark.parametrize("text", HARD)
def test_hard_numbers_are_rounded_correctly(libkiln_core: Core, text: str) -> None:
    value = float(text)
    assert c_double(libkiln_core, text) == (
        None if value in (float("inf"), -float("inf")) else struct.pack("<d", value)
    )


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
        assert c_double(libkiln_core, text) == (
            None if expected == float("inf") else struct.pack("<d", expected)
        ), text
