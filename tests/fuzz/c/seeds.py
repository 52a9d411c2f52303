"""Writes the corpora of the harnesses: `python -m kiln.tests.fuzz.c.seeds FOLDER` makes FOLDER/json and so
on."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from kiln.runtime.manifest import canonical_json
from kiln.tests.cubins import compiled, shared_object
from kiln.tests.runtime import test_like
from kiln.tests.runtime.c.documents import rich
from kiln.tests.runtime.c.test_json import EDGES, GOOD
from kiln.tests.runtime.c.test_trees import TARS
from kiln.tests.runtime.test_cubin import CONSTRUCTOR, DAMAGE, INDIRECT, held
from kiln.tests.runtime.test_manifest import DAMAGE as CONTRADICTIONS
from kiln.tests.runtime.test_manifest import index, small
from kiln.tests.runtime.test_strictjson import BAD
from kiln.tests.runtime.trees import OPS, Json, kernel, manifest
from kiln.tests.trees import C_SOURCE, cuda_tree


def tiny() -> Json:
    """The least that is a manifest: small documents mutate quickly."""
    return manifest([kernel("negate", "v", [], b"x")], ops={"negate": OPS["negate"]}, recipes=[])


def compact(value: Json) -> bytes:
    """JSON without a space."""
    return json.dumps(value, separators=(",", ":")).encode()


def documents() -> Iterator[bytes]:
    """Good manifests and indices, and the known contradictions."""
    yield from map(compact, (tiny(), small(), rich(), index()))
    yield canonical_json(tiny())
    for change, _ in CONTRADICTIONS.values():
        value = small()
        change(value)
        yield compact(value)
    yield compact(test_like.alike())
    for change, _, _ in test_like.DAMAGE.values():
        kernels = test_like.entries()
        change(kernels)
        yield compact({**test_like.alike(), "kernels": kernels})


def cubins() -> Iterator[bytes]:
    """Real ones of both layouts, and the known damage."""
    real = compiled()["scaled_sum", "sm_90a"].data
    yield from (
        compiled()[key].data
        for key in (("doubled", "sm_80"), ("doubled", "sm_120a"), ("spilling", "sm_100a"))
    )
    yield held("sm_86", tool="ptxas")
    yield from (damage(real) for damage, _ in DAMAGE.values())
    yield real


def objects() -> Iterator[bytes]:
    """Real ones of both machines, with and without code that runs when they are opened."""
    yield from (shared_object(C_SOURCE + extra) for extra in ("", CONSTRUCTOR, INDIRECT))
    yield shared_object(C_SOURCE, "aarch64-linux-gnu.2.17")


def tree_archive(form: int) -> bytes:
    """A whole tree of one target."""
    document, files = cuda_tree("sm_80")
    data = canonical_json(document)
    entry = {
        "manifest": "sm_80/MANIFEST.json",
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    root = canonical_json({"schema": 1, "generation": 1, "targets": {"sm_80": entry}})
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, body in {
            "INDEX.json": root,
            "sm_80/MANIFEST.json": data,
            **{f"sm_80/{n}": b for n, b in files.items()},
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def archives() -> Iterator[bytes]:
    """Whole trees in both forms, and the known bad archives."""
    yield from (tree_archive(form) for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT))
    yield from TARS.values()


def json_texts() -> Iterator[bytes]:
    """Everything that the tests of strict JSON try, but for the very long."""
    yield from (data for data, _ in BAD.values() if len(data) < 2000)
    yield from (text.encode() for text in (*GOOD, *EDGES))
    yield compact(tiny())


CORPORA = {"json": json_texts, "manifest": documents, "cubin": cubins, "object": objects, "tar": archives}


def write(folder: Path) -> None:
    """One folder for each harness."""
    for name, make in CORPORA.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, data in enumerate(make()):
            (folder / name / f"{i:03}").write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
