"""Fixtures of the C core's tests."""

import pytest

from kiln.tests.runtime.c.core_build import Core, build


@pytest.fixture(scope="session")
def libkiln_core(tmp_path_factory: pytest.TempPathFactory) -> Core:
    """The core of libkiln, compiled once a session."""
    return Core(build(tmp_path_factory.mktemp("libkiln_core")))
