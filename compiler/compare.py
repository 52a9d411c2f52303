"""In what two builds of one kernel differ, from its manifest entries and its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kiln.runtime.cubin import Cubin
from kiln.runtime.elf import Elf, ElfError
from kiln.runtime.proof import read_artifact

Change = Literal["identical", "debug-only", "code", "resources", "contract", "toolchain"]

_IDENTITY = ("bytes", "sha256", "inputs_digest")
_SHF_ALLOC = 2
_CODE_SECTIONS = (".text", ".rel.text", ".rela.text", ".nv.constant", ".nv.global", ".nv.shared", ".nv.local")
"""What a cubin's launch uses. Tables that number symbols are left out: debug information shifts the
numbers."""


def compare(
    target: str, old: Mapping[str, Any], new: Mapping[str, Any], old_data: bytes, new_data: bytes
) -> tuple[Change, str]:
    """(class, why) of a kernel's change; entries are as in a manifest, with their whole toolchains."""
    changed = [k for k in sorted(old.keys() | new.keys()) if k not in _IDENTITY and old.get(k) != new.get(k)]
    byte_change = _compare_bytes(target, old_data, new_data)
    if "toolchain" in changed:
        tools = sorted(t for t in {*old["toolchain"], *new["toolchain"]} if _tool(old, t) != _tool(new, t))
        moves = ", ".join(f"{t} {_tool(old, t)} -> {_tool(new, t)}" for t in tools)
        return "toolchain", f"built by {moves}; bytes: {byte_change[0]}"
    contract = [k for k in changed if k != "resources"]
    if contract:
        return "contract", "; ".join(f"{k}: {_shown(old.get(k))} -> {_shown(new.get(k))}" for k in contract)
    if changed:
        before, after = old["resources"], new["resources"]
        names = sorted(n for n in {*before, *after} if before.get(n) != after.get(n))
        return "resources", ", ".join(f"{n} {before.get(n)} -> {after.get(n)}" for n in names)
    return byte_change


def _tool(entry: Mapping[str, Any], name: str) -> str:
    return str(entry["toolchain"].get(name, "absent"))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _compare_bytes(target: str, old: bytes, new: bytes) -> tuple[Change, str]:
    if old == new:
        return "identical", ""
    try:
        before, after = read_artifact(target, old), read_artifact(target, new)
    except ElfError as e:
        return "code", f"the bytes differ, and one can't be read: {e}"
    if not isinstance(before, Cubin) or not isinstance(after, Cubin):
        one, two = _loaded(before.elf), _loaded(after.elf)
    elif before.kernels != after.kernels:
        return "code", "the kernels' own tables differ"
    else:
        one, two = _code(before.elf), _code(after.elf)
    names = sorted(n for n in {*one, *two} if one.get(n) != two.get(n))
    if names:
        return "code", f"sections differ: {', '.join(names[:8])}"
    return "debug-only", "only sections that no launch uses differ"


def _code(elf: Elf) -> dict[str, tuple[int, bytes]]:
    return {s.name: (s.size, elf.body(s)) for s in elf.sections if s.name.startswith(_CODE_SECTIONS)}


def _loaded(elf: Elf) -> dict[str, tuple[int, bytes]]:
    return {s.name: (s.address, elf.body(s)) for s in elf.sections if s.flags & _SHF_ALLOC}
