"""Several roots: the order in which they are searched, what is shadowed, and each one's own pin."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime.errors import ContractError, IntegrityError, TargetError, UnavailableError
from kiln.tests.runtime.trees import OPS, PARAMS, PLAN, SOURCE, compile_c, kernel, manifest, write_tree

X = np.ones((2, 3), np.float32)
Make = Callable[..., Path]

PACK_SOURCE = SOURCE.replace("out[r * n[2] + c] = -x", "out[r * n[2] + c] = -2 * x")
"""The pack's own `negate` doubles as well, so that it can be told apart."""


@pytest.fixture(scope="session")
def pack_so(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The pack's object."""
    assert PACK_SOURCE != SOURCE
    return compile_c(tmp_path_factory.mktemp("pack"), PACK_SOURCE)


@pytest.fixture
def make(tmp_path: Path, ops_so: bytes, pack_so: bytes) -> Make:
    """Makes a root of some ops; `mine` takes the pack's kernels, `plan` adds the composite."""

    def tree(name: str, *ops: str, mine: bool = False, plan: bool = False, generation: int = 1) -> Path:
        data = pack_so if mine else ops_so
        document = manifest((kernel(op, "base", PARAMS[op], data) for op in ops), recipes=[])
        extra = ["scale_negate"] if plan else []
        document["ops"] = {op: OPS[op] for op in (*ops, *extra)}
        document["recipes"] = [PLAN] if plan else []
        return write_tree(tmp_path / name, {"cpu-x86_64": document}, {"ops.so": data}, generation)

    return tree


def digest(root: Path) -> str:
    return "sha256:" + hashlib.sha256((root / "INDEX.json").read_bytes()).hexdigest()


def test_ops_of_later_roots_are_added(make: Make) -> None:
    first, second = make("first", "negate"), make("second", "accumulate", "gather")
    with kiln.load([first, second]) as lib:
        assert lib.ops == ("accumulate", "gather", "negate")
        assert np.array_equal(lib.negate(X), -X)
        total = X.copy()
        assert np.array_equal(lib.accumulate(X, total), 2 * X)
        assert lib.loaded == ("accumulate.base", "negate.base")
        assert lib.prepare() == 3
        assert [r.ops for r in lib.roots] == [("negate",), ("accumulate", "gather")]
        assert [r.shadowed for r in lib.roots] == [(), ()]
        assert [r.digest for r in lib.roots] == [digest(first), digest(second)]
        assert lib.stats() == {"accumulate": {"base": 1}, "negate": {"base": 1}}


@pytest.mark.parametrize("reverse", [False, True])
def test_the_first_root_that_has_an_op_serves_it(make: Make, reverse: bool) -> None:
    own, pack = make("own", "negate", "gather"), make("pack", "negate", mine=True)
    roots = [pack, own] if reverse else [own, pack]
    with kiln.load(roots) as lib:
        assert np.array_equal(lib.negate(X), (-2 if reverse else -1) * X)
        assert lib.roots[1].shadowed == ("negate",)
        assert lib.roots[0].shadowed == ()
        found = lib.explain("negate", X)
        assert f"shadowed: negate of {roots[1]}" in str(found)
        assert lib.explain("gather", X, np.zeros(1, np.int32)).notes == ()


def test_a_plan_runs_the_ops_of_its_own_root(make: Make) -> None:
    own = make("own", "negate")
    pack = make("pack", "negate", "scale_add", mine=True, plan=True)
    with kiln.load([own, pack]) as lib:
        assert np.array_equal(lib.negate(X), -X)
        assert np.array_equal(lib.scale_negate(X, X), -2 * (3 * X))
        # Disabled names and providers hold for every root.
        lib.disable("negate.base")
        with pytest.raises(kiln.SelectionError):
            lib.scale_negate(X, X)
        lib.register_provider("negate", "mine", lambda x, out: np.negative(x, out=out))
        assert np.array_equal(lib.scale_negate(X, X), -3 * X)


def test_a_root_without_this_device_is_passed_over_and_told(
    make: Make, tmp_path: Path, ops_so: bytes
) -> None:
    other = manifest([kernel("gather", "base", PARAMS["gather"], ops_so, isa=None)], "sm_90", recipes=[])
    pack = write_tree(tmp_path / "cuda", {"sm_90": other}, {"ops.so": ops_so})
    with kiln.load([pack, make("own", "negate")]) as lib:
        assert lib.ops == ("negate",)
        assert [r.targets for r in lib.roots] == [(), ("cpu-x86_64",)]
    with pytest.raises(TargetError, match="it holds sm_90"):
        kiln.load([pack])


def test_each_root_has_its_own_pin(make: Make) -> None:
    roots = [make("a", "negate", generation=2), make("b", "gather", generation=5)]
    good = [digest(r) for r in roots]
    kiln.load(roots, expect=good, minimum_generation=[2, 5]).close()
    kiln.load(roots, expect=[None, good[1]], minimum_generation=2).close()
    with pytest.raises(IntegrityError, match=r"a/INDEX\.json: found sha256"):
        kiln.load(roots, expect=good[::-1])
    with pytest.raises(IntegrityError, match=r"a/INDEX\.json: generation 2, expected at least 5"):
        kiln.load(roots, minimum_generation=5)
    with pytest.raises(IntegrityError, match=r"b/INDEX\.json: generation 5, expected at least 6"):
        kiln.load(roots, minimum_generation=[2, 6])


def test_each_root_has_its_own_key(make: Make) -> None:
    keys = pytest.importorskip("kiln.tests.runtime.keys", reason="needs cryptography: kernel-kiln[sign]")
    roots = [make("a", "negate"), make("b", "gather")]
    keys.sign_tree(roots[0], 1)
    with pytest.raises(IntegrityError, match=r"b/INDEX\.json\.sig: missing"):
        kiln.load(roots, key=keys.public_raw(1))
    kiln.load(roots, key=[keys.public_raw(1), None]).close()
    keys.sign_tree(roots[1], 2)
    with kiln.load(roots, key=[keys.public_raw(1), keys.public_raw(2)]) as lib:
        assert len({r.signed_by for r in lib.roots}) == 2
    with pytest.raises(IntegrityError, match="is not signed by"):
        kiln.load(roots, key=[keys.public_raw(2), keys.public_raw(1)])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "one digest": ({"expect": "sha256:" + "0" * 64}, "found one digest for 2 roots"),
    "three digests": ({"expect": [None] * 3}, "one for each of 2 roots"),
    "three keys": ({"key": [None] * 3}, "one for each of 2 roots"),
    "one minimum in a list": ({"minimum_generation": [1]}, "one for each of 2 roots"),
}


@pytest.mark.parametrize("case", WRONG)
def test_lists_of_other_lengths(make: Make, case: str) -> None:
    options, why = WRONG[case]
    with pytest.raises(ContractError, match=why):
        kiln.load([make("a", "negate"), make("b", "gather")], **options)


def test_nothing_stays_open_after_a_refusal(make: Make, tmp_path: Path) -> None:
    good = make("a", "negate")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ContractError, match="found no roots"):
        kiln.load([])
    for _ in range(3):
        with pytest.raises(UnavailableError):
            kiln.load([good, tmp_path / "absent"])
        kiln.load([good, good]).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_same_kernel_name_in_two_roots_is_two_kernels(make: Make) -> None:
    """Keys by bare names once made one tree's file be judged by the other's digest."""
    own, pack = make("own", "negate"), make("pack", "negate", "scale_add", mine=True, plan=True)
    with kiln.load([own, pack]) as lib:
        assert np.array_equal(lib.scale_negate(X, X), -6 * X)
        assert np.array_equal(lib.negate(X), -X)
        assert lib.loaded == ("negate.base", "negate.base", "scale_add.base")
