"""Thousands of seeded mutations of good bytes: C and Python say the same of each, and neither anything
untyped."""

import random
from collections.abc import Callable

import pytest

from kiln.runtime.manifest import canonical_json
from kiln.tests.cubins import compiled, shared_object
from kiln.tests.fuzz.mutations import cut_up, overwritten
from kiln.tests.runtime import mapped
from kiln.tests.runtime.c.core_build import ACCEPTED, Core
from kiln.tests.runtime.c.documents import agrees, index_agrees, rich
from kiln.tests.runtime.c.test_artifacts import agrees as artifact_agrees
from kiln.tests.runtime.test_cubin import held
from kiln.tests.runtime.test_manifest import index, small, text_of
from kiln.tests.trees import C_SOURCE


@pytest.mark.parametrize("seed", range(4))
def test_manifests(libkiln_core: Core, seed: int) -> None:
    rng, accepted = random.Random(seed), 0
    document = text_of(small() if seed % 2 else rich())
    for _ in range(1000):
        data = cut_up(document, rng)
        accepted += agrees(libkiln_core, data) == ACCEPTED
    assert accepted > 20


def test_manifests_with_tensor_maps(libkiln_core: Core) -> None:
    rng, accepted, document = random.Random(6), 0, text_of(mapped.document())
    for _ in range(1000):
        accepted += agrees(libkiln_core, cut_up(document, rng), "sm_90a") == ACCEPTED
    assert accepted > 20


def test_indices(libkiln_core: Core) -> None:
    rng, accepted, document = random.Random(9), 0, canonical_json(index())
    for _ in range(3000):
        accepted += index_agrees(libkiln_core, cut_up(document, rng)) == ACCEPTED
    assert accepted > 20


ARTIFACTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "sm_80": ("sm_80", lambda: compiled()["doubled", "sm_80"].data),
    "sm_90a": ("sm_90a", lambda: compiled()["scaled_sum", "sm_90a"].data),
    "sm_120a": ("sm_120a", lambda: compiled()["doubled", "sm_120a"].data),
    "old layout": ("sm_86", lambda: held("sm_86", tool="ptxas")),
    "x86-64": ("cpu-x86_64", lambda: shared_object(C_SOURCE)),
    "AArch64": ("cpu-aarch64", lambda: shared_object(C_SOURCE, "aarch64-linux-gnu.2.17")),
}


@pytest.mark.parametrize("name", ARTIFACTS)
def test_artifacts(libkiln_core: Core, name: str) -> None:
    target, make = ARTIFACTS[name]
    data, rng, refused = make(), random.Random(name), 0
    for _ in range(1500):
        refused += artifact_agrees(libkiln_core, target, overwritten(data, rng)) != ACCEPTED
    assert 200 < refused < 1500
