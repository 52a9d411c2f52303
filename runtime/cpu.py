"""Running kernels on this CPU: shared objects from verified memory, rows split over threads where it pays."""

import ctypes
import errno
import fcntl
import itertools
import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from kiln.runtime.arrays import CPU, aligned_bytes, is_torch, torch_maker
from kiln.runtime.device import Args, PlainLauncher
from kiln.runtime.dtypes import DTYPES, numpy_dtype
from kiln.runtime.entities import Kernel
from kiln.runtime.errors import ContractError, IntegrityError, KilnError, UnavailableError
from kiln.runtime.providers import Capabilities
from kiln.runtime.recipe import Recipe
from kiln.runtime.scratch import HostMemory, ScratchPolicy, ScratchPool
from kiln.runtime.targets import cpu_count, cpu_features, cpu_target, missing_features
from kiln.runtime.tiles import needs_tiles, tiles_refusal

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from kiln.runtime.packed import Packed

MIN_WORK = 1 << 17
"""Bytes of operands per thread below which starting it costs more than it saves."""

_EXECUTABLE = 0x10
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_serial = itertools.count(1)
_FORMATS = {"ptr": "Q", "i32": "q", "i64": "q", "f32": "d", "f64": "d"}


class CpuDevice:
    """The CPU of this process."""

    ordinal = CPU
    unified_memory = False
    """It is the CPU: its kernels are no reference for anything else here."""

    def __init__(
        self,
        threads: int | None = None,
        features: Iterable[str] | None = None,
        scratch: ScratchPolicy | None = None,
    ) -> None:
        """Args:
        threads: most threads a call may use; every processor this process may run on by default.
        features: CPU features to go by; those of this CPU by default.
        scratch: how scratch memory is handed out.
        """
        if threads is not None and threads < 1:
            raise ContractError(f"found threads={threads}, expected 1 or more.")
        self.target = cpu_target()
        self.threads = threads or cpu_count()
        self.features = cpu_features() if features is None else frozenset(features)
        self.gone = False
        self.scratch = ScratchPool(HostMemory(), scratch or ScratchPolicy())
        self._objects: dict[str, ctypes.CDLL] = {}
        self._pool: tuple[int, ThreadPoolExecutor | None] | None = None
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"this CPU ({self.target})"

    def capabilities(self) -> Capabilities:
        """Its features and the processors this process may use."""
        return Capabilities(True, 0, 0, cpu_count(), self.features)

    def targets(self, available: Iterable[str]) -> list[str]:
        """This machine's CPU target, if it is there."""
        return [t for t in available if t == self.target]

    def refusal(self, kernel: Kernel) -> str | None:
        """Features that the kernel needs and this CPU lacks, or does not let this process use."""
        needed = kernel.isa.features if kernel.isa else ()
        missing = missing_features(self.target, needed, self.features)
        if missing:
            return f"this CPU lacks {', '.join(missing)}"
        return tiles_refusal() if needs_tiles(needed) else None

    def check_toolchain(self, versions: Iterable[str]) -> None:
        """Nothing to check: a CPU has no driver."""

    def load(self, kernel: Kernel, data: bytes) -> Any:
        """The entry of a kernel; kernels of one file share the loaded object."""
        with self._lock:
            found = self._objects.get(kernel.sha256)
            if found is None:
                found = self._objects[kernel.sha256] = load_object(data, kernel.file)
        try:
            entry = found[kernel.entry]
        except AttributeError:
            raise IntegrityError(f"{kernel.file} has no entry {kernel.entry}; rebuild the tree.") from None
        entry.restype = ctypes.c_int64
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        return entry

    def launcher(self, kernel: Kernel, function: Any, recipe: Recipe) -> "CpuLauncher":
        """A launcher of a loaded entry."""
        return CpuLauncher(self, kernel, function, recipe)

    def stream(self, stream: Any, example: Any) -> int:
        """No stream: calls return when the work is done."""
        if stream is not None:
            raise ContractError("found stream= on the CPU, expected none; leave it out.")
        return 0

    def default_stream(self, example: Any) -> Callable[[], int] | None:
        """No stream."""
        return None

    def maker(self, example: Any, shape: tuple[int, ...], dtype: str) -> Callable[..., Any]:
        """A torch tensor where the operands are torch's, else a NumPy array that starts on a cache line."""
        if is_torch(example):
            return torch_maker(example, shape, dtype)
        kind, count = numpy_dtype(dtype), DTYPES[dtype]
        for n in shape:
            count *= n
        return lambda _, stream: aligned_bytes(count).view(kind).reshape(shape)

    def synchronize(self, stream: int) -> None:
        """Nothing to wait for: calls return when the work is done."""

    def allocates(self, example: Any) -> bool:
        """Outputs are made by NumPy or torch."""
        return False

    def check_capture(self, kernel: Kernel, stream: int) -> None:
        """Nothing is captured on a CPU."""

    def check_usable(self) -> None:
        """Refuse a closed device.

        Raises:
            UnavailableError: it was closed.
        """
        raise UnavailableError("this library was closed; load the tree again.")

    def pool(self) -> "ThreadPoolExecutor | None":
        """The worker threads, started at first need; a forked child starts its own. None if the system gives
        no thread."""
        with self._lock:
            if self._pool is None or self._pool[0] != os.getpid():
                self._pool = (os.getpid(), _started(self.threads))
            return self._pool[1]

    def close(self) -> None:
        """Stop the threads. Loaded objects stay mapped: another library may be running them."""
        self.gone = True
        self.scratch.close()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and pool[0] == os.getpid() and pool[1] is not None:
            pool[1].shutdown(wait=True)


class CpuLauncher(PlainLauncher):
    """An entry with its parameters laid out: pointers, then integers, then floats, eight bytes each."""

    def __init__(self, device: CpuDevice, kernel: Kernel, function: Any, recipe: Recipe) -> None:
        self._device = device
        self._kernel = kernel
        self._function = function
        self._recipe = recipe
        formats = [_FORMATS[d] for d in recipe.dtypes]
        self._order = sorted(range(len(formats)), key=lambda i: "Qqd".index(formats[i]))
        self._packed = struct.Struct("=" + "".join(formats[i] for i in self._order))
        self._ints = 8 * formats.count("Q")
        self._floats = self._ints + 8 * formats.count("q")
        self._buffer = ctypes.c_char * max(self._packed.size, 8)
        total = recipe.grid[0]
        self._chunks = max(1, min(device.threads, total, recipe.work // MIN_WORK))
        self.scratch_bytes, self.zeroed_bytes = recipe.scratch.size, recipe.zeroed.size

    def run(
        self, pointers: Sequence[int], args: Args, stream: int, scratch: int = 0, zeroed: int = 0
    ) -> None:
        """Run the entry over its rows and wait for it.

        Raises:
            ContractError: a row holds an index out of range; other rows may have been written.
        """
        self._run(self._recipe.fill(pointers, args, scratch, zeroed))

    def packed(
        self, order: Sequence[int], pointers: Sequence[int] | None, args: Args | None
    ) -> "Packed | None":
        """See Packs; calls that are split over threads are not."""
        from kiln.runtime.packed import Packed

        recipe = self._recipe
        if self._chunks != 1 or self.scratch_bytes or self.zeroed_bytes or (args is None and recipe.computed):
            return None
        values = recipe.constants(pointers, args)
        at = {parameter: i for i, parameter in enumerate(self._order)}
        return Packed(
            code=ctypes.cast(self._function, ctypes.c_void_p).value or 0,
            template=self._packed.pack(*[values[i] for i in self._order]),
            addresses=Packed.patches((at[p], order[i]) for p, i in recipe.pointers if pointers is None),
            scalars=Packed.patches(
                (at[p], i, ord(_FORMATS[recipe.dtypes[p]])) for p, i in recipe.args if args is None
            ),
            integers=self._ints // 8,
            floats=self._floats // 8,
            rows=recipe.grid[0],
        )

    def _run(self, values: list[Any]) -> None:
        buffer = self._buffer()
        self._packed.pack_into(buffer, 0, *[values[i] for i in self._order])
        base = ctypes.addressof(buffer)
        where = (base, base + self._ints, base + self._floats)
        total = self._recipe.grid[0]
        code = self._call(where, 0, total) if self._chunks == 1 else self._split(where, total)
        if code:
            self.refuse(code)

    def _split(self, where: tuple[int, int, int], total: int) -> int:
        bounds = [total * i // self._chunks for i in range(self._chunks + 1)]
        pool = self._device.pool()
        if pool is None:
            return self._call(where, 0, total)
        futures: list[Future[int]] = []
        try:
            for a, b in itertools.pairwise(bounds[1:]):
                futures.append(pool.submit(self._call, where, a, b))
            codes = [self._call(where, 0, bounds[1])] + [f.result() for f in futures]
        except BaseException:
            _finish(futures)
            raise
        # The first faulty row, whatever the number of threads.
        return min((c for c in codes if c), default=0)

    def _call(self, where: tuple[int, int, int], begin: int, end: int) -> int:
        code: int = self._function(*where, begin, end)
        return code

    def refuse(self, code: int) -> NoReturn:
        """Raise what an entry's code other than 0 means.

        Raises:
            ContractError: a row holds an index out of range.
            KilnError: no entry returns such a code.
        """
        k = self._kernel
        if code < 0:
            raise KilnError(
                f"{k.op}.{k.variant}: its entry returned {code}; expected 0 or a row. Rebuild the tree."
            )
        raise ContractError(
            f"{k.op}: row {code - 1} holds an index that is out of range; pass indices inside the "
            "array they select from."
        )


def _finish(futures: "list[Future[int]]") -> None:
    """Return when nothing of a call runs any more, however often this is interrupted: what runs uses its
    parameters and the caller's arrays, which go when an interruption has left the call."""
    for future in futures:
        future.cancel()
        while not future.done():
            with suppress(KeyboardInterrupt):
                future.exception()


def _started(threads: int) -> "ThreadPoolExecutor | None":
    """A pool of as many threads as the system gives, all running: a thread that could not be started for a
    part of a call would leave that part to nobody knows when."""
    from concurrent.futures import ThreadPoolExecutor

    while threads:
        pool, go = ThreadPoolExecutor(threads, thread_name_prefix="kiln"), threading.Event()
        running = 0
        try:
            while running < threads:
                pool.submit(go.wait)
                running += 1
            return pool
        except RuntimeError:
            threads = running
        finally:
            go.set()
        pool.shutdown(wait=True)
    return None


def load_object(data: bytes, name: str) -> ctypes.CDLL:
    """A shared object from memory; nothing on disk can change between the check and the load.

    Raises:
        UnavailableError: this system can neither make a memory file nor load from a temporary folder, or
            limits the size of both.
        IntegrityError: the dynamic linker refuses the bytes, or the object's own check fails.
    """
    try:
        fd = _memory_file(name)
    except (AttributeError, OSError):
        return _checked(_load_from_folder(data, name), name)
    try:
        _fill(fd, data, name)
        _seal(fd, name)
        return _checked(_dlopen(_unique_path(fd), name), name)
    finally:
        os.close(fd)


def _checked(loaded: ctypes.CDLL, name: str) -> ctypes.CDLL:
    """The object, whose own check of its arithmetic has passed if it brings one."""
    try:
        check = loaded["kiln_check"]
    except AttributeError:
        return loaded
    check.restype, check.argtypes = ctypes.c_int64, []
    if code := check():
        raise IntegrityError(
            f"{name}: its arithmetic is not what it was built for (check {code} fails); rebuild the tree, or "
            "run on another CPU."
        )
    return loaded


def _memory_file(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name[:200], flags | _EXECUTABLE)
    except OSError:
        # Kernels before 6.3 do not know the flag; later ones may be configured to need it.
        return os.memfd_create(name[:200], flags)


def _fill(fd: int, data: bytes, name: str) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError as e:
        # A limit on file sizes holds for files in memory too.
        limit = " (RLIMIT_FSIZE)" if e.errno == errno.EFBIG else ""
        raise UnavailableError(
            f"{name}: {e.strerror}{limit} while putting its {len(data)} bytes into a file; raise that "
            "limit or make room."
        ) from None


def _seal(fd: int, name: str) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as e:
        raise UnavailableError(
            f"{name}: {e.strerror} while sealing its memory file; run where that is allowed."
        ) from None


def _unique_path(fd: int) -> str:
    # The dynamic linker takes an object loaded before under the same path text for this one, and descriptors
    # are reused: spell each load's serial number in components that mean nothing.
    spelled = "".join("./" if bit == "1" else "/" for bit in f"{next(_serial):b}")
    return f"/proc/self/fd/{spelled}{fd}"


def _load_from_folder(data: bytes, name: str) -> ctypes.CDLL:
    import shutil
    import tempfile

    try:
        folder = tempfile.mkdtemp(prefix="kiln-")
    except OSError as e:
        raise UnavailableError(
            f"{name}: this system has no memory files and no writable temporary folder "
            f"({e.strerror}); provide one of them."
        ) from None
    try:
        path = os.path.join(folder, f"{next(_serial)}-{name}")
        _write_new(path, data, name)
        return _dlopen(path, name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_new(path: str, data: bytes, name: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise UnavailableError(
            f"{name}: {e.strerror} while making a temporary file for it; provide memory files or a writable "
            "temporary folder."
        ) from None
    try:
        _fill(fd, data, name)
    finally:
        os.close(fd)


def _dlopen(path: str, name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as e:
        raise IntegrityError(f"{name}: the dynamic linker refused it ({e}); rebuild the tree.") from None
