"""Opening trees, good and bad: each bad one is a typed error, nothing of it is loaded, nothing hangs."""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.errors import IntegrityError, KilnError, SchemaError, TargetError, UnavailableError
from kiln.runtime.files import Folder
from kiln.runtime.manifest import Kernel, canonical_json
from kiln.tests.runtime.trees import (
    PARAMS,
    SOURCE,
    compile_c,
    cpu_manifest,
    kernel,
    manifest,
    write_tree,
)

X = np.ones((2, 3), np.float32)


def run(tree: Path) -> None:
    """Open a tree and run one kernel of it."""
    with kiln.load(tree) as lib:
        assert np.array_equal(lib.negate(X), -X)


def test_good_tree(tree: Path) -> None:
    run(tree)
    with kiln.load(tree) as lib:
        assert list(lib.ops) == ["accumulate", "gather", "negate", "scale_add", "scale_negate"]
        assert not lib.loaded
        assert lib.prepare(["scale_negate"]) == 2
        assert lib.loaded == ("negate.base", "scale_add.base")
        assert lib.generation == 1


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path.name)
    finally:
        os.chdir(here)


def _link(path: Path) -> None:
    outside = path.parent.parent.parent / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    os.truncate(path, 5 << 30)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "missing"),
    "empty": (lambda p: p.write_bytes(b""), "found 0 bytes|not JSON"),
    "folder": (_folder, "not a regular file"),
    "fifo": (_fifo, "not a regular file"),
    "socket": (_socket, "socket|No such device|expected a regular file"),
    "link to outside": (_link, "symbolic link"),
    "dangling link": (_dangling, "symbolic link"),
    "link loop": (_loop, "symbolic link"),
    "link to a device": (_device, "symbolic link"),
    "5 GiB": (_sparse, "at most"),
}


@pytest.mark.parametrize("name", ["INDEX.json", "cpu-x86_64/MANIFEST.json", "cpu-x86_64/ops.so"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_file_of_another_kind_is_refused(tree: Path, name: str, damage: str) -> None:
    change, why = DAMAGE[damage]
    change(tree / name)
    with pytest.raises(IntegrityError, match=why) as e:
        run(tree)
    assert Path(name).name in str(e.value)


def test_folder_of_a_target_may_be_no_link(tree: Path) -> None:
    real = tree / "cpu-x86_64"
    shutil.move(real, tree.parent / "elsewhere")
    real.symlink_to(tree.parent / "elsewhere")
    with pytest.raises(IntegrityError, match="folder"):
        run(tree)
    real.unlink()
    real.write_bytes(b"")
    with pytest.raises(IntegrityError, match="folder"):
        run(tree)
    real.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        run(tree)


def test_root_may_be_a_link(tree: Path) -> None:
    link = tree.parent / "link"
    link.symlink_to(tree)
    run(link)


@pytest.mark.parametrize("root", ["absent", "file", "", "a\0b", "x" * 5000], ids=ascii)
def test_root_that_is_no_folder(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnavailableError, match="expected the folder of a built tree"):
        kiln.load(f"{tmp_path}/{root}" if root else "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IntegrityError, match=r"INDEX\.json: missing"):
        kiln.load(tmp_path / "empty")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_unreadable_tree(tree: Path) -> None:
    for folder in (tree.parent.parent.parent, tree.parent.parent, tree.parent, tree, tree / "cpu-x86_64"):
        os.chmod(folder, 0o755)
    os.chmod(tree / "cpu-x86_64" / "MANIFEST.json", 0)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Root reads everything: only another user can be refused.
        try:
            os.setuid(65534)
            kiln.load(tree)
            os.write(write, b"loaded")
        except IntegrityError as e:
            os.write(write, str(e).encode())
        except BaseException as e:
            os.write(write, repr(e).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"not readable" in os.read(read, 4096)


def test_every_length_of_an_index_and_every_flipped_byte(tree: Path) -> None:
    path = tree / "INDEX.json"
    data = path.read_bytes()
    expect = "sha256:" + hashlib.sha256(data).hexdigest()
    for n in range(len(data) - 1):
        path.write_bytes(data[:n])
        with pytest.raises(KilnError):
            kiln.load(tree)
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with pytest.raises(KilnError):
            kiln.load(tree, expect=expect)
    path.write_bytes(data)
    kiln.load(tree, expect=expect).close()


@pytest.mark.parametrize("code", [0, 1, -3])
def test_an_object_whose_check_of_its_arithmetic_fails_is_refused(tmp_path: Path, code: int) -> None:
    data = compile_c(tmp_path, f"{SOURCE}\ni64 kiln_check(void) {{ return {code}; }}\n")
    root = write_tree(tmp_path / "tree", {"cpu-x86_64": cpu_manifest(data)}, {"ops.so": data})
    with kiln.load(root) as lib:
        if code == 0:
            assert np.array_equal(lib.negate(X), -X)
            return
        why = rf"ops.so: its arithmetic is not what it was built for \(check {code} fails\); rebuild the tree"
        with pytest.raises(IntegrityError, match=why):
            lib.negate(X)


@pytest.mark.parametrize("name", ["MANIFEST.json", "ops.so"])
def test_changed_bytes_are_refused(tree: Path, name: str) -> None:
    path = tree / "cpu-x86_64" / name
    data = path.read_bytes()
    for changed, why in (
        (data[:-1], "bytes[,;] expected"),
        (data + b"\n", "at most"),
        (data[:40] + bytes([data[40] ^ 1]) + data[41:], "sha256"),
        (b"\0" * len(data), "sha256"),
    ):
        path.write_bytes(changed)
        with pytest.raises(IntegrityError, match=why):
            run(tree)
    path.write_bytes(data)
    run(tree)


def test_swapped_files(tree: Path, ops_so: bytes) -> None:
    document = cpu_manifest(ops_so)
    other = ops_so[:-1] + bytes([ops_so[-1] ^ 1])
    document["sources"] = {"other.so": {"bytes": len(other), "sha256": hashlib.sha256(other).hexdigest()}}
    write_tree(tree, {"cpu-x86_64": document}, {"ops.so": other, "other.so": ops_so})
    with pytest.raises(IntegrityError, match="sha256"):
        run(tree)


def test_swapped_files_with_their_hashes(tree: Path) -> None:
    garbage = b"\x7fELF but not one"
    entries = [kernel("negate", "base", PARAMS["negate"], garbage, resources={})]
    write_tree(tree, {"cpu-x86_64": manifest(entries, recipes=[])}, {"ops.so": garbage})
    with pytest.raises(IntegrityError, match=r"is not what negate\.base promises"):
        run(tree)


def test_unlisted_file_is_ignored(tree: Path) -> None:
    (tree / "cpu-x86_64" / "evil.so").write_bytes(b"x")
    (tree / ".staging-123").mkdir()
    run(tree)


def test_manifest_of_another_target(tmp_path: Path, ops_so: bytes) -> None:
    tree = write_tree(tmp_path / "t", {"cpu-x86_64": manifest([], target="cpu-aarch64")}, {"ops.so": ops_so})
    with pytest.raises(SchemaError, match="kernels"):
        kiln.load(tree)
    document = cpu_manifest(ops_so)
    document["target"] = "cpu-aarch64"
    tree = write_tree(tmp_path / "u", {"cpu-x86_64": document}, {"ops.so": ops_so})
    with pytest.raises(SchemaError, match="expected cpu-x86_64"):
        kiln.load(tree)


def test_old_manifest_with_a_new_index(tree: Path, ops_so: bytes) -> None:
    document = cpu_manifest(ops_so)
    document["toolchain"] = {"ziglang": "0.0.1"}
    (tree / "cpu-x86_64" / "MANIFEST.json").write_bytes(canonical_json(document))
    with pytest.raises(IntegrityError):
        kiln.load(tree)


def test_pins(tree: Path) -> None:
    digest = hashlib.sha256((tree / "INDEX.json").read_bytes()).hexdigest()
    kiln.load(tree, expect=f"sha256:{digest}", minimum_generation=1).close()
    with pytest.raises(IntegrityError, match="rolled back"):
        kiln.load(tree, minimum_generation=2)
    with pytest.raises(IntegrityError, match="expected " + "0" * 64):
        kiln.load(tree, expect="sha256:" + "0" * 64)
    for wrong in ("", digest, "md5:" + "0" * 32, "sha256:12"):
        with pytest.raises(kiln.ContractError, match="expected sha256"):
            kiln.load(tree, expect=wrong)


def test_device_names(tree: Path) -> None:
    for wrong in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", ""):
        with pytest.raises(kiln.ContractError, match="expected cpu"):
            kiln.load(tree, device=wrong)
    with pytest.raises(TargetError, match="it holds cpu-x86_64"):
        kiln.load(tree, device="sm_90a")


def test_artifact_replaced_between_check_and_load(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Folder.read_exact
    path = tree / "cpu-x86_64" / "ops.so"

    def replacing(self: Folder, name: str, size: int, sha256: str) -> bytes:
        data = original(self, name, size, sha256)
        if name == "ops.so":
            path.write_bytes(b"replaced")
        return data

    monkeypatch.setattr(Folder, "read_exact", replacing)
    run(tree)


def test_artifact_truncated_while_reading(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tree / "cpu-x86_64" / "ops.so"
    original = os.read
    monkeypatch.setattr(os, "read", lambda fd, n: original(fd, min(n, 100)) if _cut(path) else b"")
    with pytest.raises(IntegrityError):
        run(tree)


def _cut(path: Path) -> bool:
    if path.stat().st_size > 150:
        os.truncate(path, 150)
    return True


def test_32_threads_load_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kiln.load(tree) as lib:
        loads: list[str] = []
        load = lib.device.load

        def counting(kernel: Kernel, data: bytes) -> object:
            loads.append(kernel.variant)
            return load(kernel, data)

        monkeypatch.setattr(lib.device, "load", counting)
        start = threading.Barrier(32)
        results = []

        def work() -> None:
            start.wait()
            results.append(np.array_equal(lib.negate(X), -X))

        threads = [threading.Thread(target=work) for _ in range(32)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert results == [True] * 32
        assert loads == ["base"]


def test_close(tree: Path) -> None:
    lib = kiln.load(tree)
    lib.negate(X)
    lib.close()
    lib.close()
    for call in (lambda: lib.negate(X), lambda: lib.prepare()):
        with pytest.raises(UnavailableError, match="closed"):
            call()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(KilnError):
            kiln.load(tree, minimum_generation=9)
        kiln.load(tree).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_seal(tree: Path) -> None:
    with kiln.load(tree) as lib:
        lib.prepare(["negate"])
        lib.seal()
        lib.negate(X)
        with pytest.raises(UnavailableError, match="sealed"):
            lib.scale_add(X, X)


def test_unknown_op(tree: Path) -> None:
    with kiln.load(tree) as lib:
        with pytest.raises(AttributeError, match="did you mean negate"):
            lib.negatte(X)
        with pytest.raises(kiln.ContractError, match="did you mean negate"):
            lib.explain("negatte", X)
        assert "negate" in dir(lib)


def test_disabled(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_DISABLE", " negate.base , other")
    with kiln.load(tree) as lib:
        with pytest.raises(kiln.SelectionError, match=r"disabled by KILN_DISABLE=negate\.base"):
            lib.negate(X)
        lib.scale_add(X, X)


NO_WRITES = """
import os, sys
before = dict(os.environ)
import numpy as np, kiln.runtime as kiln
lib = kiln.load(sys.argv[1])
x = np.ones((3, 5), np.float32)
if (lib.negate(x) != -x).any() or (lib.scale_negate(x, x) != -3 * x).any() or dict(os.environ) != before:
    raise SystemExit("wrong")
try:
    lib.negate(x, x, x)
except kiln.ContractError:
    print("fine")
"""


@pytest.mark.parametrize("optimize", ["", "-O", "-OO"])
def test_read_only_system_without_home(tree: Path, tmp_path: Path, optimize: str) -> None:
    """No write anywhere: every folder it could write to is on a read-only mount."""
    script = tmp_path / "script.py"
    script.write_text(NO_WRITES, encoding="ascii")
    root = Path(__file__).parents[2]
    command = [sys.executable, *([optimize] if optimize else []), "-B", str(script), str(tree)]
    environment = {"PYTHONPATH": str(root / ".typing"), "PATH": "/nonexistent"}
    isolated = ["unshare", "-m", "sh", "-c", 'mount -o remount,ro,bind / && exec "$@"', "sh", *command]
    isolated[0] = shutil.which("unshare") or ""
    probe = ["unshare", "-m", "sh", "-c", "mount -o remount,ro,bind /"]
    allowed = isolated[0] and subprocess.run(probe, capture_output=True).returncode == 0
    environment["PATH"] = os.defpath if allowed else environment["PATH"]
    done = subprocess.run(
        isolated if allowed else command, env=environment, capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert (done.stdout.strip(), done.stderr) == ("fine", "")
