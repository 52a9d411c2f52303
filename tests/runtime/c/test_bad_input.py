"""Bad inputs that no other test brings to libkiln: the Python runtime's own, and those of cubins, devices and
contexts."""

import ctypes
from pathlib import Path

import pytest

from kiln.runtime.errors import ContractError, DriverError
from kiln.runtime.manifest import parse_manifest
from kiln.tests.cubins import compiled
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.core_build import ACCEPTED, Core
from kiln.tests.runtime.c.fake import FakeCuda, part_of_tree
from kiln.tests.runtime.c.test_artifacts import agrees, proofs
from kiln.tests.runtime.c.test_calls import _opened_by_libkiln  # noqa: F401
from kiln.tests.runtime.c.test_cuda_calls import BASE, TREE, norm, tensor
from kiln.tests.runtime.test_bad_input import (  # noqa: F401
    test_files_that_change_while_they_are_read,
    test_the_digest_of_nothing,
    without_kernel,
)
from kiln.tests.runtime.test_cubin import held, patched, record_of
from kiln.tests.trees import cuda_kernel


def test_parameters_over_4_kib(libkiln_core: Core) -> None:
    data = held("sm_90a", struct_bytes=5000)
    assert agrees(libkiln_core, "sm_90a", data) == ACCEPTED
    at = record_of(data, ".nv.info.held", 0x45)
    for offset in (4, 6, 8):
        bad = agrees(libkiln_core, "sm_90a", patched(data, "<H", at + offset, 7))
        assert bad.code == "IntegrityError"


def test_a_cubin_without_a_kernel(libkiln_core: Core) -> None:
    entry, data = cuda_kernel(compiled()["scaled_sum", "sm_90a"]), without_kernel()
    assert agrees(libkiln_core, "sm_90a", data) == ACCEPTED
    assert (
        "must be the one kernel of its file, which holds []" in proofs(libkiln_core, entry, "sm_90a", data)[0]
    )


def test_memory_of_another_device(c: ctypes.CDLL) -> None:
    with libkiln.Library(c, TREE, "sm_90a") as library:
        assert "runs" in library.rms_norm.explain(**norm())
        with pytest.raises(ContractError, match="x is on cuda:1, expected cuda:0"):
            library.rms_norm.explain(**norm(x=tensor(4, 256, at=BASE, device=1)))


@pytest.mark.parametrize(("code", "why"), [(400, "another context"), (709, "open the tree again")])
def test_streams_and_contexts_that_are_gone(c: ctypes.CDLL, tmp_path: Path, code: int, why: str) -> None:
    fake = FakeCuda(tmp_path)
    root = part_of_tree(tmp_path / "tree", TREE, "rms_norm")
    fake.know(root, parse_manifest((root / "sm_90a" / "MANIFEST.json").read_bytes()))
    with libkiln.Library(c, root, "cuda", driver_path=fake.path) as library:
        fake.c.fake_fail_named(b"cuLaunchKernelEx", code)
        with pytest.raises(DriverError, match=why) as e:
            library.rms_norm(**norm(), stream=3)
        assert e.value.code == code
    assert fake.live() == (0, 0, 0)
