"""Calls on the CPU: results, operands by position and by name, and every misuse with its sentence."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kiln.runtime as kiln
from kiln.runtime import cpu
from kiln.runtime.errors import ContractError, SelectionError
from kiln.tests.runtime.trees import (
    MN,
    OPS,
    PARAMS,
    PLAN,
    compile_c,
    cpu_manifest,
    dim,
    kernel,
    manifest,
    pointer,
    scalar,
    tensor,
    write_tree,
)

Array = Any
RNG = np.random.default_rng(7)


def rows(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture
def lib(tree: Path) -> Iterator[kiln.Library]:
    with kiln.load(tree, threads=3) as library:
        yield library


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 129), (2, 3, 4), (2, 1, 3, 4), (5,)])
def test_shapes_of_any_rank(lib: kiln.Library, shape: tuple[int, ...]) -> None:
    x, y = rows(*shape), rows(*shape)
    out = lib.scale_add(x, y, alpha=3.0)
    assert out.shape == shape
    assert np.array_equal(out, x * np.float32(3) + y)
    assert np.array_equal(lib.scale_negate(x, y, 3), -out)


def test_strided_rows_and_broadcast(lib: kiln.Library) -> None:
    base = rows(6, 20)
    x, y = base[::2, 3:9], np.broadcast_to(rows(6), (3, 6))
    out = np.full((3, 10), np.nan, np.float32)
    assert np.array_equal(lib.scale_add(x, y, out=out[:, 2:8]), x * np.float32(2) + y)
    assert np.isnan(out[:, :2]).all()
    assert np.isnan(out[:, 8:]).all()


def test_names_and_order(lib: kiln.Library) -> None:
    x, y = rows(2, 3), rows(2, 3)
    expected = x * np.float32(0.5) + y
    for out in (
        lib.scale_add(x, y, 0.5),
        lib.scale_add(y=y, x=x, alpha=np.float32(0.5)),
        lib.scale_add(x, alpha=0.5, y=y),
        lib.op("scale_add")(x, y, 0.5),
    ):
        assert np.array_equal(out, expected)
    given = np.empty_like(x)
    assert lib.scale_add(x, y, 0.5, out=given) is given
    assert lib.scale_add(x, y, 0.5, out=(given,)) is given
    assert np.array_equal(given, expected)
    assert lib.scale_add(x, y, 0.5, out=None) is not given


def test_in_place_operand_and_its_written_side(lib: kiln.Library) -> None:
    x, total, bias = rows(4, 3), rows(4, 3), rows(3)
    expected = total + x + bias
    apart = np.empty_like(total)
    before = total.copy()
    assert lib.accumulate(x, total, bias, out=apart) is apart
    assert np.array_equal(apart, expected)
    assert np.array_equal(total, before)
    assert lib.accumulate(x, total, bias) is total
    assert np.array_equal(total, expected)
    lib.accumulate(x, total)
    assert np.array_equal(total, expected + x)


def test_rows_operand_with_leading_dims(lib: kiln.Library) -> None:
    table = rows(10, 4)
    index = np.array([3, 0, 9, 3], np.int32)
    assert np.array_equal(lib.gather(table, index), table[index])


def test_zero_rows_run_nothing(lib: kiln.Library) -> None:
    out = lib.negate(rows(0, 4))
    assert out.shape == (0, 4)
    assert lib.negate(rows(3, 0)).shape == (3, 0)
    assert lib.scale_negate(rows(2, 0, 4), rows(2, 0, 4)).shape == (2, 0, 4)
    assert lib.loaded == ()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_do_not_change_results(tree: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MIN_WORK", 1)
    x = rows(17, 33)
    table, index = rows(40, 33), np.arange(17, dtype=np.int32)
    with kiln.load(tree, threads=threads) as lib:
        assert np.array_equal(lib.negate(x), -x)
        index[[5, 11]] = 40
        for _ in range(5):
            with pytest.raises(ContractError, match="gather: row 5 holds an index"):
                lib.gather(table, index)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_threads_after_fork(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MIN_WORK", 1)
    x = rows(64, 8)
    with kiln.load(tree, threads=2) as lib:
        lib.negate(x)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if np.array_equal(lib.negate(x), -x) else 1)
        assert os.waitpid(pid, 0)[1] == 0


X, Y = rows(4, 6), rows(4, 6)
READ_ONLY = rows(4, 6)
READ_ONLY.flags.writeable = False
Call = Callable[[kiln.Library], Any]

MISUSE: dict[str, tuple[Call, str]] = {
    "too many": (lambda lib: lib.negate(X, X), "found 2 operands, expected at most 1: x"),
    "too few": (lambda lib: lib.scale_add(X), "scale_add: the operand y is missing"),
    "none": (lambda lib: lib.negate(), "the operand x is missing"),
    "None": (lambda lib: lib.negate(None), "the operand x is missing"),
    "twice": (lambda lib: lib.negate(X, x=X), "x is given twice"),
    "unknown name": (lambda lib: lib.scale_add(X, Y, alpho=1.0), "did you mean alpha"),
    "float as text": (lambda lib: lib.scale_add(X, Y, "2"), "alpha is a str, expected a number"),
    "float as bool": (lambda lib: lib.scale_add(X, Y, True), "alpha is a bool"),
    "float as array": (lambda lib: lib.scale_add(X, Y, np.ones(1)), "alpha is a ndarray"),
    "float too big": (lambda lib: lib.scale_add(X, Y, 1e39), "f32 cannot hold"),
    "no array": (lambda lib: lib.negate([[1.0]]), "x: found an object of type list"),
    "a string": (lambda lib: lib.negate("x"), "x: found an object of type str"),
    "a number": (lambda lib: lib.negate(1.0), "x: found an object of type float"),
    "0-d": (lambda lib: lib.negate(np.zeros((), np.float32)), r"x has shape \(\), expected \[M, N\]"),
    "wrong dtype": (lambda lib: lib.negate(X.astype(np.float64)), "x is f64, expected f32"),
    "wrong int": (lambda lib: lib.gather(X, np.zeros(4, np.int64)), "index is i64, expected i32"),
    "bf16": (lambda lib: lib.negate(X.astype(ml_dtypes.bfloat16)), "x is bf16, expected f32"),
    "object": (lambda lib: lib.negate(X.astype(object)), "array of object"),
    "complex": (lambda lib: lib.negate(X.astype(np.complex64)), "array of complex64"),
    "structured": (lambda lib: lib.negate(np.zeros((2, 2), [("a", "f4")])), "array of void32"),
    "big-endian": (lambda lib: lib.negate(X.astype(">f4")), "of the other byte order"),
    "column stride": (lambda lib: lib.negate(X[:, ::2]), "a row of x are 2 apart, expected 1"),
    "transposed": (lambda lib: lib.negate(rows(6, 4).T), "a row of x are 4 apart"),
    "negative rows": (lambda lib: lib.negate(X[::-1]), "negative stride"),
    "uneven leading dims": (lambda lib: lib.negate(rows(4, 4, 6)[:, :2]), "cannot be walked with one stride"),
    "stride between elements": (
        lambda lib: lib.negate(np.ndarray((2, 2), np.float32, bytes(64), 0, (10, 4))),
        "strides of .* bytes",
    ),
    "other width": (lambda lib: lib.scale_add(X, rows(4, 5)), "y has N=5 but x gave N=6"),
    "other rows": (lambda lib: lib.scale_add(X, rows(3, 6)), "y has M=3 but x gave M=4"),
    "vector of other rank": (
        lambda lib: lib.accumulate(X, Y.copy(), rows(1, 6)),
        r"bias has shape \(1, 6\), expected \[N\]",
    ),
    "out of other shape": (lambda lib: lib.negate(X, out=rows(4, 5)), "out has N=5 but x gave N=6"),
    "out of other dtype": (lambda lib: lib.negate(X, out=np.zeros((4, 6))), "out is f64, expected f32"),
    "two outs": (lambda lib: lib.negate(X, out=(X, X)), "out= holds 2 arrays, expected 1: out"),
    "read-only out": (lambda lib: lib.negate(X, out=READ_ONLY), "out is written but its array is read-only"),
    "read-only in place": (
        lambda lib: lib.accumulate(X, READ_ONLY),
        "sum is written but its array is read-only",
    ),
    "overlapping rows": (
        lambda lib: lib.negate(X, out=np.lib.stride_tricks.as_strided(rows(40), (4, 6), (4, 4))),
        "rows of the output out overlap each other",
    ),
    "one row for all": (
        lambda lib: lib.negate(X, out=np.lib.stride_tricks.as_strided(rows(6), (4, 6), (0, 4))),
        "rows of the output out overlap each other",
    ),
    "one row for all, in place": (
        lambda lib: lib.accumulate(X, np.lib.stride_tricks.as_strided(rows(6), (4, 6), (0, 4))),
        "rows of the output sum overlap each other",
    ),
    "written side of other strides": (
        lambda lib: lib.accumulate(X, Y.copy(), out=rows(4, 8)[:, :6]),
        "expected the same layout",
    ),
    "stream on the CPU": (lambda lib: lib.negate(X, stream=0), "stream= on the CPU"),
    "mode": (lambda lib: lib.negate(X, mode="turbo"), "found mode='turbo'"),
    "bad index": (lambda lib: lib.gather(X, np.array([0, 4], np.int32)), "gather: row 1 holds an index"),
    "negative index": (lambda lib: lib.gather(X, np.array([-1], np.int32)), "gather: row 0 holds an index"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_refused_by_name(lib: kiln.Library, name: str) -> None:
    call, why = MISUSE[name]
    for _ in range(2):
        with pytest.raises(ContractError, match=why):
            call(lib)
    assert np.array_equal(lib.negate(X), -X)


def test_forced_candidates(lib: kiln.Library) -> None:
    for options in ({"tier": "composite"}, {"variant": "composite"}, {"isa": "x86-64"}, {"mode": "fast"}):
        assert np.array_equal(lib.scale_negate(X, Y, **options), -(X * np.float32(2) + Y))
    for options in ({"tier": "fused"}, {"variant": "other"}):
        with pytest.raises(SelectionError, match="was asked for"):
            lib.scale_negate(X, Y, **options)
    with pytest.raises(SelectionError, match="ISA tier x86-64-v4 was asked for"):
        lib.negate(X, isa="x86-64-v4")


def test_aliasing(lib: kiln.Library) -> None:
    x = rows(4, 6)
    expected = -x
    lib.negate(x, out=x)
    assert np.array_equal(x, expected)
    wide = rows(9, 6)
    with pytest.raises(ContractError, match="memory of out, which is written, overlaps that of x"):
        lib.negate(wide[:8], out=wide[1:])
    # Column ranges of one wider buffer lie between each other's rows.
    both = rows(4, 12)
    left = both[:, :6].copy()
    lib.negate(both[:, :6], out=both[:, 6:])
    assert np.array_equal(both, np.concatenate([left, -left], axis=1))
    with pytest.raises(ContractError, match="overlaps"):
        lib.negate(both[:, :6], out=both[:, 5:11])
    # A gathered row may come from anywhere: not even the same buffer is fine.
    with pytest.raises(ContractError, match="overlaps that of table"):
        lib.gather(x, np.arange(4, dtype=np.int32), out=x)
    total = rows(4, 6)
    expected = total + total
    lib.accumulate(total, total)
    assert np.array_equal(total, expected)


def test_aliasing_through_a_plan(lib: kiln.Library, tmp_path: Path, ops_so: bytes) -> None:
    x, y = rows(4, 6), rows(4, 6)
    expected = -(x * np.float32(2) + y)
    lib.scale_negate(x, y, out=x)
    assert np.array_equal(x, expected)
    # A plan that reads x again after it has written out must refuse the two to be one.
    document = cpu_manifest(ops_so)
    document["recipes"][0]["steps"] = [
        {"op": "negate", "bind": {"x": "x", "out": "out"}, "args": {}, "attrs": {}},
        {
            "op": "scale_add",
            "bind": {"x": "out", "y": "x", "out": "temp:t0"},
            "args": {"alpha": 1},
            "attrs": {},
        },
        {
            "op": "scale_add",
            "bind": {"x": "temp:t0", "y": "y", "out": "out"},
            "args": {"alpha": 1},
            "attrs": {},
        },
    ]
    with kiln.load(write_tree(tmp_path / "again", {"cpu-x86_64": document}, {"ops.so": ops_so})) as again:
        assert np.array_equal(again.scale_negate(x, y), y)
        with pytest.raises(ContractError, match="overlaps that of x"):
            again.scale_negate(x, y, out=x)


def test_plan_reads_what_it_wrote(tmp_path: Path, ops_so: bytes) -> None:
    """A step after the one that wrote an in/out operand sees the written side, in place or not."""
    document = cpu_manifest(ops_so)
    document["ops"]["twice"] = {**OPS["accumulate"], "kind": "recipe"}
    step = {"op": "accumulate", "bind": {"x": "x", "sum": "sum", "bias": "bias"}, "args": {}, "attrs": {}}
    plan = {**document["recipes"][0], "op": "twice", "temps": [], "steps": [step, step]}
    document["recipes"].append(plan)
    with kiln.load(write_tree(tmp_path / "t", {"cpu-x86_64": document}, {"ops.so": ops_so})) as lib:
        x, total = rows(3, 5), rows(3, 5)
        apart = np.empty_like(total)
        expected = (total + x) + x
        assert np.array_equal(lib.twice(x, total, out=apart), expected)
        assert np.array_equal(lib.twice(x, total), expected)
        assert lib.stats() == {"accumulate": {"base": 4}, "twice": {"composite": 2}}


def test_plan_whose_step_cannot_run_is_passed_over(
    lib: kiln.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib.disable("negate")
    with pytest.raises(SelectionError, match="composite: negate: none of 1 candidates"):
        lib.scale_negate(X, Y)


def test_selection_order(tmp_path: Path, ops_so: bytes) -> None:
    def entry(variant: str, **more: Any) -> Any:
        return kernel("negate", variant, PARAMS["negate"], ops_so, **more)

    v3 = {"isa": {"tier": "x86-64-v3", "features": ["sse2"]}}
    none = {"isa": {"tier": "x86-64-v4", "features": ["no_such_feature"]}}
    wide = {"when": ["ge", dim("N"), 64]}
    aligned = [pointer("x", align=64), *PARAMS["negate"][1:]]
    entries = [
        entry("a_low", priority=-1),
        entry("b_base"),
        entry("c_base"),
        entry("d_v3", **v3),
        entry("e_v4", **none),
        entry("f_fused", tier="fused", **wide),
        entry("g_fast", tier="fast", mode="fast"),
        {**entry("h_aligned", tier="fast"), "params": aligned},
    ]
    root = write_tree(tmp_path / "t", {"cpu-x86_64": manifest(entries, recipes=[])}, {"ops.so": ops_so})
    x = rows(65, 64)
    misaligned = x.reshape(-1)[1 : 1 + 64 * 64].reshape(64, 64)
    if misaligned.ctypes.data % 64 == 0:
        misaligned = x.reshape(-1)[2 : 2 + 64 * 64].reshape(64, 64)
    with kiln.load(root) as lib:
        told = lib.explain("negate", misaligned[:, :8])
        assert [v.variant for v in told.verdicts] == [
            "g_fast", "h_aligned", "f_fused", "e_v4", "d_v3", "b_base", "c_base", "a_low",
        ]  # fmt: skip
        whys = {v.variant: v.why or "" for v in told.verdicts}
        assert 'mode="fast"' in whys["g_fast"]
        assert "aligned to 64 bytes" in whys["h_aligned"]
        assert "needs N >= 64, found 8" in whys["f_fused"]
        assert "lacks no_such_feature" in whys["e_v4"]
        assert told.chosen is not None
        assert told.chosen.variant == "d_v3"
        assert "d_v3 (generated, x86-64-v3): runs" in str(told)
        for options, variant in (
            ({}, "f_fused"),
            ({"mode": "fast"}, "g_fast"),
            ({"isa": "x86-64"}, "f_fused"),
        ):
            chosen = lib.bind("negate", misaligned, **options).candidate
            assert chosen is not None
            assert chosen.variant == variant


def test_bound_call_runs_again(lib: kiln.Library) -> None:
    x, out = rows(3, 4), np.zeros((3, 4), np.float32)
    ready = lib.bind("negate", x, out=out)
    assert ready.outputs is out
    x += 1
    ready()
    assert np.array_equal(out, -x)


def test_integer_scalar_binds_a_dim(tmp_path: Path, ops_so: bytes) -> None:
    sig = {
        **OPS["negate"],
        "operands": [tensor("x", "in", MN), tensor("out", "out", [dim("M"), dim("K")]), scalar("k", "i32")],
        "constraints": [[["le", dim("K"), dim("N")], "k is at most the row's length"]],
    }
    params = [*PARAMS["negate"][:2], {**PARAMS["negate"][2], "value": dim("K")}, *PARAMS["negate"][3:]]
    document = manifest([kernel("negate", "base", params, ops_so)], ops={"negate": sig}, recipes=[])
    with kiln.load(write_tree(tmp_path / "t", {"cpu-x86_64": document}, {"ops.so": ops_so})) as lib:
        x = rows(3, 8)
        for k in (2, 5):
            assert np.array_equal(lib.negate(x, k=k), -x[:, :k])
        for wrong, why in (
            (9, "at most the row's length"),
            (-1, "expected an extent"),
            (1 << 31, "32 bits"),
            (2.0, "float"),
        ):
            with pytest.raises(ContractError, match=why):
                lib.negate(x, k=wrong)
        with pytest.raises(ContractError, match="k is missing"):
            lib.negate(x)


def test_attributes_constraints_and_ranges(tmp_path: Path, ops_so: bytes) -> None:
    sig = {
        **OPS["negate"],
        "operands": [*OPS["negate"]["operands"], scalar("eps", default=1.0, minimum=0.0, positive=True)],
        "attrs": [{"name": "gemma", "choices": [False, True], "default": False, "doc": ""}],
        "constraints": [[["divisible", dim("N"), 2], "rows must be even"]],
    }
    entry = kernel("negate", "base", PARAMS["negate"], ops_so, when=["attr", "gemma", True])
    document = manifest([entry], ops={"negate": sig}, recipes=[])
    with kiln.load(write_tree(tmp_path / "t", {"cpu-x86_64": document}, {"ops.so": ops_so})) as lib:
        assert np.array_equal(lib.negate(X, gemma=True), -X)
        assert np.array_equal(lib.negate(X, gemma=np.True_), -X)
        with pytest.raises(SelectionError, match="needs gemma=True, found False"):
            lib.negate(X)
        misuse: tuple[tuple[Callable[[], Any], str], ...] = (
            (lambda: lib.negate(X, gemma=1), "gemma=1, expected one of False, True"),
            (lambda: lib.negate(rows(2, 3), gemma=True), "rows must be even"),
            (lambda: lib.negate(X, 0.0, gemma=True), "eps is 0.0, expected more than 0.0"),
            (lambda: lib.negate(X, float("nan"), gemma=True), "eps is nan"),
        )
        for call, why in misuse:
            with pytest.raises(ContractError, match=why):
                call()


def test_parameter_promises(tmp_path: Path, ops_so: bytes) -> None:
    params = [*PARAMS["negate"]]
    params[2] = {**params[2], "divisible_by": 16}
    dropped = {"name": "m", "kind": "dropped", "dtype": "i32", "value": dim("M"), "equals": 1}
    narrow = {**PARAMS["negate"][2], "dtype": "i32", "value": ["mul", dim("N"), 1 << 28]}
    entries = [
        kernel("negate", "divisible", params, ops_so, tier="fused"),
        kernel("negate", "dropped", [*PARAMS["negate"], dropped], ops_so),
        kernel("negate", "narrow", [*PARAMS["negate"][:2], narrow, *PARAMS["negate"][3:]], ops_so),
    ]
    document = manifest(entries, recipes=[])
    with kiln.load(write_tree(tmp_path / "t", {"cpu-x86_64": document}, {"ops.so": ops_so})) as lib:
        with pytest.raises(SelectionError) as e:
            lib.negate(rows(2, 24))
        for why in (
            "needs n divisible by 16, found 24",
            "compiled for m = 1, found 2",
            "passes n as i32, but it is 6442450944",
        ):
            assert why in str(e.value)
        assert lib.bind("negate", rows(1, 8)).variant == "dropped"
        assert lib.bind("negate", rows(2, 32)).variant == "divisible"


def test_decisions_are_bounded(lib: kiln.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiln.runtime.operation.MAX_DECISIONS", 3)
    for n in range(1, 9):
        x = rows(2, n)
        assert np.array_equal(lib.negate(x), -x)
    assert len(lib.op("negate")._decisions) <= 3


def test_scratch(tmp_path: Path, ops_so: bytes) -> None:
    """A kernel that is given scratch memory as its output leaves the operand alone."""
    params = [pointer("x"), pointer("scratch:tmp", "write", name="tmp"), *PARAMS["negate"][2:]]
    scratch = [{"name": "tmp", "bytes": ["mul", 4, ["mul", dim("M"), dim("N")]], "align": 64}]
    entry = kernel("negate", "base", params, ops_so, scratch=scratch)
    root = write_tree(tmp_path / "t", {"cpu-x86_64": manifest([entry], recipes=[])}, {"ops.so": ops_so})
    with kiln.load(root) as lib:
        out = np.full_like(X, 7)
        lib.negate(X, out=out)
        assert (out == 7).all()


COUNTING = """
typedef long long i64;

i64 kiln_negate(void *const *p, const i64 *n, const double *f, i64 begin, i64 end) {
  const float *x = p[0];
  float *out = p[1];
  int *count = p[2];
  unsigned char *work = p[3];
  (void)f;
  for (i64 r = begin; r < end; ++r) {
    if (count[r] != 0) return r + 1;
    for (i64 c = 0; c < n[0]; ++c, ++count[r]) out[r * n[2] + c] = -x[r * n[1] + c];
    work[r] = 0xff;
    if (x[r * n[1]] != 99) count[r] = 0;
  }
  return 0;
}
"""
"""Counts in scratch that must be zero; a row that begins with 99 is aborted before it is zero again."""


def counting_tree(tmp_path: Path) -> Path:
    """That kernel, and a plan of two calls of it."""
    data = compile_c(tmp_path, COUNTING)
    scratch = [
        {"name": "count", "bytes": ["mul", 4, dim("M")], "align": 4, "zeroed": True},
        {"name": "work", "bytes": dim("M"), "align": 1},
    ]
    pointers = [pointer(f"scratch:{s['name']}", "write", "u8", 1, s["name"]) for s in scratch]
    params = [*PARAMS["negate"][:2], *pointers, *PARAMS["negate"][2:]]
    entry = kernel("negate", "base", params, data, scratch=scratch)
    steps = [
        {"op": "negate", "bind": {"x": "x", "out": "temp:t0"}, "args": {}, "attrs": {}},
        {"op": "negate", "bind": {"x": "temp:t0", "out": "out"}, "args": {}, "attrs": {}},
    ]
    plan = {**PLAN, "op": "twice", "steps": steps}
    ops = {"negate": OPS["negate"], "twice": {**OPS["negate"], "kind": "recipe"}}
    m = manifest([entry], ops=ops, recipes=[plan])
    return write_tree(tmp_path / "t", {"cpu-x86_64": m}, {"ops.so": data})


def test_zeroed_scratch(tmp_path: Path) -> None:
    """It is zero at each launch, in a plan too; what an aborted kernel left is replaced by `release`."""
    with kiln.load(counting_tree(tmp_path)) as lib:
        for n in (3, 3, 5000, 3):
            x = rows(n, 7)
            assert np.array_equal(lib.negate(x), -x)
            assert np.array_equal(lib.twice(x), x)
        bound = lib.twice.bind(x)
        assert (bound.zeroed_bytes, bound.scratch_bytes > 256) == (256, True)
        assert np.array_equal(bound(), x)
        assert lib.scratch.zeroed.counters.growths <= 2
        bad = x.copy()
        bad[1, 0] = 99
        lib.negate(bad)
        with pytest.raises(ContractError, match="row 1 holds"):
            lib.negate(x)
        with pytest.raises(ContractError, match="row 1 holds"):
            bound()
        lib.scratch.release(0)
        assert lib.scratch.zeroed.counters[3:] == (0, 0)
        assert np.array_equal(lib.negate(x), -x)
        assert np.array_equal(bound(), x)
