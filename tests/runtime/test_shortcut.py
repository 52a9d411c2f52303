"""The short way gives what the long way gives: results, refusals, and everything that may change between two
calls."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import proof, shortcut
from kiln.runtime.cuda import CudaDevice
from kiln.runtime.errors import ContractError, UnavailableError
from kiln.runtime.operation import Operation
from kiln.tests.runtime.fake_driver import FakeDriver, read_params
from kiln.tests.runtime.test_call import MISUSE
from kiln.tests.runtime.test_cuda import CudaArray, Tensor, entry
from kiln.tests.runtime.test_cuda import tree as cuda_tree
from kiln.tests.runtime.trees import PARAMS, cpu_manifest, kernel, write_tree


def rows(*shape: int) -> Any:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def aligned(*shape: int) -> Any:
    """Zeros at a multiple of 256: what is next to it in memory changes no alignment, and so no key."""
    count = int(np.prod(shape))
    raw = np.zeros(count + 64, np.float32)
    start = -raw.ctypes.data % 256 // 4
    return raw[start : start + count].reshape(shape)


class Long(Exception):
    """The long way was taken."""


@pytest.fixture
def no_long_way(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A switch: from then on the long way raises."""

    def switch() -> None:
        def refuse(*_: Any) -> Any:
            raise Long

        monkeypatch.setattr(Operation, "_long", refuse)

    return switch


def calls(lib: kiln.Library) -> list[Any]:
    """Results of calls of many forms on the same arrays."""
    x, y, out = rows(3, 5), rows(3, 5), np.empty((3, 5), np.float32)
    total = np.ones((3, 5), np.float32)
    return [
        lib.scale_add(x, y).copy(),
        lib.scale_add(x, y, 0.5).copy(),
        lib.scale_add(x, alpha=-0.0, y=y).copy(),
        lib.scale_add(x, alpha=0.0, y=y).copy(),
        lib.scale_add(y=y, x=x, alpha=np.float32(0.25)).copy(),
        lib.scale_add(x, y, out=out).copy(),
        lib.scale_add(x, y, out=(out,)).copy(),
        lib.scale_add(x, y, out=(None,)).copy(),
        lib.scale_add(x, y, out=[out]).copy(),
        lib.scale_negate(x, y, 3).copy(),
        lib.accumulate(x, total).copy(),
        lib.accumulate(x, total, bias=rows(5)).copy(),
        lib.accumulate(x, total, None, out=out).copy(),
        lib.negate(x[:, 1:]).copy(),
        lib.negate(rows(5)).copy(),
        lib.negate(np.zeros((0, 5), np.float32)).copy(),
    ]


def test_repeated_calls_give_the_same(tree: Path) -> None:
    with kiln.load(tree) as lib:
        first = calls(lib)
        for _ in range(4):
            again = calls(lib)
            assert [a.tobytes() for a in again] == [a.tobytes() for a in first]


def test_the_short_way_is_taken(tree: Path, no_long_way: Any) -> None:
    with kiln.load(tree) as lib:
        x, y, out = aligned(3, 5), aligned(3, 5), aligned(3, 5)
        x += rows(3, 5)
        y -= rows(3, 5)
        for _ in range(2):
            lib.scale_add(x, y)
            lib.scale_add(x, y=y, alpha=1.0, out=aligned(3, 5))
        no_long_way()
        assert lib.scale_add(x, y=y, alpha=3.0, out=out) is out
        assert np.array_equal(out, x * np.float32(3) + y)
        assert np.array_equal(lib.scale_add(y, x), y * np.float32(2) + x)
        others: tuple[Callable[[], Any], ...] = (
            lambda: lib.scale_add(x[1:], y[1:]),
            lambda: lib.scale_add(x[:, ::2], y[:, ::2]),
            lambda: lib.scale_add(x.astype(np.float64), y),
            lambda: lib.scale_add(x, y, out=out[:2]),
            lambda: lib.scale_add(x, y, variant="base"),
            lambda: lib.scale_add(x, y, alpha="2", out=out),
            lambda: lib.scale_add(x, y, 2.0),
        )
        for other in others:
            with pytest.raises(Long):
                other()
        assert lib.stats()["scale_add"]["base"] == 6


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_refused_after_good_calls_too(tree: Path, name: str) -> None:
    call, why = MISUSE[name]
    with kiln.load(tree, threads=2) as lib:
        for _ in range(3):
            calls(lib)
        for _ in range(3):
            with pytest.raises(kiln.KilnError, match=why):
                call(lib)


def test_overlap_is_seen_at_each_call(tree: Path) -> None:
    memory = np.zeros((9, 5), np.float32)
    with kiln.load(tree) as lib:
        for _ in range(3):
            lib.negate(memory[:3], out=memory[3:6])
            lib.negate(memory[:3], out=memory[:3])
        for at in (1, 2):
            with pytest.raises(ContractError, match="overlaps"):
                lib.negate(memory[:3], out=memory[at : at + 3])


def test_a_read_only_output_is_seen(tree: Path) -> None:
    x, out = rows(2, 3), np.empty((2, 3), np.float32)
    with kiln.load(tree) as lib:
        for _ in range(3):
            lib.negate(x, out=out)
        out.flags.writeable = False
        with pytest.raises(ContractError, match="read-only"):
            lib.negate(x, out=out)


def test_layouts_and_forms_are_bounded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcut, "MAX_ENTRIES", 4)
    monkeypatch.setattr(shortcut, "MAX_CHECKED", 2)
    monkeypatch.setattr(shortcut, "MAX_FORMS", 1)
    with kiln.load(tree) as lib:
        x = rows(30, 5)
        keep = [np.empty((3, 5), np.float32) for _ in range(9)]
        for n in range(1, 30):
            assert np.array_equal(lib.negate(x[:n]), -x[:n])
            assert np.array_equal(lib.negate(x=x[:n]), -x[:n])
            lib.negate(x[:3], out=keep[n % 9])
        form = lib.negate._forms[1]
        assert len(lib.negate._forms) == 1
        assert len(form.entries) <= 4
        assert all(e.checked is None or len(e.checked) <= 2 for e in form.entries.values())


def test_a_closed_library_is_closed(tree: Path) -> None:
    with kiln.load(tree) as lib:
        x = rows(2, 3)
        for _ in range(3):
            lib.negate(x)
    with pytest.raises(UnavailableError, match="was closed"):
        lib.negate(x)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[kiln.Library, FakeDriver]:
    """Two variants by alignment, and something that passes for torch."""
    monkeypatch.setattr(proof, "prove_launch", lambda *_: [])
    torch = SimpleNamespace(
        bfloat16="bfloat16",
        empty_like=lambda x: x.new_empty(x.shape, x.dtype),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda d: 0x77 + d),
    )
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    driver = FakeDriver()
    driver.stack = [0xC0]
    fast, plain = entry("aligned", dtype="bf16", tier="fast"), entry("plain", align=2, dtype="bf16")
    return kiln.load(cuda_tree(tmp_path, fast, plain), CudaDevice(0, driver)), driver


def test_torch_tensors(gpu: Any, no_long_way: Any) -> None:
    lib, driver = gpu
    for ptr in (1 << 20, (1 << 20) + 2) * 2:
        lib.negate(Tensor((2, 32), ptr=ptr), seed=1)
    no_long_way()
    driver.allowed = {"cuLaunchKernelEx"}
    for ptr, variant in ((5 << 20, "aligned"), ((5 << 20) + 2, "plain")):
        before = lib.stats()["negate"][variant]
        out = lib.negate(Tensor((2, 32), ptr=ptr), seed=9)
        assert (out.shape, out.dtype) == ((2, 32), "bfloat16")
        assert lib.stats()["negate"][variant] == before + 1
        assert read_params(driver.launches[-1]["params"], "QQiqfq")[:2] == [ptr, 2 << 20]
        assert read_params(driver.launches[-1]["params"], "QQiqfq")[5] == 14
        assert driver.launches[-1]["config"].hStream == 0x77
    lib.negate(Tensor((2, 32)), seed=9, stream=5)
    assert driver.launches[-1]["config"].hStream == 5
    odd, away = Tensor((2, 32), ptr=(5 << 20) + 8), Tensor((2, 32), device="cpu")
    for other in (odd, away, Tensor((3, 32)), Tensor((2, 32), dtype="float32"), None):
        with pytest.raises(Long):
            lib.negate(other, seed=9)


@pytest.mark.parametrize("null", [Tensor((2, 32), ptr=0), CudaArray((2, 32), 0, typestr="<f4")])
def test_a_null_address_is_seen(gpu: Any, null: Any) -> None:
    lib, _ = gpu
    for _ in range(3):
        lib.negate(Tensor((2, 32)))
    with pytest.raises(ContractError, match="null address"):
        lib.negate(null)


def test_zeros_of_either_sign_reach_the_kernel(gpu: Any) -> None:
    lib, driver = gpu
    signs = []
    for eps in (0.0, -0.0, 0.0, -0.0, 1.0, 1.0, -0.0):
        lib.negate(Tensor((2, 32)), eps=eps)
        signs.append(np.signbit(read_params(driver.launches[-1]["params"], "QQiqfq")[4]))
    assert signs == [False, True, False, True, False, False, True]


def test_a_scalar_that_only_another_call_may_pass(gpu: Any) -> None:
    lib, _ = gpu
    for _ in range(3):
        lib.negate(Tensor((2, 32)), seed=3, eps=1.0)
    for named, why in (
        ({"seed": 1 << 63}, "seed is 9223372036854775808"),
        ({"seed": True}, "seed is a bool"),
        ({"seed": 1.0}, "seed is a float"),
        ({"eps": 1e39}, "f32 cannot hold"),
        ({"eps": "1"}, "eps is a str"),
        ({"eps": None}, "eps is missing"),
    ):
        with pytest.raises(ContractError, match=why):
            lib.negate(Tensor((2, 32)), **{"seed": 3, "eps": 1.0, **named})


def test_a_scalar_that_chooses_a_steps_kernel(tmp_path: Path, ops_so: bytes) -> None:
    """What a plan's step runs may depend on a scalar that means nothing to the plan itself."""
    document = cpu_manifest(ops_so)
    large = kernel("scale_add", "large", PARAMS["scale_add"], ops_so, when=["ge", ["arg", "alpha"], 10])
    document["kernels"] = sorted([*document["kernels"], {**large, "priority": 1}], key=_name)
    root = write_tree(tmp_path / "tree", {"cpu-x86_64": document}, {"ops.so": ops_so})
    x = rows(2, 3)
    with kiln.load(root) as lib:
        for alpha in (1.0, 20.0, 1.0, 20.0, 20.0):
            assert np.array_equal(lib.scale_negate(x, x, alpha), -(x * np.float32(alpha) + x))
        assert lib.stats()["scale_add"] == {"base": 2, "large": 3}


def _name(entry: Any) -> tuple[str, str]:
    return entry["op"], entry["variant"]
