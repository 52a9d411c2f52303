"""The caller's own providers on the command line: a function that registers them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from kiln.runtime.errors import KilnError
from kiln.runtime.load import Library
from kiln.tools.console import UsageError


def add_providers_option(parser: argparse.ArgumentParser) -> None:
    """The option --providers, repeatable."""
    parser.add_argument(
        "--providers",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="a function that is called with the library and registers providers; may be repeated",
    )


def register_providers(library: Library, names: list[str]) -> None:
    """Call every named function; a module may lie in the current folder.

    Raises:
        UsageError: a name that is no MODULE:FUNCTION, or one that fails.
        KilnError: what the library refuses to register.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in names:
        function = _function(name)
        try:
            function(library)
        except KilnError:
            raise
        except Exception as error:  # its code is not ours: anything may be wrong with it
            raise UsageError(f"{name} fails with {type(error).__name__}: {error}") from error


def _function(name: str) -> Callable[[Library], Any]:
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute.isidentifier():
        raise UsageError(f"found --providers {name!r}, expected MODULE:FUNCTION")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise UsageError(f"{module} cannot be imported: {error}") from error
    if not callable(found):
        raise UsageError(f"{module} has no function {attribute}; it is called with the library")
    function: Callable[[Library], Any] = found
    return function
