"""inputs_digest: what it depends on, what it does not; and which files a module stands for."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kiln.compiler.digest import (
    core_sources,
    file_hash,
    files_json,
    inputs_digest,
    module_closure,
    package_version,
)

Write = Callable[..., None]


def forget() -> None:
    """As in a fresh process: what files held before is read again."""
    file_hash.cache_clear()
    files_json.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write modules of a package `digested` (or beside it), and forget what was read before."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [m for m in sys.modules if m.partition(".")[0] == "digested"]:
        monkeypatch.delitem(sys.modules, name)

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "digested").mkdir(exist_ok=True)
        if not (tmp_path / "digested" / "__init__.py").exists():
            (tmp_path / "digested" / "__init__.py").write_text("")
        importlib.invalidate_caches()
        forget()
        module_closure.cache_clear()

    return write


def _closure(name: str) -> list[str]:
    return [p.name for p in module_closure(name)]


def test_modules_of_the_package_are_followed(package: Write) -> None:
    package(
        digested__kernels="import triton\nfrom digested.helpers import f\n",
        digested__helpers="import digested.deep.leaf\nimport json\n",
        digested__deep____init__="",
        digested__deep__leaf="",
        digested__other="",
    )
    assert _closure("digested.kernels") == ["leaf.py", "helpers.py", "kernels.py"]


def test_no_module_is_imported(package: Write) -> None:
    package(
        digested__kernels="from digested.helpers import f\nfrom strange.ones import g\n",
        digested__helpers="from digested.deep import leaf\nimport digested.broken\n",
        digested__deep__leaf="",
        digested__broken="1 / 0",
        strange__ones="",
    )
    assert _closure("digested.kernels") == ["broken.py", "leaf.py", "helpers.py", "kernels.py"]
    found = {m for m in sys.modules if m.partition(".")[0] in ("digested", "strange")}
    assert found == {"digested", "digested.deep"}  # packages


PLANNED = """
import sys
from kiln.compiler.catalog import OWN, load_catalogs
from kiln.compiler.pipeline import plan_targets
from kiln.tools.backends import all_backends
plans = plan_targets([OWN], load_catalogs((OWN,)), ["sm_90a", "cpu-x86_64"], all_backends(), None)
loaded = {name.partition(".")[0] for name in sys.modules}
print([len(p.jobs) > 20 for p in plans], loaded & {"triton", "mlir", "networkx"})
"""


def test_planning_imports_no_compiler() -> None:
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    done = subprocess.run(
        [sys.executable, "-c", PLANNED], env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("[True, True] set()\n", "")


def test_what_is_taken_from_the_package_itself_counts(package: Write, tmp_path: Path) -> None:
    package(digested__kernels="from digested import SIZE\n", digested__other="")
    (tmp_path / "digested" / "__init__.py").write_text("SIZE = 3\n")
    assert _closure("digested.kernels") == ["__init__.py", "kernels.py"]
    package(digested__kernels="from digested import other\n")
    assert _closure("digested.kernels") == ["kernels.py", "other.py"]


@pytest.mark.parametrize(
    "line", ["from . import helpers", "from .helpers import f", "def g():\n    from digested import helpers"]
)
def test_every_way_to_import_is_seen(package: Write, line: str) -> None:
    package(digested__kernels=line, digested__helpers="")
    assert _closure("digested.kernels") == ["helpers.py", "kernels.py"]


def test_a_file_beside_a_lone_module_is_followed(package: Write) -> None:
    package(digested_alone="import digested_beside\nimport json\n", digested_beside="")
    assert _closure("digested_alone") == ["digested_alone.py", "digested_beside.py"]


def test_a_cycle_ends(package: Write) -> None:
    package(digested__a="import digested.b", digested__b="import digested.a")
    assert _closure("digested.a") == ["a.py", "b.py"]


def test_nothing_is_imported(package: Write) -> None:
    package(digested__kernels="raise RuntimeError\n")
    assert _closure("digested.kernels") == ["kernels.py"]


def test_families_stand_for_what_they_use() -> None:
    assert _closure("kiln.recipes.norm") == ["activation.py", "norm.py"]
    assert {"norm.py", "quant.py", "fusion.py"} <= set(_closure("kiln.recipes.fusion"))
    assert "norm.py" not in _closure("kiln.recipes.quant")
    assert _closure("kiln.backends.cuda.kernels.topk") == ["topk.py"]


def test_the_core_is_the_ir_and_the_passes() -> None:
    names = {p.name for p in core_sources()}
    assert {"language.py", "functions.py", "lower.py", "rowprogram.py", "expand.py", "rows.py"} <= names
    assert "pipeline.py" not in names


PAYLOAD = {"op": "rms_norm", "width": 4096}
TOOLS = {"triton": "3.9.0"}


def test_the_digest_covers_sources_data_and_tools(tmp_path: Path) -> None:
    source = tmp_path / "a" / "k.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    first = inputs_digest([source], PAYLOAD, TOOLS)
    assert len(first) == 64
    assert inputs_digest([source], {**PAYLOAD, "width": 5120}, TOOLS) != first
    assert inputs_digest([source], PAYLOAD, {"triton": "3.10.0"}) != first
    source.write_text("x = 2\n")
    forget()
    assert inputs_digest([source], PAYLOAD, TOOLS) != first


def test_the_digest_does_not_depend_on_the_folder_or_the_order(tmp_path: Path) -> None:
    digests = set()
    for place in ("one", "two/deeper"):
        folder = tmp_path / place / "kernels"
        folder.mkdir(parents=True)
        for name in ("a.py", "b.py"):
            (folder / name).write_text(name)
        files = [folder / "a.py", folder / "b.py"]
        for order in (files, files[::-1], files * 2):
            digests.add(inputs_digest(order, {"b": 1, "a": [2]}, TOOLS))
            digests.add(inputs_digest(order, {"a": [2], "b": 1}, TOOLS))
    assert len(digests) == 1


def test_versions_of_packages() -> None:
    assert package_version("numpy").startswith("2.")
    assert package_version("no-such-distribution") == "absent"
