"""What all tests share: golden files, named after the test that reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"

Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register --update-golden."""
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the golden files with what is found"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with `golden/<test module>/<name>`; --update-golden writes it instead."""
    folder = GOLDEN / request.path.stem.removeprefix("test_")
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path = folder / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            return
        assert path.is_file(), f"{path} is missing; run pytest --update-golden, and read what it wrote"
        assert text == path.read_text("utf-8"), (
            f"differs from {path}; if that is meant, run pytest --update-golden"
        )

    return check
