"""The rows of the kernel-family matrix."""

from __future__ import annotations

import re

from kiln.recipes import catalog
from kiln.recipes.matrix import CAPABILITIES, FAMILIES, LACKING
from kiln.tools.capabilities import EXERCISES


def test_sixty_rows_with_titles_of_their_own() -> None:
    assert len(FAMILIES) == 60
    assert len(set(FAMILIES.values())) == 60
    assert all(re.fullmatch(r"[A-Z][A-Z0-9]*(-[A-Z0-9]+)+", name) for name in FAMILIES)
    assert all(title and not title.endswith(".") for title in FAMILIES.values())


def test_every_op_belongs_to_a_row() -> None:
    assert {op.name: op.family for op in catalog().ops if op.family not in FAMILIES} == {}


def test_what_lacks_is_said_of_rows_that_have_ops() -> None:
    assert set(LACKING) <= {op.family for op in catalog().ops}
    assert all(text and not text.endswith(".") for text in LACKING.values())


def test_a_capability_is_a_row_that_something_proves() -> None:
    assert set(CAPABILITIES) <= set(FAMILIES)
    # What prepares the weights that its kernels take.
    own = {op.name: op.family for op in catalog().ops if op.family in CAPABILITIES}
    assert own == {"gated_delta_rule_pack": "GDN-MOE-PACKED-BA"}
    assert set(CAPABILITIES.values()) == set(EXERCISES)
