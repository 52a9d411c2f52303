"""Bad inputs that no other test brings: digests of nothing, trees that change while they are read."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.arrays import described
from kiln.runtime.cubin import read_cubin
from kiln.runtime.elf import read_elf
from kiln.runtime.errors import ContractError, IntegrityError, SchemaError
from kiln.runtime.manifest import parse_kernel
from kiln.runtime.proof import prove_launch
from kiln.tests.cubins import compiled
from kiln.tests.runtime.test_cubin import patched
from kiln.tests.runtime.trees import cpu_manifest, write_tree
from kiln.tests.trees import cuda_kernel

X = np.ones((2, 3), np.float32)
NOTHING = hashlib.sha256(b"").hexdigest()


def load_and_run(root: Path) -> None:
    with kiln.load(root) as lib:
        assert np.array_equal(lib.negate(X), -X)


@pytest.mark.parametrize(("size", "error"), [(0, SchemaError), (1, IntegrityError)])
def test_the_digest_of_nothing(tmp_path: Path, ops_so: bytes, size: int, error: type[Exception]) -> None:
    document = cpu_manifest(ops_so)
    for entry in document["kernels"]:
        entry.update(bytes=size, sha256=NOTHING)
    root = write_tree(tmp_path / "t", {"cpu-x86_64": document}, {"ops.so": b""})
    with pytest.raises(error):
        load_and_run(root)


@contextmanager
def changing(change: Callable[[int], None]) -> Iterator[None]:
    """While inside, another thread makes one change after the other."""
    stop = threading.Event()

    def work() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            change(turn)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("name", ["INDEX.json", "cpu-x86_64/MANIFEST.json", "cpu-x86_64/ops.so"])
@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_files_that_change_while_they_are_read(tree: Path, name: str, how: str) -> None:
    """Each time either the whole tree as it was, or a refusal: never other bytes, never a signal."""
    path, spare = tree / name, tree.parent / "spare"
    good = path.read_bytes()
    ran, refused = 0, 0

    def change(turn: int) -> None:
        if how == "cut" and turn % 2:
            os.truncate(path, len(good) // 2)
        elif how == "cut":
            with path.open("r+b") as file:
                file.write(good)
        else:
            spare.write_bytes(bytes([*good[:-1], good[-1] ^ 1]) if turn % 2 else good)
            os.replace(spare, path)
        time.sleep(0.001)

    digest = f"sha256:{hashlib.sha256((tree / 'INDEX.json').read_bytes()).hexdigest()}"
    with changing(change):
        while ran + refused < 2000 and not (ran > 3 and refused > 3):
            try:
                with kiln.load(tree, expect=digest) as lib:
                    assert np.array_equal(lib.negate(X), -X)
                ran += 1
            except IntegrityError:
                refused += 1
    assert ran + refused < 2000, (ran, refused)
    path.write_bytes(good)
    load_and_run(tree)


def without_kernel() -> bytes:
    """A cubin whose function is no entry any more."""
    data = compiled()["scaled_sum", "sm_90a"].data
    elf = read_elf(data)
    table = elf.find(".symtab")
    assert table is not None
    at = next(i for i, s in enumerate(elf.symbols(table)) if s.other & 0x10)
    return patched(data, "<B", table.offset + 24 * at + 5, 0)


def test_a_cubin_without_a_kernel() -> None:
    assert read_cubin(without_kernel()).kernels == {}
    entry = parse_kernel(cuda_kernel(compiled()["scaled_sum", "sm_90a"]))
    assert "which holds []" in prove_launch(entry, "sm_90a", without_kernel())[0]


@pytest.mark.parametrize("shape", [(1 << 40, 1 << 40), (1 << 62, 4), ((1 << 63) - 1, (1 << 63) - 1)])
def test_extents_whose_product_is_beyond_64_bits(tree: Path, shape: tuple[int, int]) -> None:
    with kiln.load(tree) as lib:
        for ask in (lib.negate.explain, lib.negate.shapes, lib.negate.reserve):
            with pytest.raises(ContractError, match="would have shape"):
                ask(described(shape, "f32"))
