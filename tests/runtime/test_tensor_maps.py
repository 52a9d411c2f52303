"""Kernels that take tensor maps made by the host, in the Python runtime: manifest, launch proof, selection,
and what the driver is given when."""

from pathlib import Path
from typing import Any

import pytest

import kiln.runtime as kiln
from kiln.runtime import cuda_maps
from kiln.runtime.cubin import read_cubin
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.dtypes import DTYPES
from kiln.runtime.errors import DriverError, SchemaError, SelectionError
from kiln.runtime.manifest import canonical_json, dump, parse_kernel, parse_manifest
from kiln.runtime.proof import prove_launch
from kiln.runtime.tensor_map import ALIGN, BYTES, ELEMENTS, SMALL, SMALL_FIXED_IN
from kiln.tests.runtime import mapped
from kiln.tests.runtime.fake_driver import CUresult, FakeDriver, TensorMap, read_params
from kiln.tests.runtime.mapped import LEGAL, OUT, OUT_OF_RANGE, REFUSED, X, call, cubin, entry, matrix
from kiln.tests.runtime.trees import MN, pointer, value

FORMATS = "iMMQ"
PARAMS = 4


def opened(root: Path, driver: FakeDriver, *entries: Any) -> kiln.Library:
    return kiln.load(mapped.tree(root, *entries), device=CudaDevice(0, driver))


def current(version: int = 13000) -> FakeDriver:
    """A driver with the device's context current."""
    driver = FakeDriver(version=version)
    driver.stack = [0xC0]
    return driver


# ---- manifests


def test_maps_round_trip() -> None:
    data = canonical_json(mapped.document())
    parsed = parse_manifest(data, "sm_90a")
    assert canonical_json(dump(parsed)) == data
    _, x, out, _ = parsed.kernels[0].params
    assert (x.operand, x.access, x.align) == ("x", "read", None)
    assert out.map is not None
    assert (out.map.box, out.map.swizzle, out.map.shape) == ((64, 64), "128b", (("dim", "M"), ("dim", "N")))


@pytest.mark.parametrize(("field", "found", "why"), REFUSED)
def test_maps_that_break_a_rule_are_refused(field: str, found: Any, why: str) -> None:
    broken = entry(cubin(), passed=mapped.params(**{field: found}))
    with pytest.raises(SchemaError, match=why):
        parse_manifest(canonical_json(mapped.document(broken)), "sm_90a")


@pytest.mark.parametrize("changed", LEGAL, ids=str)
def test_maps_that_keep_the_rules_are_read(changed: Any) -> None:
    fine = entry(cubin(), passed=mapped.params(**changed))
    assert parse_manifest(canonical_json(mapped.document(fine)), "sm_90a").kernels[0].params[1].map


@pytest.mark.parametrize(
    ("field", "found", "why"),
    [
        ("box", [64, 257], "an integer from 1 to 256"),
        ("box", [0, 64], "an integer from 1 to 256"),
        ("box", [1] * 6, "a list of 1 to 5 values"),
        ("shape", [], "a list of 1 to 5 values"),
        ("swizzle", "128", "one of"),
        ("interleave", None, "one of"),
        ("l2", "512b", "one of"),
        ("fill", "ones", "one of"),
    ],
)
def test_fields_of_another_kind_are_refused(field: str, found: Any, why: str) -> None:
    broken = entry(cubin(), passed=mapped.params(**{field: found}))
    with pytest.raises(SchemaError, match=rf"/params/1/map/{field}.*{why}"):
        parse_kernel(broken)


def test_nan_fills_floats_alone() -> None:
    for dtype, size in DTYPES.items():
        box = [8, 16 // size]
        x = mapped.tensor_map("x", dtype=dtype, fill="nan", box=box, swizzle="32b")
        made = canonical_json(mapped.document(entry(cubin(), passed=[x])))
        if dtype in ("f16", "bf16", "f32", "f64"):
            parse_manifest(made, "sm_90a")
        else:
            with pytest.raises(SchemaError, match=f"param x fills {dtype} with NaN"):
                parse_manifest(made, "sm_90a")


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "cpu-x86_64"])
def test_targets_without_a_copy_engine_have_none(target: str) -> None:
    isa = {"tier": "x86-64", "features": []} if target.startswith("cpu") else None
    document = mapped.document(entry(cubin(), isa=isa), target=target)
    with pytest.raises(SchemaError, match=f"is a tensor map, which {target} has not"):
        parse_manifest(canonical_json(document), target)
    for later in ("sm_90a", "sm_100a", "sm_121a"):
        parse_manifest(canonical_json(mapped.document(entry(cubin()), target=later)), later)


def test_every_element_type_has_a_number() -> None:
    assert ELEMENTS.keys() == DTYPES.keys()


def test_the_access_must_fit_the_role() -> None:
    for x, why in (
        (mapped.tensor_map("x", "write"), "is a write of the in operand x"),
        (mapped.tensor_map("z", strides=[8]), "points to 'z', which is no tensor or scratch"),
    ):
        with pytest.raises(SchemaError, match=why):
            parse_manifest(canonical_json(mapped.document(entry(cubin(), passed=[x]))), "sm_90a")


# ---- the launch proof

ASSEMBLERS = [("sm_90a", "ptxas"), ("sm_90a", "ptxas-blackwell"), ("sm_100a", "ptxas-blackwell")]


@pytest.mark.parametrize(("arch", "tool"), ASSEMBLERS)
def test_places_of_maps_are_proved(arch: str, tool: str) -> None:
    """In the constant bank maps begin at multiples of 64, whatever the parameters' own begin there is."""
    data = cubin(arch, tool)
    found = read_cubin(data)
    assert found.abi == (7 if tool == "ptxas" else 8)
    kernel = found.kernels["copied"]
    assert [p.size for p in kernel.params] == [4, BYTES, BYTES, 8]
    assert [(kernel.param_base + p.offset) % ALIGN for p in kernel.params[1:3]] == [0, 0]
    assert kernel.param_base % ALIGN == (16 if arch == "sm_90a" else 0)
    assert prove_launch(parse_kernel(entry(data)), arch, data) == []


FALSE = [
    ([value("m", 1, "i64"), *mapped.params()[1:]], "passes 'm' as 8 bytes at offset 0"),
    ([mapped.params()[1], mapped.params()[0], *mapped.params()[2:]], "passes 'x' as 128 bytes at offset 48"),
    ([*mapped.params()[:2], pointer("out", "write", "bf16"), mapped.params()[3]], "as 8 bytes at offset 176"),
    (mapped.params()[:3], "takes 4 parameters in its file, the manifest passes 3"),
]


@pytest.mark.parametrize(("passed", "why"), FALSE)
@pytest.mark.parametrize("tool", ["ptxas", "ptxas-blackwell"])
def test_false_places_are_told(passed: list[Any], why: str, tool: str) -> None:
    data = cubin(tool=tool)
    faults = prove_launch(parse_kernel(entry(data, passed=passed)), "sm_90a", data)
    assert any(why in fault for fault in faults), faults


# ---- selection


@pytest.mark.parametrize(("what", "given", "why"), OUT_OF_RANGE)
def test_calls_that_break_a_rule_never_reach_the_driver(
    tmp_path: Path, what: str, given: dict[str, Any], why: str
) -> None:
    driver = current()
    with opened(tmp_path, driver) as lib, pytest.raises(SelectionError, match=why):
        lib.copied(**given)
    assert not driver.maps
    assert not driver.launches, what


def test_a_kernel_is_passed_over_for_what_its_map_does_not_cover(tmp_path: Path) -> None:
    data, extra = cubin(), mapped.tensor_map("extra")
    both = [entry(data), entry(data, "also", [*mapped.params()[:2], extra, mapped.params()[3]], priority=1)]
    with opened(tmp_path, current(), *both) as lib:
        told = str(lib.explain("copied", **call()))
        assert "also (generated): needs extra present" in told
        assert "mapped (generated): runs" in told
        assert "also (generated): runs" in str(lib.explain("copied", **call(extra=matrix(mapped.EXTRA))))


def test_a_driver_that_makes_no_maps_is_told(tmp_path: Path) -> None:
    driver = current()
    driver.encode_address = None
    with (
        opened(tmp_path, driver) as lib,
        pytest.raises(SelectionError, match="has no cuTensorMapEncodeTiled"),
    ):
        lib.copied(**call())


# ---- launches


def made_of(m: TensorMap) -> tuple[Any, ...]:
    return m[1:]


BF16, HOW = 9, (0, 3, 2, 0)
BOX, ONES = (64, 64), (1, 1)


def test_the_driver_is_told_what_the_manifest_says(tmp_path: Path) -> None:
    driver = current()
    with opened(tmp_path, driver) as lib:
        lib.copied(x=matrix(X, stride=96), out=matrix(OUT), most=150, stream=7)
    assert [made_of(m) for m in driver.maps] == [
        (BF16, X, (72, 150), (192,), BOX, ONES, HOW),
        (BF16, OUT, (72, 200), (144,), BOX, ONES, HOW),
    ]
    m, x, out, profile = read_params(driver.launches[-1]["params"], FORMATS)
    assert (m, profile) == (200, 0)
    for passed, made in zip((x, out), driver.maps, strict=True):
        assert made.where % ALIGN == 0
        assert passed[:8] == made.address.to_bytes(8, "little")


def test_fields_of_a_map_reach_the_driver(tmp_path: Path) -> None:
    shape = {"shape": [1, *MN], "strides": [0, ["stride", "x"]], "box": [1, 8, 8]}
    changed = {**shape, "interleave": "32b", "swizzle": "32b", "l2": "256b", "fill": "nan"}
    driver = current()
    given = call(columns=64)
    with opened(tmp_path, driver, entry(cubin(), passed=mapped.params(**changed))) as lib:
        lib.copied(**given)
        with pytest.raises(SelectionError, match="needs x aligned to 32 bytes, found it 16 bytes off"):
            lib.copied(**{**given, "x": matrix(X + 16, 200, 64)})
        with pytest.raises(SelectionError, match="maps x with a stride of 72, expected a multiple of 16"):
            lib.copied(**{**given, "x": matrix(X, 200, 64, 72)})
    assert made_of(driver.maps[0]) == (BF16, X, (64, 200, 1), (128, 0), (8, 8, 1), (1, 1, 1), (2, 1, 3, 1))


def test_a_map_is_made_again_only_for_another_address_or_shape(tmp_path: Path) -> None:
    driver = current()
    with opened(tmp_path, driver) as lib:
        for given, made in (
            (call(), [X, OUT]),
            (call(), []),
            (call(out=matrix(OUT + 512)), [OUT + 512]),
            (call(out=matrix(OUT + 512)), []),
            (call(x=matrix(X + 256), out=matrix(OUT)), [X + 256]),
            (call(), []),
            (call(rows=8), [X, OUT]),
            (call(most=9), [X, OUT]),
            (call(most=9), []),
        ):
            driver.maps.clear()
            lib.copied(**given, stream=7)
            assert [m.address for m in driver.maps] == made
            _, x, out, _ = read_params(driver.launches[-1]["params"], FORMATS)
            passed = (x[:8], out[:8])
            assert passed == tuple(given[n].ptr.to_bytes(8, "little") for n in ("x", "out"))
            if len(driver.launches) == 1:
                passed_first = [x, out]
        driver.maps.clear()
        lib.copied(**call(), stream=8)
        assert not driver.maps
        assert read_params(driver.launches[-1]["params"], FORMATS)[1:3] == passed_first


def test_a_parameter_keeps_so_many_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_maps, "MAX_KEPT", 2)
    driver = current()
    with opened(tmp_path, driver) as lib:
        for i in (0, 1, 2, 2, 0):
            lib.copied(**call(x=matrix(X + 256 * i)), stream=7)
            _, x, out, _ = read_params(driver.launches[-1]["params"], FORMATS)
            assert (x[:8], out[:8]) == ((X + 256 * i).to_bytes(8, "little"), OUT.to_bytes(8, "little"))
    assert [m.address for m in driver.maps] == [X, OUT, X + 256, X + 512, X]


@pytest.mark.parametrize(("version", "made"), [(SMALL_FIXED_IN, 1), (SMALL_FIXED_IN + 10, 3)])
def test_maps_for_an_allocation_are_not_kept(tmp_path: Path, version: int, made: int) -> None:
    """Of a small tensor, by drivers that look at it: another may be there at the next call."""
    driver = current(version)
    big = {"x": matrix(X, 2048, 64), "out": matrix(OUT, 2048, 64)}
    with opened(tmp_path, driver) as lib:
        for _ in range(3):
            lib.copied(**call(8, 64), stream=7)
        assert len(driver.maps) == 2 * made
        driver.maps.clear()
        for _ in range(3):
            lib.copied(**big, stream=7)
        assert len(driver.maps) == 2


def test_a_bound_call_makes_its_maps_when_it_is_bound(tmp_path: Path) -> None:
    driver = current()
    with opened(tmp_path, driver) as lib:
        bound = lib.bind("copied", **call(), stream=7)
        assert [m.address for m in driver.maps] == [X, OUT]
        lib.seal()
        driver.log.clear()
        driver.maps.clear()
        bound()
        bound()
        assert driver.names() == ["cuLaunchKernelEx"] * 2
        bound.update(x=matrix(X + 1024))
        assert [m.address for m in driver.maps] == [X + 1024]
        bound()
        _, x, out, _ = read_params(driver.launches[-1]["params"], FORMATS)
        assert (x[:8], out[:8]) == ((X + 1024).to_bytes(8, "little"), OUT.to_bytes(8, "little"))


def test_a_sealed_library_only_makes_maps_and_launches(tmp_path: Path) -> None:
    driver = current()
    with opened(tmp_path, driver) as lib:
        lib.prepare()
        lib.seal()
        driver.log.clear()
        driver.capturing = {7}
        driver.allowed = {"cuTensorMapEncodeTiled", "cuLaunchKernelEx"}
        lib.copied(**call(), stream=7)
        lib.copied(**call(rows=5), stream=7)
        assert driver.names() == [*2 * ["cuTensorMapEncodeTiled"], "cuLaunchKernelEx"] * 2
        driver.allowed = None


def test_steps_of_a_plan_map_its_temporaries(tmp_path: Path) -> None:
    driver = current()
    with opened(tmp_path, driver) as lib:
        lib.copied_twice(x=matrix(X), out=matrix(OUT), stream=7)
        (between,) = driver.allocated
        assert [m.address for m in driver.maps] == [X, between, between, OUT]
        first = [read_params(n["params"], FORMATS) for n in driver.launches]
        lib.copied_twice(x=matrix(X), out=matrix(OUT), stream=7)
        assert len(driver.maps) == 4
        # Both steps are one launcher's, and what it passes last is the second's.
        assert read_params(driver.launches[-1]["params"], FORMATS) == first[-1]


@pytest.mark.parametrize(
    ("version", "rows", "mended"),
    [
        (SMALL_FIXED_IN, 1024, True),
        (SMALL_FIXED_IN, 1025, False),
        (SMALL_FIXED_IN + 10, 1024, False),
        (12080, 1, True),
    ],
)
def test_maps_of_small_tensors_are_mended(tmp_path: Path, version: int, rows: int, mended: bool) -> None:
    """One bit, on drivers that need it: of a tensor whose last element begins within 128 KiB."""
    assert 1024 * 64 * 2 == SMALL
    driver = current(version)
    with opened(tmp_path, driver) as lib:
        lib.copied(**call(rows, 64))
    words = read_params(driver.launches[-1]["params"], FORMATS)[1]
    kept = (1 << 64) - 1 - (mended << 21)
    assert words[8:16] == kept.to_bytes(8, "little")
    assert words[16:] == b"\xff" * 112


def test_a_context_is_made_current_where_the_driver_asks_for_one(tmp_path: Path) -> None:
    driver = FakeDriver()
    driver.needs_context = True
    with opened(tmp_path, driver) as lib:
        lib.copied(**call())
    assert [m.address for m in driver.maps] == [X, OUT]
    assert driver.stack == [0]


def test_what_the_driver_refuses_is_typed_and_forgotten(tmp_path: Path) -> None:
    driver = current()
    with opened(tmp_path, driver) as lib:
        lib.copied(**call(), stream=7)
        bound = lib.bind("copied", **call(), stream=7)
        driver.fail["cuTensorMapEncodeTiled"] = CUresult.CUDA_ERROR_INVALID_VALUE
        why = r"copied\.mapped: cuTensorMapEncodeTiled returned 1 CUDA_ERROR_INVALID_VALUE"
        with pytest.raises(DriverError, match=why):
            lib.copied(**call(x=matrix(X + 256)), stream=7)
        with pytest.raises(DriverError, match=why):
            bound.update(x=matrix(X + 256))
        assert bound.pointers[0] == X
        driver.fail.clear()
        bound()
        passed = read_params(driver.launches[-1]["params"], FORMATS)[1:3]
        assert [p[:8] for p in passed] == [X.to_bytes(8, "little"), OUT.to_bytes(8, "little")]
        driver.maps.clear()
        count = len(driver.launches)
        lib.copied(**call(), stream=7)
        bound.update(x=matrix(X))
        bound()
        assert len(driver.launches) == count + 2
        for launch in driver.launches[-2:]:
            _, x, out, _ = read_params(launch["params"], FORMATS)
            assert (x[:8], out[:8]) == (X.to_bytes(8, "little"), OUT.to_bytes(8, "little"))
