"""libkiln through ctypes, with the calls of the Python runtime: one table of cases can drive both."""

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kiln.runtime.arrays import View, aligned_bytes, view
from kiln.runtime.dtypes import DTYPES, numpy_dtype
from kiln.runtime.entities import Signature
from kiln.runtime.errors import (
    ContractError,
    DriverError,
    IntegrityError,
    KilnError,
    SchemaError,
    SelectionError,
    TargetError,
    UnavailableError,
)
from kiln.runtime.manifest import parse_manifest
from kiln.runtime.select import Explanation, Verdict
from kiln.tests.runtime.c.options import Options
from kiln.tests.runtime.c.scratch import Scratch

SOURCES = Path(__file__).parents[3] / "runtime" / "c"
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Werror")
MAX_RANK = 8
CODES = list(DTYPES)


class Error(ctypes.Structure):
    """kiln_error"""

    _fields_ = (("code", ctypes.c_int), ("driver", ctypes.c_int), ("message", ctypes.c_char * 2048))


class Tensor(ctypes.Structure):
    """kiln_tensor"""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("device", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("readonly", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("strides", ctypes.c_int64 * MAX_RANK),
    )


class Argument(ctypes.Structure):
    """kiln_argument"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int),
        ("tensor", ctypes.POINTER(Tensor)),
        ("number", ctypes.c_double),
        ("integer", ctypes.c_int64),
        ("text", ctypes.c_char_p),
    )


TENSOR, NUMBER, INTEGER, BOOL, TEXT, WRITTEN = range(1, 7)


class Choice(ctypes.Structure):
    """kiln_choice"""

    _fields_ = tuple((name, ctypes.c_char_p) for name in ("mode", "tier", "variant", "isa"))


class Output(ctypes.Structure):
    """kiln_output"""

    _fields_ = (("name", ctypes.c_char_p), ("tensor", Tensor))


class Device(ctypes.Structure):
    """kiln_device"""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("ordinal", "major", "minor", "units", "unified_memory")
    )


Supports = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Device))
Run = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(Argument),
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.POINTER(Error),
)
StatsSeen = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64
)
SelftestSeen = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p
)
FaultSeen = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)


class Provider(ctypes.Structure):
    """kiln_provider"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("priority", ctypes.c_int32),
        ("reference", ctypes.c_int32),
        ("supports", Supports),
        ("run", Run),
        ("user", ctypes.c_void_p),
    )


class OutOfMemoryError(KilnError):
    """KILN_MEMORY"""


class InternalError(KilnError):
    """KILN_INTERNAL"""


DECLINED = 9
_KINDS: Mapping[int, type[KilnError]] = {
    1: ContractError,
    2: IntegrityError,
    3: SchemaError,
    4: TargetError,
    5: SelectionError,
    6: UnavailableError,
    8: OutOfMemoryError,
    10: InternalError,
}


def check(code: int, error: Error) -> None:
    """Raise the Python runtime's exception for a code."""
    if code == 0:
        return
    assert error.code == code
    text = error.message.decode(errors="replace")
    assert text
    raise DriverError(text, error.driver) if code == 7 else _KINDS[code](text)


def compilers() -> dict[str, list[str]]:
    """Command of each C compiler that is here."""
    found = {"zig": [sys.executable, "-m", "ziglang", "cc", "-fno-sanitize=undefined"]}
    return {"gcc": ["gcc"], **found} if shutil.which("gcc") else found


def build(
    out: Path, *options: str, compiler: str | None = None, extra: tuple[Path, ...] = (), optimize: str = "-O2"
) -> Path:
    """Compile libkiln in one call; more options and sources may follow."""
    known = compilers()
    command = known[compiler or next(iter(known))]
    sources = [*sorted(SOURCES.glob("*.c")), *extra]
    flags = [*WARNINGS, optimize, "-fPIC", "-fvisibility=hidden", "-DKILN_BUILD", f"-I{SOURCES / 'include'}"]
    done = subprocess.run(
        [*command, *flags, *options, "-shared", *map(str, sources), "-o", str(out), "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "kiln_version": (ctypes.c_char_p,),
    "kiln_op_count": (ctypes.c_uint32, ctypes.c_void_p),
    "kiln_op_at": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
    "kiln_op_name": (ctypes.c_char_p, ctypes.c_void_p),
    "kiln_find": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    "kiln_close": (None, ctypes.c_void_p),
    "kiln_seal": (None, ctypes.c_void_p),
    "kiln_call_free": (None, ctypes.c_void_p),
    "kiln_call_variant": (ctypes.c_char_p, ctypes.c_void_p),
    "kiln_scratch_bytes": (ctypes.c_size_t, ctypes.c_void_p),
    "kiln_stats": (None, ctypes.c_void_p, StatsSeen, ctypes.c_void_p),
    "kiln_open": (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    "kiln_launch": (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    "kiln_rebind": (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "kiln_disable": (ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p),
    "kiln_set_scratch": (ctypes.c_int, *(ctypes.c_void_p,) * 3, ctypes.c_size_t, ctypes.c_void_p),
    "kiln_set_zeroed_scratch": (ctypes.c_int, *(ctypes.c_void_p,) * 3, ctypes.c_size_t, ctypes.c_void_p),
    "kiln_release_scratch": (ctypes.c_int, *(ctypes.c_void_p,) * 3),
    "kiln_scratch_stats": (None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p),
    "kiln_zeroed_bytes": (ctypes.c_size_t, ctypes.c_void_p),
    "kiln_register_provider": (ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, *(ctypes.c_void_p,) * 2),
    "kiln_prepare": (ctypes.c_int, *(ctypes.c_void_p,) * 2, ctypes.c_size_t, *(ctypes.c_void_p,) * 2),
    "kiln_selftest": (ctypes.c_int, ctypes.c_void_p, SelftestSeen, *(ctypes.c_void_p,) * 3),
    "kiln_verify": (ctypes.c_int, ctypes.c_void_p, FaultSeen, *(ctypes.c_void_p,) * 3),
    "kiln_run": (ctypes.c_int, *(ctypes.c_void_p,) * 2, ctypes.c_size_t, *(ctypes.c_void_p,) * 3),
    "kiln_bind": (ctypes.c_int, *(ctypes.c_void_p,) * 2, ctypes.c_size_t, *(ctypes.c_void_p,) * 3),
    "kiln_explain": (
        ctypes.c_int,
        *(ctypes.c_void_p,) * 2,
        ctypes.c_size_t,
        *(ctypes.c_void_p,) * 2,
        ctypes.c_size_t,
        *(ctypes.c_void_p,) * 2,
    ),
    "kiln_outputs": (
        ctypes.c_int,
        *(ctypes.c_void_p,) * 2,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_size_t,
        *(ctypes.c_void_p,) * 2,
    ),
}


def opened(path: Path) -> ctypes.CDLL:
    """The shared library with its functions declared."""
    found = ctypes.CDLL(str(path))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def tensor_of(v: View) -> Tensor:
    """A view as libkiln takes it."""
    t = Tensor(v.ptr, CODES.index(v.dtype) + 1, v.device, len(v.shape), v.readonly)
    t.shape[: len(v.shape)] = v.shape
    t.strides[: len(v.shape)] = v.strides
    return t


def argument(name: str, value: Any, written: bool = False) -> Argument:
    """One argument of a call, of the kind that a Python value has."""
    a = Argument(name=name.encode())
    if isinstance(value, bool | np.bool_):
        a.kind, a.integer = BOOL, int(value)
    elif isinstance(value, int | np.integer):
        a.kind, a.integer = INTEGER, int(value)
    elif isinstance(value, float | np.floating):
        a.kind, a.number = NUMBER, float(value)
    elif isinstance(value, str):
        a.kind, a.text = TEXT, value.encode()
    else:
        a.kind = WRITTEN if written else TENSOR
        if value is not None:
            a.tensor = ctypes.pointer(tensor_of(view(value)))
    return a


def arguments(items: list[Argument]) -> Any:
    """An array of arguments."""
    return (Argument * len(items))(*items)


class Library:
    """A tree opened by libkiln; ops are called as the Python runtime's are."""

    def __init__(
        self,
        c: ctypes.CDLL,
        root: Path | None,
        device: str = "cpu",
        *,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        self.c = c
        self.handle = ctypes.c_void_p()
        self.error = Error()
        self._keep: list[Any] = []
        self.roots = [] if root is None else [root]
        text = {"root": root, "device": device, **options}
        given = {k: str(v).encode() if isinstance(v, str | Path) else v for k, v in text.items()}
        self.call(
            "kiln_open", ctypes.byref(Options(threads=threads or 0, **given)), ctypes.byref(self.handle)
        )
        self._signatures: dict[str, Signature] = {}

    def call(self, name: str, *args: Any) -> None:
        """Call a function that returns a code and takes a kiln_error last."""
        error = Error()
        check(getattr(self.c, name)(*args, ctypes.byref(error)), error)

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of all ops, by id."""
        count = self.c.kiln_op_count(self.handle)
        return tuple(self.c.kiln_op_name(self.c.kiln_op_at(self.handle, i)).decode() for i in range(count))

    def op(self, name: str) -> "Operation":
        """One op by name."""
        error = Error()
        found = self.c.kiln_find(self.handle, name.encode(), ctypes.byref(error))
        check(0 if found else error.code, error)
        return Operation(self, name, found)

    def __getattr__(self, name: str) -> Any:
        return self.op(name)

    def signature(self, name: str) -> Signature:
        """The signature of an op, read from the tree by the Python reader."""
        if not self._signatures:
            for root in reversed(self.roots):
                for path in sorted(root.glob("*/MANIFEST.json")):
                    self._signatures.update(parse_manifest(path.read_bytes()).ops)
        return self._signatures[name]

    def explain(self, name: str, *operands: Any, **named: Any) -> Explanation:
        """What kiln_explain says, as the Python runtime has it."""
        head, *lines = self.op(name).explain(*operands, **named).split("\n")
        verdicts = []
        for line in lines:
            found = re.fullmatch(r"  (\S+) \((\w+)(?:, ([\w.-]+))?\): (.*)", line)
            assert found, line
            why = None if found[4] in ("runs", "could run") else found[4]
            verdicts.append(Verdict(found[1], found[2], found[3], why))
        return Explanation(name, head.removeprefix(f"{name} on ").removesuffix(":"), tuple(verdicts))

    def bind(self, name: str, *operands: Any, **named: Any) -> "Call":
        """As in the Python runtime."""
        return self.op(name).bind(*operands, **named)

    def prepare(self, names: list[str] | None = None) -> int:
        """As in the Python runtime."""
        loaded = ctypes.c_uint32()
        array = (ctypes.c_char_p * len(names or ()))(*(n.encode() for n in names or ()))
        given = None if names is None else ctypes.byref(array)
        self.call("kiln_prepare", self.handle, given, len(names or ()), ctypes.byref(loaded))
        return loaded.value

    def seal(self) -> None:
        """As in the Python runtime."""
        self.c.kiln_seal(self.handle)

    def stats(self) -> dict[str, dict[str, int]]:
        """Runs per op and variant."""
        found: dict[str, dict[str, int]] = {}

        def seen(_: Any, op: bytes, name: bytes, runs: int, declined: int) -> None:
            found.setdefault(op.decode(), {})[name.decode()] = runs
            if declined:
                found[op.decode()][f"{name.decode()} declined"] = declined

        self.c.kiln_stats(self.handle, StatsSeen(seen), None)
        return found

    @property
    def scratch(self) -> Scratch:
        """As in the Python runtime."""
        return Scratch(self)

    def set_scratch(self, buffer: View | int, stream: int | None = None, *, zeroed: bool = False) -> None:
        """As in the Python runtime; in place of a buffer, how much the library's own must have."""
        name = "kiln_set_zeroed_scratch" if zeroed else "kiln_set_scratch"
        given = (None, buffer) if isinstance(buffer, int) else (buffer.ptr, buffer.shape[0])
        self.call(name, self.handle, stream, *given)

    def disable(self, name: str, disabled: bool = True) -> None:
        """kiln_disable"""
        self.call("kiln_disable", self.handle, name.encode(), disabled)

    def register(
        self,
        op: str,
        name: str | None,
        run: Callable[[dict[str, Any], int | None], int] | None,
        priority: int = 0,
        supports: Callable[[Device], int] | None = None,
        reference: bool = False,
    ) -> None:
        """Register a Python function as a provider; it gets its arguments by name, tensors as kiln_tensor."""

        def called(_: Any, __: Any, items: Any, count: int, stream: int | None, error: Any) -> int:
            values: dict[str, Any] = {}
            for a in items[:count]:
                kinds = {NUMBER: a.number, INTEGER: a.integer, BOOL: bool(a.integer), TEXT: a.text}
                key = a.name.decode() + (" written" if a.kind == WRITTEN else "")
                values[key] = kinds[a.kind] if a.kind in kinds else Tensor.from_buffer_copy(a.tensor.contents)
            assert run is not None
            return run(values, stream)

        provider = Provider(
            name=None if name is None else name.encode(),
            priority=priority,
            reference=reference,
            supports=Supports(0 if supports is None else lambda _, d: supports(d.contents)),
            run=Run(0 if run is None else called),
        )
        self._keep.append(provider)
        self.call("kiln_register_provider", self.handle, op.encode(), ctypes.byref(provider))

    def close(self) -> None:
        """Close it; twice is fine here."""
        self.c.kiln_close(self.handle)
        self.handle = ctypes.c_void_p()

    def __enter__(self) -> "Library":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Operation:
    """An op; call it as the Python runtime's."""

    def __init__(self, library: Library, name: str, handle: int) -> None:
        self.owner, self.name, self.handle = library, name, handle

    def _named(self, operands: tuple[Any, ...], named: Mapping[str, Any], out: Any) -> list[Argument]:
        sig = self.owner.signature(self.name)
        inputs = [o.name for o in sig.operands if o.kind == "scalar" or o.role != "out"]
        items = [argument(n, x) for n, x in zip(inputs, operands, strict=False)]
        roles = {t.name: t.role for t in sig.tensors}
        items += [argument(n, x) for n, x in named.items() if x is not None or n in roles]
        for name, array in zip(sig.returns, _each(out), strict=False):
            if array is not None:
                items.append(argument(name, array, written=roles[name] == "inout"))
        return items

    def arrays(self, items: list[Argument]) -> dict[str, Any]:
        """New arrays for the outputs that the arguments leave out."""
        found = ctypes.c_size_t()
        outputs = (Output * 64)()
        self.owner.call(
            "kiln_outputs",
            self.handle,
            arguments(items),
            len(items),
            outputs,
            64,
            ctypes.byref(found),
        )
        made = {}
        for o in outputs[: found.value]:
            shape, dtype = tuple(o.tensor.shape[: o.tensor.rank]), CODES[o.tensor.dtype - 1]
            data = aligned_bytes(int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype])
            made[o.name.decode()] = data.view(numpy_dtype(dtype)).reshape(shape)
        return made

    def prepared(
        self,
        operands: tuple[Any, ...],
        named: Mapping[str, Any],
        out: Any = None,
        mode: str | None = None,
        tier: str | None = None,
        variant: str | None = None,
        isa: str | None = None,
    ) -> tuple[Any, int, Choice, dict[str, Any]]:
        """The arguments of kiln_run, and the arrays that were made."""
        items = self._named(operands, named, out)
        made = self.arrays(items)
        items += [argument(n, x) for n, x in made.items()]
        choice = Choice(*(None if x is None else x.encode() for x in (mode, tier, variant, isa)))
        return arguments(items), len(items), choice, made

    def __call__(self, *operands: Any, out: Any = None, stream: int | None = None, **named: Any) -> Any:
        wanted = {k: named.pop(k) for k in ("mode", "tier", "variant", "isa") if k in named}
        items, count, choice, made = self.prepared(operands, named, out, **wanted)
        handle = None if stream is None else stream or 1
        self.owner.call("kiln_run", self.handle, items, count, ctypes.byref(choice), handle)
        return self._results(operands, named, out, made)

    def _results(self, operands: Any, named: Mapping[str, Any], out: Any, made: Mapping[str, Any]) -> Any:
        sig = self.owner.signature(self.name)
        given = _each(out) or (None,) * len(sig.returns)
        inputs = [o.name for o in sig.operands if o.kind == "scalar" or o.role != "out"]
        known = {**dict(zip(inputs, operands, strict=False)), **named, **made}
        results = [g if g is not None else known.get(n) for n, g in zip(sig.returns, given, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    def explain(self, *operands: Any, out: Any = None, **named: Any) -> str:
        """What kiln_explain says, without its final newline."""
        wanted = {k: named.pop(k).encode() for k in ("mode", "tier", "variant", "isa") if k in named}
        items = self._named(operands, named, out)
        text = ctypes.create_string_buffer(1 << 16)
        self.owner.call(
            "kiln_explain",
            self.handle,
            arguments(items),
            len(items),
            ctypes.byref(Choice(**wanted)),
            text,
            len(text),
            None,
        )
        return text.value.decode().removesuffix("\n")

    def bind(self, *operands: Any, out: Any = None, **named: Any) -> "Call":
        """A bound call."""
        wanted = {k: named.pop(k) for k in ("mode", "tier", "variant", "isa") if k in named}
        items, count, choice, made = self.prepared(operands, named, out, **wanted)
        call = ctypes.c_void_p()
        self.owner.call("kiln_bind", self.handle, items, count, ctypes.byref(choice), ctypes.byref(call))
        return Call(self.owner, call, (operands, named, out, made), self._results(operands, named, out, made))


def _each(out: Any) -> tuple[Any, ...]:
    # A view is a tuple, too, but one array.
    return () if out is None else out if isinstance(out, tuple) and not isinstance(out, View) else (out,)


class Call:
    """A kiln_call."""

    def __init__(self, library: Library, handle: Any, keep: Any, outputs: Any) -> None:
        self.owner, self.handle, self.keep, self.outputs = library, handle, keep, outputs

    def __del__(self) -> None:
        self.free()

    @property
    def candidate(self) -> SimpleNamespace:
        """What runs, as the Python runtime names it."""
        return SimpleNamespace(variant=self.variant)

    @property
    def variant(self) -> str:
        """What runs."""
        return str(self.owner.c.kiln_call_variant(self.handle).decode())

    @property
    def scratch_bytes(self) -> int:
        """Scratch of a launch."""
        return int(self.owner.c.kiln_scratch_bytes(self.handle))

    @property
    def zeroed_bytes(self) -> int:
        """Zeroed scratch of a launch."""
        return int(self.owner.c.kiln_zeroed_bytes(self.handle))

    def launch(self, stream: int | None = None) -> None:
        """Launch it again."""
        self.owner.call("kiln_launch", self.handle, stream)

    def __call__(self, stream: int | None = None) -> Any:
        """As in the Python runtime."""
        self.launch(stream)
        return self.outputs

    def rebind(self, **named: Any) -> None:
        """Other arrays or scalars."""
        items = [argument(n, x) for n, x in named.items()]
        self.owner.call("kiln_rebind", self.handle, arguments(items), len(items))
        self.keep = (self.keep, named)

    def free(self) -> None:
        """Free it."""
        handle, self.handle = self.handle, ctypes.c_void_p()
        self.owner.c.kiln_call_free(handle)
