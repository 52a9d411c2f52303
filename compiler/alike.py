"""Kernels of a manifest as they are written: each as what differs from the earlier one of its op that leaves
least to say (`kiln.runtime.like` reads them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kiln.runtime.like import LIKE, MOST_PARAMS, NEAR, OWN, STORED
from kiln.runtime.strictjson import dense

Entry = Mapping[str, Any]


class _Known(NamedTuple):
    """A kernel: as it is, and as JSON."""

    entry: Entry
    texts: Mapping[str, str]
    """Its fields."""
    params: Sequence[Mapping[str, str]]
    """The fields of its parameters."""
    names: Sequence[tuple[str, str]] | None
    """Name and kind of its parameters; None if they can only be given as a list."""


def brief(kernels: Sequence[Entry]) -> list[Entry]:
    """The kernels, in the same order, without what an earlier one of their op says as well.

    Of several that leave equally little the first is named, so that a new kernel moves few others.
    """
    near: dict[str, list[tuple[int, _Known]]] = {}
    out = []
    for place, entry in enumerate(kernels):
        mine = _known(entry)
        before = near.setdefault(entry["op"], [])
        out.append(_least(mine, [base for at, base in before if place - at <= NEAR]))
        before.append((place, mine))
    return out


def _known(entry: Entry) -> _Known:
    params = [{name: dense(value) for name, value in p.items()} for p in entry["params"]]
    names = [(p["name"], p["kind"]) for p in entry["params"]]
    has_maps = any(kind == "tensor_map" for _, kind in names)
    is_told_apart = not has_maps and len({name for name, _ in names}) == len(names) <= MOST_PARAMS
    texts = {name: dense(value) for name, value in entry.items()}
    return _Known(entry, texts, params, names if is_told_apart else None)


def _least(mine: _Known, bases: Sequence[_Known]) -> Entry:
    """The shortest way to write an entry."""
    sizes = {name: len(name) + len(text) + 4 for name, text in mine.texts.items()}  # quotes, colon and comma
    shortest, best = sum(sizes.values()), mine.entry
    for base in bases:
        own = _own(mine, base)
        size = len(LIKE) + len(base.entry["variant"]) + 6 + sum([sizes[name] for name in own])
        if size >= shortest and "params" not in own:
            continue
        written = _written(mine, base, own)
        if "params" in own:
            size += len(dense(written["params"])) - len(mine.texts["params"])
            size -= sizes["scratch"] if "scratch" not in written else 0
        if size < shortest:
            shortest, best = size, written
    return best


def _own(mine: _Known, base: _Known) -> set[str]:
    """The fields that an entry gives itself beside this base."""
    own = {name for name, text in mine.texts.items() if text != base.texts.get(name)}
    stored = {STORED} & mine.texts.keys() if "file" in own else ()
    linked = ("params", "scratch") if not own.isdisjoint(("params", "scratch")) else ()
    return {*own, *OWN, *stored, *linked}


def _written(mine: _Known, base: _Known, own: set[str]) -> Entry:
    out = {LIKE: base.entry["variant"], **{name: mine.entry[name] for name in own}}
    is_scratch_kept = mine.texts["scratch"] == base.texts["scratch"]
    if "params" in own and is_scratch_kept and mine.names is not None and mine.names == base.names:
        out["params"] = _changes(mine, base)
        del out["scratch"]
    return out


def _changes(mine: _Known, base: _Known) -> dict[str, Any]:
    """By name of the parameter: the fields that differ."""
    return {
        param["name"]: {name: param[name] for name, text in texts.items() if text != others[name]}
        for param, texts, others in zip(mine.entry["params"], mine.params, base.params, strict=True)
        if texts != others
    }


def whole(kernels: Sequence[Entry]) -> list[dict[str, Any]]:
    """The kernels of a manifest that was read, written out: whole(brief(x)) == x."""
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in kernels:
        base = known[entry["op"], entry[LIKE]] if LIKE in entry else {}
        gone = (LIKE, STORED) if "file" in entry else (LIKE,)
        made = {k: v for k, v in {**base, **entry}.items() if k not in gone or (k == STORED and k in entry)}
        if isinstance(made["params"], Mapping):
            changes = made["params"]
            made["params"] = [{**p, **changes.get(p["name"], {})} for p in base["params"]]
        known[entry["op"], entry["variant"]] = made
    return list(known.values())
