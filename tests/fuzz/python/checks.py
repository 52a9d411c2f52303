"""What a harness asks of the Python loaders: each check takes any bytes and returns whether they were
accepted; anything but success or a KilnError with a message is a finding and leaves the check."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kiln.runtime import strictjson
from kiln.runtime.arrays import described
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.cuda_memory import DeviceArray
from kiln.runtime.device import Device, PretendDevice
from kiln.runtime.entities import Kernel, Scalar, Signature, Tensor
from kiln.runtime.errors import IntegrityError, KilnError, SchemaError
from kiln.runtime.expr import Env, compile_expr
from kiln.runtime.load import Library, load
from kiln.runtime.manifest import canonical_json, dump, parse_index, parse_manifest
from kiln.runtime.proof import prove_launch, read_artifact
from kiln.runtime.targets import capability
from kiln.tests.runtime.fake_driver import FakeDriver

SIZE, DIGEST = b"7654321", b"5" * 64
"""What stands for the size and the SHA-256 of the artifact in the manifest of a tree's seed."""
CUBIN, OBJECT = "k.cubin", "k.so"
"""The one artifact of a tree's seed."""


def refused(kind: type[KilnError], run: Callable[[], Any]) -> bool:
    """Whether `run` refuses with an error of this kind, which says something."""
    try:
        run()
    except kind as e:
        said = str(e)
    else:
        return False
    assert said, "an error without a message"
    return True


def json_text(data: bytes) -> bool:
    """Strict JSON; what is accepted has one canonical form."""
    if refused(SchemaError, lambda: strictjson.parse(data, "X.json")):
        return False
    value = strictjson.parse(data, "X.json")
    again = canonical_json(value)
    assert canonical_json(strictjson.parse(again, "X.json", 1 << 30)) == again
    return True


def document(data: bytes) -> bool:
    """A manifest and an index; what is accepted is written as it was read."""
    accepted = not refused(SchemaError, lambda: parse_index(data))
    if refused(SchemaError, lambda: parse_manifest(data)):
        return accepted
    found = parse_manifest(data)
    assert parse_manifest(canonical_json(dump(found))) == found
    return True


_ENTRY = {
    "op": "op",
    "variant": "v",
    "tier": "generated",
    "mode": "exact",
    "file": "f",
    "bytes": 1,
    "sha256": "",
    "inputs_digest": "",
    "toolchain": {},
    "params": (),
    "grid": (1, 1, 1),
    "block": (128, 1, 1),
    "cluster": (1, 1, 1),
    "shared_bytes": 0,
    "launch": {},
    "scratch": (),
    "when": True,
    "priority": 0,
    "isa": None,
    "resources": {"registers": 8},
    "budget": {"registers": 8, "code_bytes": 1},
    "numerics": None,
    "specialization": {},
}


def _proved(target: str, entry: str, data: bytes) -> bool:
    kernel = Kernel(entry=entry, **_ENTRY)  # type: ignore[arg-type]
    faults = prove_launch(kernel, target, data)
    assert all(f for f in faults)
    return not refused(IntegrityError, lambda: read_artifact(target, data))


def cubin(data: bytes) -> bool:
    """A cubin, read and held against a kernel that some seeds have."""
    return _proved("sm_90a", "scaled_sum", data)


def shared_object(data: bytes) -> bool:
    """A shared object, read and held against a kernel that some seeds have."""
    return _proved("cpu-x86_64", "doubled", data)


def descriptors() -> int:
    """The lowest number that is free."""
    free = os.open("/", os.O_RDONLY)
    os.close(free)
    return free


class Trees:
    """A folder that holds one tree after the other."""

    def __init__(self) -> None:
        memory = "/dev/shm"
        self.root = Path(tempfile.mkdtemp(prefix="kiln-fuzz-", dir=memory if os.path.isdir(memory) else None))
        self._held: dict[str, bytes] = {}
        self._opened = descriptors()

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.root)

    def write(self, target: str, manifest: bytes, artifact: bytes) -> None:
        """A tree whose index is right about the manifest."""
        folder = self.root / target
        folder.mkdir(exist_ok=True)
        (folder / "MANIFEST.json").write_bytes(manifest)
        if self._held.get(target) != artifact:
            self._held[target] = artifact
            for name in (CUBIN, OBJECT):
                (folder / name).write_bytes(artifact)
        digest = hashlib.sha256(manifest).hexdigest()
        entry = {"manifest": f"{target}/MANIFEST.json", "bytes": max(len(manifest), 1), "sha256": digest}
        index = {"schema": 1, "generation": 1, "targets": {target: entry}}
        (self.root / "INDEX.json").write_bytes(canonical_json(index))

    def check(self, data: bytes) -> bool:
        """A tree: a manifest, a zero byte and its artifact. It is loaded and prepared, and every op is
        explained and called, on a recording driver or on a pretended CPU."""
        text, _, artifact = data.partition(b"\0")
        digest = hashlib.sha256(artifact).hexdigest().encode()
        manifest = text.replace(SIZE, b"%d" % len(artifact)).replace(DIGEST, digest)
        told = re.search(rb'"target": *"(sm_(?:80|90a|120a)|cpu-x86_64)"', manifest)
        target = told[1].decode() if told else "sm_90a"
        self.write(target, manifest, artifact)
        driver = FakeDriver(capability(target)[:2] if target.startswith("sm_") else (9, 0))
        accepted = not refused(KilnError, lambda: self._use(target, driver))
        assert descriptors() == self._opened, "a descriptor is left open"
        check_clean(driver)
        return accepted

    def _use(self, target: str, driver: FakeDriver) -> None:
        on_cpu = target.startswith("cpu-")
        device: Device = PretendDevice(target) if on_cpu else CudaDevice(0, driver)
        with load(self.root, device) as library:
            for name in library.ops:
                call_every_way(library, name, None if on_cpu else device)
            library.prepare()


def check_clean(driver: FakeDriver) -> None:
    """Nothing of a closed library is left in the driver."""
    assert driver.allocated == {}, "memory is left"
    assert driver.stack == [0], "a context is left current"
    names = driver.names()
    for made, gone in (("cuModuleLoadData", "cuModuleUnload"),
                       ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease")):  # fmt: skip
        assert names.count(made) == names.count(gone), f"{made} without {gone}"


_EXTENTS: tuple[dict[str, int], ...] = ({}, {"M": 3, "N": 64, "K": 2, "V": 5}, {"M": 0, "N": 1})


def call_every_way(library: Library, name: str, device: Any) -> None:
    """Explain, reserve and call an op with operands of several sizes."""
    operation = library.op(name)
    for extents in _EXTENTS:
        try:
            named = operands(operation.sig, extents, device)
        except KilnError:
            continue
        refused(KilnError, lambda n=named: operation.explain(**n))  # type: ignore[misc]
        if device is not None:
            refused(KilnError, lambda n=named: operation.reserve(**n))  # type: ignore[misc]
            refused(KilnError, lambda n=named: operation(**n))  # type: ignore[misc]


def operands(sig: Signature, extents: dict[str, int], device: Any) -> dict[str, Any]:
    """An argument for every operand that is not an output."""
    env = Env()
    env.dims = {**dict.fromkeys(sig.names["dim"], 64), **extents}
    env.attrs = {a.name: a.default for a in sig.attrs}
    env.args = {o.name: _number(o) for o in sig.scalars}
    found: dict[str, Any] = dict(env.args)
    for t in sig.tensors:
        if t.role != "out" and t.name not in ("out", "stream"):
            found[t.name] = _array(t, env, device)
    return found


def _number(o: Scalar) -> int | float:
    value = o.default if o.default is not None else max(o.minimum or 0, 1)
    return float(value) if o.dtype in ("f32", "f64") else int(value)


def _array(t: Tensor, env: Env, device: Any) -> Any:
    extents = (compile_expr(e)(env) for e in t.shape)
    shape = tuple(min(max(n, 0), 1 << 20) if type(n) is int else 1 for n in extents)
    dtype = t.dtype if isinstance(t.dtype, str) else t.dtype.choices[0]
    return described(shape, dtype) if device is None else DeviceArray(device, shape, dtype, 0)


CHECKS: dict[str, Callable[[bytes], bool]] = {
    "json": json_text,
    "manifest": document,
    "cubin": cubin,
    "object": shared_object,
}
"""Every harness but `tree`, which needs a folder."""
