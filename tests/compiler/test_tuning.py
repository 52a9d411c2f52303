"""The tuning database: exact documents, merging without order, and what is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from kiln.compiler.tuning import (
    Database,
    Row,
    Run,
    Time,
    database_bytes,
    merged,
    parse_database,
    parse_run,
    run_json,
)
from kiln.runtime.errors import SchemaError

SHAPE = {"M": 16, "N": 4096, "K": 4096}


def run_of(date: str, device: str = "H200", us: float = 12.5, name: str = "a", m: int = 16) -> Run:
    row = Row("out=bf16 x=bf16", {**SHAPE, "M": m}, {name: Time(us, 0.25), "z": Time(20.0, 0.5)})
    return Run(device, "13.0", "sm 1980 MHz", "13.4.59", date, {name: "a" * 64, "z": "b" * 64}, (row,))


RUNS = (
    run_of("2026-01-01T00:00:00Z"),
    run_of("2026-01-02T00:00:00Z", us=11.0),
    run_of("2026-01-02T00:00:00Z", us=11.5, name="b"),
    run_of("2026-01-03T00:00:00Z", device="H100"),
    run_of("2026-01-01T00:00:00Z", m=32),
)


def test_a_database_reads_back() -> None:
    known = merged(Database("matmul_bt", "sm_90a"), RUNS)
    data = database_bytes(known)
    assert parse_database(data, "db") == known
    assert database_bytes(parse_database(data, "db")) == data


@pytest.mark.parametrize("us", [float("nan"), float("inf"), 1e13, 10**400, 0, -1], ids=lambda us: str(us)[:6])
def test_a_time_that_is_none_is_refused(us: float) -> None:
    value = run_json(RUNS[0])
    for times in ([us, 0.1], [12.5, us]):
        value["rows"][0]["times"]["a"] = times
        if times == [12.5, 0]:
            assert parse_run(value, "samples").rows[0].times["a"] == Time(12.5, 0.0)
            continue
        with pytest.raises(SchemaError, match=r"samples at /rows/0/times/a: .*of finite numbers"):
            parse_run(value, "samples")


def test_the_order_of_acceptance_never_shows() -> None:
    empty = Database("matmul_bt", "sm_90a")
    found = set()
    for order in itertools.permutations(RUNS):
        known = empty
        for run in order:
            known = merged(known, [run])
        found.add(database_bytes(known))
    assert found == {database_bytes(merged(empty, RUNS))}
    known = merged(empty, RUNS)
    assert merged(known, RUNS) == known


def test_the_newest_sample_of_a_device_stays() -> None:
    known = merged(Database("matmul_bt", "sm_90a"), RUNS)
    at_16 = [
        (run.device, run.date[:10], name, time.us)
        for run in known.runs
        for row in run.rows
        if row.shape["M"] == 16
        for name, time in row.times.items()
        if name != "z"
    ]
    assert at_16 == [
        ("H200", "2026-01-02", "a", 11.0),
        ("H200", "2026-01-02", "b", 11.5),
        ("H100", "2026-01-03", "a", 12.5),
    ]


def _with(path: str, value: Any) -> dict[str, Any]:
    document: Any = {"schema": 1, "op": "matmul_bt", "target": "sm_90a", "runs": [run_json(RUNS[0])]}
    *parents, last = path.split("/")
    place = document
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    place[last] = value
    return dict(document)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("schema", 2, "found 2, expected 1"),
        ("more", 1, "more"),
        ("runs/0/rows/0/checked", False, "whose numbers were checked"),
        ("runs/0/rows/0/times/a", [0.0, 0.1], "a positive median"),
        ("runs/0/rows/0/times/a", [1.0, -0.1], "a spread that is not negative"),
        ("runs/0/rows/0/times/a", 1.0, "a median and a spread"),
        ("runs/0/rows/0/times/stray", [1.0, 0.1], "the run's own candidates"),
        ("runs/0/rows/0/shape/M", -1, "/runs/0/rows/0/shape/M"),
        ("runs/0/candidates/a", "12", "64 lower-case hex digits"),
        ("runs/0/date", "yesterday", "a date as"),
    ],
)
def test_a_wrong_document_is_refused_with_a_sentence(path: str, value: Any, sentence: str) -> None:
    parse_database(json.dumps(_with("op", "matmul_bt")).encode(), "db")
    with pytest.raises(SchemaError, match=sentence):
        parse_database(json.dumps(_with(path, value)).encode(), "db")


def test_a_run_is_judged_alone_too() -> None:
    assert parse_run(run_json(RUNS[0]), "samples") == RUNS[0]
    stray = replace(RUNS[0], candidates={})
    with pytest.raises(SchemaError, match="the run's own candidates"):
        parse_run(run_json(stray), "samples")
