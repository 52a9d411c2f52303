"""The extension: made of these sources, of the limited API alone, clean under the sanitizers."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kiln.runtime import fastcall
from kiln.runtime.shared_object import read_shared_object
from kiln.tools import native

pytest.importorskip("ziglang", reason="the compiler is not installed: pip install kernel-kiln[compiler]")
ROOT = Path(__file__).resolve().parents[2]
CALLS = [f"tests/runtime/test_{name}.py" for name in ("fastcall", "shortcut", "bound")]
SANITIZED = "from kiln.runtime import fastcall; fastcall.module_path = lambda machine: {path!r}; "
# Without what runs slowly here and looks at no memory: assertions that are rewritten, calls by Python alone.
ALONE = "not (python and (test_bound or test_shortcut))"
OPTIONS = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain", "-k", ALONE]
RUN = f"import sys, pytest; sys.exit(pytest.main([*{OPTIONS}, *sys.argv[1:]]))"


@pytest.mark.parametrize("machine", native.MACHINES)
def test_the_committed_modules_are_made_of_these_sources(machine: str) -> None:
    committed = native.path(machine)
    assert Path(fastcall.module_path(machine)).samefile(committed)
    assert native.compiled(machine) == committed.read_bytes(), "run `make native`"


@pytest.mark.parametrize("machine", native.MACHINES)
def test_a_module_needs_nothing_but_its_interpreter(machine: str) -> None:
    found = read_shared_object(native.path(machine).read_bytes())
    assert list(found.exports) == ["PyInit_native"]
    assert found.needed == ()
    assert {n for n in found.undefined if not n.startswith(("Py", "_Py"))} == {"memcpy"}


@pytest.mark.parametrize("macro", [False, True])
def test_the_sources_keep_to_the_limited_api(tmp_path: Path, macro: bool) -> None:
    """They compile against Python.h too, confined to the limited API of 3.11."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        pytest.skip(f"this Python came without its headers: there is no {include}/Python.h")
    sources = shutil.copytree(native.FOLDER, tmp_path / "native")
    if macro:
        change(sources / "forms.c", "PyTuple_GetItem(names, i)", "PyTuple_GET_ITEM(names, i)", 1)
    done = gcc("-fsyntax-only", "-DKILN_PYTHON_H", "-isystem", str(include), *map(str, sources.glob("*.c")))
    assert (done.returncode == 0) != macro, done.stderr
    assert ("PyTuple_GET_ITEM" in done.stderr) == macro


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True])
def test_calls_under_the_sanitizers(tmp_path: Path, fault: bool) -> None:
    runtime = gcc("-print-file-name=libasan.so").stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("this gcc came without libasan")
    sources, module = shutil.copytree(native.FOLDER, tmp_path / "native"), tmp_path / "native.so"
    if fault:
        change(sources / "entries.c", "(size_t)(k->count + 1)", "(size_t)(k->count - 1)", 1)
    checks = ("-O1", "-g", "-fPIC", "-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    built = gcc(*checks, *map(str, sources.glob("*.c")), "-o", str(module))
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED.format(path=str(module)) + RUN, *CALLS],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(ROOT / ".typing"), *sys.path]),
            "LD_PRELOAD": runtime,
            # Objects that end are given back to the system's allocator, which sees who uses them afterwards.
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ("AddressSanitizer: heap-buffer-overflow" in done.stdout + done.stderr) == fault, (
        done.stdout + done.stderr
    )
    assert (done.returncode == 0) != fault, done.stdout + done.stderr


def gcc(*options: str) -> "subprocess.CompletedProcess[str]":
    """Run the system's compiler with the warnings that count as errors."""
    path = shutil.which("gcc")
    if path is None:
        pytest.skip("needs gcc")
    command = [path, "-std=c11", "-Wall", "-Wextra", "-Werror", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def change(file: Path, old: str, new: str, times: int) -> None:
    """Break a copy of the source on purpose."""
    text = file.read_text("utf-8")
    assert text.count(old) == times
    file.write_text(text.replace(old, new), encoding="utf-8")
