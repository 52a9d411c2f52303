"""The stand-in for libcuda, and the Python runtime's own, side by side."""

import ctypes
import hashlib
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from kiln.runtime.entities import Kernel, Manifest
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.fake_driver import CUresult, FakeDriver, Function, read_params
from kiln.tests.runtime.trees import write_tree
from kiln.tests.support.documents import manifest_document

FORMATS = {"ptr": "Q", "i32": "i", "i64": "q", "f32": "f", "f64": "d"}
MAP = "M"
"""The format of a tensor map."""


class Launch(NamedTuple):
    """What a launch was given."""

    entry: str
    sha256: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: tuple[tuple[int, ...], ...]
    params: tuple[Any, ...]


class _Launched(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("attribute_count", ctypes.c_uint),
        ("attributes", ctypes.c_uint * 4 * 4),
        ("stream", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("params", ctypes.c_int),
        ("values", ctypes.c_uint64 * 64),
        ("maps", ctypes.c_uint8 * 128 * 4),
    )


def part_of_tree(root: Path, tree: Path, op: str, **changed: Any) -> Path:
    """A tree of one op of sm_90a and of what its plans call, with fields of its kernels changed."""
    m = manifest_document(tree / "sm_90a")
    plans = [p for p in m["recipes"] if p["op"] == op]
    ops = {op, *(s["op"] for p in plans for s in p["steps"])}
    kernels = [{**k, **changed} for k in m["kernels"] if k["op"] in ops and k["tier"] == "generated"]
    part = {**m, "kernels": kernels, "recipes": plans, "ops": {n: m["ops"][n] for n in ops}, "sources": {}}
    files = {k["file"]: (tree / "sm_90a" / k["file"]).read_bytes() for k in kernels}
    return write_tree(root, {"sm_90a": part}, files)


def passed(kernel: Kernel) -> str:
    """The format of each parameter that a launch passes."""
    kinds = (p for p in kernel.params if p.kind != "dropped")
    return "".join(
        MAP if p.map is not None else FORMATS[p.dtype if p.kind == "scalar" else "ptr"] for p in kinds
    )


class FakeCuda:
    """fake_cuda.c, compiled."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.path = folder / "libcuda_fake.so"
        source = Path(__file__).with_name("fake_cuda.c")
        command = next(iter(libkiln.compilers().values()))
        options = [*libkiln.WARNINGS, "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared", *more, "-o", str(self.path)]
        subprocess.run([*command, *options, str(source), "-lpthread"], check=True)
        self.c = ctypes.CDLL(str(self.path))
        self.c.fake_call.restype = ctypes.c_char_p
        self.c.fake_launched.restype = ctypes.POINTER(_Launched)
        self.c.fake_context.restype = ctypes.c_void_p
        for name in ("fake_calls", "fake_launches", "fake_live"):
            getattr(self.c, name).restype = ctypes.c_long
        self.kernels: list[tuple[Kernel, str]] = []
        self._keep: list[bytes] = []

    def know(self, root: Path, manifest: Manifest) -> None:
        """Tell it of every kernel of a target."""
        self.c.fake_forget_kernels()
        self.kernels = []
        images: dict[str, bytes] = {}
        for k in manifest.kernels:
            image = images.setdefault(k.file, (root / manifest.target / k.file).read_bytes())
            self._keep.append(image)
            self.c.fake_kernel(image, ctypes.c_size_t(len(image)), k.entry.encode(), passed(k).encode())
            self.kernels.append((k, passed(k)))

    def reset(self) -> None:
        """Forget calls, launches and failures."""
        self.c.fake_reset()

    def names(self) -> list[str]:
        """Calls since the last reset."""
        return [self.c.fake_call(ctypes.c_long(i)).decode() for i in range(self.c.fake_calls())]

    def launches(self) -> list[Launch]:
        """Launches since the last reset."""
        return [
            self._launch(self.c.fake_launched(ctypes.c_long(i)).contents)
            for i in range(self.c.fake_launches())
        ]

    def _launch(self, found: _Launched) -> Launch:
        kernel, formats = self.kernels[found.kernel]
        values = (
            bytes(found.maps[v]) if f == MAP else struct.unpack_from(f, struct.pack("Q", v))[0]
            for f, v in zip(formats, found.values, strict=False)
        )
        attributes = tuple(tuple(a) for a in found.attributes[: found.attribute_count])
        return Launch(
            kernel.entry,
            kernel.sha256,
            tuple(found.grid),
            tuple(found.block),
            found.shared,
            found.stream or 0,
            attributes,
            tuple(values),
        )

    def live(self) -> tuple[int, int, int]:
        """Device allocations, modules and retained contexts that are alive."""
        memory, modules, contexts = (int(self.c.fake_live(i)) for i in range(3))
        return memory, modules, contexts


class RecordingDriver(FakeDriver):
    """The Python runtime's stand-in; what a launch is given is read when it is launched."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.formats = {(k.sha256, k.entry): passed(k) for k in manifest.kernels}
        self.recorded: list[Launch] = []

    @staticmethod
    def CUlaunchAttribute() -> Any:
        """A launch attribute."""
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        found = Function(("function", name, hashlib.sha256(module[1]).hexdigest()))
        found.context = self.stack[-1]
        return self._result("cuModuleGetFunction", (module, name), found)

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> Any:
        status = super().cuLaunchKernelEx(config, function, params, extra)
        if status[0] == CUresult.CUDA_SUCCESS:
            self.recorded.append(self._launched(config, function, params))
        return status

    def _launched(self, config: Any, function: Any, params: int) -> Launch:
        _, name, digest = function
        return Launch(
            name.decode(),
            digest,
            (config.gridDimX, config.gridDimY, config.gridDimZ),
            (config.blockDimX, config.blockDimY, config.blockDimZ),
            config.sharedMemBytes,
            int(config.hStream),
            tuple(_attribute(a) for a in config.attrs),
            tuple(read_params(params, self.formats[digest, name.decode()])),
        )


def _attribute(a: Any) -> tuple[int, ...]:
    v = a.value
    if a.id == 4:
        return (4, v.clusterDim.x, v.clusterDim.y, v.clusterDim.z)
    return (a.id, 1, 0, 0)


def without_addresses_of_temporaries(launches: list[Launch], low: int, high: int) -> list[Launch]:
    """The same launches, addresses outside [low, high) numbered in order of appearance."""
    seen: dict[int, str] = {}
    found = []
    for launch in launches:
        formats = [type(v) for v in launch.params]
        params = tuple(
            seen.setdefault(v, f"temporary {len(seen)}")
            if kind is int and v >= 1 << 32 and not low <= v < high
            else v
            for v, kind in zip(launch.params, formats, strict=True)
        )
        found.append(launch._replace(params=params))
    return found
