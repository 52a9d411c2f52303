"""What each stage of the pipeline may contain, as a table; checked between every two passes."""

from __future__ import annotations

from collections.abc import Iterator

from mlir import ir

from kiln.ir.diagnostics import LegalityError
from kiln.ir.structural import STRUCTURAL

ROW_OPS = frozenset(
    {
        "func.func", "func.return", "scf.forall", "scf.forall.in_parallel", "linalg.yield", "linalg.reduce",
        "linalg.broadcast",
        "tensor.splat", "tensor.empty", "tensor.extract", "tensor.extract_slice", "tensor.expand_shape",
        "tensor.collapse_shape",
        "arith.constant", "arith.addf", "arith.subf", "arith.mulf", "arith.divf", "arith.negf",
        "arith.maximumf", "arith.minimumf",
        "arith.maxnumf", "arith.minnumf", "arith.cmpf", "arith.cmpi", "arith.select", "arith.extf",
        "arith.truncf", "arith.sitofp",
        "arith.bitcast", "arith.trunci", "arith.extui", "arith.addi", "arith.subi", "arith.muli",
        "arith.maxsi", "arith.divsi", "arith.shli", "arith.shrsi", "arith.andi",
        "arith.ori", "arith.index_cast", "arith.floordivsi", "math.fma", "math.sqrt", "math.absf", "math.exp",
        "math.tanh", "math.erf",
    }
)  # fmt: skip
MEMORY = frozenset(f"kiln.{name}" for name in STRUCTURAL)
GRAPH_OPS = frozenset({"func.func", "func.return", "arith.constant", "kiln.absent"})


def _legal(stage: str, name: str) -> bool:
    """Whether operation `name` may occur after `stage`: declared ops live in the graph and in rows, and
    are gone after expand.
    """
    declared = name.startswith("kiln.") and name not in MEMORY
    if stage == "graph":
        return declared or name in GRAPH_OPS
    if stage == "rows":
        return declared or name in ROW_OPS or name in MEMORY
    return name in ROW_OPS or name in MEMORY


def _operations(operation: ir.Operation) -> Iterator[ir.Operation]:
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                yield child.operation
                yield from _operations(child.operation)


def check_stage(module: ir.Module, stage: str) -> None:
    """LegalityError naming the first operation that the stage does not allow, and where it came from."""
    for operation in _operations(module.operation):
        if not _legal(stage, operation.name):
            raise LegalityError(
                f"{operation.name} is not legal after stage {stage}: {operation}", str(operation.location)
            )
