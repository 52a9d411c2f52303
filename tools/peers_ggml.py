"""llama.cpp's CPU kernels as peers: ggml, built from a source archive that the user gives, with and without
its llamafile kernels.

Any archive that holds `ggml/src/CMakeLists.txt` will do, such as the source distribution of
llama-cpp-python. CMake, Ninja and a C++ compiler are the user's; nothing is downloaded.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kiln.tools.console import UsageError, note
from kiln.tools.peers import Call, PeerLibrary, Run

FEATURES = {
    "avx2": ("AVX", "AVX2", "FMA", "F16C", "BMI2", "SSE42"),
    "avx512f": ("AVX512",),
    "avx512_vbmi": ("AVX512_VBMI",),
    "avx512_vnni": ("AVX512_VNNI",),
    "avx512_bf16": ("AVX512_BF16",),
}
"""A flag of /proc/cpuinfo -> what ggml's build calls it."""
BUILDS = {"ggml": "OFF", "ggml+llamafile": "ON"}
"""Peer -> GGML_LLAMAFILE."""
TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
"""ggml's numbers of element types."""
SLACK = 1 << 20
"""Bytes beside the tensors: their heads and the graph."""


class _Init(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("work", ctypes.c_void_p),
        ("threads", ctypes.c_int),
        ("pool", ctypes.c_void_p),
        ("abort", ctypes.c_void_p),
        ("abort_data", ctypes.c_void_p),
        ("use_reference", ctypes.c_bool),
    )


def build(archive: Path) -> dict[str, Path]:
    """The folder of each build's libraries, beside the archive; what is there is taken.

    Raises:
        UsageError: no ggml in the archive, or it does not build.
    """
    place = archive.with_name(f"{archive.name}.built")
    source = _unpacked(archive, place / "source")
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii").split()
    on = [f"-DGGML_{n}=ON" for flag, names in FEATURES.items() if flag in flags for n in names]
    found = {}
    for name, llamafile in BUILDS.items():
        folder = place / name
        if not (folder / "src" / "libggml-cpu.so").exists():
            note(f"building {name} in {folder}")
            options = ("NATIVE=OFF", "OPENMP=OFF", "BUILD_TESTS=OFF", "BUILD_EXAMPLES=OFF")
            _run("cmake", "-S", source, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                 f"-DGGML_LLAMAFILE={llamafile}", *(f"-DGGML_{o}" for o in options), *on)  # fmt: skip
            _run("ninja", "-C", folder, "ggml-cpu")
        found[name] = folder / "src"
    return found


def _unpacked(archive: Path, place: Path) -> Path:
    with tarfile.open(archive) as packed:
        inside = [m for m in packed.getmembers() if "/ggml/" in m.name]
        root = next(
            (m.name.split("/ggml/")[0] for m in inside if m.name.endswith("ggml/src/CMakeLists.txt")), None
        )
        if root is None:
            raise UsageError(f"{archive} holds no ggml/src/CMakeLists.txt; give an archive of ggml's sources")
        source = place / root / "ggml"
        if not source.exists():
            packed.extractall(place, [m for m in inside if m.name.startswith(root)], filter="data")
    # Packages leave out what only an installation needs.
    (source / "ggml.pc.in").touch()
    return source


def _run(*command: str | os.PathLike[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UsageError(f"building ggml needs {error.filename}, which is not installed") from None
    if done.returncode:
        raise UsageError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-1000:]}")


def ggml_peers(archive: Path) -> tuple[PeerLibrary, ...]:
    """Both builds as peers. A process loads both: each finds its own ggml-base."""
    version = _version(archive)
    return tuple(PeerLibrary(name, version, _ops(folder)) for name, folder in build(archive).items())


def _version(archive: Path) -> str:
    text = next(archive.with_name(f"{archive.name}.built").rglob("ggml/CMakeLists.txt")).read_text(
        encoding="utf-8"
    )
    return ".".join(re.findall(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", text))


class Ggml:
    """One build: a product of matrices in memory of ggml's own."""

    def __init__(self, folder: Path) -> None:
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=os.RTLD_LOCAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=os.RTLD_LOCAL)
        pointer = ctypes.c_void_p
        for name, arguments in (
            ("ggml_init", (_Init,)),
            ("ggml_new_tensor_2d", (pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)),
            ("ggml_mul_mat", (pointer, pointer, pointer)),
            ("ggml_new_graph", (pointer,)),
            ("ggml_get_data", (pointer,)),
        ):
            function = getattr(self.base, name)
            function.restype, function.argtypes = pointer, arguments
        self.base.ggml_build_forward_expand.argtypes = (pointer, pointer)
        self.base.ggml_free.argtypes = (pointer,)
        self.cpu.ggml_graph_plan.restype = _Plan
        self.cpu.ggml_graph_plan.argtypes = (pointer, ctypes.c_int, pointer)
        self.cpu.ggml_graph_compute.argtypes = (pointer, ctypes.POINTER(_Plan))
        self.cpu.ggml_cpu_init()

    def product(self, x: np.ndarray, weight: np.ndarray) -> tuple[Run, Callable[[], np.ndarray]]:
        """A run of x [M, K] times weight [N, K] transposed, and what reads its f32 result [M, N].

        Activations are f32, as llama.cpp has them; ggml rounds them to weight's type itself.
        """
        rows, outputs = len(x), len(weight)
        wide = x.astype(np.float32)
        size = weight.nbytes + wide.nbytes + 4 * rows * outputs + SLACK
        context = self.base.ggml_init(_Init(size, None, False))
        tensors = [self._tensor(context, weight), self._tensor(context, wide)]
        result = self.base.ggml_mul_mat(context, *tensors)
        graph = self.base.ggml_new_graph(context)
        self.base.ggml_build_forward_expand(graph, result)
        plan = self.cpu.ggml_graph_plan(graph, 1, None)
        work = np.empty(plan.size, np.uint8)
        plan.work = work.ctypes.data

        def run() -> None:
            if self.cpu.ggml_graph_compute(graph, plan) or not len(work) == plan.size:
                raise RuntimeError("ggml refused the product")

        def read() -> np.ndarray:
            at = self.base.ggml_get_data(result)
            kept: np.ndarray = np.frombuffer(
                (ctypes.c_float * (rows * outputs)).from_address(at), np.float32
            ).copy()
            return kept.reshape(rows, outputs)

        return run, read

    def _tensor(self, context: int, array: np.ndarray) -> int:
        rows, columns = array.shape
        tensor: int = self.base.ggml_new_tensor_2d(context, TYPES[array.dtype.name], columns, rows)
        ctypes.memmove(self.base.ggml_get_data(tensor), np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return tensor
