"""Writes the corpora of the harnesses: `python -m kiln.tests.fuzz.python.seeds FOLDER` makes FOLDER/json and
so on. All but the trees are those of libkiln's harnesses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kiln.tests.cubins import compiled
from kiln.tests.fuzz.c.seeds import compact, cubins, documents, json_texts, objects
from kiln.tests.fuzz.python.checks import CUBIN, DIGEST, OBJECT, SIZE
from kiln.tests.runtime.c.documents import rich
from kiln.tests.runtime.test_manifest import small
from kiln.tests.trees import Json, cpu_kernel, cuda_kernel, manifest, signature


def tree(document: Json, artifact: bytes, file: str) -> bytes:
    """One input of the harness `tree`."""
    for kernel in document["kernels"]:
        kernel.update(file=file, bytes=int(SIZE), sha256=DIGEST.decode())
    return compact(document) + b"\0" + artifact


def planned(target: str) -> tuple[Json, bytes]:
    """A manifest with a plan of two steps, and the cubin of both."""
    made = compiled()["doubled", target]
    document = manifest(target, [cuda_kernel(made)])
    mn = [["dim", "M"], ["dim", "N"]]
    step: Json = {"op": "doubled", "args": {"s": ["arg", "s"]}, "attrs": {}}
    plan = {
        "op": "fourfold",
        "variant": "composite",
        "tier": "composite",
        "mode": "exact",
        "when": ["ge", ["dim", "M"], 0],
        "priority": 0,
        "temps": [
            {"name": "t", "dtype": {"like": "x"}, "shape": mn},
            {"name": "u", "dtype": {"like": "temp:t"}, "shape": [["mul", ["dim", "N"], 2]]},
        ],
        "steps": [
            {**step, "bind": {"x": "x", "y": "temp:t"}},
            {**step, "bind": {"x": "temp:t", "y": "y"}},
        ],
    }
    ops = {**document["ops"], "fourfold": {**signature(), "kind": "recipe"}}
    return {**document, "ops": ops, "recipes": [plan]}, made.data


def trees() -> Iterator[bytes]:
    """Sound ones of several targets, and documents with every kind of field."""
    for name, target in (("doubled", "sm_80"), ("scaled_sum", "sm_90a"), ("doubled", "sm_120a")):
        made = compiled()[name, target]
        yield tree(manifest(target, [cuda_kernel(made)]), made.data, CUBIN)
    yield tree(*planned("sm_90a"), CUBIN)
    entry, data = cpu_kernel("doubled")
    yield tree(manifest("cpu-x86_64", [entry]), data, OBJECT)
    yield tree(small(), data, OBJECT)
    for document in (small(), rich()):
        on_cuda = {
            **document,
            "target": "sm_90a",
            "kernels": [{**k, "isa": None} for k in document["kernels"]],
        }
        yield tree(on_cuda, compiled()["doubled", "sm_90a"].data, CUBIN)


CORPORA: dict[str, Callable[[], Iterable[bytes]]] = {
    "json": json_texts,
    "manifest": documents,
    "cubin": cubins,
    "object": objects,
    "tree": trees,
}


def write(folder: Path) -> None:
    """One folder for each harness."""
    for name, make in CORPORA.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, data in enumerate(make()):
            (folder / name / f"{i:03}").write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
