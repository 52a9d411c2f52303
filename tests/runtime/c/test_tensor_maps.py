"""Kernels that take tensor maps made by the host, in both runtimes: one table of calls, one function that
makes the maps, equal launches; and in libkiln alone what only it has."""

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kiln.runtime as kiln
from kiln.runtime.arrays import View
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.errors import DriverError, KilnError, SchemaError, SelectionError
from kiln.runtime.manifest import canonical_json, parse_manifest
from kiln.tests.runtime import mapped
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.core_build import ACCEPTED, Core
from kiln.tests.runtime.c.documents import agrees
from kiln.tests.runtime.c.fake import FakeCuda, RecordingDriver, without_addresses_of_temporaries
from kiln.tests.runtime.mapped import LEGAL, OUT, OUT_OF_RANGE, REFUSED, X, call, cubin, entry, matrix
from kiln.tests.runtime.trees import dim

MADE, LAUNCHED = "cuTensorMapEncodeTiled", "cuLaunchKernelEx"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def fake(loaded: FakeCuda) -> Iterator[FakeCuda]:
    loaded.reset()
    yield loaded
    assert loaded.live() == (0, 0, 0)
    assert loaded.c.fake_depth() == 0


class Both:
    """A tree in both runtimes, whose maps one function makes."""

    def __init__(self, c: ctypes.CDLL, fake: FakeCuda, root: Path) -> None:
        manifest = parse_manifest((root / "sm_90a" / "MANIFEST.json").read_bytes())
        fake.know(root, manifest)
        self.fake, self.driver = fake, RecordingDriver(manifest)
        self.driver.stack = [0xC0]
        self.driver.encode_address = ctypes.cast(fake.c.cuTensorMapEncodeTiled, ctypes.c_void_p).value
        self.python = kiln.load(root, CudaDevice(0, self.driver))
        self.c = libkiln.Library(c, root, "cuda", driver_path=fake.path)

    def __enter__(self) -> "Both":
        return self

    def __exit__(self, *_: object) -> None:
        self.python.close()
        self.c.close()

    def told(self, op: str, given: dict[str, Any]) -> tuple[Any, Any]:
        """What each says of a call: its launches, or the error."""
        answers: list[Any] = []
        for run in (self.python.op(op), self.c.op(op)):
            self.driver.recorded.clear()
            self.fake.reset()
            try:
                run(**given, stream=0x51)
            except KilnError as e:
                answers.append(f"{type(e).__name__}: {e}")
            else:
                answers.append(self.driver.recorded[:] or self.fake.launches())
        return answers[0], answers[1]


@pytest.fixture
def both(c: ctypes.CDLL, fake: FakeCuda, tmp_path: Path) -> Iterator[Both]:
    with Both(c, fake, mapped.tree(tmp_path)) as made:
        yield made


# ---- manifests


def test_the_same_meaning(libkiln_core: Core) -> None:
    assert agrees(libkiln_core, canonical_json(mapped.document()), "sm_90a") == ACCEPTED
    for changed in LEGAL:
        document = mapped.document(entry(cubin(), passed=mapped.params(**changed)))
        assert agrees(libkiln_core, canonical_json(document), "sm_90a") == ACCEPTED, changed


@pytest.mark.parametrize(("field", "found", "why"), REFUSED)
def test_the_same_refusals(
    libkiln_core: Core, c: ctypes.CDLL, fake: FakeCuda, tmp_path: Path, field: str, found: Any, why: str
) -> None:
    broken = entry(cubin(), passed=mapped.params(**{field: found}))
    assert agrees(libkiln_core, canonical_json(mapped.document(broken)), "sm_90a") != ACCEPTED
    root = mapped.tree(tmp_path, broken)
    with pytest.raises(SchemaError, match=why):
        libkiln.Library(c, root, "cuda", driver_path=fake.path)


WRONG: tuple[Any, ...] = (True, None, 0, -1, 257, 1.5, "x", "none", "128b", [], [1], [1, 1], ["dim", "M"], {})


def test_every_value_of_another_kind_has_the_same_verdict(libkiln_core: Core) -> None:
    refused = 0
    for field in mapped.params()[1]["map"]:
        for found in WRONG:
            document = mapped.document(entry(cubin(), passed=mapped.params(**{field: found})))
            refused += agrees(libkiln_core, canonical_json(document), "sm_90a") != ACCEPTED
    for field in mapped.params()[1]:
        document = mapped.document()
        del document["kernels"][0]["params"][1][field]
        assert agrees(libkiln_core, canonical_json(document), "sm_90a") != ACCEPTED
    for target in ("sm_80", "sm_89"):
        document = mapped.document(target=target)
        assert agrees(libkiln_core, canonical_json(document), target) != ACCEPTED
    assert refused > 70


# ---- calls

STRIDED = {"x": matrix(X, stride=96), "out": matrix(OUT, stride=128)}
CALLS = (
    call(), call(1, 8), call(300, 64), call(2048, 512), call(most=7), call(16, 8, most=1), STRIDED,
    {**STRIDED, "most": 199}, call(extra=matrix(mapped.EXTRA)),
)  # fmt: skip


@pytest.mark.parametrize("given", CALLS, ids=str)
def test_the_same_launches(both: Both, given: dict[str, Any]) -> None:
    """Each parameter to the byte: a map is what it was made of."""
    python, c = both.told("copied", given)
    assert python == c
    (launch,) = c
    _, x, out, _ = launch.params
    assert len(x) == len(out) == 128
    assert x != out
    again, _ = both.told("copied", given)
    assert again == python


def test_fields_reach_the_driver_in_both(c: ctypes.CDLL, fake: FakeCuda, tmp_path: Path) -> None:
    seen = set()
    for i, changed in enumerate(LEGAL):
        root = mapped.tree(tmp_path / str(i), entry(cubin(), passed=mapped.params(**changed)))
        with Both(c, fake, root) as both:
            python, found = both.told("copied", call(columns=64))
            assert python == found
            seen.add(found[0].params[1])
    assert len(seen) == len(LEGAL)


def test_the_same_launches_of_a_plan(both: Both) -> None:
    """A temporary lies in scratch, of which no address is known before the launch."""
    for stream_of_calls in range(2):
        python, c = both.told("copied_twice", {"x": matrix(X), "out": matrix(OUT)})
        first, second = c
        assert first.params[2][16:24] == second.params[1][16:24], stream_of_calls
        assert first.params[1][16:24] == X.to_bytes(8, "little")
        assert second.params[2][16:24] == OUT.to_bytes(8, "little")
        strip = [[p[:16] + p[24:] for p in launch.params[1:3]] for launch in python]
        assert strip == [[p[:16] + p[24:] for p in launch.params[1:3]] for launch in c]
        plain = [launch._replace(params=()) for launch in python]
        assert without_addresses_of_temporaries(plain, X, OUT) == [n._replace(params=()) for n in c]


@pytest.mark.parametrize(("what", "given", "why"), OUT_OF_RANGE)
def test_calls_that_break_a_rule_are_refused_in_the_same_words(
    both: Both, what: str, given: dict[str, Any], why: str
) -> None:
    python, c = both.told("copied", given)
    assert python == c, what
    assert c.startswith("SelectionError")
    assert why in c
    assert MADE not in both.fake.names()


def test_what_is_admitted_breaks_no_rule(c: ctypes.CDLL, fake: FakeCuda, tmp_path: Path) -> None:
    """Random calls of random maps: the driver refuses none that got through, and both decide alike."""
    rng, ran, refused = random.Random(5), 0, 0
    for round_ in range(12):
        interleave = rng.choice(["none", "none", "16b", "32b"])
        shape: list[Any] = [["arg", "most"], dim("N")]
        strides: list[Any] = [["stride", "x"]]
        box = [rng.choice([1, 8, 64, 256]), rng.choice([8, 16, 32, 64])]
        if interleave != "none":
            shape, strides, box = [dim("M"), *shape], [["mul", 2, dim("N")], *strides], [1, *box]
        changed = {
            "shape": shape, "strides": strides, "box": box, "interleave": interleave,
            "swizzle": "32b" if interleave == "32b" else rng.choice(["none", "128b"]),
        }  # fmt: skip
        root = mapped.tree(tmp_path / str(round_), entry(cubin(), passed=mapped.params(**changed)))
        with Both(c, fake, root) as both:
            for _ in range(12):
                columns = rng.choice([8, 16, 24, 33, 64, 4096])
                pitch = columns + rng.choice([0, 8, 16, 3])
                most = rng.choice([-1, 0, 1, 5, 1 << 32, (1 << 32) + 1])
                x = matrix(X + rng.choice([0, 16, 32, 64, 4]), 6, columns, pitch)
                python, found = both.told(
                    "copied", {"x": x, "out": matrix(OUT, 6, columns, 4096), "most": most}
                )
                assert python == found
                assert fake.c.fake_broken_rule() == 0, found
                refused += isinstance(found, str)
                ran += not isinstance(found, str)
    assert min(ran, refused) > 20


# ---- libkiln


def test_maps_are_made_once_for_an_address(c: ctypes.CDLL, fake: FakeCuda, tmp_path: Path) -> None:
    root = mapped.tree(tmp_path)
    fake.know(root, parse_manifest((root / "sm_90a" / "MANIFEST.json").read_bytes()))
    with libkiln.Library(c, root, "cuda", driver_path=fake.path) as library:
        fake.c.fake_push(0)
        bound = library.copied.bind(**call())
        assert fake.names().count(MADE) == 2
        library.seal()
        fake.reset()
        bound.launch(0x51)
        bound.launch(0x52)
        assert fake.names() == ["cuCtxGetCurrent", LAUNCHED] * 2
        fake.reset()
        bound.rebind(x=matrix(X + 4096))
        assert fake.names() == [MADE]
        bound.launch(0x51)
        (launch,) = fake.launches()
        assert launch.params[1][16:24] == (X + 4096).to_bytes(8, "little")
        for given in (call(), call(5)):
            fake.reset()
            library.copied(**given, stream=0x51)
            assert set(fake.names()) == {"cuCtxGetCurrent", MADE, LAUNCHED}
        bound.free()
        fake.c.fake_pop()


def test_what_the_driver_refuses_is_typed_and_changes_nothing(
    c: ctypes.CDLL, fake: FakeCuda, tmp_path: Path
) -> None:
    root = mapped.tree(tmp_path)
    fake.know(root, parse_manifest((root / "sm_90a" / "MANIFEST.json").read_bytes()))
    with libkiln.Library(c, root, "cuda", driver_path=fake.path) as library:
        bound = library.copied.bind(**call(most=3))
        for code in (1, 201):
            fake.c.fake_fail_named(MADE.encode(), code)
            why = rf"copied\.mapped: {MADE} returned {code} "
            with pytest.raises(DriverError, match=why):
                library.copied(**call())
            with pytest.raises(DriverError, match=why):
                library.copied.bind(**call())
            with pytest.raises(DriverError, match=why):
                bound.rebind(x=matrix(X + 4096))
            fake.reset()
            bound.rebind(x=matrix(X))
            bound.launch(0x51)
            assert fake.launches()[-1].params[1][16:24] == X.to_bytes(8, "little")
        fake.reset()
        fake.c.fake_fail(1, 1)  # the second map, when the first is made
        with pytest.raises(DriverError, match=MADE):
            bound.rebind(x=matrix(X + 4096), out=matrix(OUT + 4096))
        assert fake.names() == [MADE] * 4
        bound.launch(0x51)
        kept = fake.launches()[-1].params[1:3]
        assert [p[16:24] for p in kept] == [X.to_bytes(8, "little"), OUT.to_bytes(8, "little")]
        bound.free()


def test_a_driver_that_makes_no_maps_is_told(c: ctypes.CDLL, fake: FakeCuda, tmp_path: Path) -> None:
    """Both say so of the candidate, and nothing is loaded for it."""
    old = FakeCuda(tmp_path, "-DcuTensorMapEncodeTiled=cuTensorMapOfLater")
    root = mapped.tree(tmp_path)
    told = []
    with libkiln.Library(c, root, "cuda", driver_path=old.path) as library:
        with pytest.raises(SelectionError, match="libcuda has no cuTensorMapEncodeTiled; update the driver"):
            library.copied(**call())
        told.append(library.copied.explain(**call()))
        assert library.prepare(["copied"]) == 0
    driver = RecordingDriver(parse_manifest((root / "sm_90a" / "MANIFEST.json").read_bytes()))
    driver.encode_address = None
    with kiln.load(root, CudaDevice(0, driver)) as python:
        told.append(str(python.explain("copied", **call())))
    assert told[0] == told[1]


def test_a_bit_of_small_tensors_is_cleared_where_drivers_need_it(
    c: ctypes.CDLL, fake: FakeCuda, tmp_path: Path
) -> None:
    root = mapped.tree(tmp_path)
    manifest = parse_manifest((root / "sm_90a" / "MANIFEST.json").read_bytes())
    fake.know(root, manifest)
    for version, rows, mended in ((13010, 1024, True), (13010, 1025, False), (13020, 1024, False)):
        fake.c.fake_device(9, 0, version, 1, 0)
        with libkiln.Library(c, root, "cuda", driver_path=fake.path) as library:
            x: View = matrix(X, rows, 64)
            library.copied(x=x, out=matrix(OUT, rows, 64))
        word = int.from_bytes(fake.launches()[-1].params[1][8:16], "little")
        assert word == (1 << 64) - 1 - (mended << 21)
        fake.reset()
