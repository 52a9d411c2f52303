"""Kernels of a manifest that are written as what differs from an earlier one.

An entry with the field `like` has every field of the kernel that it names, a variant of its op among the NEAR
entries before it, but for those that it gives itself. It always gives `op` and `variant`. Its `params` are a
list, and then it gives `scratch` too, which they name, or an object of those that differ: by name, the fields
that do; not where there are tensor maps. 3389 kernels take 3.6 MB so, and 7.5 written out.

A kernel whose file would be a copy of another's has the field `stored_as`, the name of the one that is there.
What reads a manifest knows no other name than that; a build knows `file`, under which it would make it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kiln.runtime.entities import Kernel, Param
from kiln.runtime.fields import Mismatch, Reader, array, given, record, refuse_keys

LIKE = "like"
NEAR = 256
"""How many entries before one its base may stand: a search that costs little whatever a document says."""
OWN = ("op", "variant")
STORED = "stored_as"
MOST_PARAMS = 64
"""Of a kernel some of whose parameters another one changes: each such entry makes a list of them all."""

Fields = Mapping[str, Reader[Any]]


def kernel(fields: Fields) -> Reader[Kernel]:
    """A kernel with these fields and perhaps a `stored_as`."""
    return record(_kernel, fields, {STORED: fields["file"]})


def kernels(fields: Fields, params: Mapping[str, Fields], most: int) -> Reader[tuple[Kernel, ...]]:
    """A list of 1 to `most` kernels with these fields; what they have of another is read once and shared.

    Args:
        params: by a parameter's kind, its fields beside name and kind.
    """
    whole, own = kernel(fields), {**fields, STORED: fields["file"]}
    changes: dict[str, Reader[Any]] = {kind: record(dict, {}, of_kind) for kind, of_kind in params.items()}
    return lambda value: array(_Entries(own, whole, changes).read, most, 1)(value)


def _kernel(**values: Any) -> Kernel:
    values["file"] = values.pop(STORED, values["file"])
    return Kernel(**values)


class _Entries:
    """The entries of one list, read one after another."""

    def __init__(self, own: Fields, whole: Reader[Kernel], changes: Fields) -> None:
        self._own = own
        self._names = frozenset(own) | {LIKE}
        self._whole = whole
        self._changes = changes
        self._count = 0
        self._seen: dict[tuple[str, str], tuple[int, Kernel]] = {}

    def read(self, value: Any) -> Kernel:
        is_like = type(value) is dict and LIKE in value
        kernel = self._derived(value) if is_like else self._whole(value)
        self._seen[kernel.op, kernel.variant] = self._count, kernel
        self._count += 1
        return kernel

    def _derived(self, value: dict[str, Any]) -> Kernel:
        changes = type(value.get("params")) is dict
        own = self._own
        needed = {*OWN, *(("params",) if "scratch" in value else ())}
        needed |= {"scratch"} if "params" in value and not changes else set()
        if not needed <= value.keys() <= self._names:
            refuse_keys(value, frozenset(needed), self._names)
        base = self._base(given(value, {"op": own["op"]})["op"], value[LIKE])
        if changes:
            own = {**own, "params": partial(self._changed, base.params)}
        return _kernel(**{**vars(base), **given(value, own)})

    def _base(self, op: str, variant: Any) -> Kernel:
        place, kernel = self._seen.get((op, variant), (0, None)) if type(variant) is str else (0, None)
        if kernel is None or self._count - place > NEAR:
            mismatch = Mismatch(f"a variant of the same op among the {NEAR} entries before", variant)
            mismatch.path.append(LIKE)
            raise mismatch
        return kernel

    def _changed(self, params: tuple[Param, ...], value: dict[str, Any]) -> tuple[Param, ...]:
        if len(params) > MOST_PARAMS:
            raise Mismatch(
                f"a list: the kernel that it is like has more than {MOST_PARAMS} parameters", value
            )
        if any(p.map is not None for p in params):
            raise Mismatch("a list: the kernel that it is like has tensor maps", value)
        out = list(params)
        for name, change in value.items():
            try:
                place = next((i for i, p in enumerate(params) if p.name == name), None)
                if place is None:
                    raise Mismatch("a parameter of the kernel that it is like", name)
                old = params[place]
                out[place] = Param(**{**vars(old), **self._changes[old.kind](change)})
            except Mismatch as m:
                m.path.append(name)
                raise
        return tuple(out)
