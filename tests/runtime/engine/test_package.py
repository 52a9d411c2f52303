"""The installed package: the example engine, built and run with no Python; CMake, pkg-config, versions."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from kiln.tests.runtime.engine.conftest import EXAMPLE, ROOT, SOURCE, WARNINGS, Engines
from kiln.tests.support.compilers import run
from kiln.tests.support.readme import block, session
from kiln.tools.trees import shipped

TREE = shipped()
HERE = f"cpu-{platform.machine()}"


def version() -> str:
    found = re.search(r'#define KILN_VERSION "(.+)"', (SOURCE / "include" / "kiln.h").read_text("ascii"))
    assert found
    return found[1]


def refused(command: list[str | Path]) -> str:
    """What an engine says that must not run."""
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    return done.stderr


def check_output(text: str) -> None:
    assert re.search(r"^cpu: norm 1\.375 1\.63281 1\.84375, fp8 81 85 88, 0 wrong$", text, re.MULTILINE), text
    assert "silu_mul on this CPU" in text
    assert text.count("ran c.bf16") == 3
    assert float(re.findall(r"^([0-9.]+) us a launch$", text, re.MULTILINE)[0]) > 0


@pytest.fixture(scope="module")
def engine(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example engine with an embedded tree."""
    build = tmp_path_factory.mktemp("engine")
    flags = f"-DCMAKE_CXX_FLAGS={WARNINGS} -Wpedantic"
    engines.build(EXAMPLE, build, f"-DKILN_TREE={TREE}", "-DKILN_TREE_TARGETS=cpu-x86_64;cpu-aarch64", flags)
    return build / "engine"


def test_readme_s_first_program_is_the_example_and_runs(engines: Engines) -> None:
    assert block("c", "int main") == (EXAMPLE / "quick.c").read_text("utf-8")
    engines.follow(session("./quick aot_artifacts"))


def test_readme_s_engine_is_the_example_and_runs(engines: Engines) -> None:
    lines = (EXAMPLE / "engine.cpp").read_text("utf-8").splitlines()
    assert set(block("cpp", "kiln_bind_").splitlines()) <= set(lines)
    engines.follow(session("build/engine/engine cpu"))


def test_readme_s_cmakelists_is_accepted(engines: Engines, tmp_path: Path) -> None:
    start = (
        "cmake_minimum_required(VERSION 3.18)\nproject(x LANGUAGES CXX)\nadd_executable(engine engine.cpp)\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(start + block("cmake", "find_package"))
    (tmp_path / "engine.cpp").touch()
    (tmp_path / "aot_artifacts").symlink_to(TREE)
    engines.configure(tmp_path, tmp_path / "build")
    assert (tmp_path / "build" / "kiln_embed" / "engine" / "kiln_embedded_tree.cpp").stat().st_size > 10_000


def test_the_engine_is_short() -> None:
    assert len((EXAMPLE / "engine.cpp").read_text("utf-8").splitlines()) < 100


def test_the_engine_runs_from_its_embedded_tree(engine: Path) -> None:
    check_output(run([engine], Path("/"), PATH=""))


def test_the_engine_runs_from_a_folder(engine: Path) -> None:
    check_output(run([engine, "cpu", TREE], Path("/"), PATH=""))


def test_the_engine_refuses_a_folder_that_is_no_tree(engine: Path, tmp_path: Path) -> None:
    assert "INDEX.json" in refused([engine, "cpu", tmp_path])


def test_the_engine_tells_a_device_that_computes_nothing(engine: Path, tmp_path: Path) -> None:
    """The CUDA path as far as it goes without a GPU: memory, binding and launching go through the driver."""
    source = Path(__file__).with_name("idle_cuda.c")
    run(["cc", "-std=gnu11", "-w", "-shared", "-fPIC", source, "-o", "libcuda.so.1", "-pthread"], tmp_path)
    command: list[str | Path] = [engine, "cuda", TREE]
    done = subprocess.run(
        command, env={"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert re.match(r"cuda: norm .* fp8 0 0 0, [1-9]\d* wrong\nsilu_mul on cuda:0", done.stdout), done.stdout
    assert "ran bf16_n5120\n" in done.stdout


def test_the_engine_says_that_there_is_no_driver(engine: Path) -> None:
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("this machine has a CUDA driver")
    assert "no CUDA driver on this machine" in refused([engine, "cuda", TREE])


def small_tree(folder: Path) -> Path:
    """A copy of the shipped tree with the one target that this machine runs."""
    folder.mkdir()
    shutil.copy(TREE / "INDEX.json", folder)
    shutil.copytree(TREE / HERE, folder / HERE)
    return folder


def test_the_engine_refuses_another_tree_than_its_header_was_written_for(
    engine: Path, tmp_path: Path
) -> None:
    tree = small_tree(tmp_path / "tree")
    index = tree / "INDEX.json"
    generation = re.compile(rb'"generation": (\d+)')
    index.write_bytes(generation.sub(b'"generation": 1\\1', index.read_bytes()))
    assert "sha256" in refused([engine, "cpu", tree])


def test_the_engine_refuses_a_kernel_that_was_changed(engine: Path, tmp_path: Path) -> None:
    tree = small_tree(tmp_path / "tree")
    for kernel in (tree / HERE).glob("silu_mul.*.so"):
        data = bytearray(kernel.read_bytes())
        data[-1] ^= 1
        kernel.write_bytes(data)
    told = refused([engine, "cpu", tree])
    assert "silu_mul" in told
    assert "sha256" in told


def test_pkg_config_and_one_compiler_call(engines: Engines, tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    moved = tmp_path / "moved"
    shutil.copytree(engines.prefix, moved, symlinks=True)
    (config,) = moved.rglob("kiln.pc")
    env = {"PKG_CONFIG_PATH": str(config.parent)}
    assert engines.run("pkg-config", "--modversion", "kiln", **env).strip() == version()
    words = engines.run("pkg-config", "--cflags", "--libs", "kiln", **env).split()
    libraries = str(next(Path(w[2:]) for w in words if w.startswith("-L")))
    assert Path(libraries).resolve().is_relative_to(moved)
    engines.run("cc", "-std=c11", EXAMPLE / "quick.c", *words, "-o", tmp_path / "quick")
    done = run([tmp_path / "quick", TREE], tmp_path, PATH="", LD_LIBRARY_PATH=libraries)
    assert done == "0.365148 0.730297 1.09545 2.92119\n-1.41421 0 0 2.82842\n"
    static = [w for w in engines.run("pkg-config", "--static", "--cflags", "--libs", "kiln", **env).split()]
    static = [f"{libraries}/libkiln.a" if w == "-lkiln" else w for w in static]
    engines.run("cc", "-std=c11", EXAMPLE / "quick.c", *static, "-o", tmp_path / "quick-static")
    assert run([tmp_path / "quick-static", TREE], tmp_path, PATH="") == done


def test_quick_says_what_is_wrong(engines: Engines, tmp_path: Path) -> None:
    (library,) = engines.prefix.rglob("libkiln.a")
    include = f"-I{engines.prefix / 'include'}"
    quick = tmp_path / "quick"
    engines.run(
        "cc", "-std=c11", include, EXAMPLE / "quick.c", library, "-pthread", "-ldl", "-lm", "-o", quick
    )
    assert refused([quick, tmp_path / "none"]).startswith("quick: ")


CONSUMER = """cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C)
{find}
add_executable(quick {example}/quick.c)
target_link_libraries(quick PRIVATE kiln::kiln)
"""


def consumer(folder: Path, find: str) -> Path:
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(CONSUMER.format(find=find, example=EXAMPLE))
    return folder


def test_a_shared_build_links_the_shared_library(engines: Engines, tmp_path: Path) -> None:
    source = consumer(tmp_path / "source", f"find_package(kiln {version()} REQUIRED)")
    engines.build(source, tmp_path / "build", "-DBUILD_SHARED_LIBS=ON")
    quick = tmp_path / "build" / "quick"
    assert f"libkiln.so.{version().rpartition('.')[0]}".encode() in quick.read_bytes()
    assert run([quick, TREE], tmp_path, PATH="").startswith("0.365148 ")


@pytest.mark.parametrize("wanted", ["99.0", "0.0.1"])
def test_an_installation_of_another_version_is_refused(engines: Engines, tmp_path: Path, wanted: str) -> None:
    source = consumer(tmp_path / "source", f"find_package(kiln {wanted} REQUIRED)")
    with pytest.raises(AssertionError, match=r"compatible\s+with\s+requested\s+version"):
        engines.configure(source, tmp_path / "build")


def test_it_is_a_subdirectory_of_an_engine_too(engines: Engines, tmp_path: Path) -> None:
    source = consumer(tmp_path / "source", f"add_subdirectory({SOURCE} kiln EXCLUDE_FROM_ALL)")
    with (source / "CMakeLists.txt").open("a") as file:
        file.write(f"kiln_embed_tree(quick {TREE} TARGETS {HERE})\n")
    engines.configure(source, tmp_path / "build", "-G", "Unix Makefiles")
    targets = engines.run("cmake", "--build", tmp_path / "build", "--target", "help")
    assert {"kiln_static", "kiln_shared", "quick"} <= set(re.findall(r"\w+", targets))
    engines.run("cmake", "--install", tmp_path / "build", "--prefix", tmp_path / "prefix")
    assert not (tmp_path / "prefix").exists()


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == version()
