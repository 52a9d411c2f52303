"""A backend whose compiler is the cubins (and the C) that tests build once, and which can misbehave on
demand."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kiln.compiler.backend import Built, Job
from kiln.compiler.errors import BuildError
from kiln.ir.spec import Op
from kiln.tests.cubins import compiled
from kiln.tests.trees import C_SOURCE, cpu_kernel, cuda_kernel

CATALOG = "kiln.tests.compiler.fake_catalog"
RUNNER = "kiln.tests.compiler.fake_backend:run"


def plan_entry(op: str, *steps: str) -> dict[str, Any]:
    """PLAN entry that runs ops one after another."""
    places = ["x", *(f"temp:t{i}" for i in range(len(steps) - 1)), "y"]
    args = {"s": ["arg", "s"]}
    return {
        "op": op,
        "variant": "composite",
        "tier": "composite",
        "mode": "exact",
        "when": True,
        "priority": 0,
        "temps": [
            {"name": f"t{i}", "dtype": {"like": "x"}, "shape": [["dim", "M"], ["dim", "N"]]}
            for i in range(len(steps) - 1)
        ],
        "steps": [
            {"op": step, "bind": {"x": a, "y": b}, "args": args, "attrs": {}}
            for step, a, b in zip(steps, places, places[1:], strict=False)
        ],
    }


class FakeBackend:
    """See kiln.compiler.backend.Backend. `modes` maps an op to how its jobs misbehave, `salt` to changed
    inputs, `uses` to the selections of its job; `stale` are samples of kernels that changed."""

    name = "fake"

    def __init__(
        self,
        targets: Sequence[str] = ("sm_80", "sm_90a"),
        ops: Sequence[str] = ("doubled", "scaled_sum", "spilling"),
        modes: Mapping[str, str] | None = None,
        salt: Mapping[str, str] | None = None,
        tools: Mapping[str, str] | None = None,
        log: Path | None = None,
        uses: Mapping[str, tuple[Mapping[str, Any], ...]] | None = None,
        stale: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._targets, self._ops, self._modes, self._salt = targets, ops, dict(modes or {}), dict(salt or {})
        self._tools, self._log = dict(tools or {"triton": "3.9.0"}), log
        self._uses, self._stale = dict(uses or {}), list(stale)

    def targets(self) -> tuple[str, ...]:
        return tuple(self._targets)

    def plan(self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str) -> list[Job]:
        compiled()  # once, here: workers find the cubins
        names = [n for n in self._ops if n in ops and (target.startswith("sm_") or n != "spilling")]
        return [self._job(n, target) for n in names]

    def _job(self, op: str, target: str) -> Job:
        text = f"{op} {target} {self._salt.get(op)} {sorted(self._tools.items())}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        payload = {"mode": self._modes.get(op, ""), "log": str(self._log or "")}
        return Job(target, op, "generic", digest, RUNNER, payload, self._uses.get(op, ()))

    def recipes(self, ops: Mapping[str, Op], catalogs: Sequence[str]) -> list[dict[str, Any]]:
        return [plan_entry("doubled_sum", "doubled", "scaled_sum")] if "doubled_sum" in ops else []

    def toolchain(self, target: str) -> dict[str, str]:
        return dict(self._tools)

    def stale_samples(
        self, ops: Mapping[str, Op], catalogs: Sequence[str], target: str
    ) -> list[tuple[str, str]]:
        return self._stale


def run(job: Job) -> Built:
    """What a worker calls."""
    mode = job.payload["mode"]
    if job.payload["log"]:
        with open(job.payload["log"], "a", encoding="ascii") as log:
            log.write(f"{job.target} {job.op} {os.getpid()}\n")
    if mode == "refuse":
        raise BuildError("the assembler does not like it")
    if mode == "raise":
        raise ZeroDivisionError("a bug of the compiler")
    if mode == "die":
        os._exit(9)
    if mode == "sleep":
        time.sleep(600)
    if job.target.startswith("cpu-"):
        return _cpu(job, C_SOURCE + ("int other;" if mode == "code" else ""))
    return _cuda(job, mode)


def _cpu(job: Job, source: str) -> Built:
    entry, data = cpu_kernel(job.op, job.target, source)
    entry |= {"inputs_digest": job.inputs_digest, "file": f"{job.op}.so"}
    return Built((entry,), {f"{job.op}.so": data}, {f"{job.op}.c": source.encode()})


def _cuda(job: Job, mode: str) -> Built:
    made = compiled()["doubled" if mode == "other" else job.op, job.target]
    entry = cuda_kernel(made, job.op) | {
        "inputs_digest": job.inputs_digest,
        "toolchain": {"ptxas": "12.9.86"},
    }
    if mode == "budget":
        entry["budget"] = {"registers": 1}
    if mode == "twice":
        entry["budget"] = {"code_bytes": 1, "registers": 1}
    if mode == "contract":
        entry["block"] = [32, 1, 1]
    if mode == "priority":
        entry["priority"] = 7
    if mode == "schema":
        entry["surprise"] = 1
    if mode == "stranger":
        entry["inputs_digest"] = "0" * 64
    if mode == "no file":
        return Built((entry,), {})
    if mode == "nothing":
        return Built((), {})
    if mode == "extra file":
        return Built((entry,), {entry["file"]: made.data, "more.cubin": b"x"})
    return Built((entry,), {entry["file"]: made.data})
