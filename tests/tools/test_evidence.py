"""EVIDENCE.json: strict reading, canonical writing, entries that go with their artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kiln.runtime.errors import SchemaError
from kiln.tests.tools.synthetic import Json, digest, interpreted, measured, ran
from kiln.tools.evidence import (
    NAME,
    Compiled,
    Evidence,
    Interpreted,
    Measured,
    Peer,
    Proofs,
    Ran,
    evidence_bytes,
    parse_evidence,
    read_evidence,
    write_evidence,
)

A = digest("add.generic.cubin")
B = digest("sub.generic.cubin")


def document(**changes: Any) -> Json:
    artifacts = {
        A: {
            "compiled": {"launch_proof": True, "budgets": True},
            "interpreted": interpreted(),
            "ran": ran(max_error=0.5),
            "measured": [measured("add")],
        }
    }
    return {"schema": 1, "target": "sm_90a", "artifacts": artifacts, **changes}


def parse(value: Json) -> Evidence:
    return parse_evidence(json.dumps(value).encode())


def test_reads_every_field() -> None:
    proofs = parse(document()).of(A)
    assert proofs.compiled == Compiled(launch_proof=True, budgets=True)
    assert proofs.interpreted == Interpreted("3.9.0", "2026-01-31", 3, 0.0, True)
    assert proofs.ran == Ran("NVIDIA H200", "580.1", "2026-01-31", 3, 0.5, True)
    assert proofs.measured[0].peers == {"torch": Peer("2.9", 5.0)}
    assert (proofs.measured[0].median_us, proofs.measured[0].limit_from) == (2.5, "copy of the same bytes")


def test_writes_what_it_reads() -> None:
    found = parse(document())
    data = evidence_bytes(found)
    assert parse_evidence(data) == found
    assert evidence_bytes(parse_evidence(data)) == data
    assert json.loads(data) == document()


def test_a_limit_may_be_unknown() -> None:
    value = measured("add", limit_us=None, limit_from=None, ratio_to_limit=None, peers={})
    assert parse(document(artifacts={A: {"measured": [value]}})).of(A).measured[0].limit_us is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": 2}, "/schema"),
        ({"extra": 1}, "unknown field extra"),
        ({"target": ""}, "/target"),
        ({"artifacts": {"abc": {"ran": ran()}}}, "a sha256 in lower-case hex"),
        ({"artifacts": {A: {}}}, "an object with one of compiled"),
        ({"artifacts": {A: {"seen": True}}}, "expected one of"),
        ({"artifacts": {A: {"compiled": {"launch_proof": True}}}}, "the field 'budgets'"),
        ({"artifacts": {A: {"compiled": {"launch_proof": 1, "budgets": True}}}}, "launch_proof"),
        ({"artifacts": {A: {"ran": ran(note="fast")}}}, "unknown field note"),
        ({"artifacts": {A: {"ran": ran(date="yesterday")}}}, "a date as 2026-01-31"),
        ({"artifacts": {A: {"ran": ran(contract_met="yes")}}}, "true or false"),
        ({"artifacts": {A: {"ran": ran(max_error=-1)}}}, "not negative"),
        ({"artifacts": {A: {"ran": ran(device="")}}}, "a printable text"),
        ({"artifacts": {A: {"ran": None}}}, "an object"),
        ({"artifacts": {A: {"interpreted": interpreted(cases=True)}}}, "an integer"),
        ({"artifacts": {A: {"measured": []}}}, "a list of 1"),
        ({"artifacts": {A: {"measured": [measured("sub")]}}}, "a timing of"),
        ({"artifacts": {A: {"measured": [measured("add", shape={"M": 1.5})]}}}, "/M"),
        ({"artifacts": {A: {"measured": [measured("add", peers={"torch": 5})]}}}, "/torch"),
    ],
)
def test_refuses(change: Json, told: str) -> None:
    with pytest.raises(SchemaError, match=r"EVIDENCE\.json") as caught:
        parse(document(**change))
    assert told in str(caught.value)


def test_refuses_what_is_not_strict_json() -> None:
    with pytest.raises(SchemaError):
        parse_evidence(b'{"schema": 1, "schema": 1, "target": "sm_80", "artifacts": {}}')


def test_refuses_to_write_what_it_would_not_read() -> None:
    timing = Measured(**{**measured("add"), "median_us": -1.0, "peers": {}})
    with pytest.raises(SchemaError):
        evidence_bytes(Evidence("sm_90a", {A: Proofs(measured=(timing,))}))


def test_an_entry_goes_with_its_artifact(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    folder.mkdir()
    both = Evidence("sm_90a", {d: Proofs(compiled=Compiled(True, True)) for d in (A, B)})
    write_evidence(folder, both, {A, B})
    assert read_evidence(folder, "sm_90a", {A, B}) == both
    assert set(read_evidence(folder, "sm_90a", {B}).artifacts) == {B}
    write_evidence(folder, both, {B})
    assert set(json.loads((folder / NAME).read_bytes())["artifacts"]) == {B}
    write_evidence(folder, both, set())
    assert list(tmp_path.rglob("*")) == [folder]
    assert read_evidence(folder, "sm_90a", {A}) == Evidence("sm_90a")


def test_refuses_another_targets_evidence(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps(document()))
    assert read_evidence(tmp_path, "sm_90a", {A}).of(A).ran
    with pytest.raises(SchemaError, match="evidence of sm_90a lies in the folder of sm_80"):
        read_evidence(tmp_path, "sm_80", {A})


def test_merging_keeps_what_is_not_renewed() -> None:
    old = parse(document())
    slower = Measured(**{**measured("add", median_us=9.0), "peers": {}})
    other = Measured(**{**measured("add", shape={"M": 1, "N": 64}), "peers": {}})
    new = old.with_proofs(A, Proofs(measured=(slower, other))).of(A)
    assert new.ran == old.of(A).ran
    assert [(m.shape["M"], m.median_us) for m in new.measured] == [(1, 2.5), (16, 9.0)]
