"""A model of Gluon for Hopper on NumPy: enough of it to run a warp-specialized kernel's own Python functions.

Every partition of a program is a thread; mbarriers count arrivals and bytes and flip their phase as PTX
says, TMA loads land at once and fill with zeros, and products are summed in f32. A wait that nobody ends
fails after `PATIENCE` seconds, with what it waited for. What Triton's compiler makes of the code is not
modelled.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

PATIENCE = 20.0


@dataclass(frozen=True)
class Kind:
    """An element type."""

    dtype: Any
    primitive_bitwidth: int


F32 = Kind(np.float32, 32)
KINDS = {
    np.dtype(d): Kind(d, bits)
    for d, bits in (
        (np.float32, 32), (np.int32, 32), (np.float16, 16), (ml_dtypes.bfloat16, 16),
        (ml_dtypes.float8_e4m3fn, 8),
    )
}  # fmt: skip


class Int(int):
    """A scalar of the kernel."""

    def to(self, kind: Any) -> "Int":
        return self

    def __add__(self, other: Any) -> Any:
        return other + int(self) if isinstance(other, np.ndarray) else Int(int(self) + other)

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __sub__(self, other: Any) -> Any:
        return Int(int(self) - other)

    def __mul__(self, other: Any) -> Any:
        return other * int(self) if isinstance(other, np.ndarray) else Int(int(self) * other)

    def __floordiv__(self, other: Any) -> Any:
        return Int(int(self) // other)

    def __mod__(self, other: Any) -> Any:
        return Int(int(self) % other)

    def __xor__(self, other: Any) -> Any:
        return Int(int(self) ^ other)


class Tensor(np.ndarray[Any, Any]):
    """A tensor in registers."""

    def to(self, kind: Kind) -> "Tensor":
        return self.astype(kind.dtype).view(Tensor)

    def permute(self, order: Sequence[int]) -> "Tensor":
        return self.transpose(order).view(Tensor)

    def split(self) -> tuple["Tensor", "Tensor"]:
        return self[..., 0].view(Tensor), self[..., 1].view(Tensor)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)


@dataclass(frozen=True)
class Pointer:
    """An address, or many, in global memory; None for the null pointer."""

    memory: np.ndarray[Any, Any] | None
    at: Any = 0

    @property
    def dtype(self) -> Any:
        assert self.memory is not None
        return SimpleNamespace(element_ty=KINDS[self.memory.dtype])

    def to(self, kind: Any) -> int:
        return 0 if self.memory is None else 1

    def __add__(self, step: Any) -> "Pointer":
        return Pointer(self.memory, self.at + step)


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all arrivals are in and all bytes that were announced."""

    count: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def update(self, arrivals: int, more: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += more
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            over = self.changed.wait_for(lambda: self.phase != phase, PATIENCE)
            assert over, (
                f"nobody ends phase {phase}: {self.pending} arrivals and {self.bytes} bytes are missing"
            )


@dataclass
class Shared:
    """Shared memory."""

    memory: Any
    shape: tuple[int, ...]
    dtype: Any
    layout: None = None

    def index(self, i: int) -> "Shared":
        return Shared(self.memory[int(i)], self.shape[1:], self.dtype)

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.memory.transpose(order), self.shape, self.dtype)

    def store(self, value: Tensor) -> None:
        self.memory[...] = value


@dataclass(frozen=True)
class Descriptor:
    """A tensor map of rows and columns."""

    base: Pointer
    shape: tuple[int, int]
    stride: int
    block_shape: tuple[int, int]

    @property
    def dtype(self) -> Kind:
        kind: Kind = self.base.dtype.element_ty
        return kind

    @property
    def bytes(self) -> int:
        return self.block_shape[0] * self.block_shape[1] * self.dtype.primitive_bitwidth // 8

    def inside(self, at: Sequence[int]) -> tuple[slice, slice, Any]:
        """Where a box meets the matrix: rows and columns of the box, and the elements."""
        rows, cols = (
            max(0, min(b, s - int(a))) for b, s, a in zip(self.block_shape, self.shape, at, strict=True)
        )
        index = (int(at[0]) + np.arange(rows))[:, None] * self.stride + int(at[1]) + np.arange(cols)
        return slice(0, rows), slice(0, cols), self.base.at + index


_thread = threading.local()
_atomics = threading.Lock()


def _allocate(kind: Kind, shape: Sequence[int], layout: Any) -> Shared:
    return Shared(np.full(shape, np.nan, kind.dtype), tuple(shape), kind)


def _load_box(source: Descriptor, at: Sequence[int], bar: Shared, into: Shared) -> None:
    rows, cols, where = source.inside(at)
    assert source.base.memory is not None
    assert into.shape == source.block_shape
    into.memory[...] = 0
    into.memory[rows, cols] = source.base.memory[where]
    bar.memory.update(0, -source.bytes)


def _store_box(into: Descriptor, at: Sequence[int], source: Shared) -> None:
    rows, cols, where = into.inside(at)
    assert into.base.memory is not None
    into.base.memory[where] = source.memory[rows, cols]


def _mma(a: Shared, b: Shared, total: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    assert is_async
    left, right = (s.memory.astype(np.float32) for s in (a, b))
    with np.errstate(invalid="ignore"):
        made = left @ right
        return np.asarray(total + made if use_acc else made).view(Tensor)


def _store(p: Pointer, value: Any) -> None:
    assert p.memory is not None
    p.memory[p.at] = value


def _atomic_add(p: Pointer, value: int, sem: str, scope: str) -> Int:
    assert (sem, scope) == ("acq_rel", "gpu")
    assert p.memory is not None
    with _atomics:
        old = Int(p.memory[p.at])
        p.memory[p.at] += value
    return old


def _load(p: Pointer, mask: Any = True, other: float = 0.0, cache_modifier: str = "") -> Any:
    if p.memory is None:
        return np.full(np.shape(p.at), other, np.float32).view(Tensor)
    if np.ndim(p.at) == 0:
        return p.memory[int(p.at)] if mask else p.memory.dtype.type(other)
    return np.where(mask, p.memory[np.where(mask, p.at, 0)], other).astype(p.memory.dtype).view(Tensor)


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, np.ndarray):
        return np.asarray(np.where(condition, a, b)).view(Tensor)
    return Int(a if condition else b)


def _descriptor(base: Pointer, shape: Any, strides: Any, block: Any, layout: Any) -> Descriptor:
    assert strides[1] == 1
    assert strides[0] * base.dtype.element_ty.primitive_bitwidth % 128 == 0, (
        "rows are multiples of 16 bytes apart"
    )
    return Descriptor(base, (int(shape[0]), int(shape[1])), int(strides[0]), (block[0], block[1]))


def _spawn(work: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], program: tuple[int, int]) -> None:
    """Runs functions in threads of their own; raises what one of them raised first."""
    errors: list[BaseException] = []

    def run(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        _thread.program = program
        try:
            function(*args)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=w) for w in work]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def _warp_specialize(work: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
    assert len(work) == len(warps) + 1 == len(registers) + 1
    _spawn(work, _thread.program)


def _init(bar: Shared, count: int) -> None:
    bar.memory.count = bar.memory.pending = count


def _arrive(bar: Shared, pred: bool = True) -> None:
    if pred:
        bar.memory.update(1, 0)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


LANGUAGE = SimpleNamespace(
    constexpr=None, float32=F32, int64=None, static_range=range,
    program_id=lambda axis: Int(_thread.program[0]), num_programs=lambda axis: Int(_thread.program[1]),
    cdiv=lambda a, b: Int(-(-int(a) // int(b))), minimum=lambda a, b: Int(min(a, b)),
    maximum=lambda a, b: Int(max(a, b)),
    where=_where,
    arange=lambda first, last, layout: np.arange(first, last).view(Tensor),
    zeros=lambda shape, kind, layout: np.zeros(shape, kind.dtype).view(Tensor), load=_load, store=_store,
    atomic_add=_atomic_add, barrier=_nothing,
    SliceLayout=_nothing, static_assert=_nothing, NVMMADistributedLayout=_nothing,
    NVMMASharedLayout=SimpleNamespace(get_default_for=_nothing), DistributedLinearLayout=_nothing,
    convert_layout=lambda value, layout: value, allocate_shared_memory=_allocate,
    inline_asm_elementwise=lambda asm, constraints, args, *rest, **more: args[0],
    warp_specialize=_warp_specialize,
)  # fmt: skip
MBARRIER = SimpleNamespace(
    allocate_mbarrier=lambda count: Shared([Barrier() for _ in range(count)], (count,), None),
    init=_init, wait=lambda bar, phase: bar.memory.wait(phase), arrive=_arrive,
    expect=lambda bar, size: bar.memory.update(1, size),
)  # fmt: skip
TMA = SimpleNamespace(
    make_tensor_descriptor=_descriptor, async_load=_load_box, async_store=_store_box, store_wait=_nothing
)


def functions(*modules: ModuleType) -> dict[str, Any]:
    """The Python functions and numbers of the modules' kernels, over the model instead of Gluon."""
    own: dict[str, Any] = {
        "gl": LANGUAGE, "mbarrier": MBARRIER, "tma": TMA, "fence_async_shared": _nothing, "min": min,
        "warpgroup_mma": _mma, "warpgroup_mma_wait": lambda n, deps: deps[0],
        "range": lambda *a: map(Int, range(*map(int, a))),
    }  # fmt: skip
    for module in modules:
        for name, made in vars(module).items():
            code = getattr(getattr(made, "fn", None), "__code__", None)
            if code is not None and name not in own:
                own[name] = FunctionType(code, own, name)
            elif name.isupper():
                own[name] = made.value
    return own


def launch(kernel: Callable[..., Any], programs: int, arguments: Mapping[str, Any]) -> None:
    """Runs programs one after another."""
    for program in range(programs):
        _spawn([(lambda: kernel(**arguments), ())], (program, programs))
