"""The Python loader's tests of bad trees, with libkiln in its place."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kiln.runtime.errors import IntegrityError, UnavailableError
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.core_build import Core
from kiln.tests.runtime.c.documents import agrees
from kiln.tests.runtime.c.test_calls import _opened_by_libkiln  # noqa: F401
from kiln.tests.runtime.test_load import (  # noqa: F401
    X,
    test_an_object_whose_check_of_its_arithmetic_fails_is_refused,
    test_changed_bytes_are_refused,
    test_device_names,
    test_every_length_of_an_index_and_every_flipped_byte,
    test_file_of_another_kind_is_refused,
    test_folder_of_a_target_may_be_no_link,
    test_manifest_of_another_target,
    test_old_manifest_with_a_new_index,
    test_pins,
    test_root_may_be_a_link,
    test_swapped_files,
    test_swapped_files_with_their_hashes,
    test_unlisted_file_is_ignored,
    test_unreadable_tree,
)
from kiln.tests.runtime.test_manifest import good, text_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("root", ["absent", "file", "", "x" * 300, "x" * 5000], ids=lambda r: r[:6])
def test_root_that_is_no_folder(c: ctypes.CDLL, tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    # A message has room for 2047 bytes: a longer path has its end cut off.
    why = "x{1000}" if len(root) == 5000 else "expected the folder of a built tree"
    with pytest.raises(UnavailableError, match=why):
        libkiln.Library(c, Path(f"{tmp_path}/{root}") if root else Path("nowhere at all"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(IntegrityError, match=r"INDEX\.json: missing"):
        libkiln.Library(c, tmp_path / "empty")


@pytest.mark.parametrize("name", ["../x", "a/b", "", "{0}", "a b", "x\0"], ids=ascii)
@pytest.mark.parametrize("field", ["op", "variant", "entry"])
def test_hostile_kernel_names_have_the_same_verdict(libkiln_core: Core, field: str, name: str) -> None:
    document = good()
    document["kernels"][0][field] = name
    found = agrees(libkiln_core, text_of(document))
    assert (found.code, found.place) == ("SchemaError", f"/kernels/0/{field}")


def test_32_threads_load_once(c: ctypes.CDLL, tree: Path) -> None:
    start, results = threading.Barrier(32), []
    with libkiln.Library(c, tree) as lib:

        def work() -> None:
            start.wait()
            results.append(np.array_equal(lib.negate(X), -X))

        threads = [threading.Thread(target=work) for _ in range(32)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert results == [True] * 32
        assert lib.stats() == {"negate": {"base": 32}}


READ_ONLY = """
import sys
from pathlib import Path
import numpy as np
from kiln.tests.runtime.c import libkiln
x = np.ones((3, 5), np.float32)
with libkiln.Library(libkiln.opened(Path(sys.argv[2])), Path(sys.argv[1])) as lib:
    fine = (lib.negate(x) == -x).all() and (lib.scale_negate(x, x) == -3 * x).all()
    print("fine" if fine else "wrong")
"""


def test_read_only_system_without_home(built: Path, tree: Path) -> None:
    """No write anywhere: every folder it could write to is on a read-only mount."""
    command = [sys.executable, "-B", "-c", READ_ONLY, str(tree), str(built)]
    mount = ["unshare", "-m", "sh", "-c", "mount -o remount,ro,bind /"]
    if shutil.which("unshare") and subprocess.run(mount, capture_output=True).returncode == 0:
        command = [*mount[:-1], f'{mount[-1]} && exec "$@"', "sh", *command]
    environment = {"PYTHONPATH": str(ROOT / ".typing"), "PATH": os.defpath}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd="/")
    assert (done.stdout.strip(), done.stderr) == ("fine", "")
