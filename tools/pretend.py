"""A call without arrays, from `key=value` words: what `kiln explain` asks about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kiln.runtime.arrays import View, described
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.expr import Env, compile_expr, names
from kiln.runtime.manifest import Attr, DTypeVar, Scalar, Signature, Tensor
from kiln.tools.console import UsageError, nearest

ABSENT = "none"


@dataclass
class Call:
    """Everything the words said, sorted by what it is of."""

    dims: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    """Type variable or operand -> element type, or `none` for an absent operand."""
    strides: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    attrs: dict[str, bool | int | str] = field(default_factory=dict)


def parse_call(name: str, sig: Signature, words: Sequence[str]) -> Call:
    """The call that `words` describe.

    Raises:
        UsageError: a word that is no key=value, a key the op doesn't have, a value its key doesn't take, or a
            dimension that is needed and wasn't given.
    """
    call = Call()
    keys = _keys(sig, call)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"found {word!r}, expected key=value with one of {', '.join(keys)}")
        if key not in keys:
            raise UsageError(nearest(key, keys, f"key of {name}"))
        try:
            keys[key](value)
        except ValueError as wrong:
            raise UsageError(f"{word}: {wrong}") from None
    needed = [d for d in dims_of(sig) if d not in call.dims]
    if needed:
        raise UsageError(f"{name} needs {' '.join(f'{d}=…' for d in needed)} as well")
    return call


Setter = Callable[[str], None]


def _keys(sig: Signature, call: Call) -> dict[str, Setter]:
    """Every key that a call of the op takes, with what sets it."""
    keys: dict[str, Setter] = {dim: _set(call.dims, dim, _extent) for dim in dims_of(sig)}
    for tensor in sig.tensors:
        keys[tensor.name] = _set(call.dtypes, tensor.name, _dtype_reader(tensor))
        if isinstance(tensor.dtype, DTypeVar):
            keys.setdefault(
                tensor.dtype.var, _set(call.dtypes, tensor.dtype.var, _one_of(tensor.dtype.choices))
            )
        if len(tensor.shape) > 1:
            keys[f"{tensor.name}.stride"] = _set(call.strides, tensor.name, _extent)
    keys |= {s.name: _set(call.scalars, s.name, float) for s in sig.scalars}
    keys |= {a.name: _set(call.attrs, a.name, _attr_reader(a)) for a in sig.attrs}
    return keys


def _set(store: dict[str, Any], key: str, reader: Callable[[str], Any]) -> Setter:
    def setter(value: str) -> None:
        store[key] = reader(value)

    return setter


def _extent(value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise ValueError("expected an extent such as 5120")
    return int(value)


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def reader(value: str) -> str:
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return value

    return reader


def _dtype_reader(tensor: Tensor) -> Callable[[str], str]:
    choices = tensor.dtype.choices if isinstance(tensor.dtype, DTypeVar) else tuple(DTYPES)
    return _one_of((*choices, ABSENT) if tensor.optional else choices)


def _attr_reader(attr: Attr) -> Callable[[str], bool | int | str]:
    by_text = {str(c).lower(): c for c in attr.choices}

    def reader(value: str) -> bool | int | str:
        if value.lower() not in by_text:
            raise ValueError(f"expected one of {', '.join(by_text)}")
        return by_text[value.lower()]

    return reader


def dims_of(sig: Signature) -> list[str]:
    """The dimensions of an op, in the order its shapes name them."""
    trees = (e for t in sig.tensors for e in t.shape)
    return list(dict.fromkeys(name for e in trees for head, name in names(e) if head == "dim"))


def dtype_of(tensor: Tensor, call: Call) -> str | None:
    """The operand's element type in this call; None where it is absent. The first choice is the default."""
    if not isinstance(tensor.dtype, DTypeVar):
        chosen = call.dtypes.get(tensor.name, tensor.dtype)
    else:
        chosen = call.dtypes.get(tensor.name) or call.dtypes.get(tensor.dtype.var) or tensor.dtype.choices[0]
    return None if chosen == ABSENT else chosen


def given(tensor: Tensor, sig: Signature, call: Call) -> bool:
    """Whether the call has the operand: an input, or an output whose own type or stride was said."""
    if tensor.role != "out":
        return True
    inputs = [t for t in sig.tensors if t.role != "out" and dtype_of(t, call) is not None]
    bound = {t.dtype.var for t in inputs if isinstance(t.dtype, DTypeVar)}
    free = {tensor.dtype.var} - bound if isinstance(tensor.dtype, DTypeVar) else set()
    return tensor.name in call.strides or not call.dtypes.keys().isdisjoint({tensor.name} | free)


def view_of(tensor: Tensor, call: Call, device: int) -> View | None:
    """The operand as a view of no memory."""
    dtype = dtype_of(tensor, call)
    if dtype is None:
        return None
    env = Env()
    env.dims = call.dims
    shape = tuple(int(compile_expr(e)(env)) for e in tensor.shape)
    view = described(shape, dtype, device)
    if tensor.name in call.strides:
        view = view._replace(strides=(*view.strides[:-2], call.strides[tensor.name], 1))
    return view


def scalar_of(scalar: Scalar, call: Call) -> int | float:
    """The number in this call: given, or the extent of the dim it binds, or its default, or 1."""
    value = call.scalars.get(scalar.name, call.dims.get(scalar.name.upper(), scalar.default))
    value = 1 if value is None else value
    return int(value) if scalar.dtype in ("i32", "i64") else float(value)


def attrs_of(sig: Signature, call: Call) -> dict[str, bool | int | str]:
    """Every attribute's value in this call."""
    return {a.name: call.attrs.get(a.name, a.default) for a in sig.attrs}


def describe(name: str, sig: Signature, call: Call) -> str:
    """The call in one line.

    As in `rms_norm(x: bf16[16, 5120], weight: bf16[5120], eps=1e-06)`.
    """
    parts = [_tensor_text(t, call) for t in sig.tensors if given(t, sig, call)]
    parts += [f"{s.name}={scalar_of(s, call):g}" for s in sig.scalars]
    parts += [f"{a}={v}" for a, v in attrs_of(sig, call).items()]
    return f"{name}({', '.join(parts)})"


def _tensor_text(tensor: Tensor, call: Call) -> str:
    view = view_of(tensor, call, -1)
    if view is None:
        return f"{tensor.name}: {ABSENT}"
    stride = f" stride {call.strides[tensor.name]}" if tensor.name in call.strides else ""
    return f"{tensor.name}: {view.dtype}{list(view.shape)}{stride}"
