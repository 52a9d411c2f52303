"""Parts of kernels that kernels share are compared once in a manifest; with anything else in their place they
are compared again."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kiln.runtime.errors import SchemaError
from kiln.runtime.manifest import parse_manifest
from kiln.tests.runtime.test_manifest import text_of
from kiln.tests.runtime.trees import cpu_manifest


@pytest.fixture
def document() -> Any:
    """A manifest whose parts agree."""
    return cpu_manifest(b"not looked at here")


@pytest.mark.parametrize("field", ["params", "grid", "when"])
def test_a_part_that_names_what_is_not_there_is_found_after_sound_ones(document: Any, field: str) -> None:
    parse_manifest(text_of(document))
    wrong = copy.deepcopy(document)
    kernel = wrong["kernels"][0]
    if field == "params":
        kernel["params"][0]["operand"] = "stranger"
    elif field == "grid":
        kernel["grid"][0] = ["dim", "STRANGER"]
    else:
        kernel["when"] = ["ge", ["dim", "STRANGER"], 1]
    for _ in range(2):
        with pytest.raises(SchemaError, match=r"(?i)stranger"):
            parse_manifest(text_of(wrong))


def test_sound_parts_of_another_op_are_compared(document: Any) -> None:
    """The same kernel, of an op whose operands have other names."""
    parse_manifest(text_of(document))
    op = document["kernels"][0]["op"]
    for operand in document["ops"][op]["operands"]:
        operand["name"] += "_x"
    document["ops"][op]["returns"] = [f"{name}_x" for name in document["ops"][op]["returns"]]
    with pytest.raises(SchemaError, match=f"kernel {op}"):
        parse_manifest(text_of(document))


def test_a_cpu_kernel_under_another_target_is_compared(document: Any) -> None:
    parse_manifest(text_of(document))
    document["target"] = "sm_90a"
    with pytest.raises(SchemaError, match="isa is given for target sm_90a"):
        parse_manifest(text_of(document))
