"""Kiln's ops by the names that calls have."""

from __future__ import annotations

import pytest

from kiln.ir.diagnostics import DeclarationError
from kiln.recipes import catalog, op


def test_every_op_has_its_name() -> None:
    assert all(op(declared.name) is declared for declared in catalog().ops)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(DeclarationError, match="Kiln has no op 'rms_nrom'; there are rms_norm"):
        op("rms_nrom")
