"""PyTorch's door: the ops of a library as custom ops that torch.compile and CUDA graphs accept.

    import kiln.runtime as kiln
    import kiln.runtime.torch as kt

    ops = kt.register(kiln.load("aot_artifacts", device="cuda:0"))
    y = torch.ops.kiln.rms_norm(x, weight, eps=1e-6)        # or ops.rms_norm(…)

Operands come in declared order, outputs left out; attributes by name. Outputs are new tensors; an in/out
operand is written in place and not returned, because a custom op must not return its argument. There are no
gradients: call under torch.no_grad() or on tensors that need none.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from kiln.runtime.arrays import CPU, View
from kiln.runtime.dtypes import NUMPY_NAMES
from kiln.runtime.entities import Attr, Scalar, Signature, Tensor
from kiln.runtime.errors import ContractError, UnavailableError
from kiln.runtime.load import Library
from kiln.runtime.operation import Operation

_TORCH_TYPES = {kiln: getattr(torch, name) for name, kiln in NUMPY_NAMES.items() if hasattr(torch, name)}
_KILN_TYPES = {dtype: kiln for kiln, dtype in _TORCH_TYPES.items()}
_SCALARS = {"f32": "float", "f64": "float", "i32": "int", "i64": "int", "bool": "bool"}


@dataclass
class _CustomOp:
    """One op of a namespace, served by one library per device."""

    schema: str
    fragment: Any
    """The torch.library.Library that holds the definition; it goes when this is dropped."""
    names: list[str]
    """Operands by position."""
    outputs: frozenset[str]
    """Those of them that are written alone, given or not."""
    results: list[str]
    operations: dict[int, Operation] = field(default_factory=dict)
    """CPU or CUDA ordinal -> who runs it there."""


_lock = threading.Lock()
_custom_ops: dict[tuple[str, str], _CustomOp] = {}


class Registration:
    """The custom ops of one library: `ops.rms_norm` is `torch.ops.kiln.rms_norm`."""

    def __init__(self, namespace: str, names: tuple[str, ...], ordinal: int) -> None:
        self.namespace = namespace
        self.names = names
        self._ordinal = ordinal

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.names:
            raise AttributeError(f"no op {name!r} was registered; there is {', '.join(self.names)}.")
        return getattr(getattr(torch.ops, self.namespace), name)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self.names]

    def close(self) -> None:
        """Take the ops of this device away again, before their library is closed; twice is fine."""
        names, self.names = self.names, ()
        with _lock:
            _remove(self.namespace, names, self._ordinal)

    def __enter__(self) -> "Registration":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def register(library: Library, *, namespace: str = "kiln", ops: Iterable[str] | None = None) -> Registration:
    """Make ops of a library custom ops of PyTorch, `torch.ops.<namespace>.<op>`, for the library's device.

    Libraries of several devices share the namespace: each call goes to the one of its tensors' device.

    Args:
        library: what runs the calls; keep it open.
        namespace: where PyTorch finds them.
        ops: which ones; every op by default.

    Raises:
        ContractError: no such op, a namespace that is no name, an op that is registered already for this
            device, or that has another signature there. Nothing is registered then.
    """
    if not namespace.isidentifier():
        raise ContractError(f"found namespace={namespace!r}, expected a name such as kiln.")
    names = tuple(library.ops if ops is None else ops)
    made: list[str] = []
    with _lock:
        try:
            for name in names:
                _add(namespace, library.op(name), library.device.ordinal)
                made.append(name)
        except BaseException:
            _remove(namespace, made, library.device.ordinal)
            raise
    return Registration(namespace, names, library.device.ordinal)


def schema(operation: Operation) -> str:
    """The signature of an op as PyTorch writes it.

    As in `rms_norm(Tensor x, Tensor weight, float eps=1e-06) -> Tensor`.
    """
    sig = operation.sig
    required = _arguments(sig)
    last = max((i for i, o in enumerate(required) if _default(o) is None), default=-1)
    parts = []
    marks = iter("abcdefghijklmnopqrstuvwxyz")
    for i, o in enumerate(required):
        default = _default(o) if i > last else None
        mark = f"({next(marks)}!)" if isinstance(o, Tensor) and o.role != "in" else ""
        kind = f"Tensor{mark}{'?' if o.optional else ''}" if isinstance(o, Tensor) else _SCALARS[o.dtype]
        parts.append(f"{kind} {o.name}" + (f"={default}" if default is not None else ""))
    if sig.attrs:
        parts += ["*", *map(_attr, sig.attrs)]
    results = len(_results(sig))
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    return f"{operation.name}({', '.join(parts)}) -> {returned}"


def _arguments(sig: Signature) -> list[Tensor | Scalar]:
    return [o for o in sig.operands if not _is_result(o)]


def _is_result(o: Tensor | Scalar) -> bool:
    # An optional output is computed only where the caller gives memory for it.
    return isinstance(o, Tensor) and o.role == "out" and not o.optional


def _results(sig: Signature) -> list[str]:
    outputs = {o.name for o in sig.tensors if _is_result(o)}
    return [n for n in sig.returns if n in outputs]


def _default(o: Tensor | Scalar) -> str | None:
    if isinstance(o, Tensor):
        return "None" if o.optional else None
    if o.default is None:
        return None
    kind = _SCALARS[o.dtype]
    return (
        str(bool(o.default)) if kind == "bool" else str(int(o.default)) if kind == "int" else repr(o.default)
    )


def _attr(a: Attr) -> str:
    kind = type(a.default).__name__
    text = f'"{a.default}"' if kind == "str" else a.default
    return f"{kind} {a.name}={text}"


def _add(namespace: str, operation: Operation, ordinal: int) -> None:
    name = operation.name
    where = f"{namespace}::{name}"
    custom = _custom_ops.get((namespace, name))
    if custom is None:
        custom = _custom_ops[namespace, name] = _define(namespace, operation)
    if custom.schema != schema(operation):
        raise ContractError(
            f"{where} is {custom.schema}, expected {schema(operation)}; use another namespace for this tree."
        )
    if ordinal in custom.operations:
        raise ContractError(
            f"{where} is registered for this device already; close that registration, or use another "
            "namespace."
        )
    custom.operations[ordinal] = operation


def _define(namespace: str, operation: Operation) -> _CustomOp:
    name = operation.name
    fragment = torch.library.Library(namespace, "FRAGMENT")
    arguments = _arguments(operation.sig)
    outputs = frozenset(o.name for o in arguments if isinstance(o, Tensor) and o.role == "out")
    names = [o.name for o in arguments]
    custom = _CustomOp(schema(operation), fragment, names, outputs, _results(operation.sig))
    try:
        fragment.define(custom.schema)
        for key in ("CPU", "CUDA"):
            fragment.impl(name, _runner(f"{namespace}::{name}", custom), key)
        torch.library.register_fake(f"{namespace}::{name}", _faker(custom), lib=fragment)
    except RuntimeError as e:
        fragment._destroy()
        reason = str(e).splitlines()[0]
        raise ContractError(f"{namespace}::{name} cannot be defined: {reason}; use another one.") from None
    return custom


def _remove(namespace: str, names: Iterable[str], ordinal: int) -> None:
    for name in names:
        custom = _custom_ops.get((namespace, name))
        if custom is None:
            continue
        custom.operations.pop(ordinal, None)
        if not custom.operations:
            custom.fragment._destroy()
            del _custom_ops[namespace, name]


def _by_name(custom: _CustomOp, operands: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    given = {**dict(zip(custom.names, operands, strict=False)), **named}
    return {n: x for n, x in given.items() if x is not None or n not in custom.outputs}


def _runner(where: str, custom: _CustomOp) -> Callable[..., Any]:
    operations, results = custom.operations, custom.results

    def run(*operands: Any, **named: Any) -> Any:
        example = operands[0] if isinstance(operands[0], torch.Tensor) else _first(operands)
        # On the CPU get_device() is -1, as CPU is.
        operation = operations.get(ordinal := example.get_device())
        if operation is None:
            raise UnavailableError(
                f"{where} is not registered for {'the CPU' if ordinal == CPU else f'cuda:{ordinal}'}; "
                "register a library that is loaded for it."
            )
        # By position where that says the same: it is the shorter way.
        outputs = custom.outputs
        returned = (
            operation(**_by_name(custom, operands, named)) if outputs else operation(*operands, **named)
        )
        if operation.sig.returns == tuple(results):
            return returned
        by_name = dict(
            zip(operation.sig.returns, returned if type(returned) is tuple else (returned,), strict=True)
        )
        fresh = tuple(by_name[n] for n in results)
        return fresh[0] if len(fresh) == 1 else fresh or None

    return run


def _faker(custom: _CustomOp) -> Callable[..., Any]:
    """What tracing runs: shapes and types from the signature, no memory touched."""

    def fake(*operands: Any, **named: Any) -> Any:
        example = _first(operands)
        # Tensors of a device without a library can be traced, not run.
        operation = custom.operations.get(example.get_device(), next(iter(custom.operations.values())))
        ordinal = operation.device.ordinal
        given = _by_name(custom, operands, named)
        outputs = operation.shapes(**{n: _described(x, ordinal) for n, x in given.items()})
        made = [outputs[n] for n in custom.results]
        fresh = tuple(example.new_empty(o.shape, dtype=_TORCH_TYPES[o.dtype]) for o in made)
        return fresh[0] if len(fresh) == 1 else fresh or None

    return fake


def _first(operands: tuple[Any, ...]) -> Any:
    return next(x for x in operands if isinstance(x, torch.Tensor))


def _described(x: Any, ordinal: int) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    dtype = _KILN_TYPES.get(x.dtype)
    if dtype is None:
        raise ContractError(f"found a tensor of {x.dtype}, expected one of {', '.join(NUMPY_NAMES)}.")
    return View(0, tuple(x.shape), x.stride(), dtype, ordinal, False, None)
