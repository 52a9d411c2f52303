"""What is installed: the package list against the disk, the metadata, and a real wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("aot_artifacts", "backends", "compiler", "ir", "recipes", "runtime", "tools")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def packages_under(root: Path) -> set[str]:
    """Dotted names of the folders that hold Python files, below the seven layers."""
    files = (p for layer in LAYERS for p in (root / layer).rglob("*.py"))
    return {"kiln." + ".".join(p.parent.relative_to(root).parts) for p in files} | {"kiln.aot_artifacts"}


def test_the_package_list_equals_the_disk() -> None:
    listed = project()["tool"]["setuptools"]["packages"]
    assert listed == sorted(listed)
    assert set(listed) == packages_under(ROOT)


def test_an_unlisted_package_is_found(tmp_path: Path) -> None:
    for name in ("ir/spec.py", "backends/new/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert packages_under(tmp_path) == {"kiln.ir", "kiln.backends.new", "kiln.aot_artifacts"}


def test_every_listed_package_has_its_folder() -> None:
    setuptools = project()["tool"]["setuptools"]
    assert setuptools["package-dir"] == {f"kiln.{layer}": layer for layer in LAYERS}
    for name in setuptools["packages"]:
        assert (ROOT / Path(*name.split(".")[1:])).is_dir(), name


def test_metadata() -> None:
    meta = project()["project"]
    assert (meta["name"], meta["license"], meta["requires-python"]) == ("kernel-kiln", "Apache-2.0", ">=3.11")
    assert {re.split(r"[<>=]", d)[0] for d in meta["dependencies"]} == {"numpy", "ml_dtypes"}
    assert set(meta["optional-dependencies"]) == {"compiler", "cuda", "dev", "sign", "torch"}
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")


def lock() -> dict[str, str]:
    """Name -> version of every locked distribution."""
    text = (ROOT / "requirements.lock").read_text("utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==([^ \\]+)", text, re.MULTILINE))


def test_the_lock_pins_what_the_extras_pin() -> None:
    extras, locked = project()["project"]["optional-dependencies"], lock()
    pins = [p.split("==") for extra in ("compiler", "dev") for p in extras[extra] if "==" in p]
    assert pins
    assert {n: v for n, v in pins} == {n: locked.get(n.replace("_", "-")) for n, _ in pins}
    assert "torch" not in locked


def test_the_lock_hashes_everything_and_names_no_host() -> None:
    text = (ROOT / "requirements.lock").read_text("utf-8")
    entries = re.split(r"\n(?=[a-z])", text)
    assert [e.split("\n")[0] for e in entries if "--hash=sha256:" not in e] == []
    assert "://" not in text


def copy_tree(target: Path) -> Path:
    """The sources a wheel is built from, without artifacts, plus one tiny artifact tree."""
    for layer in LAYERS:
        if layer != "aot_artifacts":
            shutil.copytree(ROOT / layer, target / layer, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    tree = target / "aot_artifacts" / "sm_00"
    tree.mkdir(parents=True)
    for file in (tree / "MANIFEST.json", tree / "k.cubin", tree / "k.so", tree.parent / "INDEX.json"):
        file.write_text("{}")
    return target


SETUPTOOLS = int(version("setuptools").split(".")[0])


@pytest.mark.slow
@pytest.mark.skipif(SETUPTOOLS < 77, reason=f"setuptools {SETUPTOOLS} is older than 77; use make env")
def test_the_wheel_holds_code_and_data_and_no_tests(tmp_path: Path) -> None:
    source = copy_tree(tmp_path / "source")
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == "kernel_kiln-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read("kernel_kiln-0.1.0.dist-info/entry_points.txt").decode()
    kept = {"*.py", "*.j2", "*.h", "*.c", "*.cpp", "*.cmake", "*.in", "CMakeLists.txt", "*.abi3.so"}
    code_files = {p for pattern in kept for layer in LAYERS[1:] for p in (source / layer).rglob(pattern)}
    expected = {f"kiln/{p.relative_to(source).as_posix()}" for p in code_files}
    artifacts = ("INDEX.json", "sm_00/MANIFEST.json", "sm_00/k.cubin", "sm_00/k.so")
    assert expected | {f"kiln/aot_artifacts/{n}" for n in artifacts} <= names
    assert not [n for n in names if "tests" in n.split("/")]
    assert "kiln = kiln.tools.cli:main" in entry_points


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["env", "build", "native", "test", "lint", "check", "clean", "lock"])
def test_make_knows_its_targets(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_without_a_python_says_so(tmp_path: Path) -> None:
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = ["make", "env", "PYTHON="]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no Python >= 3.11 on PATH" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_ci_script_parses() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
