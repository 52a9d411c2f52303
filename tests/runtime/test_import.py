"""What importing the runtime costs and needs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code: str, *options: str) -> str:
    """Run code in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env={"PYTHONPATH": str(ROOT / ".typing")},
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")
        if top[0] in ("cuda", "mlir", "triton", "torch", "ziglang", "jinja2", "networkx", "rich",
        "ml_dtypes"):
            raise ImportError(name)
        if top[0] == "kiln" and len(top) > 1 and top[1] not in ("runtime", "aot_artifacts"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import kiln.runtime
import pkgutil, importlib
found = []
for m in pkgutil.iter_modules(kiln.runtime.__path__):
    try:
        importlib.import_module("kiln.runtime." + m.name)
    except ImportError as e:
        found.append((m.name, str(e)))
print(found)
"""


@pytest.mark.parametrize("options", [(), ("-O",), ("-OO",), ("-I", "-X", "dev")])
def test_leaf(options: tuple[str, ...]) -> None:
    code = (
        BLOCKED
        if "-I" not in options
        else f"import sys; sys.path.insert(0, {str(ROOT / '.typing')!r})\n" + BLOCKED
    )
    # The one door to a framework needs it; nothing else may.
    assert python(code, *options) == "[('torch', 'torch')]\n"


TIMED = """
from time import process_time
start = process_time()
import numpy
between = process_time()
import kiln.runtime
print((process_time() - between) / (between - start))
"""


def test_import_is_quick() -> None:
    # 0.24 to 0.42 of NumPy's own import (66 of 220 ms), on slow and busy machines too; twice that fails.
    assert min(float(python(TIMED)) for _ in range(5)) < 0.6


def test_the_extension_waits_for_a_library() -> None:
    code = "import sys, kiln.runtime; print([n for n in sys.modules if 'fastcall' in n or 'native' in n])"
    assert python(code) == "[]\n"
    loaded = code.replace("; print", f"; kiln.runtime.load({str(ROOT / 'aot_artifacts')!r}); print")
    assert python(loaded) == "['kiln.runtime.fastcall', 'kiln.runtime.native']\n"


def test_one_environment_variable() -> None:
    sources = [p.read_text(encoding="utf-8") for p in (ROOT / "runtime").glob("*.py")]
    named = [
        name
        for s in sources
        for name in re.findall(r"environ\.get\(\"(.*?)\"|environment\.get\(\"(.*?)\"", s)
    ]
    assert named == [("", "KILN_DISABLE")]
    assert not any(
        word in s for s in sources for word in ("getenv(", "eval(", "exec(", "pickle", "\nassert ")
    )
