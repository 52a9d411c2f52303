"""Kernels of a manifest that are written as what differs from an earlier one.

An entry with the field `like` has every field of the kernel that it names, a variant of its op among the NEAR
entries before it, but for those that it gives itself. It always gives `op` and `variant`, and both or neither
of `params` and `scratch`, which name each other. 3389 kernels take 4.4 MB so, and 7.5 written out.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kiln.runtime.entities import Kernel
from kiln.runtime.fields import Mismatch, Reader, array, given, record, refuse_keys

LIKE = "like"
NEAR = 256
"""How many entries before one its base stands at most: a search that costs little whatever a document says."""
OWN = ("op", "variant")
TOGETHER = ("params", "scratch")


def kernels(fields: Mapping[str, Reader[Any]], most: int) -> Reader[tuple[Kernel, ...]]:
    """A list of 1 to `most` kernels with these fields; what they have of another is read once and shared."""
    whole = record(Kernel, fields)
    return lambda value: array(_Entries(fields, whole).read, most, 1)(value)


class _Entries:
    """The entries of one list, read one after another."""

    def __init__(self, fields: Mapping[str, Reader[Any]], whole: Callable[[Any], Kernel]) -> None:
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
        return Kernel(**{**vars(base), **given(value, self._fields)})

    def _base(self, op: str, variant: Any) -> Kernel:
        place, kernel = self._seen.get((op, variant), (0, None)) if type(variant) is str else (0, None)
        if kernel is None or self._count - place > NEAR:
            mismatch = Mismatch(f"a variant of the same op among the {NEAR} entries before", variant)
            mismatch.path.append(LIKE)
            raise mismatch
        return kernel
