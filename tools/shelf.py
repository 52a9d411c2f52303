"""Kernels without a tree: manifest entries and code that were just made, offered as a library offers real
ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kiln.compiler.signatures import signature_json
from kiln.ir.spec import Op
from kiln.runtime.device import Device
from kiln.runtime.entities import Kernel, Manifest
from kiln.runtime.manifest import canonical_json, parse_manifest
from kiln.runtime.operation import Operation
from kiln.runtime.providers import Capabilities, Providers


class Shelf:
    """The kernels of one op on one device."""

    disabled: Mapping[str, str] = MappingProxyType({})
    providers = Providers(Capabilities, lambda: None)
    sealed = False

    def __init__(
        self,
        op: Op,
        target: str,
        kernels: Sequence[Mapping[str, Any]],
        device: Device,
        load: Callable[[Kernel], Any],
    ) -> None:
        """`kernels` are KERNEL entries; `load` gives what the device launches for one."""
        document = {
            "schema": 1,
            "abi": 1,
            "target": target,
            "toolchain": {},
            "ops": {op.name: signature_json(op)},
            "kernels": sorted(kernels, key=lambda k: str(k["variant"])),
            "recipes": [],
            "sources": {},
        }
        manifest = parse_manifest(canonical_json(document), target)
        self.device = device
        self.manifests: dict[str, Manifest] = {target: manifest}
        self._load = load
        self._operation = Operation(op.name, manifest.ops[op.name], target, list(manifest.kernels), self)

    def operation(self, target: str, name: str) -> Operation:
        """The op."""
        return self._operation

    def function(self, target: str, kernel: Kernel, stream: Callable[[], int] | None = None) -> Any:
        """The kernel's function."""
        return self._load(kernel)

    def check_open(self) -> None:
        """It is never closed."""
