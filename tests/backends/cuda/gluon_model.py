"""A model of Gluon for Hopper on NumPy: enough of it to run a warp-specialized kernel's own Python
functions.

Every partition of every CTA of a cluster is a thread; mbarriers count arrivals and bytes and flip their
phase as PTX says, TMA loads land at once and fill with zeros, and products are summed in f32. A wait that
nobody ends fails after `PATIENCE` seconds, with what it waited for.
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
        (np.float32, 32), (np.float16, 16), (np.int32, 32), (ml_dtypes.bfloat16, 16),
        (ml_dtypes.float8_e4m3fn, 8),
    )
}  # fmt: skip


class Int(int):
    """A scalar of the kernel."""

    def to(self, kind: Any) -> "Int":
        return self

    def __add__(self, other: Any) -> Any:
        return other + int(self) if isinstance(other, np.ndarray | Pointer) else Int(int(self) + other)

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __sub__(self, other: Any) -> Any:
        return Int(int(self) - other)

    def __rsub__(self, other: Any) -> Any:
        return Int(other - int(self))

    def __mul__(self, other: Any) -> Any:
        return other * int(self) if isinstance(other, np.ndarray) else Int(int(self) * other)

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __floordiv__(self, other: Any) -> Any:
        return Int(int(self) // other)

    def __mod__(self, other: Any) -> Any:
        return Int(int(self) % other)

    def __xor__(self, other: Any) -> Any:
        return Int(int(self) ^ other)

    def __eq__(self, other: object) -> Any:
        return Int(int(self) == other)

    def __hash__(self) -> int:
        return hash(int(self))


class Tensor(np.ndarray[Any, Any]):
    """A tensor in registers: the part that a CTA has."""

    def to(self, kind: Kind) -> "Tensor":
        return self.astype(kind.dtype).view(Tensor) if isinstance(kind, Kind) else self

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
        return 0 if self.memory is None else 1 << 20

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
    """Shared memory: the same allocation in every CTA of a cluster."""

    parts: list[Any]
    shape: tuple[int, ...]
    dtype: Kind
    layout: Any

    def index(self, i: int) -> "Shared":
        return Shared([p[i] for p in self.parts], self.shape[1:], self.dtype, self.layout)

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared([p.transpose(order) for p in self.parts], self.shape, self.dtype, self.layout)

    def store(self, value: Tensor) -> None:
        self.parts[_rank()][...] = value


@dataclass(frozen=True)
class Layout:
    """Whether rows are divided among the CTAs of a cluster."""

    divided: bool

    @staticmethod
    def get_default_for(shape: Any, kind: Any, cga_layout: Any = ()) -> "Layout":
        return Layout(any(rows for rows, _ in cga_layout))


@dataclass(frozen=True)
class Descriptor:
    """A tensor map of rows and columns."""

    base: Pointer
    shape: tuple[int, int]
    stride: int
    block_shape: tuple[int, int]
    layout: Layout

    @property
    def dtype(self) -> Kind:
        kind: Kind = self.base.dtype.element_ty
        return kind

    @property
    def rows(self) -> int:
        return self.block_shape[0] // (_here().ctas if self.layout.divided else 1)

    @property
    def nbytes_per_cta(self) -> int:
        return self.rows * self.block_shape[1] * self.dtype.primitive_bitwidth // 8

    def inside(self, at: Sequence[int]) -> tuple[slice, slice, Any]:
        """Where a CTA's box meets the matrix: rows and columns of the box, and the elements."""
        assert self.base.memory is not None
        first = int(at[0]) + (self.rows * _rank() if self.layout.divided else 0)
        rows = max(0, min(self.rows, self.shape[0] - first))
        cols = max(0, min(self.block_shape[1], self.shape[1] - int(at[1])))
        index = (first + np.arange(rows))[:, None] * self.stride + int(at[1]) + np.arange(cols)
        return slice(0, rows), slice(0, cols), self.base.at + index


@dataclass
class _Cluster:
    """What the CTAs of a program share."""

    ctas: int
    program: int
    programs: int
    memory: list[Shared] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    together: Any = None


_thread = threading.local()


def _here() -> _Cluster:
    cluster: _Cluster = _thread.cluster
    return cluster


def _rank() -> int:
    rank: int = _thread.rank
    return rank


def _allocate(kind: Any, shape: Sequence[int], layout: Any, new: Callable[[], Any] | None = None) -> Shared:
    """The next allocation of this CTA, made by whichever CTA comes first."""
    cluster = _here()
    with cluster.lock:
        at, _thread.allocated = _thread.allocated, _thread.allocated + 1
        if at == len(cluster.memory):
            local = list(shape)
            if isinstance(layout, Layout) and layout.divided:
                local[-2] //= cluster.ctas
            parts = [new() if new else np.full(local, np.nan, kind.dtype) for _ in range(cluster.ctas)]
            cluster.memory.append(Shared(parts, tuple(shape), kind, layout))
        found: Shared = cluster.memory[at]
        return found


def _barriers(count: int) -> Shared:
    return _allocate(None, (count,), None, lambda: [Barrier() for _ in range(count)])


def _shared_memory(kind: Any, shape: Sequence[int], layout: Any) -> Shared:
    if isinstance(layout, str):
        return _allocate(None, shape, layout, lambda: [Barrier() for _ in range(shape[0])])
    return _allocate(kind, shape, layout)


def _barrier(shared: Shared) -> Barrier:
    found: Barrier = shared.parts[0 if shared.layout == "one" else _rank()]
    return found


def _init(bar: Shared, count: int) -> None:
    if bar.layout == "one" and _rank():
        return
    barrier = _barrier(bar)
    barrier.count = barrier.pending = count * (_here().ctas if bar.layout == "one" else 1)


def _wait(bar: Shared, phase: int) -> None:
    if bar.layout != "one" or _rank() == 0:
        _barrier(bar).wait(phase)


def _arrive(bar: Shared, pred: Any = True) -> None:
    if pred:
        _barrier(bar).update(1, 0)


def _load_box(
    source: Descriptor, at: Sequence[int], bar: Shared, into: Shared, multicast: bool = False
) -> None:
    rows, cols, where = source.inside(at)
    if multicast and _rank():
        return
    assert source.base.memory is not None
    for rank in range(_here().ctas) if multicast else (_rank(),):
        into.parts[rank][...] = 0
        into.parts[rank][rows, cols] = source.base.memory[where]
        bar.parts[rank].update(0, -source.nbytes_per_cta)


def _store_box(into: Descriptor, at: Sequence[int], source: Shared) -> None:
    rows, cols, where = into.inside(at)
    assert into.base.memory is not None
    into.base.memory[where] = source.parts[_rank()][rows, cols]


def _mma(a: Shared, b: Shared, total: Tensor, is_async: bool) -> Tensor:
    left, right = (s.parts[_rank()].astype(np.float32) for s in (a, b))
    with np.errstate(invalid="ignore"):
        return np.asarray(total + left @ right).view(Tensor)


def _arange(first: int, last: int, layout: Any) -> Tensor:
    count = last // _here().ctas if layout == "rows" else last
    shift = count * _rank() if layout == "rows" else 0
    return (np.arange(first, count, dtype=np.int64) + shift).view(Tensor)


def _zeros(shape: Sequence[int], kind: Kind, layout: Any) -> Tensor:
    return np.zeros((shape[0] // _here().ctas, shape[1]), kind.dtype).view(Tensor)


def _load(p: Pointer, mask: Any = True, other: float = 0.0) -> Any:
    if p.memory is None:
        return np.full(np.shape(p.at), other, np.float32).view(Tensor)
    at = np.where(mask, p.at, 0)
    return np.where(mask, p.memory[at], other).astype(p.memory.dtype).view(Tensor)


def _store(p: Pointer, value: Any) -> None:
    assert p.memory is not None
    p.memory[p.at] = value


_atomics = threading.Lock()


def _atomic_add(p: Pointer, value: int, sem: str, scope: str) -> Int:
    assert (sem, scope) == ("acq_rel", "gpu")
    assert p.memory is not None
    with _atomics:
        old = Int(p.memory[p.at])
        p.memory[p.at] += value
    return old


def _spawn(
    work: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], cluster: _Cluster, ranks: Sequence[int]
) -> None:
    """Runs functions in threads of their own; raises what one of them raised first."""
    errors: list[BaseException] = []

    def run(function: Callable[..., Any], args: tuple[Any, ...], rank: int) -> None:
        _thread.cluster, _thread.rank, _thread.allocated = cluster, rank, 0
        try:
            function(*args)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(*w, r)) for w, r in zip(work, ranks, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def _warp_specialize(work: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
    assert len(work) == len(warps) + 1 == len(registers) + 1
    _spawn(work, _here(), [_rank()] * len(work))


def _descriptor(base: Pointer, shape: Any, strides: Any, block: Any, layout: Layout) -> Descriptor:
    assert strides[1] == 1
    assert strides[0] * base.dtype.element_ty.primitive_bitwidth % 128 == 0, (
        "rows are multiples of 16 bytes apart"
    )
    return Descriptor(base, (shape[0], shape[1]), strides[0], (block[0], block[1]), layout)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


LANGUAGE = SimpleNamespace(
    constexpr=None, float32=F32, int32=None, int64=None, num_ctas=lambda: _here().ctas,
    program_id=lambda axis: Int(_here().program), num_programs=lambda axis: Int(_here().programs),
    cdiv=lambda a, b: Int(-(-int(a) // int(b))), minimum=lambda a, b: Int(min(a, b)),
    maximum=lambda a, b: Int(max(a, b)), where=lambda c, a, b: Int(a if c else b), static_range=range,
    arange=_arange, zeros=_zeros, load=_load, store=_store, atomic_add=_atomic_add, barrier=_nothing,
    SliceLayout=lambda dim, parent: "rows" if dim == 1 else "columns", NVMMASharedLayout=Layout,
    DistributedLinearLayout=lambda *a: "columns", convert_layout=lambda value, layout: value,
    NVMMADistributedLayout=lambda *a, **k: None, allocate_shared_memory=_shared_memory,
    warp_specialize=_warp_specialize,
)  # fmt: skip
MBARRIER = SimpleNamespace(
    allocate_mbarrier=_barriers, MBarrierLayout=lambda bases: "one", init=_init, wait=_wait, arrive=_arrive,
    expect=lambda bar, size: _barrier(bar).update(1, size),
)  # fmt: skip
TMA = SimpleNamespace(
    make_tensor_descriptor=_descriptor, async_load=_load_box, async_store=_store_box, store_wait=_nothing
)


def functions(*modules: ModuleType) -> dict[str, Any]:
    """The Python functions of the modules' kernels, over the model instead of Gluon."""
    own: dict[str, Any] = {
        "gl": LANGUAGE, "mbarrier": MBARRIER, "tma": TMA, "fence_async_shared": _nothing,
        "cluster": SimpleNamespace(barrier=lambda: _here().together.wait(PATIENCE)),
        "warpgroup_mma": _mma, "warpgroup_mma_wait": lambda n, deps: deps if len(deps) > 1 else deps[0],
        "range": lambda *a: map(Int, range(*a)),
    }  # fmt: skip
    for module in modules:
        for name, made in vars(module).items():
            code = getattr(getattr(made, "fn", None), "__code__", None)
            if code is not None and name not in own:
                own[name] = FunctionType(code, own, name)
    return own


def launch(
    kernel: Callable[..., Any], order: Sequence[int], programs: int, ctas: int, arguments: Mapping[str, Any]
) -> None:
    """Runs the programs of `order`, of `programs`, one after another, each a cluster of `ctas` CTAs."""
    for program in order:
        cluster = _Cluster(ctas, program, programs, together=threading.Barrier(ctas))
        work = [(lambda: kernel(**arguments), ())] * ctas
        _spawn(work, cluster, range(ctas))
