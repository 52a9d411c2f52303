"""Kernels of a manifest that are written as what differs from an earlier one.

An entry with the field `like` has every field of the kernel that it names, a variant of its op among the NEAR
entries before it, but for those that it gives itself. It always gives `op` and `variant`, and both or neither
of `params` and `scratch`, which name each other. 3389 kernels take 4.4 MB so, and 7.5 written out.

A kernel whose file would be a copy of another's has the field `stored_as`, the name of the one that is there.
What reads a manifest knows no other name than that; a build knows `file`, under which it would make it.
"""

from collections.abc import Mapping
from typing import Any

from kiln.runtime.entities import Kernel
from kiln.runtime.fields import Mismatch, Reader, array, given, record, refuse_keys

LIKE = "like"
NEAR = 256
"""How many entries before one its base may stand: a search that costs little whatever a document says."""
OWN = ("op", "variant")
TOGETHER = ("params", "scratch")
STORED = "stored_as"


def kernel(fields: Mapping[str, Reader[Any]]) -> Reader[Kernel]:
    """A kernel with these fields and perhaps a `stored_as`."""
    return record(_kernel, fields, {STORED: fields["file"]})


def kernels(fields: Mapping[str, Reader[Any]], most: int) -> Reader[tuple[Kernel, ...]]:
    """A list of 1 to `most` kernels with these fields; what they have of another is read once and shared."""
    whole, own = kernel(fields), {**fields, STORED: fields["file"]}
    return lambda value: array(_Entries(own, whole).read, most, 1)(value)


def _kernel(**values: Any) -> Kernel:
    values["file"] = values.pop(STORED, values["file"])
    return Kernel(**values)


class _Entries:
    """The entries of one list, read one after another."""

    def __init__(self, fields: Mapping[str, Reader[Any]], whole: Reader[Kernel]) -> None:
        self._fields = fields
        self._op = {"op": fields["op"]}
        self._names = frozenset(fields) | {LIKE}
        self._whole = whole
        self._count = 0
        self._seen: dict[tuple[str, str], tuple[int, Kernel]] = {}

    def read(self, value: Any) -> Kernel:
        is_like = type(value) is dict and LIKE in value
        kernel = self._derived(value) if is_like else self._whole(value)
        self._seen[kernel.op, kernel.variant] = self._count, kernel
        self._count += 1
        return kernel

    def _derived(self, value: dict[str, Any]) -> Kernel:
        needed = {*OWN, *(TOGETHER if any(n in value for n in TOGETHER) else ())}
        if not needed <= value.keys() <= self._names:
            refuse_keys(value, frozenset(needed), self._names)
        base = self._base(given(value, self._op)["op"], value[LIKE])
        return _kernel(**{**vars(base), **given(value, self._fields)})

    def _base(self, op: str, variant: Any) -> Kernel:
        place, kernel = self._seen.get((op, variant), (0, None)) if type(variant) is str else (0, None)
        if kernel is None or self._count - place > NEAR:
            mismatch = Mismatch(f"a variant of the same op among the {NEAR} entries before", variant)
            mismatch.path.append(LIKE)
            raise mismatch
        return kernel
