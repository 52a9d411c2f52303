"""From arrays to dimensions: checks a call against its op's signature and solves for every dim, stride and
element type.

Leading dims collapse to one: an operand declared [M, N] takes an array of any rank whose last extent is N
and whose leading
extents can be walked with one stride. Errors name the operand, what it has and what it should have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from kiln.runtime.arrays import ANY_CUDA, CPU, View, contiguous
from kiln.runtime.dtypes import CODES, DTYPES
from kiln.runtime.entities import DTypeVar, Signature, Tensor
from kiln.runtime.errors import ContractError
from kiln.runtime.expr import Env, compile_expr, render, whole, why_not
from kiln.runtime.record import record


@dataclass(frozen=True, slots=True)
class Geometry:
    """The memory an operand covers: rows of `width` elements, `row` apart, elements `col` apart."""

    shape: tuple[int, ...]
    row: int
    col: int
    itemsize: int

    @property
    def rows(self) -> int:
        """Rows after collapsing all dims but the last."""
        return prod(self.shape[:-1])

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last; 0 if there is none."""
        if 0 in self.shape:
            return 0
        return ((self.rows - 1) * self.row + (self.width - 1) * self.col + 1) * self.itemsize


@record
class Output:
    """An output that the runtime allocates."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class Bound:
    """A checked call: what expressions may see, and the geometry of each tensor operand (None where
    absent)."""

    env: Env
    geometry: list[Geometry | None]
    outputs: dict[int, Output]
    """Tensor position -> what to allocate, for outputs that were not given."""
    empty: bool
    """Nothing is to be computed, and nothing launched: see `Binder._is_empty`."""


def refuse_unwritten(op: str, sig: Signature, geometry: Sequence[Geometry | None], none: str) -> None:
    """Nothing is launched, because `none` is 0.

    Raises:
        ContractError: an output has elements, which would be left as they were made.
    """
    if (found := _with_elements(sig, geometry)) is not None:
        raise ContractError(
            f"{op}: {none} is 0 and nothing would be computed, but the output {found[0]} has shape "
            f"{found[1]}; leave the call out."
        )


def _with_elements(sig: Signature, geometry: Sequence[Geometry | None]) -> tuple[str, tuple[int, ...]] | None:
    """Name and shape of the first output that has elements."""
    outputs = ((t, g) for t, g in zip(sig.tensors, geometry, strict=True) if t.role == "out")
    return next(((t.name, g.shape) for t, g in outputs if g is not None and 0 not in g.shape), None)


class Binder:
    """Binds calls of one op."""

    def __init__(self, name: str, sig: Signature, device: int) -> None:
        self.name = name
        self.sig = sig
        self.tensors = sig.tensors
        self.device = device
        self._rows = ("dim", sig.rows)
        self._shapes = [[compile_expr(e) for e in t.shape] for t in self.tensors]
        named = {d for t in self.tensors for e in t.shape for d in _dims_of(e)}
        self.dim_scalars = [
            (i, o.name.upper())
            for i, o in enumerate(sig.scalars)
            if o.dtype in ("i32", "i64") and o.name.upper() in named
        ]
        """(scalar position, dim) of integer scalars that bind the dim of their upper-case name."""

    def bind(
        self,
        reads: Sequence[View | None],
        writes: Sequence[View | None],
        scalars: Sequence[int | float],
        attrs: dict[str, Any],
    ) -> Bound:
        """Check views against the signature.

        Args:
            reads: per tensor operand, what is read (None for outputs and absent operands).
            writes: per tensor operand, what is written (None for inputs, and for outputs to be allocated).
            scalars: values in declared order.
            attrs: every attribute's value.

        Raises:
            ContractError: anything that breaks the signature or a constraint.
        """
        env = Env()
        env.attrs = attrs
        env.args = {o.name: v for o, v in zip(self.sig.scalars, scalars, strict=True)}
        self._presence(reads, writes)
        self._dtypes(env, reads, writes)
        lead = self._lead(reads)
        geometry = self._geometries(reads, writes, lead)
        self._solve(env, geometry, scalars)
        for i, t in enumerate(self.tensors):
            g, v = geometry[i], reads[i] if reads[i] is not None else writes[i]
            if g is not None and v is not None:
                env.strides[t.name], env.colstrides[t.name] = g.row, g.col
                # An in-place operand may be written elsewhere: what holds for both addresses holds for this.
                env.pointers[t.name] = _address(reads[i]) | _address(writes[i])
        for pred, sentence in self.sig.constraints:
            why = why_not(pred, env)
            if why is not None:
                raise ContractError(f"{self.name}: {sentence} ({why}).")
        outputs = self._outputs(env, writes, geometry, lead)
        return Bound(env, geometry, outputs, self._is_empty(env, geometry))

    def _is_empty(self, env: Env, geometry: Sequence[Geometry | None]) -> bool:
        """No columns; or no rows, and no output that has elements all the same: a state after no tokens."""
        if env.dims.get(self.sig.rows) == 0:
            return _with_elements(self.sig, geometry) is None
        if env.dims.get(self.sig.width) != 0:
            return False
        refuse_unwritten(self.name, self.sig, geometry, self.sig.width)
        return True

    def _presence(self, reads: Sequence[View | None], writes: Sequence[View | None]) -> None:
        for t, r, w in zip(self.tensors, reads, writes, strict=True):
            if r is None and t.role != "out" and not t.optional:
                raise ContractError(f"{self.name}: the operand {t.name} is missing; pass an array.")
            for v in (r, w):
                if v is not None:
                    self._place(t, v)
            if w is not None and w.readonly:
                raise ContractError(
                    f"{self.name}: {t.name} is written but its array is read-only; pass a copy."
                )

    def _place(self, t: Tensor, v: View) -> None:
        here = v.device == self.device or (v.device == ANY_CUDA and self.device != CPU)
        if not here:
            raise ContractError(
                f"{self.name}: {t.name} is on {_device(v.device)}, expected {_device(self.device)}; "
                "move it, or load the library for its device."
            )
        if any(s < 0 for s in v.strides):
            raise ContractError(f"{self.name}: {t.name} has a negative stride; pass a copy.")

    def _dtypes(self, env: Env, reads: Sequence[View | None], writes: Sequence[View | None]) -> None:
        chosen: dict[str, tuple[str, str]] = {}
        for t, r, w in zip(self.tensors, reads, writes, strict=True):
            for v in (r, w):
                if v is not None:
                    env.dtypes[t.name] = self._dtype(t, v.dtype, chosen)
        for t in self.tensors:
            if t.role == "out" and not t.optional and t.name not in env.dtypes:
                env.dtypes[t.name] = self._default_dtype(t, chosen)

    def _dtype(self, t: Tensor, found: str, chosen: dict[str, tuple[str, str]]) -> str:
        if isinstance(t.dtype, DTypeVar):
            if found not in t.dtype.choices:
                raise ContractError(
                    f"{self.name}: {t.name} is {found}, expected one of "
                    f"{', '.join(t.dtype.choices)}; convert it."
                )
            first, by = chosen.setdefault(t.dtype.var, (found, t.name))
            if first != found:
                raise ContractError(
                    f"{self.name}: {t.name} is {found} but {by} is {first}; make them the same type."
                )
            return found
        if found == t.dtype or (t.dtype == "u8" and found in CODES):
            return t.dtype
        raise ContractError(f"{self.name}: {t.name} is {found}, expected {t.dtype}; convert it.")

    def _default_dtype(self, t: Tensor, chosen: dict[str, tuple[str, str]]) -> str:
        if isinstance(t.dtype, str):
            return t.dtype
        if t.dtype.var in chosen:
            return chosen[t.dtype.var][0]
        if len(t.dtype.choices) == 1:
            return t.dtype.choices[0]
        # Nothing says it: the result has the type of the first operand whose type is free, as a norm has.
        first = next((found for found, _ in chosen.values()), None)
        if first in t.dtype.choices:
            return first
        raise ContractError(
            f"{self.name}: no operand fixes the type of {t.name}; pass out= with one of "
            f"{', '.join(t.dtype.choices)}."
        )

    def _lead(self, reads: Sequence[View | None]) -> tuple[int, ...] | None:
        """Leading extents of the first input whose rows are the op's rows."""
        for t, v in zip(self.tensors, reads, strict=True):
            if v is not None and len(t.shape) >= 2 and t.shape[0] == self._rows:
                return v.shape[: max(len(v.shape) - len(t.shape) + 1, 0)]
        return None

    def _geometries(
        self, reads: Sequence[View | None], writes: Sequence[View | None], lead: tuple[int, ...] | None
    ) -> list[Geometry | None]:
        found: list[Geometry | None] = []
        for t, r, w in zip(self.tensors, reads, writes, strict=True):
            g = None if r is None else self._geometry(t, r, lead)
            h = None if w is None else self._geometry(t, w, lead)
            if h is not None and h.extent and _overlaps_itself(h):
                raise ContractError(
                    f"{self.name}: rows of the output {t.name} overlap each other; pass a plain array."
                )
            if g is not None and h is not None and (g.shape, g.row, g.col) != (h.shape, h.row, h.col):
                raise ContractError(
                    f"{self.name}: {t.name} is read with shape {g.shape}, strides ({g.row}, "
                    f"{g.col}) but written with "
                    f"{h.shape}, ({h.row}, {h.col}); expected the same layout."
                )
            found.append(g if g is not None else h)
        return found

    def _geometry(self, t: Tensor, v: View, lead: tuple[int, ...] | None) -> Geometry:
        shape = self._canonical_shape(t, v, lead)
        inner = v.shape[-1:] if len(t.shape) >= 2 or v.shape == shape else ()
        outer = v.shape[: len(v.shape) - len(inner)]
        if len(t.shape) == 1 and not inner:
            # [M] given with leading dims: its elements are what the others' rows are.
            col = self._collapse(t, outer, v.strides[: len(outer)], 1)
            row = col
        else:
            col = v.strides[-1] if inner and inner[0] > 1 else 1
            row = self._collapse(t, outer, v.strides[: len(outer)], max(shape[-1], 1) if shape else 1)
            row = col if len(t.shape) == 1 else row
        g = Geometry(shape, row, col, DTYPES[v.dtype])
        self._layout(t, g)
        return g

    def _canonical_shape(self, t: Tensor, v: View, lead: tuple[int, ...] | None) -> tuple[int, ...]:
        want, have = len(t.shape), len(v.shape)
        if want >= 2:
            if want == 2 and have == 1:
                return (1, *v.shape)
            if have >= want:
                cut = have - want + 1
                return (prod(v.shape[:cut]), *v.shape[cut:])
        elif have == want:
            return v.shape
        elif want == 1 and t.shape[0] == self._rows and lead is not None and v.shape in (lead, (*lead, 1)):
            return (prod(v.shape),)
        shape = ", ".join(map(render, t.shape))
        raise ContractError(f"{self.name}: {t.name} has shape {v.shape}, expected [{shape}]; reshape it.")

    def _collapse(self, t: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dense: int) -> int:
        found = expected = None
        if 0 in shape:
            return dense
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            if extent == 1:
                continue
            if expected is not None and stride != expected:
                raise ContractError(
                    f"{self.name}: the leading dims of {t.name}, shape {shape} with strides "
                    f"{strides}, cannot be "
                    "walked with one stride; pass a contiguous copy."
                )
            found = stride if found is None else found
            expected = stride * extent
        return dense if found is None else found

    def _layout(self, t: Tensor, g: Geometry) -> None:
        if t.layout == "strided" or 0 in g.shape:
            return
        if g.col != 1:
            raise ContractError(
                f"{self.name}: the elements of a row of {t.name} are {g.col} apart, expected 1; "
                "pass a contiguous copy."
            )
        if t.layout != "rows" and g.rows > 1 and g.row != g.width and len(g.shape) > 1:
            raise ContractError(
                f"{self.name}: the rows of {t.name} are {g.row} elements apart, expected {g.width} (dense); "
                "pass a contiguous copy."
            )

    def _solve(self, env: Env, geometry: list[Geometry | None], scalars: Sequence[int | float]) -> None:
        source: dict[str, str] = {}
        order = sorted(range(len(self.tensors)), key=lambda i: self.tensors[i].role == "out")
        for i, dim in self.dim_scalars:
            env.dims[dim], source[dim] = int(scalars[i]), self.sig.scalars[i].name
            if scalars[i] < 0:
                raise ContractError(
                    f"{self.name}: {source[dim]} is {scalars[i]}, expected an extent of 0 or more."
                )
        for i in order:
            g = geometry[i]
            if g is not None:
                self._solve_operand(env, self.tensors[i], g, source)
        for i in order:
            g = geometry[i]
            for entry, axis in zip(self.tensors[i].shape, range(len(self.tensors[i].shape)), strict=True):
                if g is not None and _unknown(entry) is None:
                    wanted = self._shapes[i][axis](env)
                    if wanted != g.shape[axis]:
                        raise ContractError(
                            f"{self.name}: axis {axis} of {self.tensors[i].name} has extent {g.shape[axis]}, "
                            f"expected {render(entry)} = {wanted}; reshape it."
                        )

    def _solve_operand(self, env: Env, t: Tensor, g: Geometry, source: dict[str, str]) -> None:
        for axis, entry in enumerate(t.shape):
            unknown = _unknown(entry)
            if unknown is None:
                continue
            dim, factor = unknown
            # Not divmod: a tracer's symbols have none.
            value, rest = g.shape[axis] // factor, g.shape[axis] % factor
            if rest:
                raise ContractError(
                    f"{self.name}: axis {axis} of {t.name} has extent {g.shape[axis]}, expected "
                    f"{render(entry)}: "
                    f"a multiple of {factor}."
                )
            if env.dims.setdefault(dim, value) != value:
                raise ContractError(
                    f"{self.name}: {t.name} has {dim}={value} but {source[dim]} gave {dim}={env.dims[dim]}; "
                    "pass operands that agree."
                )
            source.setdefault(dim, t.name)

    def _outputs(
        self,
        env: Env,
        writes: Sequence[View | None],
        geometry: list[Geometry | None],
        lead: tuple[int, ...] | None,
    ) -> dict[int, Output]:
        outputs = {}
        for i, t in enumerate(self.tensors):
            if t.role != "out" or t.optional or writes[i] is not None:
                continue
            # Not int(…): a tracer's extents are symbols, and stay so.
            extents = (e(env) for e in self._shapes[i])
            shape = tuple(whole(n) if type(n) is float else n for n in extents)
            if any(n < 0 or n >= 1 << 48 for n in shape) or prod(shape) >= 1 << 48:
                raise ContractError(
                    f"{self.name}: the output {t.name} would have shape {shape}; check the operands."
                )
            dtype = env.dtypes[t.name]
            row, col = (shape[-1], 1) if len(shape) > 1 else (1, 1)
            geometry[i] = Geometry(shape, row, col, DTYPES[dtype])
            env.strides[t.name], env.colstrides[t.name], env.pointers[t.name] = row, col, 0
            outer = lead is not None and len(shape) <= 2 and t.shape and t.shape[0] == self._rows
            outputs[i] = Output((*lead, *shape[1:]) if outer and lead is not None else shape, dtype)
        return outputs


def flat_view(v: View, g: Geometry) -> View:
    """The same memory in the operand's own rank: leading dims collapsed."""
    if len(g.shape) < 2:
        return v._replace(shape=g.shape, strides=(g.col,) * len(g.shape))
    outer = contiguous(g.shape[:-1])
    return v._replace(shape=g.shape, strides=(*(s * g.row for s in outer), g.col))


def _address(v: View | None) -> int:
    return 0 if v is None else v.ptr


def _overlaps_itself(g: Geometry) -> bool:
    """Whether elements share memory: one step of them is 0, or neither a row nor a column ends before the
    next one begins."""
    if (g.rows > 1 and g.row == 0) or (g.width > 1 and g.col == 0):
        return True
    by_rows = g.rows <= 1 or g.row > (g.width - 1) * g.col
    by_columns = g.width <= 1 or g.col > (g.rows - 1) * g.row
    return not (by_rows or by_columns)


def _dims_of(expr: Any) -> set[str]:
    if type(expr) is not tuple:
        return set()
    if expr[0] == "dim":
        return {expr[1]}
    return set().union(*(_dims_of(e) for e in expr[1:]))


def _unknown(expr: Any) -> tuple[str, int] | None:
    """(dim, factor) where an extent determines a dim: N, or a positive multiple of it."""
    if type(expr) is not tuple:
        return None
    if expr[0] == "dim":
        return expr[1], 1
    if expr[0] == "mul":
        for factor, dim in ((expr[1], expr[2]), (expr[2], expr[1])):
            if type(factor) is int and factor > 0 and type(dim) is tuple and dim[0] == "dim":
                return dim[1], factor
    return None


def _device(ordinal: int) -> str:
    return "the CPU" if ordinal == CPU else "a CUDA device" if ordinal == ANY_CUDA else f"cuda:{ordinal}"
