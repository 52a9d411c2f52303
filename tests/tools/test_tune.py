"""`kiln tune`: a bundle of two candidates, measured on a driver whose memory is the host's and whose clock
is told, kept as samples, accepted into a database, and seen by the next plan."""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest

from kiln.backends.cuda import tuned
from kiln.backends.cuda.backend import CudaBackend
from kiln.recipes.gemm import MATMUL_BT
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.entities import Contract
from kiln.runtime.errors import ContextLostError, KilnError
from kiln.runtime.load import load
from kiln.runtime.verify import verify_tree
from kiln.tests.runtime.fake_driver import CUresult, Function, read_params
from kiln.tests.tools.host_driver import GraphDriver
from kiln.tools import cli, tune_device
from kiln.tools.tune_check import differs
from kiln.tools.tune_plan import NAME, TREE, Call, Plan, read_plans
from kiln.tools.tune_run import Event, Journal, TuneError, measure, pick
from kiln.tools.tune_worker import Worker

Array: TypeAlias = np.ndarray[Any, Any]

FAST, SLOW = "f32_any", "f32_any_unaligned"
SHAPES = ("M=3,N=32,K=64", "M=40,N=32,K=64")
GROUP = "out=f32 weight=f32 x=f32"


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    code = cli.main([*words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of two f32 candidates."""
    bundle = tmp_path_factory.mktemp("tune") / "bundle"
    shapes = [word for s in SHAPES for word in ("--shape", s)]
    words = ["tune", "matmul_bt", "--target", "sm_90a", "--out", str(bundle), "--candidate", "f32_*", *shapes]
    assert cli.main([*words, "--jobs", "1"]) == 0
    return bundle


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "bundle"))


class TuneDriver(GraphDriver):
    """A device that multiplies on the host; each kernel takes the microseconds it is told, by its file's
    hash."""

    CUdevice_attribute = SimpleNamespace(
        **vars(GraphDriver.CUdevice_attribute),
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE=38,
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE=13,
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE=36,
    )

    def __init__(self, files: dict[str, bytes], micros: dict[str, float]) -> None:
        super().__init__(self._multiply)
        self.names = {hashlib.sha256(data).hexdigest(): name for name, data in files.items()}  # type: ignore[assignment]
        self.micros, self.clock = micros, 0.0
        self.after: Callable[[str, Array], None] = lambda name, out: None
        self.ran: list[str] = []
        self.freed: list[Any] = []

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:
        told = {38: 1 << 20, 13: 1_980_000, 36: 3_201_000}.get(attribute)
        return (
            super().cuDeviceGetAttribute(attribute, device) if told is None else (CUresult.CUDA_SUCCESS, told)
        )

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        status, _ = super().cuModuleGetFunction(module, name)
        known: Any = self.names
        function = Function(("function", known[hashlib.sha256(module[1]).hexdigest()].encode()))
        function.context = self.stack[-1]
        self._functions[id(function)] = function
        return status, function

    def _multiply(self, name: str, params: int) -> None:
        x, weight, out, m, n, k, *strides = read_params(params, "QQQiiiqqqQQ")
        a, b = (
            _array(at, rows, k, stride) for at, rows, stride in ((x, m, strides[0]), (weight, n, strides[1]))
        )
        found = _array(out, m, n, strides[2])
        found[...] = a @ b.T
        self.after(name, found)
        self.ran.append(name)
        self.clock += self.micros[name]

    def cuMemFree(self, address: int) -> Any:
        self.freed.append(self._held[address])  # so that no later memory takes its place
        return super().cuMemFree(address)

    def cuMemcpyDtoD(self, to: int, source: int, size: int) -> Any:
        ctypes.memmove(to, source, size)
        return (CUresult.CUDA_SUCCESS,)

    def cuEventCreate(self, flags: int) -> Any:
        return CUresult.CUDA_SUCCESS, SimpleNamespace(at=0.0)

    def cuEventRecord(self, event: Any, stream: int) -> Any:
        event.at = self.clock
        return (CUresult.CUDA_SUCCESS,)

    def cuEventSynchronize(self, event: Any) -> Any:
        return (CUresult.CUDA_SUCCESS,)

    def cuEventElapsedTime(self, begin: Any, end: Any) -> Any:
        return CUresult.CUDA_SUCCESS, (end.at - begin.at) / 1e3

    def cuGraphDestroy(self, graph: Any) -> Any:
        return (CUresult.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, graph: Any) -> Any:
        return (CUresult.CUDA_SUCCESS,)


def _array(address: int, rows: int, columns: int, stride: int) -> Array:
    flat = (ctypes.c_float * (stride * rows)).from_address(address)
    found: Array = np.ctypeslib.as_array(flat).reshape(rows, stride)
    return found[:, :columns]


def driver_of(bundle: Path, fast: float = 5.0, slow: float = 9.0) -> TuneDriver:
    files = {v: (bundle / TREE / "sm_90a" / f"matmul_bt.{v}.cubin").read_bytes() for v in (FAST, SLOW)}
    return TuneDriver(files, {FAST: fast, SLOW: slow})


def spawner(driver: TuneDriver, limit: int = 10**9) -> Callable[[Event], Iterator[Event]]:
    """Workers in this process; each says at most `limit` things before it ends."""

    def spawn(request: Event) -> Iterator[Event]:
        device = CudaDevice(0, driver=driver)
        bundle = Path(request["bundle"])
        said = 0
        try:
            with load(bundle / TREE, device) as library, device.current():
                worker = Worker(library, device, read_plans(bundle)[0], request["deadline"], request["lost"])
                yield {"head": worker.head()}
                for event in worker.run(
                    [Call(c["group"], c["shape"], tuple(c["candidates"])) for c in request["calls"]]
                ):
                    yield event
                    said += 1
                    if said >= limit:
                        yield {"ended": "its worker ended with -11"}
                        return
        except ContextLostError as lost:
            yield {"lost": str(lost)}

    return spawn


def measured(bundle: Path, driver: TuneDriver, **more: Any) -> Any:
    plan = read_plans(bundle)[0]
    budget = more.pop("budget", None)
    return measure(plan, bundle, bundle / "samples.jsonl", budget, 0, spawner(driver, **more))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_device, "BLOCK", 5000)


def test_operands_lie_in_memory_that_is_there(bundle: Path) -> None:
    driver = driver_of(bundle)
    device = CudaDevice(0, driver=driver)
    with load(bundle / TREE, device) as library, device.current():
        bench = tune_device.Bench(device)
        types = read_plans(bundle)[0].groups[GROUP].types
        for k in (64, 1 << 19, 64):  # the second weight is larger than all memory of the first call
            shape = {"M": 3, "N": 40, "K": k}
            sets = bench.operands(library.op("matmul_bt").sig, types, shape)
            live = [(at, at + len(buffer) - (1 << 20)) for at, buffer in driver._held.items()]
            for operands in sets:
                for view in (operands["x"], operands["weight"], *operands["out"]):
                    size = 4 * view.shape[0] * view.shape[1]
                    assert any(low <= view.ptr and view.ptr + size <= high for low, high in live)
            assert np.isfinite(bench.whole(sets[-1]["weight"])).all()
            assert len({operands["weight"].ptr for operands in sets}) > 1 or k > 64


def test_a_bundle_is_a_tree_that_verifies_and_a_plan(made: Path) -> None:
    assert list(verify_tree(made / TREE)) == []
    plan = read_plans(made)[0]
    assert (plan.op, plan.target, plan.along) == ("matmul_bt", "sm_90a", "M")
    assert [dict(s) for s in plan.shapes] == [{"M": 3, "N": 32, "K": 64}, {"M": 40, "N": 32, "K": 64}]
    own = {
        j.variant: j.inputs_digest
        for j in CudaBackend().candidate_jobs("matmul_bt", ("kiln.recipes",), "sm_90a")
    }
    assert dict(plan.candidates) == {FAST: own[FAST], SLOW: own[SLOW]}
    assert plan.groups[GROUP].trusted == SLOW


def test_a_second_build_of_a_bundle_compiles_nothing(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (bundle / TREE / "INDEX.json").read_bytes()
    args = ("tune", "matmul_bt", "--target", "sm_90a", "--out", str(bundle), "--candidate", "f32_*")
    code, document, _ = told(capsys, *args)
    assert (code, document["failures"]) == (0, [])
    assert (bundle / TREE / "INDEX.json").read_bytes() == before
    assert document["targets"]["sm_90a"]["shapes"] == 378  # the op's own, now that none are named


def test_measuring_checks_times_and_keeps(bundle: Path) -> None:
    report = measured(bundle, driver_of(bundle))
    assert (report.measured, report.left, dict(report.failed)) == (4, 0, {})
    run = Journal.open(bundle / "samples.jsonl", resume=False).run()
    assert run.device == "Host H200"
    assert run.clocks.startswith("at most 1980 MHz, memory 3201 MHz")
    assert run.assembler.startswith("ptxas 13")
    times = {(row.shape["M"], n): t.us for row in run.rows for n, t in row.times.items()}
    assert times == {(3, FAST): 5.0, (3, SLOW): 9.0, (40, FAST): 5.0, (40, SLOW): 9.0}


def test_a_hopeless_candidate_is_replayed_once(bundle: Path) -> None:
    measured(bundle, driver_of(bundle, slow=50.0))
    lines = Journal.open(bundle / "samples.jsonl", resume=False).lines
    assert {line["candidate"]: line["replays"] for line in lines} == {FAST: 9, SLOW: 1}


def test_wrong_numbers_are_never_timed(bundle: Path) -> None:
    driver = driver_of(bundle)

    def spoil(name: str, out: Array) -> None:
        if name == FAST and out.shape[0] == 40:
            out[16, 3] += 9.0  # only in a call that is measured, not in the small ones

    driver.after = spoil
    report = measured(bundle, driver)
    assert "the worst element is" in report.failed[FAST]
    run = Journal.open(bundle / "samples.jsonl", resume=False).run()
    assert {(row.shape["M"], n) for row in run.rows for n in row.times} == {(3, FAST), (3, SLOW), (40, SLOW)}


def test_what_all_candidates_get_wrong_is_seen_beside_float64(bundle: Path) -> None:
    driver = driver_of(bundle)

    def spoil(name: str, out: Array) -> None:
        out *= np.float32(1.01)

    driver.after = spoil
    report = measured(bundle, driver)
    assert report.measured == 0
    assert all("beside float64" in why for why in report.failed.values())


def test_an_output_that_is_not_written_is_seen(bundle: Path) -> None:
    driver = driver_of(bundle)
    driver.after = lambda name, out: out[-1:].fill(np.nan) if name == FAST and out.shape[0] == 40 else None
    assert "not written, or wrong" in measured(bundle, driver).failed[FAST]


def test_bits_that_change_are_seen(bundle: Path) -> None:
    driver = driver_of(bundle)

    def drift(name: str, out: Array) -> None:
        if name == FAST:
            out[0, 0] += np.float32(1e-6 * len(driver.ran))

    driver.after = drift
    assert "two runs of one call differ in bits" in measured(bundle, driver).failed[FAST]


def test_a_worker_that_ends_is_replaced_without_its_candidate(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = driver_of(bundle)

    def fault(name: str, out: Array) -> None:
        if name == FAST and out.shape == (40, 32):
            driver.fail["cuStreamSynchronize"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS

    driver.after = fault
    inner = spawner(driver)

    def spawn(request: Event) -> Iterator[Event]:
        driver.fail.clear()
        return inner(request)

    plan = read_plans(bundle)[0]
    report = measure(plan, bundle, bundle / "samples.jsonl", None, 0, spawn)
    assert "a kernel accessed memory it may not" in report.failed[FAST]
    assert f"{FAST}: " in capsys.readouterr().err
    run = Journal.open(bundle / "samples.jsonl", resume=False).run()
    assert {(row.shape["M"], n) for row in run.rows for n in row.times} == {(3, FAST), (3, SLOW), (40, SLOW)}


def test_a_trusted_candidate_that_ends_workers_is_trusted_no_more(bundle: Path) -> None:
    driver = driver_of(bundle)

    def fault(name: str, out: Array) -> None:
        if name == SLOW and out.shape == (40, 32):
            driver.fail["cuStreamSynchronize"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS

    driver.after = fault
    inner, started = spawner(driver), []

    def spawn(request: Event) -> Iterator[Event]:
        started.append(request["lost"])
        driver.fail.clear()
        return inner(request)

    plan = read_plans(bundle)[0]
    assert plan.groups[GROUP].trusted == SLOW
    report = measure(plan, bundle, bundle / "samples.jsonl", None, 0, spawn)
    assert started == [[], [SLOW]]
    assert (report.measured, list(report.failed)) == (3, [SLOW])


def test_an_interrupted_run_goes_on(bundle: Path) -> None:
    assert measured(bundle, driver_of(bundle), budget=0.0).left == 4
    journal = bundle / "samples.jsonl"
    assert measured(bundle, driver_of(bundle)).measured == 4
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # killed while writing
    with pytest.raises(TuneError, match="the last line is cut short"):
        Journal.open(journal, resume=False)
    report = measured(bundle, driver_of(bundle))
    assert (report.measured, report.left) == (4, 0)
    assert sorted(journal.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_samples_of_another_bundle_are_not_mixed(bundle: Path) -> None:
    measured(bundle, driver_of(bundle))
    path = bundle / "samples.jsonl"
    path.write_bytes(path.read_bytes().replace(b"Host H200", b"Other", 1))
    (bundle / NAME).write_bytes((bundle / NAME).read_bytes().replace(b'"M": 40', b'"M": 41'))
    with pytest.raises(TuneError, match="of another device"):
        measured(bundle, driver_of(bundle))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda s: s.replace('"kiln_samples": 1', '"kiln_samples": 2'), "its first line is no header"),
        (lambda s: s.replace('"us": 5.0', '"us": -5.0'), "a positive median"),
        (lambda s: s.replace('"us": 5.0', '"us": "5"'), "expected a number"),
        (lambda s: s.replace('"group"', '"gruop"'), "is no sample"),
        (lambda s: s.replace('"date"', '"data"'), "its header lacks date"),
        (lambda s: s.replace('{"candidate"', '["candidate"', 1), "is not JSON"),
        (lambda s: "", "there are no samples"),
    ],
)
def test_corrupted_samples_are_refused(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[str], str],
    sentence: str,
) -> None:
    measured(bundle, driver_of(bundle))
    path = bundle / "samples.jsonl"
    path.write_text(spoil(path.read_text()))
    code, document, _ = told(capsys, "tune", "--accept", str(path), "--database", str(tmp_path / "db"))
    assert code == 2
    assert sentence in document["error"]["message"]
    assert not (tmp_path / "db").exists()


def test_accepted_samples_choose(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(bundle, driver_of(bundle, fast=9.0, slow=5.0))
    words = ("tune", "--accept", str(bundle / "samples.jsonl"), "--database", str(tmp_path))
    code, document, err = told(capsys, *words)
    assert (code, err) == (0, "")
    assert document["accepted"][0]["samples"] == 4
    assert document["accepted"][0]["changed"] is True
    assert told(capsys, *words)[1]["accepted"][0]["changed"] is False
    code, document, _ = told(capsys, "tune", "matmul_bt", "--target", "sm_90a", "--database", str(tmp_path))
    chosen = [c for c in document["choices"] if c["group"] == GROUP]
    assert [(c["call"], c["candidate"], c["runner_up"], c["margin"], c["basis"]) for c in chosen] == [
        (call, SLOW, FAST, 1.8, "measured") for call in ("M=3 N=32 K=64", "M=40 N=32 K=64", "M=3", "M=40")
    ]
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path)
    jobs = {j.variant: j for j in CudaBackend().plan({"matmul_bt": MATMUL_BT}, ("kiln.recipes",), "sm_90a")}
    assert [s["variant"] for s in jobs[SLOW].selections] == [f"{SLOW}.shapes", f"{SLOW}.rows", SLOW]
    assert [s["variant"] for s in jobs[FAST].selections] == [FAST]


def test_accepting_tells_what_is_stale(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(bundle, driver_of(bundle))
    path = bundle / "samples.jsonl"
    digest = read_plans(bundle)[0].candidates[FAST]
    path.write_text(path.read_text().replace(digest, "0" * 64))
    _, _, err = told(capsys, "tune", "--accept", str(path), "--database", str(tmp_path))
    assert f"matmul_bt.{FAST}: It was measured on" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("tune",), "name an op"),
        (("tune", "matmul_bd"), "did you mean matmul_bt"),
        (("tune", "matmul_bt", "--out", "b"), "name the target"),
        (("tune", "matmul_bt", "--out", "b", "--target", "sm_90b"), "sm_90a"),
        (("tune", "matmul_bt", "--out", "b", "--target", "sm_90a", "--shape", "M=x"), "expected sizes"),
        (("tune", "matmul_bt", "--out", "b", "--target", "sm_90a", "--candidate", "no*"), "no candidate"),
        (("tune", "--run", "nowhere"), "is no tuning bundle"),
        (("tune", "--run", "nowhere", "--device", "cpu"), "expected cuda"),
        (("tune", "--accept", "nowhere"), "no samples file"),
    ],
)
def test_usage_errors_say_what_to_type(
    words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code, document, _ = told(capsys, *words)
    assert code == 2
    assert sentence in document["error"]["message"]


def test_a_bundle_of_two_targets_needs_a_name(made: Path) -> None:
    plan = read_plans(made)[0]
    other = Plan(1, plan.op, "sm_80", plan.along, plan.groups, plan.shapes)
    assert pick([plan, other], "sm_80") is other
    with pytest.raises(Exception, match="name one of them"):
        pick([plan, other], None)


def test_the_real_worker_says_why_it_cannot_work(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        CudaDevice(0)
    except KilnError:
        code, document, _ = told(capsys, "tune", "--run", str(bundle))
        assert code == 2
        assert "the device cannot be used" in document["error"]["message"]
    else:
        pytest.skip("a CUDA device is here, so that the worker can work")


ENVELOPE = Contract("envelope", 1e-2, 4.0)
ONES = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("found", "factor", "sentence"),
    [
        (ONES, 1.0, None),
        (ONES * np.float32(1 + 3e-7), 1.0, None),
        (ONES * np.float32(1 + 8e-7), 1.0, "the worst element"),
        (ONES * np.float32(1 + 8e-7), 2.0, None),
        (np.full((2, 2), np.inf, np.float32), 1.0, "not written, or wrong"),
    ],
)
def test_a_contract_decides(found: Any, factor: float, sentence: str | None) -> None:
    why = differs(found, ONES, ENVELOPE, factor)
    assert why is None if sentence is None else why is not None and sentence in why


def test_an_exact_contract_allows_nothing() -> None:
    assert (
        differs(ONES * np.float32(1 + 3e-7), ONES, Contract("exact", 0.0, 0.0), 2.0)
        == "4 of 4 elements differ"
    )
