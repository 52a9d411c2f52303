"""Loading a tree: the index and the manifests of this device are verified now, each artifact when it is
first used."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kiln.runtime.arguments import nearest
from kiln.runtime.arrays import writable_bytes
from kiln.runtime.bound import BoundCall
from kiln.runtime.cpu import CpuDevice
from kiln.runtime.device import Device, PretendDevice
from kiln.runtime.entities import Kernel, Manifest, Plan
from kiln.runtime.errors import ContractError, IntegrityError, UnavailableError
from kiln.runtime.extend import Extensible
from kiln.runtime.files import Folder
from kiln.runtime.operation import Operation
from kiln.runtime.providers import Providers
from kiln.runtime.roots import OpenRoot, Root, RootInfo, open_roots
from kiln.runtime.scratch import ScratchPolicy, ScratchPool
from kiln.runtime.select import Explanation
from kiln.runtime.signature import PublicKey

if TYPE_CHECKING:
    from kiln.runtime.selftest import SelftestReport


def load(
    root: Root | Sequence[Root] | None = None,
    device: str | Device = "cpu",
    *,
    expect: str | Sequence[str | None] | None = None,
    minimum_generation: int | Sequence[int] = 0,
    key: PublicKey | Sequence[PublicKey | None] | None = None,
    threads: int | None = None,
    scratch: ScratchPolicy | None = None,
) -> "Library":
    """Open a tree of artifacts for a device, or several that are searched in order.

    Args:
        root: the folder that holds INDEX.json, or several; the installed kiln.aot_artifacts by default. Each
            op is served by the first root that holds it for the device, see `Library.roots`.
        device: "cpu", "cuda", "cuda:1", or a target name such as "sm_90a" to explain calls without that
            device.
        expect: "sha256:<hex>", the digest of INDEX.json that `kiln build` printed; any other tree is refused.
            One for each root where there are several.
        minimum_generation: refuse a tree that is older than this generation; one for every root, or one each.
        key: the Ed25519 public key whose owner must have signed the tree: 32 bytes, "ed25519:<hex>" or the
            path of a file in PEM; one for every root, or one each (None for an unsigned root).
        threads: most CPU threads a call may use.
        scratch: how scratch memory is handed out, where `device` is a name.

    Raises:
        UnavailableError: no such tree, no such device, or no package for signatures.
        IntegrityError: INDEX.json, its signature or a manifest is not what it should be.
        TargetError: no root holds anything for the device.
    """
    place = _device(device, threads, scratch)
    roots = open_roots(root, place, expect, minimum_generation, key)
    try:
        return Library(roots, place)
    except BaseException:
        for opened in roots:
            opened.folder.close()
        raise


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
    """The names in KILN_DISABLE: ops, variants, op.variant, tiers or ISA tiers that must not run; and
    `native`, the C extension that answers calls which were made before."""
    return frozenset(filter(None, (n.strip() for n in environment.get("KILN_DISABLE", "").split(","))))


class Library(Extensible):
    """The ops of trees on one device: `library.rms_norm(x, weight)`. Threads may share it."""

    def __init__(self, roots: Sequence[OpenRoot], device: Device) -> None:
        super().__init__(device, {n: f"KILN_DISABLE={n}" for n in read_disabled()})
        self.generation = roots[0].generation
        self._roots = tuple(roots)
        self._lock = threading.RLock()
        self._closed = False
        self.sealed = False
        self._buffers: dict[tuple[int, bool], Any] = {}
        self._functions: dict[tuple[int, str, str, str], Any] = {}
        self._hosts = [_Host(self, i, r) for i, r in enumerate(self._roots)]
        self._ops: dict[str, Operation] = {}
        self.manifests: dict[str, Manifest] = {}
        for host in self._hosts:
            for target, manifest in host.root.manifests.items():
                self.manifests.setdefault(target, manifest)
            for name, operation in host.best().items():
                self._ops.setdefault(name, operation)
        self.targets = tuple(self.manifests)
        device.check_toolchain(v for r in self._roots for m in r.manifests.values() for v in _assemblers(m))

    def __repr__(self) -> str:
        places = ", ".join(r.folder.path for r in self._roots)
        return f"<{len(self._ops)} ops of {places} on {self.device.label}>"

    def _everything(self) -> list[Operation]:
        return [o for h in self._hosts for of_target in h.operations.values() for o in of_target.values()]

    @property
    def roots(self) -> tuple[RootInfo, ...]:
        """Every root in order, with what it serves and what an earlier one serves instead."""
        found = []
        for host in self._hosts:
            best, r = host.best(), host.root
            mine = tuple(sorted(n for n, o in best.items() if self._ops[n] is o))
            shadowed = tuple(sorted(best.keys() - set(mine)))
            targets = tuple(r.manifests)
            found.append(
                RootInfo(r.folder.path, r.digest, r.generation, r.signed_by, targets, mine, shadowed)
            )
        return tuple(found)

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
            raise ContractError(f"this tree has no op {name!r}; {self._nearest(name)}")
        return found

    def __getattr__(self, name: str) -> Operation:
        ops = self.__dict__.get("_ops", {})
        if name in ops:
            operation: Operation = ops[name]
            self.__dict__[name] = operation
            return operation
        hint = self._nearest(name) if ops else "it was not opened."
        raise AttributeError(f"this library has no op or attribute {name!r}; {hint}")

    def _nearest(self, name: str) -> str:
        return nearest(name, self._ops, {n: f"{o.sig.doc} {o.sig.family}" for n, o in self._ops.items()})

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self._ops]

    def explain(self, name: str, *operands: Any, **named: Any) -> Explanation:
        """Every candidate of a call, in order, with its reason. See
        Operation.explain. Other roots that hold the op as well are noted."""
        found = self.op(name).explain(*operands, **named)
        notes = tuple(f"shadowed: {name} of {r.path}" for r in self.roots if name in r.shadowed)
        return replace(found, notes=notes) if notes else found

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
            if operation in seen:
                continue
            seen.add(operation)
            for c in operation.candidates:
                if isinstance(c, Plan):
                    pending += [operation.callee(step.op) for step in c.steps]
                elif self.device.refusal(c) is None:
                    operation.function(c)
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
        self._forget_short_ways()

    def _forget_short_ways(self) -> None:
        for operation in self._everything():
            operation.forget()

    @property
    def scratch(self) -> ScratchPool:
        """The scratch memory of the device: its counters, release and poison; `scratch.zeroed` is the pool
        of what is all zeros between launches."""
        return self.device.scratch

    def set_scratch(self, buffer: Any, stream: Any = None, *, zeroed: bool = False) -> None:
        """Let calls on a stream take their scratch from the caller's buffer and never from elsewhere.

        Args:
            buffer: a dense array of any type on the library's device, at a multiple of 256 bytes, as large as
                the largest `BoundCall.scratch_bytes`; it is kept alive until the library is closed.
            stream: as for a call.
            zeroed: it is for scratch that kernels find and leave all zeros, `BoundCall.zeroed_bytes` of it:
                the caller fills it with zeros once, before the first launch, and after a kernel was aborted;
                nothing but these launches may write it. Each kind is the library's own where no buffer was
                given for it.

        Raises:
            ContractError: another device, layout or alignment, or a read-only array.
        """
        handle = self.device.stream(stream, buffer)
        pool = self.device.scratch.zeroed if zeroed else self.device.scratch
        pool.give(*writable_bytes(buffer, self.device.ordinal), handle)
        self._buffers[handle, zeroed] = buffer

    def selftest(
        self, ops: Iterable[str] | None = None, *, against: "Library | None" = None
    ) -> "SelftestReport":
        """Run every kernel and plan that this device may run on small seeded calls, and compare the ways to
        run each op with each other. Takes seconds, needs no compiler; do it before sealing.

        Args:
            ops: which; every op by default.
            against: the same ops loaded for the CPU, whose answers exact ops must give as well.

        Returns:
            A report: `report.ok`, and text with what was wrong.

        Raises:
            UnavailableError: the device is only pretended.
        """
        from kiln.runtime import selftest

        return selftest.run(self, ops, against)

    def stats(self) -> dict[str, dict[str, int]]:
        """Calls per op and variant, those of plans' steps included; ops that never ran are left out."""
        found: dict[str, dict[str, int]] = {}
        for operation in self._everything():
            # A copy: a call that first meets a provider adds to it.
            for variant, count in list(operation.counts.items()):
                if count[0]:
                    of_op = found.setdefault(operation.name, {})
                    of_op[variant] = of_op.get(variant, 0) + count[0]
        return found

    @property
    def loaded(self) -> tuple[str, ...]:
        """The kernels that were loaded, as op.variant, sorted."""
        return tuple(sorted(f"{op}.{variant}" for _, _, op, variant in self._functions))

    def close(self) -> None:
        """Give everything back; closing twice is fine, calling an op afterwards is refused."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._forget_short_ways()
            self._functions.clear()
            for opened in self._roots:
                opened.folder.close()
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
        """An op of one target, of the first root that has it."""
        return next(h.operations[target][name] for h in self._hosts if name in h.operations.get(target, ()))

    def function(
        self, root: int, target: str, kernel: Kernel, stream: Callable[[], int] | None = None
    ) -> Any:
        """The entry of a kernel: its file is read once, verified and proved to match the manifest, then
        loaded.

        Args:
            stream: what tells the stream of the call that needs it, if one does.

        Raises:
            IntegrityError: the file is not the one the manifest describes.
            UnavailableError: the library is sealed or closed, or the stream is being captured.
        """
        key = (root, target, kernel.op, kernel.variant)
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
                data = _verified(self._roots[root].folder, target, kernel)
                found = self._functions[key] = self.device.load(kernel, data)
        return found


class _Host:
    """One root of a library, as its operations see it: kernels and the ops that plans call are its own."""

    def __init__(self, library: Library, number: int, root: OpenRoot) -> None:
        self.root = root
        self.device = library.device
        self.providers: Providers = library.providers
        self.check_open = library.check_open
        self._library = library
        self._number = number
        self.operations = {t: self._operations_of(t, m) for t, m in root.manifests.items()}

    def _operations_of(self, target: str, m: Manifest) -> dict[str, Operation]:
        candidates: dict[str, list[Kernel | Plan]] = {name: [] for name in m.ops}
        for c in m.kernels:
            candidates[c.op].append(c)
        for p in m.recipes:
            candidates[p.op].append(p)
        # Imported, and the extension loaded, with the first library: it would add 2 ms to the import's 30.
        from kiln.runtime.fastcall import operation_type

        kind = operation_type(self.disabled)
        return {name: kind(name, sig, target, candidates[name], self) for name, sig in m.ops.items()}

    @property
    def disabled(self) -> Mapping[str, str]:
        """Names that must not run -> who said so."""
        return self._library.disabled

    def best(self) -> dict[str, Operation]:
        """Every op, of the best target that has it."""
        found: dict[str, Operation] = {}
        for operations in self.operations.values():
            for name, operation in operations.items():
                found.setdefault(name, operation)
        return found

    def operation(self, target: str, name: str) -> Operation:
        """An op of one manifest: what that manifest's plans call."""
        return self.operations[target][name]

    @property
    def sealed(self) -> bool:
        """Whether nothing may be loaded or allocated any more."""
        return self._library.sealed

    def function(self, target: str, kernel: Kernel, stream: Callable[[], int] | None = None) -> Any:
        """The loaded entry of a kernel; `stream` tells whose call needs it, if one does."""
        return self._library.function(self._number, target, kernel, stream)


def _verified(root: Folder, target: str, kernel: Kernel) -> bytes:
    with root.folder(target) as folder:
        data = folder.read_exact(kernel.file, kernel.bytes, kernel.sha256)
    # Most of the import time, and needed only once something runs.
    from kiln.runtime import proof

    faults = proof.prove_launch(kernel, target, data)
    if faults:
        raise IntegrityError(
            f"{root.path}/{target}/{kernel.file} is not what "
            f"{kernel.op}.{kernel.variant} promises: "
            f"{faults[0]} Rebuild the tree."
        )
    return data


def _assemblers(m: Manifest) -> Iterable[str]:
    found = {m.toolchain.get("ptxas"), *(k.toolchain.get("ptxas") for k in m.kernels)}
    return sorted(v for v in found if v is not None)
