"""Which operands may share memory, and the check of the others at each call."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from kiln.runtime.bind import Bound, Geometry
from kiln.runtime.entities import Kernel, Signature, Tensor
from kiln.runtime.errors import ContractError
from kiln.runtime.plan import Callee, Views, aliasing_is_safe
from kiln.runtime.providers import Provider
from kiln.runtime.select import Candidate

IN_PLACE = ("generated", "fused")
"""Tiers of kernels that read a row before they write it, so that an output may be the memory of an input."""


class Overlap(NamedTuple):
    """A written operand and another one.

    Attributes:
        written: index of its address among the call's pointers.
        other: index of the other's.
        a_bytes: from the written operand's first byte to its last.
        b_bytes: the same of the other.
        a: what the written operand covers.
        b: what the other covers.
        same_is_fine: whether they may be one and the same buffer.
        names: how messages call them.
    """

    written: int
    other: int
    a_bytes: int
    b_bytes: int
    a: Geometry
    b: Geometry
    same_is_fine: bool
    names: tuple[str, str]

    @staticmethod
    def pairs(
        sig: Signature,
        bound: Bound,
        reads: Views,
        writes: Views,
        candidate: Candidate,
        callee: Callable[[str], Callee],
    ) -> "tuple[Overlap, ...]":
        """Every pair whose addresses matter; outputs that the runtime allocates overlap nothing."""
        found = []
        count = len(sig.tensors)
        for i, w in enumerate(sig.tensors):
            g = bound.geometry[i]
            if writes[i] is None or g is None:
                continue
            for j, o in enumerate(sig.tensors):
                h = bound.geometry[j]
                if h is None:
                    continue
                if reads[j] is not None:
                    fine = i == j or _may_be_one(sig, bound, (i, j), candidate, callee)
                    found.append(Overlap(count + i, j, g.extent, h.extent, g, h, fine, (w.name, o.name)))
                if j > i and writes[j] is not None:
                    found.append(
                        Overlap(count + i, count + j, g.extent, h.extent, g, h, False, (w.name, o.name))
                    )
        return tuple(found)


def _may_be_one(
    sig: Signature, bound: Bound, pair: tuple[int, int], candidate: Candidate, callee: Callable[[str], Callee]
) -> bool:
    w, o = sig.tensors[pair[0]], sig.tensors[pair[1]]
    if not (_same_rows(w, o) and bound.env.dtypes[w.name] == bound.env.dtypes[o.name]):
        return False
    if bound.geometry[pair[0]] != bound.geometry[pair[1]]:
        return False
    if isinstance(candidate, Kernel):
        return candidate.tier in IN_PLACE
    if isinstance(candidate, Provider):
        return True
    return aliasing_is_safe(candidate, sig, callee, w.name, o.name)


def _same_rows(w: Tensor, o: Tensor) -> bool:
    return o.role == "in" and w.layout == o.layout == "rows" and w.shape == o.shape


def check_overlaps(op: str, pairs: tuple[Overlap, ...], pointers: Sequence[int]) -> None:
    """Refuse a call whose written operands share memory with others.

    Raises:
        ContractError: naming the two operands.
    """
    for pair in pairs:
        p, q = pointers[pair[0]], pointers[pair[1]]
        if p < q + pair[3] and q < p + pair[2] and not (p == q and pair.same_is_fine):
            if not _interleaved(p, pair.a, q, pair.b):
                _refuse(op, pair)


def _interleaved(p: int, a: Geometry, q: int, b: Geometry) -> bool:
    """Whether two column ranges of one wider buffer lie between each other's rows."""
    if a.row != b.row or a.col != 1 or b.col != 1 or a.itemsize != b.itemsize or a.row <= 0:
        return False
    gap, rest = divmod(q - p, a.itemsize)
    gap %= a.row
    return rest == 0 and gap >= a.width and a.row - gap >= b.width


def _refuse(op: str, pair: Overlap) -> NoReturn:
    written, other = pair.names
    raise ContractError(
        f"{op}: the memory of {written}, which is written, overlaps that of {other}; expected "
        "separate buffers"
        f"{' or exactly the same one' if pair.same_is_fine else ''}. Pass another out=."
    )
