"""simplify: upstream common-subexpression elimination, then removal of what nothing reads. Nothing that
could change a bit is folded.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlir import ir
from mlir.passmanager import PassManager

KEPT = frozenset(
    {"kiln.store", "scf.forall", "scf.forall.in_parallel", "func.func", "func.return", "linalg.yield"}
)


@dataclass(frozen=True)
class Simplify:
    """No options."""

    name = "simplify"

    def run(self, module: ir.Module) -> ir.Module:
        """Rewrites in place."""
        PassManager.parse("builtin.module(cse)").run(module.operation)
        self._drop_dead(module)
        return module

    def _drop_dead(self, module: ir.Module) -> None:
        for function in module.body.operations:
            for operation in reversed(list(_nested(function.operation))):
                dead = operation.results and all(not list(r.uses) for r in operation.results)
                if operation.name not in KEPT and dead:
                    operation.erase()


def _nested(operation: ir.Operation) -> list[ir.Operation]:
    """Operations directly inside the function and its forall, in order (reduction regions stay with their
    operation).
    """
    found: list[ir.Operation] = []
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                found.append(child.operation)
                if child.operation.name == "scf.forall":
                    found += _nested(child.operation)
    return found
