"""Fixtures of libkiln's tests: compiled once a session."""

import ctypes
from pathlib import Path

import pytest

from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.core_build import Core, build


@pytest.fixture(scope="session")
def libkiln_core(tmp_path_factory: pytest.TempPathFactory) -> Core:
    """The core of libkiln, compiled once a session."""
    return Core(build(tmp_path_factory.mktemp("libkiln_core")))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole library, with rows split over threads however few they are."""
    return libkiln.build(tmp_path_factory.mktemp("c") / "libkiln.so", "-DKILN_MIN_WORK=1")


@pytest.fixture(scope="session")
def c(built: Path) -> ctypes.CDLL:
    """Its functions."""
    return libkiln.opened(built)
