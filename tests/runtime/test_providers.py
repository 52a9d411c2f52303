"""Providers: the order in which they are asked, what a decline does, and that nothing of it is silent.

Cases 1 to 10 are those of the provider contract; `native` there is a provider of priority 0 of an op that the
tree itself has nothing for.
"""

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kiln.runtime as kiln
from kiln.runtime.arrays import CPU, View, view
from kiln.runtime.cpu import CpuDevice
from kiln.runtime.errors import ContractError, ProviderError, SelectionError
from kiln.runtime.providers import Capabilities, Provider, Providers
from kiln.tests.runtime.trees import PARAMS, cpu_manifest, kernel, manifest, write_tree

X = np.arange(12, dtype=np.float32).reshape(3, 4)
Fn = Callable[..., Any]


@pytest.fixture
def bare(tmp_path: Path, ops_so: bytes) -> Iterator[kiln.Library]:
    """A library whose op `negate` nothing can run yet."""
    entries = [kernel("accumulate", "base", PARAMS["accumulate"], ops_so)]
    root = write_tree(tmp_path / "bare", {"cpu-x86_64": manifest(entries, recipes=[])}, {"ops.so": ops_so})
    with kiln.load(root) as library:
        yield library


@pytest.fixture
def lib(tree: Path) -> Iterator[kiln.Library]:
    with kiln.load(tree) as library:
        yield library


class Log(list[str]):
    """Makes providers of `negate` that note their name and negate."""

    def negates(self, name: str) -> Fn:
        def fn(x: Any, out: Any) -> None:
            self.append(name)
            np.negative(x, out=out)

        return fn

    def declines(self, name: str) -> Fn:
        def fn(x: Any, out: Any) -> None:
            self.append(name)
            raise kiln.Decline("not today")

        return fn


def add(lib: kiln.Library, log: Log, **priorities: int) -> None:
    for name, priority in priorities.items():
        name = name.replace("_", "-")
        lib.register_provider("negate", name, log.negates(name), priority=priority)


def names(lib: kiln.Library) -> list[str]:
    return [p.variant for p in lib.providers.of("negate")]


def winner(lib: kiln.Library, log: Log) -> str:
    """Who runs a call."""
    log.clear()
    assert np.array_equal(lib.negate(X), -X)
    return log[-1] if log else "tree"


ORDERS = list(itertools.permutations({"native": 0, "accel_lo": 5, "accel_hi": 9}.items()))


@pytest.mark.parametrize("order", ORDERS)
def test_1_registration_order_does_not_matter(bare: kiln.Library, order: tuple[tuple[str, int], ...]) -> None:
    log = Log()
    add(bare, log, **dict(order))
    assert names(bare) == ["accel-hi", "accel-lo", "native"]
    assert winner(bare, log) == "accel-hi"
    assert [v.variant for v in bare.explain("negate", X).verdicts] == ["accel-hi", "accel-lo", "native"]


def test_2_ties_go_by_the_bytes_of_the_name(bare: kiln.Library) -> None:
    log = Log()
    add(bare, log, zzz=3, aaa=3)
    assert winner(bare, log) == "aaa"
    add(bare, log, b=4, a=4, B=4)
    assert names(bare)[:3] == ["B", "a", "b"]


def test_3_a_name_is_registered_once(bare: kiln.Library) -> None:
    log = Log()
    add(bare, log, dup=1)
    with pytest.raises(ContractError, match="'dup' is registered twice"):
        bare.register_provider("negate", "dup", log.declines("second"), priority=7)
    (only,) = bare.providers.of("negate")
    assert only.priority == 1
    assert winner(bare, log) == "dup"


def test_4_predicates(bare: kiln.Library) -> None:
    log = Log()
    add(bare, log, native=0)
    bare.register_provider("negate", "never", log.negates("never"), priority=100, supports=lambda c: False)
    assert winner(bare, log) == "native"
    sm9 = log.negates("sm9")
    bare.register_provider("negate", "sm9", sm9, priority=50, supports=lambda c: c.valid and c.major >= 9)
    for record, expected in (
        (Capabilities(), "native"),
        (Capabilities(True, 9, 0, 132), "sm9"),
        (Capabilities(True, 8, 9, 128), "native"),
        (Capabilities(), "native"),
    ):
        bare.providers.capabilities = record
        assert winner(bare, log) == expected


def test_5_a_decline_goes_to_the_next_lower_one(bare: kiln.Library) -> None:
    log = Log()
    for name, priority in (("accel", 10), ("accel-mid", 5), ("native", 0)):
        bare.register_provider("negate", name, log.declines(name), priority=priority)
    with pytest.raises(SelectionError, match=r"native declined \(not today\), and no candidate below it"):
        bare.negate(X)
    assert log == ["accel", "accel-mid", "native"]
    stats = bare.provider_stats("negate")
    assert (stats.declines, stats.misses, stats.fallbacks) == (3, 3, 0)
    bare.disable("accel-mid")
    log.clear()
    with pytest.raises(SelectionError):
        bare.negate(X)
    assert log == ["accel", "native"]


def test_5_a_provider_that_is_disabled_meanwhile_is_still_a_floor(bare: kiln.Library) -> None:
    log = Log()
    add(bare, log, native=0)

    def disables_itself(x: Any, out: Any) -> kiln.Decline:
        bare.disable("accel")
        return kiln.Decline()

    bare.register_provider("negate", "accel", disables_itself, priority=10)
    assert winner(bare, log) == "native"
    assert bare.provider_stats("negate").fallbacks == 1


def test_6_statistics_and_what_a_later_registration_changes(bare: kiln.Library) -> None:
    log = Log()
    add(bare, log, accel=10)
    bare.negate(X)
    assert bare.provider_stats("negate") == kiln.ProviderStats()
    bare.count_calls()
    for _ in range(5):
        bare.negate(X)
    assert bare.provider_stats("negate") == kiln.ProviderStats("accel", selections=5)
    bare.count_calls(False)
    bare.negate(X)
    assert bare.provider_stats("negate", reset=True).selections == 5
    assert bare.provider_stats("negate").selections == 0
    assert bare.stats() == {"negate": {"accel": 7}}
    add(bare, log, better=11)
    assert winner(bare, log) == "better"


def test_7_disabled_by_name(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    with kiln.load(tree) as lib:
        add(lib, log, ab_accel=10)
        assert winner(lib, log) == "ab-accel"
        lib.disable("ab-accel")
        assert winner(lib, log) == "tree"
        assert "disabled by disable('ab-accel')" in str(lib.explain("negate", X))
        lib.enable("ab-accel")
        assert winner(lib, log) == "ab-accel"
        for wrong in ("", "a,b"):
            with pytest.raises(ContractError, match="expected one name"):
                lib.disable(wrong)
    monkeypatch.setenv("KILN_DISABLE", "negate.ab-accel")
    with kiln.load(tree) as lib:
        monkeypatch.delenv("KILN_DISABLE")
        add(lib, log, ab_accel=10)
        assert winner(lib, log) == "tree"
        assert "disabled by KILN_DISABLE=negate.ab-accel" in str(lib.explain("negate", X))
        lib.enable("negate.ab-accel")
        assert winner(lib, log) == "ab-accel"


def test_8_the_fifth_of_four_is_refused(bare: kiln.Library) -> None:
    log = Log()
    bare.providers.capacity = 4
    add(bare, log, a=1, b=2, c=3, d=4)
    with pytest.raises(ContractError, match="'e' is one too many, 4 are registered"):
        add(bare, log, e=9)
    assert names(bare) == ["d", "c", "b", "a"]
    bare.providers.capacity = 5
    add(bare, log, e=9)
    assert names(bare)[0] == "e"


class Unified(CpuDevice):
    """A device that is no CPU and lets the CPU use its memory."""

    ordinal = 0
    unified_memory = True

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
        self.waited: list[int] = []

    def stream(self, stream: Any, example: Any) -> int:
        return int(stream or 0)

    def synchronize(self, stream: int) -> None:
        self.waited.append(stream)


class Discrete(Unified):
    """The same with memory of its own."""

    unified_memory = False


def bare_cuda(data: bytes) -> Any:
    """A manifest for sm_90 that has nothing for any op but `accumulate`."""
    entry = kernel("accumulate", "base", PARAMS["accumulate"], data, isa=None)
    return manifest([entry], target="sm_90", recipes=[])


def test_9_the_reference_tier(tmp_path: Path, ops_so: bytes) -> None:
    manifests = {"cpu-x86_64": cpu_manifest(ops_so), "sm_90": bare_cuda(ops_so)}
    root = write_tree(tmp_path / "t", manifests, {"ops.so": ops_so})
    x, out = X.copy(), np.zeros_like(X)
    call: dict[str, Any] = {"x": view(x)._replace(device=0), "out": view(out)._replace(device=0)}
    with kiln.load(root) as host, kiln.load(root, Discrete("sm_90")) as discrete:
        assert discrete.register_reference_tier(host) == 0
        with pytest.raises(SelectionError, match="no kernel or plan"):
            discrete.negate(**call)
        assert host.register_reference_tier(host) == 0
        device = Unified("sm_90")
        with kiln.load(root, device) as lib:
            with pytest.raises(ContractError, match="expected one for the CPU"):
                lib.register_reference_tier(lib)
            assert lib.register_reference_tier(host) == len(host.ops)
            assert lib.register_reference_tier(host) == 0
            assert not lib.registered("negate")
            with pytest.warns(RuntimeWarning, match="nothing of negate may run on") as told:
                lib.negate(**call, stream=7)
            assert len(told) == 1
            assert np.array_equal(out, -x)
            assert device.waited == [7]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                lib.negate(**call)
            assert lib.reference_hits() == 2
            log = Log()

            def native(x: Any, out: Any) -> None:
                log.append("native")

            lib.register_provider("negate", "native", native, priority=0, arrays="view")
            assert lib.registered("negate")
            lib.count_calls()
            lib.negate(**call)
            assert (log, lib.reference_hits()) == (["native"], 2)
            lib.disable("native")
            assert not lib.registered("negate")
            lib.negate(**call)
            assert lib.reference_hits() == 3
            assert lib.provider_stats("negate").last_selected == "reference"


def test_10_a_real_cpu_runs_its_own_kernels(lib: kiln.Library) -> None:
    lib.count_calls()
    assert np.array_equal(lib.negate(X), -X)
    assert lib.provider_stats("negate") == kiln.ProviderStats("base", selections=1)
    assert lib.reference_hits() == 0
    assert lib.registered("negate")
    lib.disable("negate.base")
    assert not lib.registered("negate")
    assert not lib.registered("scale_negate")
    assert lib.registered("scale_add")


def test_the_tree_stands_at_priority_0_under_the_name_kiln(lib: kiln.Library) -> None:
    log = Log()
    add(lib, log, above=1, below=-1, before_kiln=0, zz_after_kiln=0)
    found = [v.variant for v in lib.explain("negate", X).verdicts]
    assert found == ["above", "before-kiln", "base", "zz-after-kiln", "below"]
    for name in found[:2]:
        assert winner(lib, log) == name
        lib.disable(name)
    assert winner(lib, log) == "tree"
    lib.disable("base")
    assert winner(lib, log) == "zz-after-kiln"


def test_a_decline_goes_to_the_tree(lib: kiln.Library) -> None:
    log = Log()
    lib.register_provider("negate", "picky", log.declines("picky"))
    for _ in range(3):
        assert np.array_equal(lib.negate(X), -X)
    assert log == ["picky"] * 3
    assert lib.stats() == {"negate": {"base": 3}}
    assert lib.provider_stats("negate").fallbacks == 3
    assert lib.explain("negate", X).chosen is not None
    assert "picky (provider): runs unless it declines" in str(lib.explain("negate", X))


def test_a_forced_provider_that_declines_is_an_error(lib: kiln.Library) -> None:
    log = Log()
    lib.register_provider("negate", "picky", log.declines("picky"))
    with pytest.raises(SelectionError, match=r"picky declined .* variant picky was asked for"):
        lib.negate(X, variant="picky")
    lib.disable("base")
    with pytest.raises(SelectionError, match="picky declined"):
        lib.negate(X)


def test_operands_scalars_and_absent_ones(lib: kiln.Library) -> None:
    seen: dict[str, Any] = {}

    def accumulate(x: Any, sum: Any, bias: Any) -> None:
        seen.update(x=x, sum=sum, bias=bias)
        sum += 2 * x

    lib.register_provider("accumulate", "mine", accumulate)
    total = np.zeros((3, 4), np.float32)
    assert lib.accumulate(X, total) is total
    assert np.array_equal(total, 2 * X)
    assert seen["bias"] is None
    assert np.shares_memory(seen["sum"], total)
    # Written elsewhere than read: the tree's kernel takes it.
    apart = np.zeros_like(total)
    lib.accumulate(X, total, out=apart)
    assert np.array_equal(apart, 3 * X)
    assert lib.provider_stats("accumulate").fallbacks == 1

    def scale_add(x: Any, y: Any, alpha: float, out: Any) -> Any:
        return np.add(x * np.float32(alpha), y, out=out)

    lib.register_provider("scale_add", "mine", scale_add)
    wide = np.zeros((3, 9), np.float32)
    lib.scale_add(X, X, 3.0, out=wide[:, :4])
    assert np.array_equal(wide[:, :4], 4 * X)
    assert not wide[:, 4:].any()


def test_a_provider_serves_the_steps_of_plans(lib: kiln.Library) -> None:
    log = Log()
    add(lib, log, mine=1)
    assert np.array_equal(lib.scale_negate(X, X), -3 * X)
    assert log == ["mine"]


def test_an_op_without_kernels_makes_its_plans_legal(tmp_path: Path, ops_so: bytes) -> None:
    document = cpu_manifest(ops_so)
    document["kernels"] = [k for k in document["kernels"] if k["op"] != "negate"]
    root = write_tree(tmp_path / "t", {"cpu-x86_64": document}, {"ops.so": ops_so})
    with kiln.load(root) as lib:
        assert not lib.registered("scale_negate")
        with pytest.raises(SelectionError):
            lib.scale_negate(X, X)
        add(lib, Log(), mine=1)
        assert lib.registered("scale_negate")
        assert np.array_equal(lib.scale_negate(X, X), -3 * X)


def test_the_fast_mode_has_to_be_asked_for(lib: kiln.Library) -> None:
    log = Log()
    lib.register_provider("negate", "quick", log.negates("quick"), mode="fast")
    assert winner(lib, log) == "tree"
    lib.negate(X, mode="fast")
    assert log == ["quick"]
    assert "of the fast mode" in str(lib.explain("negate", X))


def test_views_and_types(tree: Path) -> None:
    with kiln.load(tree) as lib:
        seen: list[Any] = []
        lib.register_provider("negate", "raw", lambda x, out: seen.extend([x, out]), arrays="view")
        out = lib.negate(X)
        assert all(isinstance(v, View) for v in seen)
        assert seen[0].ptr == X.ctypes.data
        assert (seen[1].ptr, seen[1].shape, seen[1].dtype, seen[1].device) == (
            out.ctypes.data,
            (3, 4),
            "f32",
            CPU,
        )


def raises(x: Any, out: Any) -> None:
    raise ValueError("broken")


def bad_predicate(c: Capabilities) -> bool:
    raise KeyError("caps")


def test_failures_name_the_provider(lib: kiln.Library) -> None:
    lib.register_provider("negate", "broken", raises)
    with pytest.raises(
        ProviderError, match="negate: the provider broken failed with ValueError: broken"
    ) as e:
        lib.negate(X)
    assert isinstance(e.value.__cause__, ValueError)
    lib.disable("broken")
    lib.register_provider("negate", "returns", lambda x, out: -x)
    with pytest.raises(ProviderError, match="the provider returns returned a ndarray; expected None"):
        lib.negate(X)
    lib.disable("returns")
    lib.register_provider("negate", "odd", raises, supports=bad_predicate)
    for ask in (lambda: lib.negate(X), lambda: lib.explain("negate", X), lambda: lib.scale_negate(X, X)):
        with pytest.raises(ProviderError, match="the predicate of the provider odd failed with KeyError"):
            ask()
    assert lib.registered("negate")
    lib.disable("base")
    assert not lib.registered("negate")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"name": ""}, "expected a name"),
    "comma": ({"name": "a,b"}, "expected a name"),
    "long": ({"name": "n" * 64}, "expected a name"),
    "reserved": ({"name": "kiln"}, "this name is reserved"),
    "reference": ({"name": "reference"}, "this name is reserved"),
    "a variant": ({"name": "base"}, "named like a variant of the tree"),
    "priority": ({"priority": 1.5}, "priority 1.5, expected an integer"),
    "true": ({"priority": True}, "priority True, expected an integer"),
    "too low": ({"priority": -1000}, "expected an integer from -999"),
    "not callable": ({"fn": None}, "found a NoneType, expected something to call"),
    "mode": ({"mode": "turbo"}, "found mode='turbo'"),
    "arrays": ({"arrays": "jax"}, "arrays='jax'"),
    "a parameter less": ({"fn": lambda x: None}, "parameters and the op's differ in out"),
    "a parameter more": ({"fn": lambda x, out, y: None}, "parameters and the op's differ in y"),
    "by position only": ({"fn": lambda x, out, /: None}, "differ in out, x"),
    "no op": ({"op": "negat"}, "did you mean negate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(lib: kiln.Library, case: str) -> None:
    changes, why = REFUSED[case]
    good: dict[str, Any] = {"op": "negate", "name": "mine", "fn": lambda x, out: None}
    with pytest.raises(ContractError, match=why):
        lib.register_provider(**{**good, **changes})
    assert lib.providers.of("negate") == ()
    lib.register_provider(**good)


def test_numpy_arrays_are_refused_on_a_device(tmp_path: Path, ops_so: bytes) -> None:
    with kiln.load(write_tree(tmp_path / "t", {"sm_90": bare_cuda(ops_so)}, {}), "sm_90") as lib:
        with pytest.raises(ContractError, match="NumPy cannot see device memory"):
            lib.register_provider("negate", "mine", lambda x, out: None, arrays="numpy")
        lib.register_provider(
            "negate",
            "mine",
            lambda x, out: None,
            arrays="view",
            supports=lambda c: (c.major, c.minor) == (9, 0),
        )
        assert lib.registered("negate")


NAMES = st.text("abAB09.-_", min_size=1, max_size=3).filter(lambda n: n not in ("kiln", "reference"))


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(NAMES, st.tuples(st.integers(-3, 3), st.booleans()), max_size=6),
    st.sets(NAMES, max_size=3),
    st.randoms(use_true_random=False),
)
def test_the_order_is_a_sorted_list(made: dict[str, tuple[int, bool]], off: set[str], rng: Any) -> None:
    providers = Providers(Capabilities, lambda: None)
    order = list(made)
    rng.shuffle(order)
    for name in order:
        priority, usable = made[name]
        predicate = None if usable else lambda c: False
        providers.register(Provider("negate", name, priority, print, predicate))
    model = sorted(made.items(), key=lambda item: (-item[1][0], item[0].encode()))
    assert [p.variant for p in providers.of("negate")] == [n for n, _ in model]
    place = (0, b"kiln")
    tree = ["kernel", "plan"]
    above = [n for n, (p, _) in model if (-p, n.encode()) < place]
    below = [n for n, (p, _) in model if (-p, n.encode()) > place]
    merged = [getattr(c, "variant", c) for c in providers.merged("negate", tree)]
    assert merged == [*above, *tree, *below]
    selectable = [p.variant for p in providers.of("negate") if providers.refusal(p) is None]
    assert [n for n in selectable if n not in off] == [n for n, (_, u) in model if u and n not in off]


def test_eight_threads_call_while_providers_are_registered(lib: kiln.Library) -> None:
    stop = threading.Event()
    wrong: list[object] = []

    def work() -> None:
        while not stop.is_set():
            try:
                if not np.array_equal(lib.negate(X), -X):
                    wrong.append("bits")
            except Exception as e:
                wrong.append(e)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    log = Log()
    for i in range(40):
        add(lib, log, **{f"p{i}": i})
        lib.disable(f"p{i // 2}")
        lib.enable(f"p{i // 2}")
    stop.set()
    for t in threads:
        t.join()
    assert wrong == []
    assert winner(lib, log) == "p39"


def test_a_decision_made_during_a_change_is_not_kept(lib: kiln.Library) -> None:
    log = Log()
    registered: list[bool] = []

    def meanwhile(c: Capabilities) -> bool:
        # The change comes after this call has looked at the list of providers.
        if not registered:
            registered.append(True)
            add(lib, log, late=200)
        return True

    lib.register_provider("negate", "early", log.negates("early"), supports=meanwhile)
    assert winner(lib, log) == "early"
    assert winner(lib, log) == "late"


def test_repeated_calls_and_bound_ones(lib: kiln.Library) -> None:
    """A provider serves calls that take the short way; a bound call keeps the one it was bound to."""
    log = Log()
    lib.register_provider("negate", "mine", log.negates("mine"))
    for _ in range(4):
        assert np.array_equal(lib.negate(X), -X)
    bound = lib.op("negate").bind(X)
    assert bound.variant == "mine"
    assert np.array_equal(bound(), -X)
    assert log == ["mine"] * 5
    lib.disable("mine")
    for _ in range(4):
        assert np.array_equal(lib.negate(X), -X)
    assert np.array_equal(bound(), -X)
    assert log == ["mine"] * 6
    lib.register_provider("negate", "picky", log.declines("picky"))
    bound = lib.op("negate").bind(X)
    for _ in range(3):
        bound.outputs[:] = 0
        assert np.array_equal(bound(), -X)
    assert lib.provider_stats("negate").fallbacks == 3


def test_counted_plans_still_check_their_steps(lib: kiln.Library) -> None:
    lib.count_calls()
    for _ in range(3):
        assert np.array_equal(lib.scale_negate(X, X), -3 * X)
    assert lib.provider_stats("scale_negate") == kiln.ProviderStats("composite", selections=3)
    assert lib.provider_stats("negate").selections == 3
    wide = np.zeros((5, 4), np.float32)
    for _ in range(2):
        with pytest.raises(ContractError, match="overlaps"):
            lib.scale_negate(wide[:4], wide[:4].copy(), out=wide[1:])
