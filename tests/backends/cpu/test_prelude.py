"""What a C file takes of the vector headers: all that it needs, and no more."""

from __future__ import annotations

from collections import Counter

import pytest

from kiln.backends.cpu.c_emitter import translation_unit
from kiln.backends.cpu.prelude import Paragraph, paragraphs, prelude
from kiln.backends.cpu.toolchain import shared_object
from kiln.compiler.errors import BuildError
from kiln.compiler.target import TARGETS

TARGET = TARGETS["cpu-x86_64"]
ADD = """
void add(const uint16_t *a, const uint16_t *b, uint16_t *to);
void add(const uint16_t *a, const uint16_t *b, uint16_t *to)
{
  bf16_store(to, vf_round_bf16(bf16_load(a, 16) + bf16_load(b, 16)), 16);
}
"""
EACH = [
    (name, tier.name)
    for name in ("wf_fma", "f16_store", "bf16_gather", "nvfp4_clear", "tree_root", "row_copy", "KILN_FOLD16")
    for tier in (TARGET.tiers[0], TARGET.tiers[-1])
]


def defined(text: str) -> set[str]:
    return set().union(*(Paragraph.of(part).defines for part in text.split("\n\n")))


def test_only_what_is_used_comes_along() -> None:
    taken = defined(prelude(ADD))
    assert {"bf16_store", "bf16_load", "vf_round_bf16", "vf_round_bf16_clean", "KILN_PART", "vu"} <= taken
    assert taken.isdisjoint({"wf", "f32_load", "vf_fma", "f16_load", "KILN_COLD", "tree_push"})
    assert len(prelude(ADD)) < len("\n\n".join(p.text for p in paragraphs())) / 3


def test_nothing_is_defined_twice() -> None:
    counts = Counter(name for p in paragraphs() for name in p.defines)
    assert {name for name, n in counts.items() if n > 1} == set()
    assert len([p for p in paragraphs() if not p.defines]) == 1, "the title, with what is included"


@pytest.mark.parametrize(("name", "tier"), EACH)
def test_a_definition_compiles_alone(name: str, tier: str) -> None:
    isa = next(t for t in TARGET.tiers if t.name == tier)
    assert name in defined(prelude(name))
    source = translation_unit(name, [f"/* uses {name} */\nextern int anchor;\nint anchor = 1;"])
    assert shared_object(source, TARGET, isa, name)


def test_a_file_without_a_definition_does_not_compile() -> None:
    source = translation_unit("add", [ADD])
    assert shared_object(source, TARGET, TARGET.tiers[0], "add")
    without = "\n".join(line for line in source.splitlines() if "vf_select(vi mask" not in line)
    with pytest.raises(BuildError, match="vf_select"):
        shared_object(without, TARGET, TARGET.tiers[0], "add")
