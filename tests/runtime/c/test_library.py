"""Libraries and bound calls: what is pinned, several trees, providers, sealing, forks, the self-test."""

import ctypes
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiln.runtime.errors import (
    ContractError,
    DriverError,
    IntegrityError,
    KilnError,
    SelectionError,
    TargetError,
    UnavailableError,
)
from kiln.tests.runtime.c import libkiln
from kiln.tests.runtime.c.fake import FakeCuda
from kiln.tests.runtime.c.options import Root
from kiln.tests.runtime.c.test_ed25519 import sign
from kiln.tests.runtime.trees import (
    OPS,
    PARAMS,
    SOURCE,
    compile_c,
    cpu_manifest,
    kernel,
    manifest,
    write_tree,
)

RNG = np.random.default_rng(3)


def rows(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture
def lib(c: ctypes.CDLL, tree: Path) -> Iterator[libkiln.Library]:
    with libkiln.Library(c, tree, threads=2) as library:
        yield library


# ---- opening ----


def test_version_and_ids(lib: libkiln.Library) -> None:
    assert re.fullmatch(rb"\d+\.\d+\.\d+", lib.c.kiln_version())
    assert lib.ops == tuple(sorted(lib.ops))
    assert lib.c.kiln_op_at(lib.handle, len(lib.ops)) is None


def test_what_a_tree_must_be(c: ctypes.CDLL, tree: Path) -> None:
    digest = hashlib.sha256((tree / "INDEX.json").read_bytes()).hexdigest()
    for good in (f"sha256:{digest}", f"sha256:{digest.upper()}"):
        libkiln.Library(c, tree, expect=good).close()
    wrong: tuple[tuple[dict[str, Any], type[KilnError], str], ...] = (
        ({"expect": f"sha256:{'0' * 64}"}, IntegrityError, f"found sha256 {digest}"),
        ({"expect": f"md5:{'0' * 64}"}, ContractError, "expected sha256: and 64 hex digits"),
        ({"expect": "sha256:12"}, ContractError, "expected sha256: and 64 hex digits"),
        (
            {"minimum_generation": 2},
            IntegrityError,
            "generation 1, expected at least 2; the tree was rolled back",
        ),
        ({"public_key": bytes(32)}, IntegrityError, "INDEX.json.sig: missing"),
        ({"threads": -1}, ContractError, "threads=-1"),
        ({"device": "gpu"}, ContractError, "device='gpu', expected cpu, cuda"),
        ({"device": "cuda:x"}, ContractError, "device='cuda:x'"),
        ({"device": "sm_90a"}, TargetError, "a pretended sm_90a may run; it holds cpu-x86_64"),
    )
    for options, kind, why in wrong:
        with pytest.raises(kind, match=why):
            libkiln.Library(c, tree, **options)
    with pytest.raises(UnavailableError, match="expected the folder of a built tree"):
        libkiln.Library(c, tree / "absent")
    with pytest.raises(UnavailableError, match="no tree was given"):
        libkiln.Library(c, None)


def test_signed_index(c: ctypes.CDLL, tree: Path) -> None:
    signature = tree / "INDEX.json.sig"
    key, signed = sign(bytes(range(32)), (tree / "INDEX.json").read_bytes())
    signature.write_bytes(signed)
    # A key with a zero inside goes through its address, as every key does.
    keep = ctypes.create_string_buffer(key, 32)
    libkiln.Library(c, tree, public_key=ctypes.cast(keep, ctypes.c_char_p)).close()
    other = ctypes.create_string_buffer(bytes(31) + b"\1", 32)
    with pytest.raises(IntegrityError, match="not this key's signature"):
        libkiln.Library(c, tree, public_key=ctypes.cast(other, ctypes.c_char_p))
    signature.write_bytes(signature.read_bytes()[:-1] + b"\0")
    with pytest.raises(IntegrityError, match="not this key's signature"):
        libkiln.Library(c, tree, public_key=ctypes.cast(keep, ctypes.c_char_p))


def test_an_artifact_is_verified_before_it_is_loaded(lib: libkiln.Library, tree: Path) -> None:
    path = tree / "cpu-x86_64" / "ops.so"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="sha256"):
        lib.negate(rows(2, 3))
    path.write_bytes(good)
    assert lib.negate(rows(2, 3)) is not None


def test_several_roots(c: ctypes.CDLL, tree: Path, tmp_path: Path) -> None:
    """An op is the first tree's that holds it; a plan calls the ops of its own tree."""
    other = compile_c(tmp_path, SOURCE.replace("= -x[", "= -2 * x["))
    more = {"twice_negated": {**OPS["negate"]}, **OPS}
    entry = {**kernel("negate", "base", PARAMS["negate"], other), "op": "twice_negated"}
    document = {**cpu_manifest(other), "ops": more}
    document["kernels"] = sorted([*document["kernels"], entry], key=lambda k: (k["op"], k["variant"]))
    pack = write_tree(tmp_path / "pack", {"cpu-x86_64": document}, {"ops.so": other})
    x = rows(3, 4)
    for order, factor in (((tree, pack), -1), ((pack, tree), -2)):
        roots = (Root * 2)(*(Root(path=str(p).encode()) for p in order))
        with libkiln.Library(c, None, roots=roots, root_count=2) as library:
            library.roots = list(order)
            assert library.ops == tuple(sorted(more))
            assert np.array_equal(library.negate(x), factor * x)
            assert np.array_equal(library.twice_negated(x), -2 * x)
            assert np.array_equal(library.scale_negate(x, x), factor * (x * np.float32(2) + x))
    bad = (Root * 2)(
        Root(path=str(tree).encode()), Root(path=str(pack).encode(), minimum_generation=9)
    )
    with pytest.raises(IntegrityError, match=r"pack/INDEX\.json: generation 1"):
        libkiln.Library(c, None, roots=bad, root_count=2)
    with pytest.raises(ContractError, match="found none of path and archive"):
        libkiln.Library(c, None, roots=(Root * 1)(), root_count=1)
    with pytest.raises(ContractError, match="belong to a root that was not given"):
        libkiln.Library(c, None, roots=bad, root_count=1, minimum_generation=1)


def test_embedded_archive(c: ctypes.CDLL, tree: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(tree.rglob("*")):
            archive.add(path, path.relative_to(tree), recursive=False)
    data = packed.getvalue()
    x = rows(3, 4)
    roots = (Root * 1)(Root(archive=data, archive_bytes=len(data)))
    with libkiln.Library(c, None, roots=roots, root_count=1) as library:
        library.roots = [tree]
        assert np.array_equal(library.negate(x), -x)
    roots[0].archive_bytes = len(data) // 2
    with pytest.raises(IntegrityError):
        libkiln.Library(c, None, roots=roots, root_count=1)


def test_plans_that_nest_too_deep_are_passed_over(c: ctypes.CDLL, tmp_path: Path, ops_so: bytes) -> None:
    document = cpu_manifest(ops_so)
    plan = document["recipes"][0]
    step = {"bind": {"x": "x", "out": "out"}, "args": {}, "attrs": {}}
    for depth in range(12):
        document["ops"][f"deep{depth}"] = OPS["negate"]
        called = f"deep{depth - 1}" if depth else "negate"
        document["recipes"].append(
            {**plan, "op": f"deep{depth}", "temps": [], "steps": [{**step, "op": called}]}
        )
    root = write_tree(tmp_path / "t", {"cpu-x86_64": document}, {"ops.so": ops_so})
    x = rows(3, 4)
    with libkiln.Library(c, root) as library:
        assert np.array_equal(library.deep6(x), -x)
        with pytest.raises(SelectionError, match="composite: its plans nest too deep"):
            library.deep7(x)
        with pytest.raises(SelectionError):
            library.deep11(x)


def test_verify(c: ctypes.CDLL, tree: Path) -> None:
    def faults(**more: Any) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        seen = libkiln.FaultSeen(lambda _, file, why: found.append((file.decode(), why.decode())))
        count, error = ctypes.c_uint32(), libkiln.Error()
        root = Root(path=str(tree).encode(), **more)
        libkiln.check(
            c.kiln_verify(ctypes.byref(root), seen, None, ctypes.byref(count), ctypes.byref(error)), error
        )
        assert count.value == len(found)
        return found

    assert faults() == []
    (tree / "cpu-x86_64" / "stray").write_text("x")
    assert [file for file, _ in faults()] == ["cpu-x86_64/stray"]
    with pytest.raises(IntegrityError, match="rolled back"):
        faults(minimum_generation=2)


def test_disabled(c: ctypes.CDLL, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(2, 3)
    monkeypatch.setenv("KILN_DISABLE", " other , negate ,")
    with libkiln.Library(c, tree) as library:
        with pytest.raises(SelectionError, match="base: disabled by KILN_DISABLE=negate"):
            library.negate(x)
    with libkiln.Library(c, tree, disable="") as library:
        assert np.array_equal(library.negate(x), -x)
        call = library.negate.bind(x)
        for name in ("negate", "base", "negate.base", "generated", "x86-64"):
            library.disable(name)
            with pytest.raises(SelectionError, match=f"disabled by KILN_DISABLE={re.escape(name)}"):
                library.negate(x)
            call.launch()
            library.disable(name, False)
            assert np.array_equal(library.negate(x), -x)
        call.free()


# ---- bound calls ----


def test_bound_call(lib: libkiln.Library) -> None:
    x, y, out = rows(4, 6), rows(4, 6), np.empty((4, 6), np.float32)
    call = lib.scale_negate.bind(x, y, 3.0, out=out)
    assert (call.variant, call.scratch_bytes) == ("composite", 256)
    for _ in range(3):
        x += 1
        call.launch()
        assert np.array_equal(out, -(x * np.float32(3) + y))
    other = rows(4, 6)
    call.rebind(x=other, alpha=-2.0)
    call.launch()
    assert np.array_equal(out, -(other * np.float32(-2) + y))
    assert lib.stats() == {
        "scale_add": {"base": 4}, "negate": {"base": 4}, "scale_negate": {"composite": 4},
    }  # fmt: skip
    with pytest.raises(ContractError, match="found a stream on the CPU"):
        call.launch(5)


REBINDS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"x": rows(5, 6)}, "x has another shape than was bound"),
    "strides": ({"x": rows(4, 8)[:, :6]}, "x has another strides"),
    "type": ({"x": np.ones((4, 6), np.int32)}, "x has another element type"),
    "alignment": (
        {"x": np.frombuffer(bytes(97), np.uint8)[1:].view(np.float32).reshape(4, 6)},
        r"x is not aligned to 4 bytes, which composite needs",
    ),
    "unknown": ({"z": rows(4, 6)}, "no operand 'z' that can be changed"),
    "scalar of a tensor": ({"x": 1.0}, "x: expected a tensor"),
    "out of range": ({"alpha": 1e39}, "f32 cannot hold"),
    "wrong kind": ({"alpha": "1"}, "alpha is a str"),
}


@pytest.mark.parametrize("name", REBINDS)
def test_rebind_is_all_or_nothing(lib: libkiln.Library, name: str) -> None:
    changed, why = REBINDS[name]
    x, y, out = rows(4, 6), rows(4, 6), np.empty((4, 6), np.float32)
    x, y, out = (np.ascontiguousarray(a) for a in (x, y, out))
    call = lib.scale_negate.bind(x, y, out=out)
    with pytest.raises(ContractError, match=why):
        call.rebind(y=rows(4, 6), **changed)
    call.launch()
    assert np.array_equal(out, -(x * np.float32(2) + y))


def test_rebind_checks_overlaps_after_all_changes(lib: libkiln.Library) -> None:
    a, b = rows(4, 6), rows(4, 6)
    wide = rows(9, 6)
    call = lib.negate.bind(a, out=b)
    call.rebind(x=b, out=a)  # swapped: at no time one buffer
    b[:] = 3
    call.launch()
    assert np.array_equal(a, -b)
    with pytest.raises(ContractError, match="memory of out, which is written, overlaps that of x"):
        call.rebind(x=wide[:4], out=wide[1:5])
    frozen = rows(4, 6)
    frozen.flags.writeable = False
    with pytest.raises(ContractError, match="out is written but its tensor is read-only"):
        call.rebind(out=frozen)


def test_rebind_in_place_operand(lib: libkiln.Library) -> None:
    x, total = rows(4, 6), rows(4, 6)
    call = lib.accumulate.bind(x, total)
    other = rows(4, 6)
    expected = other + x
    call.rebind(sum=other)
    call.launch()
    assert np.array_equal(other, expected)


def test_calls_outlive_their_library(c: ctypes.CDLL, tree: Path) -> None:
    library = libkiln.Library(c, tree)
    call = library.negate.bind(rows(2, 3))
    handle = library.op("negate").handle
    library.close()
    with pytest.raises(UnavailableError, match="this library was closed"):
        call.launch()
    assert handle
    call.free()


NO_CALLS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("kiln_launch", (None, None)),
    ("kiln_rebind", (None, None, 0)),
    ("kiln_prepare", (None, None, 0, None)),
    ("kiln_set_scratch", (None, None, None, 1)),
    ("kiln_disable", (None, b"x", 1)),
)


@pytest.mark.parametrize(("name", "given"), NO_CALLS)
def test_nothing_is_refused_by_name(lib: libkiln.Library, name: str, given: tuple[Any, ...]) -> None:
    with pytest.raises(ContractError, match="found no "):
        lib.call(name, *given)
    lib.c.kiln_call_free(None)
    lib.c.kiln_close(None)


# ---- sealing and forks ----


def test_sealed(lib: libkiln.Library) -> None:
    x, y = rows(3, 4), rows(3, 4)
    bound = lib.negate.bind(x)
    lib.call("kiln_set_scratch", lib.handle, None, None, 1 << 16)
    lib.prepare(["scale_negate"])
    lib.seal()
    bound.launch()
    for m in (1, 5, 9):  # shapes that it never saw
        x, y = rows(m, 7), rows(m, 7)
        assert np.array_equal(lib.scale_negate(x, y), -(x * np.float32(2) + y))
    with pytest.raises(UnavailableError, match=r"gather\.base is not loaded and the library is sealed"):
        lib.gather(x, np.zeros(2, np.int32))
    x, y = rows(200, 200), rows(200, 200)
    with pytest.raises(
        UnavailableError, match="scale_negate: scratch growth of a sealed library: need 160000"
    ):
        lib.scale_negate(x, y)
    with pytest.raises(UnavailableError, match="sealed; register providers before that"):
        lib.register("negate", "late", lambda values, stream: 0)
    bound.free()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_after_fork(lib: libkiln.Library) -> None:
    x = rows(64, 8)
    lib.negate(x)
    bound = lib.negate.bind(x)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for call in (lambda: lib.negate(x), bound.launch, lambda: lib.prepare()):
            try:
                call()
                os.write(write, b"ran;")
            except UnavailableError as e:
                os.write(write, str(e).encode() + b";")
        lib.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read, 4096).count(b"opened before the process was forked") == 3
    bound.launch()


# ---- providers ----


def test_provider_order_does_not_depend_on_registration(c: ctypes.CDLL, tree: Path) -> None:
    names = [("accel-lo", 5), ("accel-hi", 9), ("B", 5), ("a", 5), ("below", -1)]
    for turn in range(len(names)):
        with libkiln.Library(c, tree) as library:
            for name, priority in names[turn:] + names[:turn]:
                library.register("negate", name, lambda values, stream: libkiln.DECLINED, priority)
            told = library.op("negate").explain(rows(2, 3))
            found = re.findall(r"  (\S+) \(", told)
            assert found == ["accel-hi", "B", "a", "accel-lo", "base", "below"]


def test_provider_serves_declines_and_is_counted(lib: libkiln.Library) -> None:
    x, out = rows(3, 4), np.empty((3, 4), np.float32)
    served: list[dict[str, Any]] = []

    def serve(values: dict[str, Any], stream: int | None) -> int:
        served.append(values)
        if values["alpha"] == 7:
            return libkiln.DECLINED
        ctypes.memset(values["out"].data, 0, 48)
        return 0

    lib.register("scale_add", "mine", serve, priority=1)
    lib.scale_add(x, x, out=out)
    assert not out.any()
    assert served[0]["alpha"] == 2.0  # its default
    assert served[0]["x"].data == x.ctypes.data
    lib.scale_add(x, x, 7.0, out=out)
    assert np.array_equal(out, x * np.float32(7) + x)
    assert lib.stats()["scale_add"] == {"mine": 1, "mine declined": 1, "base": 1}
    lib.disable("mine")
    lib.scale_add(x, x, out=out)
    assert np.array_equal(out, x * np.float32(2) + x)
    lib.disable("mine", False)
    call = lib.scale_add.bind(x, x, out=out)
    call.launch()
    assert not out.any()
    call.rebind(alpha=7.0)
    call.launch()
    assert np.array_equal(out, x * np.float32(7) + x)
    lib.scale_add(x, x, out=out, variant="base")
    assert lib.stats()["scale_add"]["base"] == 4
    with pytest.raises(ContractError, match="x is f64"):  # the contract is checked first
        lib.scale_add(x.astype(np.float64), x)


def test_provider_below_the_tree(lib: libkiln.Library) -> None:
    x = rows(3, 4)
    ran: list[int] = []

    def serve(values: dict[str, Any], stream: int | None) -> int:
        ran.append(1)
        return 0

    lib.register("negate", "last", serve, priority=-5)
    lib.negate(x)
    assert not ran
    lib.disable("negate")
    lib.negate(x)
    call = lib.negate.bind(x)
    call.launch()
    assert len(ran) == 2
    lib.disable("last")
    with pytest.raises(SelectionError, match="base: disabled"):
        lib.negate(x)


def test_provider_errors_are_its_own(lib: libkiln.Library) -> None:
    x = rows(3, 4)
    codes = iter([2, 77])
    lib.register("negate", "broken", lambda values, stream: next(codes), priority=1)
    with pytest.raises(IntegrityError, match="negate: provider broken: failed without a message"):
        lib.negate(x)
    with pytest.raises(libkiln.InternalError, match="provider broken"):
        lib.negate(x)


REGISTRATIONS: dict[str, tuple[dict[str, Any], type[KilnError], str]] = {
    "no name": ({"name": ""}, ContractError, "needs a name and a function"),
    "no function": ({"run": None}, ContractError, "needs a name and a function"),
    "the tree's name": ({"name": "kiln"}, ContractError, "the tree's own"),
    "twice": ({"name": "first"}, ContractError, "duplicate provider first"),
    "unknown op": ({"op": "nothing"}, ContractError, "no op 'nothing'"),
    "reference of another priority": ({"reference": True}, ContractError, "expected -1000 for a reference"),
    "priority of a reference": ({"priority": -1000}, ContractError, "and for nothing else"),
    "failing predicate": (
        {"supports": lambda d: -3},
        libkiln.InternalError,
        "predicate of provider p failed with -3",
    ),
}


@pytest.mark.parametrize("name", REGISTRATIONS)
def test_registration_is_refused(lib: libkiln.Library, name: str) -> None:
    changed, kind, why = REGISTRATIONS[name]
    given = {"op": "negate", "name": "p", "run": lambda values, stream: 0, **changed}
    lib.register("negate", "first", lambda values, stream: libkiln.DECLINED)
    with pytest.raises(kind, match=why):
        lib.register(**given)
    assert "  p (" not in lib.op("negate").explain(rows(2, 2))


def test_too_many_providers(lib: libkiln.Library) -> None:
    for i in range(64):
        lib.register("negate", f"p{i}", lambda values, stream: libkiln.DECLINED)
    with pytest.raises(ContractError, match="has 64 providers"):
        lib.register("negate", "one more", lambda values, stream: libkiln.DECLINED)


def test_predicate_sees_the_device(lib: libkiln.Library) -> None:
    seen: list[tuple[int, int]] = []

    def supports(device: libkiln.Device) -> int:
        seen.append((device.ordinal, device.units))
        return 0

    lib.register("negate", "never", lambda values, stream: 0, priority=100, supports=supports)
    assert seen == [(-1, 2)]
    assert "never (provider, 100): its predicate does not hold" in lib.op("negate").explain(rows(2, 2))
    x = rows(2, 2)
    assert np.array_equal(lib.negate(x), -x)


def test_reference_needs_unified_memory(c: ctypes.CDLL, tmp_path: Path) -> None:
    fake = FakeCuda(tmp_path)
    root = Path(__file__).parents[3] / "aot_artifacts"
    for unified in (0, 1):
        fake.reset()
        fake.c.fake_device(9, 0, 13000, 1, unified)
        with libkiln.Library(c, root, "cuda", driver_path=fake.path) as library:
            given = ("rms_norm", "cpu", lambda values, stream: 0, -1000, None, True)
            if unified:
                library.register(*given)
                continue
            with pytest.raises(TargetError, match="runs on the CPU, which cannot use the memory of cuda:0"):
                library.register(*given)


# ---- the self-test ----


def selftest(library: libkiln.Library) -> tuple[int, list[tuple[Any, ...]]]:
    found: list[tuple[Any, ...]] = []
    seen = libkiln.SelftestSeen(lambda _, *told: found.append(tuple(t and t.decode() for t in told)))
    failures = ctypes.c_uint32()
    library.call("kiln_selftest", library.handle, seen, None, ctypes.byref(failures))
    return failures.value, found


ALONE = {"gated_delta_rule_pack"}
"""Ops of one object, which copies: there is no other to compare with."""


def test_selftest_of_the_committed_tree(c: ctypes.CDLL) -> None:
    with libkiln.Library(c, Path(__file__).parents[3] / "aot_artifacts") as library:
        failures, found = selftest(library)
        assert (failures, [f for f in found if f[3]]) == (0, [])
        kernels = {(op, variant) for op, variant, _, _ in found}
        compared = {(op, variant) for op, variant, against, _ in found if against}
        assert len(kernels) > 100
        assert {op for op, _ in kernels - compared} == ALONE


def test_selftest_tells_who_disagrees(c: ctypes.CDLL, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    good = compile_c(tmp_path / "a")
    wrong = compile_c(tmp_path, SOURCE.replace("= -x[", "= -2 * x["))
    infinite = compile_c(tmp_path, SOURCE.replace("= -x[r * n[1] + c]", "= x[r * n[1] + c] / 0.0f"))
    failing = compile_c(
        tmp_path, SOURCE.replace("(void)f;\n  for", "(void)f;\n  if (end) return 7;\n  for", 1)
    )
    files = {"good.so": good, "wrong.so": wrong, "infinite.so": infinite, "failing.so": failing}
    entries = [
        kernel("negate", name.partition(".")[0], PARAMS["negate"], data, file=name)
        for name, data in files.items()
    ]
    root = write_tree(tmp_path / "t", {"cpu-x86_64": manifest(entries, recipes=[], ops=OPS)}, files)
    with libkiln.Library(c, root) as library:
        failures, found = selftest(library)
        told = {(variant, against): why for _, variant, against, why in found}
        assert failures == sum(why is not None for why in told.values())
        assert told["good", None] is None
        assert told["good", "wrong"] == "their bits differ"
        assert told["infinite", None] == "an output is not finite"
        assert "row 6 holds an index" in (told["failing", None] or "")


def test_pretended_device_only_explains(c: ctypes.CDLL) -> None:
    root = Path(__file__).parents[3] / "aot_artifacts"
    with libkiln.Library(c, root, "cpu-aarch64") as library:
        x = rows(2, 32)
        assert "rms_norm on a pretended cpu-aarch64:" in library.rms_norm.explain(x, x[0])
        for refused in (
            lambda: library.rms_norm(x, x[0]),
            lambda: library.prepare(),
            lambda: selftest(library),
        ):
            with pytest.raises(UnavailableError, match="a pretended cpu-aarch64 device cannot run kernels"):
                refused()


def test_driver_error_keeps_its_code() -> None:
    error = libkiln.Error(code=7, driver=700, message=b"x")
    with pytest.raises(DriverError) as e:
        libkiln.check(7, error)
    assert e.value.code == 700
