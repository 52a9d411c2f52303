"""Kernels of a manifest as they are written: each as what differs from the earlier one of its op that leaves
least to say (`kiln.runtime.like` reads them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kiln.runtime.like import LIKE, NEAR, OWN, STORED, TOGETHER
from kiln.runtime.strictjson import dense

Entry = Mapping[str, Any]


class _Known(NamedTuple):
    """A kernel that others may be like."""

    place: int
    variant: str
    texts: Mapping[str, str]
    """Its fields as JSON."""


def brief(kernels: Sequence[Entry]) -> list[Entry]:
    """The kernels, in the same order, without what an earlier one of their op says as well.

    Of several that leave equally little the first is named, so that a new kernel moves few others.
    """
    known: dict[str, list[_Known]] = {}
    out = []
    for place, entry in enumerate(kernels):
        texts = {name: dense(value) for name, value in entry.items()}
        near = [k for k in known.setdefault(entry["op"], []) if place - k.place <= NEAR]
        out.append(_least(entry, texts, near))
        known[entry["op"]].append(_Known(place, entry["variant"], texts))
    return out


def _least(entry: Entry, texts: Mapping[str, str], near: Sequence[_Known]) -> Entry:
    """The shortest way to write an entry."""
    sizes = {name: len(name) + len(text) + 4 for name, text in texts.items()}  # quotes, colon and comma
    shortest, best = sum(sizes.values()), entry
    for base in near:
        own = _own(texts, base.texts)
        size = sum([sizes[name] for name in own]) + len(LIKE) + len(base.variant) + 6
        if size < shortest:
            shortest, best = size, {LIKE: base.variant, **{name: entry[name] for name in own}}
    return best


def _own(texts: Mapping[str, str], base: Mapping[str, str]) -> set[str]:
    """The fields that an entry gives itself beside this base."""
    own = {name for name, text in texts.items() if text != base.get(name)}
    together = TOGETHER if not own.isdisjoint(TOGETHER) else ()
    stored = {STORED} & texts.keys() if "file" in own else ()
    return {*own, *OWN, *together, *stored}


def whole(kernels: Sequence[Entry]) -> list[dict[str, Any]]:
    """The kernels of a manifest that was read, written out: whole(brief(x)) == x."""
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in kernels:
        base = known[entry["op"], entry[LIKE]] if LIKE in entry else {}
        gone = (LIKE, STORED) if "file" in entry else (LIKE,)
        made = {k: v for k, v in base.items() if k not in gone} | {k: v for k, v in entry.items() if k != LIKE}
        known[entry["op"], entry["variant"]] = made
    return list(known.values())
