"""Loading a tree: the index and the manifests of this device are verified now, each artifact when it is
first used."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from kiln.runtime.arguments import nearest
from kiln.runtime.arrays import writable_bytes
from kiln.runtime.bound import BoundCall
from kiln.runtime.cpu import CpuDevice
from kiln.runtime.device import Device, PretendDevice, no_target
from kiln.runtime.entities import Kernel, Manifest, Plan
from kiln.runtime.errors import ContractError, IntegrityError, UnavailableError
from kiln.runtime.files import Folder, check_bytes
from kiln.runtime.manifest import parse_index, parse_manifest
from kiln.runtime.operation import Operation
from kiln.runtime.schema import MAX_INDEX_BYTES
from kiln.runtime.scratch import ScratchPolicy, ScratchPool
from kiln.runtime.select import Explanation

Root = str | os.PathLike[str]


def load(
    root: Root | None = None,
    device: str | Device = "cpu",
    *,
    expect: str | None = None,
    minimum_generation: int = 0,
    threads: int | None = None,
    scratch: ScratchPolicy | None = None,
) -> "Library":
    """Open a tree of artifacts for a device.

    Args:
        root: the folder that holds INDEX.json; the installed kiln.aot_artifacts by default.
        device: "cpu", "cuda", "cuda:1", or a target name such as "sm_90a" to explain calls without that
            device.
        expect: "sha256:<hex>", the digest of INDEX.json that `kiln build` printed; any other tree is refused.
        minimum_generation: refuse a tree that is older than this generation.
        threads: most CPU threads a call may use.
        scratch: how scratch memory is handed out, where `device` is a name.

    Raises:
        UnavailableError: no such tree, or no such device.
        IntegrityError: INDEX.json or a manifest is not what it should be.
        TargetError: the tree holds nothing for the device.
    """
    folder = Folder.open_root(root if root is not None else _installed())
    try:
        index = _read_index(folder, expect, minimum_generation)
        place = _device(device, threads, scratch)
        targets = place.targets(index.targets)
        if not targets:
            raise no_target(place, index.targets)
        manifests = {}
        for target in targets:
            entry = index.targets[target]
            where = f"{folder.path}/{entry.manifest}"
            with folder.folder(target) as inner:
                data = inner.read_exact("MANIFEST.json", entry.bytes, entry.sha256)
            manifests[target] = parse_manifest(data, target, where)
        return Library(folder, place, manifests, index.generation)
    except BaseException:
        folder.close()
        raise


def _installed() -> str:
    spec = find_spec("kiln.aot_artifacts")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise UnavailableError("no artifacts are installed; pass the folder of a built tree as root.")
    return places[0]


def _read_index(folder: Folder, expect: str | None, minimum_generation: int) -> Any:
    where = f"{folder.path}/INDEX.json"
    data = folder.read("INDEX.json", MAX_INDEX_BYTES)
    if expect is not None:
        algorithm, _, digest = expect.partition(":")
        if algorithm != "sha256" or len(digest) != 64:
            raise ContractError(f"found expect={expect!r}, expected sha256: and 64 hex digits.")
        check_bytes(data, len(data), digest.lower(), where)
    index = parse_index(data, where)
    if index.generation < minimum_generation:
        raise IntegrityError(
            f"{where}: generation {index.generation}, expected at least {minimum_generation}; the "
            "tree was rolled back."
        )
    return index


def _device(device: str | Device, threads: int | None, scratch: ScratchPolicy | None) -> Device:
    if not isinstance(device, str):
        return device
    kind, _, ordinal = device.partition(":")
    if device == "cpu":
        return CpuDevice(threads, scratch=scratch)
    if kind == "cuda" and ((ordinal.isascii() and ordinal.isdigit()) or device == "cuda"):
        from kiln.runtime.cuda import CudaDevice

        return CudaDevice(int(ordinal or 0), scratch=scratch)
    if device.startswith(("sm_", "cpu-")):
        return PretendDevice(device)
    raise ContractError(
        f"found device={device!r}, expected cpu, cuda, cuda:N or a target name such as sm_90a."
    )


def read_disabled(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The names in KILN_DISABLE: ops, variants, op.variant, tiers or ISA tiers that must not run."""
    return frozenset(filter(None, (n.strip() for n in environment.get("KILN_DISABLE", "").split(","))))


class Library:
    """The ops of a tree on one device: `library.rms_norm(x, weight)`. Threads may share it."""

    def __init__(
        self, folder: Folder, device: Device, manifests: Mapping[str, Manifest], generation: int
    ) -> None:
        self.device = device
        self.generation = generation
        self.targets = tuple(manifests)
        self.disabled = read_disabled()
        self.manifests = dict(manifests)
        self._folder = folder
        self._lock = threading.RLock()
        self._closed = False
        self.sealed = False
        self._buffers: dict[int, Any] = {}
        self._functions: dict[tuple[str, str, str], Any] = {}
        self._operations = {t: self._operations_of(t, m) for t, m in self.manifests.items()}
        self._ops: dict[str, Operation] = {}
        for operations in self._operations.values():
            for name, operation in operations.items():
                self._ops.setdefault(name, operation)
        device.check_toolchain(v for m in self.manifests.values() for v in _assemblers(m))

    def _operations_of(self, target: str, m: Manifest) -> dict[str, Operation]:
        candidates: dict[str, list[Kernel | Plan]] = {name: [] for name in m.ops}
        for c in m.kernels:
            candidates[c.op].append(c)
        for p in m.recipes:
            candidates[p.op].append(p)
        return {name: Operation(name, sig, target, candidates[name], self) for name, sig in m.ops.items()}

    @property
    def ops(self) -> tuple[str, ...]:
        """The name of every op and recipe, sorted."""
        return tuple(sorted(self._ops))

    def op(self, name: str) -> Operation:
        """One op by name.

        Raises:
            ContractError: no such op.
        """
        found = self._ops.get(name)
        if found is None:
            raise ContractError(f"this tree has no op {name!r}; {nearest(name, self._ops)}")
        return found

    def __getattr__(self, name: str) -> Operation:
        ops = self.__dict__.get("_ops", {})
        if name in ops:
            operation: Operation = ops[name]
            self.__dict__[name] = operation
            return operation
        raise AttributeError(f"this library has no op or attribute {name!r}; {nearest(name, ops)}")

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self._ops]

    def explain(self, name: str, *operands: Any, **named: Any) -> Explanation:
        """Every candidate of a call, in order, with its reason. See
        Operation.explain."""
        return self.op(name).explain(*operands, **named)

    def bind(self, name: str, *operands: Any, **named: Any) -> BoundCall:
        """A call ready to launch again and again. See Operation.bind."""
        return self.op(name).bind(*operands, **named)

    def reserve(self, name: str, *operands: Any, **named: Any) -> int:
        """Load what a call would run and reserve its scratch. See Operation.reserve."""
        return self.op(name).reserve(*operands, **named)

    def prepare(
        self,
        names: Iterable[str] | None = None,
        *,
        calls: Iterable[tuple[str, Mapping[str, Any]]] = (),
        stream: Any = None,
    ) -> int:
        """Verify and load every kernel that this device may run of these ops and of what their plans call.

        Args:
            names: ops; every op by default.
            calls: (op, its arguments by name) of calls whose scratch is reserved too; operands that are not
                there yet may be `kiln.runtime.arrays.described(shape, dtype, device)`.
            stream: the stream on which those calls will be made.

        Returns:
            The number of kernels that are loaded.
        """
        self.check_open()
        pending = [self.op(n) for n in (self.ops if names is None else names)]
        seen = set()
        count = 0
        while pending:
            operation = pending.pop()
            if (operation.target, operation.name) in seen:
                continue
            seen.add((operation.target, operation.name))
            for c in operation.candidates:
                if isinstance(c, Plan):
                    pending += [self.operation(operation.target, step.op) for step in c.steps]
                elif self.device.refusal(c) is None:
                    self.function(operation.target, c)
                    count += 1
        for op, named in calls:
            self.reserve(op, stream=stream, **named)
        return count

    def seal(self) -> None:
        """From now on nothing is read, loaded, locked or allocated, and the driver is asked nothing but to
        launch: a call that would need more is refused by name, so that every other one may be captured in a
        graph. Prepare first. Outputs that are not given are allocated by torch or NumPy if the operands are
        theirs, else refused.
        """
        self.sealed = True
        self._forget()

    def _forget(self) -> None:
        for operations in self._operations.values():
            for operation in operations.values():
                operation.forget()

    @property
    def scratch(self) -> ScratchPool:
        """The scratch memory of the device: its counters, release and poison."""
        return self.device.scratch

    def set_scratch(self, buffer: Any, stream: Any = None) -> None:
        """Let calls on a stream take their scratch from the caller's buffer and never from elsewhere.

        Args:
            buffer: a dense array of any type on the library's device, at a multiple of 256 bytes; it is kept
                alive until the library is closed.
            stream: as for a call.

        Raises:
            ContractError: another device, layout or alignment, or a read-only array.
        """
        handle = self.device.stream(stream, buffer)
        self.device.scratch.give(*writable_bytes(buffer, self.device.ordinal), handle)
        self._buffers[handle] = buffer

    def stats(self) -> dict[str, dict[str, int]]:
        """Calls per op and variant, those of plans' steps included; ops that never ran are left out."""
        found: dict[str, dict[str, int]] = {}
        for operations in self._operations.values():
            for name, operation in operations.items():
                counts = {v: n[0] for v, n in operation.counts.items() if n[0]}
                if counts:
                    found.setdefault(name, {}).update(counts)
        return found

    @property
    def loaded(self) -> tuple[str, ...]:
        """The kernels that were loaded, as op.variant, sorted."""
        return tuple(sorted(f"{op}.{variant}" for _, op, variant in self._functions))

    def close(self) -> None:
        """Give everything back; closing twice is fine, calling an op afterwards is refused."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._forget()
            self._functions.clear()
            self._folder.close()
            self.device.close()

    def __enter__(self) -> "Library":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_open(self) -> None:
        """Refuse a closed library.

        Raises:
            UnavailableError: it was closed.
        """
        if self._closed:
            raise UnavailableError("this library was closed; load the tree again.")

    def operation(self, target: str, name: str) -> Operation:
        """An op of one manifest: what that manifest's plans call."""
        return self._operations[target][name]

    def function(self, target: str, kernel: Kernel, stream: Callable[[], int] | None = None) -> Any:
        """The entry of a kernel: its file is read once, verified and proved to match the manifest, then
        loaded.

        Args:
            stream: what tells the stream of the call that needs it, if one does.

        Raises:
            IntegrityError: the file is not the one the manifest describes.
            UnavailableError: the library is sealed or closed, or the stream is being captured.
        """
        key = (target, kernel.op, kernel.variant)
        found = self._functions.get(key)
        if found is not None:
            return found
        with self._lock:
            self.check_open()
            found = self._functions.get(key)
            if found is None:
                if self.sealed:
                    raise UnavailableError(
                        f"{kernel.op}.{kernel.variant} is not loaded and the library is sealed; "
                        "prepare it before sealing."
                    )
                if stream is not None:
                    self.device.check_capture(kernel, stream())
                data = self._verified(target, kernel)
                found = self._functions[key] = self.device.load(kernel, data)
        return found

    def _verified(self, target: str, kernel: Kernel) -> bytes:
        with self._folder.folder(target) as folder:
            data = folder.read_exact(kernel.file, kernel.bytes, kernel.sha256)
        # Most of the import time, and needed only once something runs.
        from kiln.runtime import proof

        faults = proof.prove_launch(kernel, target, data)
        if faults:
            raise IntegrityError(
                f"{self._folder.path}/{target}/{kernel.file} is not what "
                f"{kernel.op}.{kernel.variant} promises: "
                f"{faults[0]} Rebuild the tree."
            )
        return data


def _assemblers(m: Manifest) -> Iterable[str]:
    found = {m.toolchain.get("ptxas"), *(k.toolchain.get("ptxas") for k in m.kernels)}
    return sorted(v for v in found if v is not None)
