"""How libkiln is built, what it exports and needs, sanitizers, and what a launch costs."""

import ctypes
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.test_cuda_calls import TREE, norm

HERE = Path(__file__).parent
INCLUDE = libkiln.SOURCES / "include"


@pytest.mark.parametrize("compiler", ["gcc", "zig"])
def test_one_call_of_any_compiler(tmp_path: Path, compiler: str) -> None:
    """-std=c11 -Wall -Wextra -Werror, and the right answer."""
    if compiler not in libkiln.compilers():
        pytest.skip(f"{compiler} is not installed")
    found = libkiln.opened(libkiln.build(tmp_path / "libkiln.so", compiler=compiler, optimize="-O1"))
    with libkiln.Library(found, TREE) as library:
        assert "rms_norm" in library.ops


def test_exports_and_needs(built: Path) -> None:
    """Only kiln_*, only what a C library has: no libm, no libcuda."""
    if shutil.which("nm") is None or shutil.which("readelf") is None:
        pytest.skip("binutils are not installed")
    listed = subprocess.run(["nm", "-D", "--defined-only", built], capture_output=True, text=True, check=True)
    symbols = {line.split()[-1] for line in listed.stdout.splitlines()}
    header = (INCLUDE / "kiln.h").read_text()
    assert symbols == set(re.findall(r"KILN_API [^;(]*?(kiln_\w+)\(", header))
    needs = subprocess.run(["readelf", "-d", built], capture_output=True, text=True, check=True).stdout
    libraries = set(re.findall(r"\(NEEDED\).*\[(\S+?)\.so", needs))
    assert libraries <= {"libc", "libpthread", "libdl", "ld-linux-x86-64", "ld-linux-aarch64"}


def test_no_global_mutable_state(built: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("binutils are not installed")
    listed = subprocess.run(["nm", "-f", "sysv", built], capture_output=True, text=True, check=True).stdout
    columns = [[c.strip() for c in line.split("|")] for line in listed.splitlines() if line.count("|") == 6]
    sections = {c[6] for c in columns}
    assert {".text", ".rodata"} <= sections
    # The compiler's own: __dso_handle, completed.0 of crtstuff.c.
    mutable = [c[0] for c in columns if c[6] in (".data", ".bss", ".tdata", ".tbss")]
    assert [name for name in mutable if not name.startswith(("_", "completed."))] == []


def test_cpp_includes_the_header(tmp_path: Path) -> None:
    source = tmp_path / "engine.cpp"
    source.write_text(
        "#include <kiln.h>\nint main() {\n  kiln_tensor x{};\n"
        '  kiln_argument a[] = {KILN_TENSOR("x", &x), KILN_NUMBER("eps", 1e-6), KILN_INTEGER("k", 4), '
        'KILN_BOOL("b", true), KILN_TEXT("t", "u"), KILN_WRITTEN("x", &x)};\n'
        "  return a[1].kind == KILN_KIND_NUMBER && a[3].integer == 1 ? 0 : 1;\n}\n",
        encoding="ascii",
    )
    options = ["-std=c++11", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", str(source), "-o"]
    # Compiled alone: to link, zig first builds its C++ library, which takes more than a minute.
    zig = [*libkiln.compilers()["zig"][:-2], "c++", "-c"]
    subprocess.run([*zig, *options, str(tmp_path / "engine.o")], check=True)
    if shutil.which("g++"):
        subprocess.run(["g++", *options, str(tmp_path / "engine")], check=True)
        assert subprocess.run([tmp_path / "engine"], check=False).returncode == 0


def sanitized(tmp_path: Path, sanitizer: str) -> Path:
    """The stress program with a sanitizer; skips where gcc has none."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc is not installed; the sanitizers of others are not tried")
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n", encoding="ascii")
    out = tmp_path / "stress"
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O0"]
    if subprocess.run([gcc, *flags, probe, "-o", out], capture_output=True, check=False).returncode:
        pytest.skip(f"gcc has no {sanitizer} sanitizer here")
    sources = [*sorted(libkiln.SOURCES.glob("*.c")), HERE / "stress.c"]
    options = [*libkiln.WARNINGS, "-DKILN_BUILD", "-DKILN_MIN_WORK=1", f"-I{INCLUDE}", "-ldl", "-lpthread"]
    options.append("-DKILN_SEALED_SETS=2")  # so few that shapes are forgotten
    subprocess.run([gcc, *flags, *map(str, sources), *options, "-o", str(out)], check=True)
    return out


def stressed(program: Path, rounds: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it; address space randomization upsets some sanitizers' shadow memory."""
    setarch = [shutil.which("setarch") or "", "-R"] if shutil.which("setarch") else []
    command = [*setarch, str(program), str(TREE), str(rounds)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_eight_threads(tmp_path: Path, sanitizer: str) -> None:
    done = stressed(sanitized(tmp_path, sanitizer), 60, TSAN_OPTIONS="halt_on_error=1")
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-6000:]


@pytest.fixture(scope="module")
def null(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """null_cuda.c, compiled."""
    command = next(iter(libkiln.compilers().values()))
    out = tmp_path_factory.mktemp("null") / "libcuda_null.so"
    flags = [*libkiln.WARNINGS, "-O2", "-fPIC", "-shared", "-o", str(out)]
    subprocess.run([*command, *flags, str(HERE / "null_cuda.c")], check=True)
    return out


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """libkiln as it is shipped."""
    return libkiln.opened(libkiln.build(tmp_path_factory.mktemp("fast") / "libkiln.so"))


def test_a_sealed_library_decides_a_shape_once(fast: ctypes.CDLL, null: Path) -> None:
    """A call that asks for its variant by name is decided each time, and any other only the first time, also
    if its shape came after sealing: 1.7 against 3.0 us, ctypes included."""

    def cost(op: libkiln.Operation, prepared: Any, calls: int = 2000) -> float:
        items, count, choice, _ = prepared
        began = time.thread_time()
        for _ in range(calls):
            fast.kiln_run(op.handle, items, count, ctypes.byref(choice), 0x51, None)
        return (time.thread_time() - began) / calls

    with libkiln.Library(fast, TREE, "cuda", driver_path=null) as library:
        library.prepare(["rms_norm"])
        variant = library.rms_norm.bind(**norm(17)).variant
        library.seal()
        op = library.rms_norm
        calls = [op.prepared((), norm(17), variant=variant), op.prepared((), norm(17))]
        # By turns, so that a machine that is slow for a while is so for both.
        decided, kept = (min(c) for c in zip(*([cost(op, p) for p in calls] for _ in range(25)), strict=True))
        assert decided > 1.3 * kept, (decided, kept)


def test_cost_of_a_bound_launch(fast: ctypes.CDLL, null: Path) -> None:
    """At most 0.3 us of CPU time over the driver's own."""
    driver = ctypes.CDLL(str(null))
    driver.null_launch_cost.restype = ctypes.c_double
    found = fast
    with libkiln.Library(found, TREE, "cuda", driver_path=null) as library:
        call = library.rms_norm.bind(**norm(16))
        library.seal()
        costs = [driver.null_launch_cost(found.kiln_launch, call.handle, 20_000) for _ in range(20)]
        call.free()
    assert 0 < min(costs) < 300, costs
