"""Derive the kernel-family matrix: each family's state per target, from declarations, manifests and evidence.

  INVENTORIED  a row of the matrix, nothing more
  DECLARED     has ops: signature, semantics, contract, reference
  COMPILED     every op has artifacts in the tree, with launch proof
  INTERPRETED  and the kernels' source met the contract in an interpreter
  RAN          and the very bytes met the contract on a device
  MEASURED     and were timed there

A cell is as far as the op of the family that is least far; a row as far as its best cell. An op that is only
a launch of another counts where that other runs by it. A row may be a capability, such as dispatch: it is as
far as the kernels that go through it, and as its own ops on targets that have them. What a row names and its
ops do not cover is listed below."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kiln.tools.console import Cell, emit, require, table, width
from kiln.tools.declared import add_catalog_option, catalogs, declared
from kiln.tools.states import Row, State, rows
from kiln.tools.targets import target_names
from kiln.tools.trees import add_tree_option, tree_or_none


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kiln matrix`."""
    add_tree_option(parser)
    add_catalog_option(parser)
    parser.add_argument("--target", action="append", metavar="T", help="only this column; may be repeated")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--md", action="store_true", help="a Markdown table")
    form.add_argument("--html", action="store_true", help="a page of its own")


def run(args: argparse.Namespace) -> int:
    """Print the matrix."""
    tree = tree_or_none(args.tree)
    known = list(dict.fromkeys([*target_names(), *(tree.manifests if tree else ())]))
    require(args.target or (), known, "target")
    columns = tuple(t for t in known if not args.target or t in args.target)
    ops = {name: op.family for name, op in declared(catalogs(args)).items()}
    found = rows(ops, tree, columns)
    form = markdown if args.md else page if args.html else plain
    emit(args, document(found), lambda: form(found, columns))
    return 0


def document(found: Sequence[Row]) -> dict[str, Any]:
    """The shape that scripts rely on; `op_targets` has each op's own states."""
    return {"rows": [_row_document(row) for row in found]}


def _row_document(row: Row) -> dict[str, Any]:
    return {
        "family": row.family,
        "title": row.title,
        "state": row.state.name,
        "ops": list(row.ops),
        "capability": row.capability,
        "lacks": row.lacks,
        "targets": _names(row.targets),
        "op_targets": {op: _names(states) for op, states in row.op_states.items()},
    }


def _names(states: Mapping[str, State]) -> dict[str, str]:
    return {target: state.name for target, state in states.items()}


def census(found: Sequence[Row]) -> str:
    """How many rows are in each state, in words."""
    counts = {s: sum(r.state is s for r in found) for s in State}
    return f"{len(found)} families: " + ", ".join(f"{n} {s.name}" for s, n in counts.items() if n)


def partial(found: Sequence[Row]) -> list[Row]:
    """Rows with ops that do not cover all that the row names."""
    return [r for r in found if r.lacks is not None]


def plain(found: Sequence[Row], columns: Sequence[str]) -> str:
    """For a terminal: one letter a cell."""
    letters = {s: "." if s is State.INVENTORIED else s.name[0] for s in State}
    short = [c.removeprefix("sm_").removeprefix("cpu-") for c in columns]
    cells: list[list[Cell]] = [
        [r.family, r.state.name, *(letters[r.targets[c]] for c in columns), len(r.ops)] for r in found
    ]
    legend = " ".join(f"{letter}={s.name}" for s, letter in letters.items())
    listed = table(["family", "state", *short, "ops"], cells, width())
    return "\n".join(
        [listed, "", legend, census(found), *(f"{r.family} lacks {r.lacks}" for r in partial(found))]
    )


def markdown(found: Sequence[Row], columns: Sequence[str]) -> str:
    """A GitHub-flavoured table; the families that are only inventoried are listed below it."""
    begun = [r for r in found if r.state > State.INVENTORIED]
    lines = [
        "| " + " | ".join(["family", "state", *columns, "ops"]) + " |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for r in begun:
        cells = [_lower(r.targets[c]) for c in columns]
        ops = ", ".join(f"`{op}`" for op in r.ops)
        lines.append("| " + " | ".join([f"`{r.family}`", r.state.name, *cells, ops]) + " |")
    lines += [f"\n`{r.family}` lacks {r.lacks}." for r in partial(found)]
    waiting = [f"- `{r.family}`: {r.title}" for r in found if r.state is State.INVENTORIED]
    return "\n".join([f"{census(found)}.", "", *lines, "", "Inventoried:", "", *(waiting or ["- none"]), ""])


def _lower(state: State) -> str:
    return state.name.lower() if state > State.DECLARED else "–"


STYLE = """
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
body { margin: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .3rem .55rem; text-align: left; border-bottom: 1px solid #8884; white-space: nowrap; }
thead th { position: sticky; top: 0; background: Canvas; }
td small { display: block; color: GrayText; white-space: normal; min-width: 16rem; }
.s0, .s1 { color: GrayText; }
.s2 { background: #8883; }
.s3 { background: #5b8def44; }
.s4 { background: #35a85344; }
.s5 { background: #35a85399; }
"""


def page(found: Sequence[Row], columns: Sequence[str]) -> str:
    """A self-contained HTML page; a cell's tooltip has the state of each op."""
    head = "".join(f"<th>{escape(c)}</th>" for c in ["family", "state", *columns])
    body = "\n".join(_html_row(r, columns) for r in found)
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8><title>Kernel-family matrix</title>"
        f"<style>{STYLE}</style>\n<h1>Kernel-family matrix</h1>\n<p>{escape(census(found))}.</p>\n"
        f"<div class=wide><table>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div></html>\n"
    )


def _html_row(row: Row, columns: Sequence[str]) -> str:
    cells = "".join(_html_cell(row, c) for c in columns)
    title = row.title if row.lacks is None else f"{row.title} (lacks {row.lacks})"
    name = f"<td><code>{escape(row.family)}</code><small>{escape(title)}</small></td>"
    return f"<tr>{name}<td class=s{row.state.value}>{row.state.name}</td>{cells}</tr>"


def _html_cell(row: Row, column: str) -> str:
    state = row.targets[column]
    tip = ", ".join(f"{op} {states[column].name}" for op, states in row.op_states.items())
    return f'<td class=s{state.value} title="{escape(tip)}">{_lower(state)}</td>'
