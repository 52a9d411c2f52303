"""What a sealed library does in a launch: nothing but launch, or an error that names the op."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import proof
from kiln.runtime.arrays import View, described
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.entities import Kernel
from kiln.runtime.errors import UnavailableError
from kiln.runtime.select import entry_of
from kiln.tests.runtime.fake_driver import CUresult, FakeDriver
from kiln.tests.runtime.test_cuda import CudaArray, entry, opened, tree
from kiln.tools.cases import STYLES, Case, Deriver, Judge, arguments, internal_ops, views

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "aot_artifacts"
TARGET = "sm_90a"
BASE = 1 << 34
LAUNCH = "cuLaunchKernelEx"


def derived(lib: kiln.Library) -> dict[str, Case]:
    """A call for each kernel and plan of the target, by op.variant."""
    found = {}
    internal = internal_ops(lib.manifests[TARGET].recipes)
    for name in lib.manifests[TARGET].ops:
        operation = lib.operation(TARGET, name)
        for c in () if name in internal else operation.candidates:
            if entry_of(c, operation.candidates) is not None:
                continue  # the same kernel, for sizes that are too big to derive
            deriver = Deriver(Judge(operation, 0, BASE), c)
            cases = (deriver.find(style, n) for n, style in enumerate(STYLES))
            found[f"{name}.{c.variant}"] = next(case for case in cases if case is not None)
    return found


def call_of(lib: kiln.Library, case: Case, base: int = BASE) -> dict[str, Any]:
    return arguments(lib.op(case.op).sig, case, views(case, base, 0))


def without_rows(lib: kiln.Library, named: dict[str, Any]) -> dict[str, Any] | None:
    """The same call of no rows; None where rows are not the first axis of what is read and written."""
    sig = lib.op(named["op"]).sig
    short = dict(named)
    outs = dict(zip(sig.returns, named["out"], strict=True))
    for t in sig.tensors:
        v = outs.get(t.name) if t.role == "out" else named.get(t.name)
        if v is not None and t.shape[0] == ("dim", sig.rows):
            cut = v._replace(shape=(0, *v.shape[1:]))
            outs = {n: cut if n == t.name else o for n, o in outs.items()}
            if t.role != "out":
                short[t.name] = cut
    short["out"] = tuple(outs.values())
    return short if short != named else None


@pytest.fixture(scope="module")
def shipped(way: str) -> tuple[kiln.Library, FakeDriver, dict[str, Case]]:
    """The committed tree, sealed after every kernel was prepared and every call's scratch reserved; from then
    on the driver may only launch."""
    driver = FakeDriver()
    driver.stack = [0xC0]
    lib = kiln.load(SHIPPED, CudaDevice(0, driver))
    cases = derived(lib)
    lib.prepare(calls=((c.op, call_of(lib, c)) for c in cases.values()), stream=7)
    lib.seal()
    driver.allowed = {LAUNCH}
    return lib, driver, cases


def test_every_shipped_call_only_launches(shipped: Any) -> None:
    lib, driver, cases = shipped
    kernels = {f"{k.op}.{k.variant}" for k in lib.manifests[TARGET].kernels}
    assert len(cases) > 100
    for label, case in cases.items():
        for base in (BASE, BASE + (1 << 30)):
            before = len(driver.launches)
            lib.op(case.op)(**call_of(lib, case, base), stream=7)
            count = len(driver.launches) - before
            assert count == 1 if label in kernels else count >= 1, label
            assert driver.launches[-1]["config"].hStream == 7
    assert {f"{op}.{v}" for op, counts in lib.stats().items() for v in counts} >= set(cases)


def test_bound_calls_only_launch(shipped: Any) -> None:
    lib, driver, cases = shipped
    for label, case in cases.items():
        bound = lib.op(case.op).bind(**call_of(lib, case), stream=7)
        before = len(driver.launches)
        bound()
        bound()
        assert f"{case.op}.{bound.variant}" == label
        assert len(driver.launches) - before >= 2


def test_no_rows_and_other_shapes_only_launch(shipped: Any) -> None:
    lib, driver, cases = shipped
    tried = 0
    for case in cases.values():
        named = without_rows(lib, {"op": case.op, **call_of(lib, case)})
        if named is None or "k" in named:
            continue
        before = len(driver.launches)
        try:
            lib.op(named.pop("op"))(**named, stream=7)
        except kiln.ContractError:
            # Some ops take no fewer rows than a block of them.
            continue
        assert len(driver.launches) == before
        tried += 1
    assert tried > 50
    x = View(BASE, (123, 5120), (5120, 1), "bf16", 0, False, None)
    w = View(BASE + (1 << 28), (5120,), (1,), "bf16", 0, False, None)
    before = len(driver.launches)
    lib.rms_norm(x, w, out=(x._replace(ptr=BASE + (1 << 29)),), stream=99)
    assert len(driver.launches) == before + 1
    assert driver.launches[-1]["config"].gridDimX >= 1


def test_the_strict_driver_is_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "prove_launch", lambda *_: [])
    driver = FakeDriver()
    lib = opened(tree(tmp_path, entry("a")), driver)
    lib.prepare()
    driver.allowed = {LAUNCH}
    with pytest.raises(AssertionError, match="cuCtxGetCurrent"):
        lib.negate(CudaArray((4, 32)), out=CudaArray((4, 32), 2 << 20))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[kiln.Library, FakeDriver]:
    """A library of two variants by alignment, not yet prepared, on a driver whose context is current."""
    monkeypatch.setattr(proof, "prove_launch", lambda *_: [])
    driver = FakeDriver()
    driver.stack = [0xC0]
    return opened(tree(tmp_path, entry("aligned", tier="fast"), entry("plain", align=4)), driver), driver


X, OUT, ODD = CudaArray((4, 32)), CudaArray((4, 32), 2 << 20), CudaArray((4, 32), (3 << 20) + 4)


def test_what_was_not_loaded_is_refused_by_name(small: Any) -> None:
    lib, driver = small
    lib.negate(X, out=OUT)
    lib.seal()
    driver.allowed = {LAUNCH}
    lib.negate(X, out=OUT)
    with pytest.raises(UnavailableError, match=r"negate\.plain is not loaded and the library is sealed"):
        lib.negate(ODD, out=OUT)


def test_outputs_are_not_allocated_from_the_driver(small: Any) -> None:
    lib, driver = small
    lib.prepare()
    for _ in range(3):
        lib.negate(X)
    lib.seal()
    driver.allowed = {LAUNCH, "cuMemFreeAsync"}
    for _ in range(3):
        with pytest.raises(UnavailableError, match=r"negate\.aligned: the output out would be allocated"):
            lib.negate(X)
    with pytest.raises(UnavailableError, match="the output out would be allocated"):
        lib.negate.bind(X)
    assert lib.negate(CudaArray((0, 32))).shape == (0, 32)
    assert lib.negate(X, out=OUT) is OUT


def test_sealed_on_the_cpu(tree: Path) -> None:
    x = np.ones((3, 4), np.float32)
    with kiln.load(tree) as lib:
        lib.prepare(["negate"])
        lib.seal()
        assert np.array_equal(lib.negate(x), -x)
        with pytest.raises(UnavailableError, match=r"scale_add\.base is not loaded"):
            lib.scale_add(x, x)


def test_a_load_during_capture_is_refused_by_name(small: Any) -> None:
    lib, driver = small
    driver.capturing = {5}
    with pytest.raises(
        UnavailableError, match=r"variant negate\.aligned was not prepared before graph capture"
    ):
        lib.negate(X, out=OUT, stream=5)
    assert "cuModuleLoadData" not in driver.names()
    lib.negate(X, out=OUT, stream=6)
    lib.negate(X, out=OUT, stream=5)
    assert driver.names().count("cuStreamIsCapturing") == 2, "asked only where a load is needed"


def test_a_capture_that_the_default_stream_would_join(small: Any) -> None:
    lib, driver = small
    driver.fail["cuStreamIsCapturing"] = CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    with pytest.raises(UnavailableError, match="not prepared before graph capture"):
        lib.negate(X, out=OUT)
    driver.fail["cuStreamIsCapturing"] = CUresult.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(kiln.DriverError, match="400"):
        lib.negate(X, out=OUT)
    del driver.fail["cuStreamIsCapturing"]
    assert lib.negate(X, out=OUT) is OUT


def test_reserve_takes_arrays_that_are_not_there_yet(small: Any) -> None:
    lib, driver = small
    assert lib.reserve("negate", described((4, 32), "f32", 0)) == 0
    assert lib.loaded == ("negate.aligned",)
    assert isinstance(lib.op("negate").candidates[0], Kernel)
    lib.seal()
    driver.allowed = {LAUNCH}
    lib.negate(X, out=OUT)
