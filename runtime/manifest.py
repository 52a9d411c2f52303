"""The schema of INDEX.json and MANIFEST.json: a strict reader and a writer.

This is the one schema of Kiln: the loader reads it, the compiler writes it. A document with an unknown
field, a missing field or a
name that is not declared is refused with a JSON pointer to it.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from kiln.runtime import schema, strictjson
from kiln.runtime.consistency import faults
from kiln.runtime.entities import (
    Attr,
    Contract,
    DTypeVar,
    Index,
    IndexEntry,
    Isa,
    Json,
    Kernel,
    Like,
    Manifest,
    Numerics,
    Operand,
    Param,
    Plan,
    Scalar,
    Scratch,
    Selftest,
    Signature,
    Source,
    Step,
    Temp,
    Tensor,
    TensorMap,
)
from kiln.runtime.errors import SchemaError
from kiln.runtime.fields import read, shown

SCHEMA = schema.SCHEMAS[-1]
"""The manifest schema that this version writes; older ones are read."""
INDEX_SCHEMA = schema.INDEX_SCHEMAS[-1]
"""The same of the index."""
ABI = 1
"""The launch ABI that this version can drive."""

canonical_json = strictjson.canonical
"""canonical_json(value) -> bytes: the one form in which Kiln writes JSON."""


def parse_index(data: bytes, what: str = "INDEX.json") -> Index:
    """The index in `data`.

    Raises:
        SchemaError: not strict JSON, or not an index of a schema that this version reads.
    """
    value = strictjson.parse(data, what, schema.MAX_INDEX_BYTES)
    _check_version(value, schema.INDEX_SCHEMAS, what)
    index = read(schema.INDEX, value, what)
    for target, entry in index.targets.items():
        if entry.manifest != f"{target}/MANIFEST.json":
            raise SchemaError(
                f"{what} at /targets/{target}: found {shown(entry.manifest)}, expected "
                f"{target}/MANIFEST.json."
            )
    return index


def parse_manifest(data: bytes, target: str | None = None, what: str = "MANIFEST.json") -> Manifest:
    """The manifest in `data`; `target`, if given, is the one it must be for.

    Raises:
        SchemaError: not strict JSON, of a schema that this version does not read, for another target, or
            naming something it does not declare.
    """
    return read_manifest(strictjson.parse(data, what, schema.MAX_MANIFEST_BYTES), target, what)


def read_manifest(value: Json, target: str | None = None, what: str = "MANIFEST.json") -> Manifest:
    """As `parse_manifest`, of a document that `strictjson.parse` has read."""
    _check_version(value, schema.SCHEMAS, what)
    manifest = read(schema.MANIFEST, value, what)
    if target is not None and manifest.target != target:
        raise SchemaError(
            f"{what}: written for target {manifest.target}, expected {target}; the folders were mixed up."
        )
    if manifest.abi != ABI:
        raise SchemaError(
            f"{what}: launch ABI {manifest.abi}, this version drives {ABI}; use the matching Kiln."
        )
    fault = next(faults(manifest), None)
    if fault is not None:
        raise SchemaError(f"{what}: {fault}")
    return manifest


def parse_kernel(value: Json, what: str = "kernel entry") -> Kernel:
    """One KERNEL object; names are not checked against a signature."""
    return read(schema.KERNEL, value, what)


def parse_signature(value: Json, what: str = "signature") -> Signature:
    """One SIG object."""
    return read(schema.SIGNATURE, value, what)


def parse_plan(value: Json, what: str = "plan") -> Plan:
    """One PLAN object; names are not checked against a signature."""
    return read(schema.PLAN, value, what)


_PARAM_FIELDS = {
    "ptr": ("kind", "name", "dtype", "operand", "access", "align"),
    "scalar": ("kind", "name", "dtype", "value", "divisible_by"),
    "null": ("kind", "name", "dtype"),
    "dropped": ("kind", "name", "dtype", "value", "equals"),
    "tensor_map": ("kind", "name", "dtype", "operand", "access", "map"),
}


def dump(value: Any) -> Json:
    """A dataclass of this module as the JSON value it was read from: dump(parse(x)) == x. Kernels are
    written out, whatever they were like."""
    if isinstance(value, Param):
        return {name: dump(getattr(value, name)) for name in _PARAM_FIELDS[value.kind]}
    if isinstance(value, Scratch):
        entry = {"name": value.name, "bytes": dump(value.bytes), "align": value.align}
        return {**entry, "zeroed": True} if value.zeroed else entry
    if is_dataclass(value):
        return {f.name: dump(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: dump(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [dump(v) for v in value]
    return value


def _check_version(value: Any, known: tuple[int, ...], what: str) -> None:
    # Told first: a future schema may differ in everything else.
    found = value.get("schema") if type(value) is dict else None
    if type(found) is int and found not in known:
        reads = " and ".join(map(str, known))
        raise SchemaError(
            f"{what}: schema {found}, this version reads {reads}; use a Kiln of the same age as the tree."
        )


__all__ = [
    "ABI",
    "INDEX_SCHEMA",
    "SCHEMA",
    "Attr",
    "Contract",
    "DTypeVar",
    "Index",
    "IndexEntry",
    "Isa",
    "Json",
    "Kernel",
    "Like",
    "Manifest",
    "Numerics",
    "Operand",
    "Param",
    "Plan",
    "Scalar",
    "Scratch",
    "Selftest",
    "Signature",
    "Source",
    "Step",
    "Temp",
    "Tensor",
    "TensorMap",
    "canonical_json",
    "dump",
    "parse_index",
    "parse_kernel",
    "parse_manifest",
    "parse_plan",
    "parse_signature",
    "read_manifest",
]
