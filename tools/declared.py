"""Declarations, where the packages that hold them are installed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from kiln.ir.spec import Op
from kiln.tools.console import note

KILN = "kiln.recipes"


def add_catalog_option(parser: argparse.ArgumentParser) -> None:
    """The option --catalog, repeatable."""
    parser.add_argument(
        "--catalog",
        action="append",
        metavar="PACKAGE",
        help=f"a package that declares ops and recipes; may be repeated (default: {KILN})",
    )


def catalogs(args: argparse.Namespace) -> tuple[str, ...]:
    """The catalogs of this command line; a named one may lie in the current folder."""
    if args.catalog and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return tuple(args.catalog or (KILN,))


def declared(names: Sequence[str]) -> Mapping[str, Op]:
    """Every declared op by name; none, with a note, where only the runtime is installed."""
    try:
        from kiln.compiler.catalog import load_catalogs

        return load_catalogs(tuple(names))
    except ModuleNotFoundError as missing:
        if missing.name in names:
            raise
        note(f"no declarations here ({missing.name} is not installed): showing what the tree holds")
        return {}
