"""The harnesses' checks of the Python loaders without atheris: every seed, and some hundred seeded mutations
of each. What C and Python say of the same bytes is compared in c/test_mutations.py."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kiln.runtime import cuda_memory, files, strictjson
from kiln.tests.fuzz.mutations import cut_up, overwritten
from kiln.tests.fuzz.python import seeds
from kiln.tests.fuzz.python.checks import CHECKS, Trees

RUNS = {"json": 3000, "manifest": 300, "cubin": 250, "object": 250, "tree": 700}


@pytest.fixture
def trees() -> Iterator[Trees]:
    """A folder for one tree after the other."""
    made = Trees()
    yield made
    made.close()


def mutated(name: str, data: bytes, rng: random.Random) -> bytes:
    """A change that knows the form of the bytes."""
    text, zero, artifact = data.partition(b"\0")
    if name == "tree" and rng.random() < 0.7:
        return cut_up(text, rng) + zero + artifact
    if name == "tree":
        return text + zero + overwritten(artifact, rng)
    return (overwritten if name in ("cubin", "object") and len(data) > 64 else cut_up)(data, rng)


@pytest.mark.parametrize("name", seeds.CORPORA)
def test_nothing_but_typed_errors_comes_out(name: str, trees: Trees) -> None:
    check = trees.check if name == "tree" else CHECKS[name]
    corpus = [data for data in seeds.CORPORA[name]() if len(data) < 16384]
    rng, slowest = random.Random(name), 0.0
    accepted = sum(map(check, corpus))
    assert 0 < accepted
    refused = 0
    for _ in range(RUNS[name]):
        data = mutated(name, rng.choice(corpus), rng)
        began = time.process_time()
        refused += not check(data)
        slowest = max(slowest, time.process_time() - began)
    assert RUNS[name] / 10 < refused < RUNS[name]
    assert slowest < 1


def test_the_seeds_of_trees_are_called(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a harness would try nothing beyond the schema."""
    ran: set[str] = set()
    monkeypatch.setattr(
        "kiln.tests.fuzz.python.checks.check_clean",
        lambda driver: ran.update(f["function"][1].decode() for f in driver.launches),
    )
    assert [trees.check(data) for data in seeds.trees()].count(True) >= 5
    assert ran == {"doubled"}


def raising(error: Exception) -> Callable[..., object]:
    def run(*args: object, **named: object) -> object:
        raise error

    return run


@pytest.mark.parametrize("name", seeds.CORPORA)
def test_an_untyped_error_is_a_finding(name: str, trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    data = next(iter(seeds.CORPORA[name]()))
    broken = {"cubin": "read_artifact", "object": "read_artifact"}.get(name)
    if broken:
        monkeypatch.setattr(f"kiln.tests.fuzz.python.checks.{broken}", raising(KeyError("x")))
    monkeypatch.setattr(strictjson, "_decode", raising(KeyError("x")))
    with pytest.raises(KeyError):
        (trees.check if name == "tree" else CHECKS[name])(data)


def test_a_leak_is_a_finding(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    data = next(seeds.trees())
    with monkeypatch.context() as patch:
        patch.setattr(files.Folder, "close", lambda self: None)
        with pytest.raises(AssertionError, match="descriptor is left open"):
            trees.check(data)
    monkeypatch.setattr(cuda_memory.CudaMemory, "free_ordered", lambda *_: None)
    with pytest.raises(AssertionError, match=r"memory is left|descriptor"):
        trees.check(data)


def test_the_corpora_are_written(tmp_path: Path) -> None:
    seeds.write(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == set(RUNS)
    assert all(len(list(p.iterdir())) > 3 for p in tmp_path.iterdir())
