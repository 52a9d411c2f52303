"""libkiln's reading of kernels that are like another, against Python's."""

import time

import pytest

from kiln.tests.runtime.c.core_build import ACCEPTED, Core
from kiln.tests.runtime.c.documents import agrees
from kiln.tests.runtime.test_like import DAMAGE, alike, crowd, entries
from kiln.tests.runtime.test_manifest import text_of


def test_they_are_understood_alike(libkiln_core: Core) -> None:
    assert agrees(libkiln_core, text_of(alike())) == ACCEPTED


@pytest.mark.parametrize("name", DAMAGE)
def test_contradictions_are_refused_with_the_same_words(libkiln_core: Core, name: str) -> None:
    kernels = entries()
    edit, place, why = DAMAGE[name]
    edit(kernels)
    found = agrees(libkiln_core, text_of({**alike(), "kernels": kernels}))
    assert found.code == "SchemaError"
    assert why in found.message
    assert f" at {place}:" in found.message or not place


def test_parameters_that_differ_are_given_by_name(libkiln_core: Core) -> None:
    kernels = entries()
    kernels[1]["params"] = {"x_read": {"align": 2, "dtype": "bf16"}, "n": {"value": ["add", ["dim", "M"], 1]}}
    kernels[2] |= {"params": {"n": {"divisible_by": 8}}, "scratch": []}
    assert agrees(libkiln_core, text_of(alike(kernels))) == ACCEPTED
    kernels[2] |= {"params": {"x_read": {"operand": "scratch:work"}}}
    assert "'scratch:work'" in agrees(libkiln_core, text_of(alike(kernels))).message


def test_the_file_is_what_a_kernel_is_stored_as(libkiln_core: Core) -> None:
    kernels = entries()
    kernels[0] |= {"file": "own.so", "stored_as": "other.so"}
    kernels[2]["file"] = "third.so"
    assert agrees(libkiln_core, text_of(alike(kernels))) == ACCEPTED


def test_a_null_isa_is_not_that_of_the_kernel_it_is_like(libkiln_core: Core) -> None:
    kernels = entries()
    kernels[1]["isa"] = None
    assert "isa is missing" in agrees(libkiln_core, text_of({**alike(), "kernels": kernels})).message


def test_lists_that_many_share_are_read_and_checked_once(libkiln_core: Core) -> None:
    document = text_of(crowd())
    start = time.process_time()
    assert libkiln_core.manifest_verdict(document) == ACCEPTED
    assert time.process_time() - start < 2
