"""functions: exp, tanh, erf and the code conversions are replaced by their exact expansions, unless the
target has them as an instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlir import ir
from mlir.rewrite import PatternRewriter, RewritePatternSet, walk_and_apply_patterns

from kiln.compiler.passes.expand import dtype_of, width_argument
from kiln.compiler.rowprogram import shape_of
from kiln.ir.functions import FUNCTIONS
from kiln.ir.language import Value
from kiln.ir.trace import RowMachine

APPROXIMATE = frozenset({"math.exp", "kiln.logistic"})
"""What `fast` mode leaves to native approximations."""


@dataclass(frozen=True)
class Functions:
    """Options of the pass: what the target does natively, and whether native approximations are allowed
    (`fast` mode).
    """

    features: frozenset[str]
    fast: bool = False

    name = "functions"

    def run(self, module: ir.Module) -> ir.Module:
        """Rewrites in place."""
        patterns = RewritePatternSet()
        for name, function in FUNCTIONS.items():
            approximate = self.fast and name in APPROXIMATE
            native = approximate or function.feature in self.features
            if not native:
                canonical = "canonical_nan" in self.features
                patterns.add(
                    name, _pattern(function.canonical if canonical and function.canonical else function.exact)
                )
        walk_and_apply_patterns(module.operation, patterns.freeze())
        return module


def _pattern(expansion: Callable[[Value], Value]) -> Any:
    def rewrite(operation: Any, rewriter: PatternRewriter) -> None:
        target = operation.operation
        x = target.operands[0]
        with rewriter.ip, target.location:
            machine = RowMachine(width_argument(target))
            value = Value(machine, x, shape_of(x, width_argument(target)), dtype_of(x.type))
            result = expansion(value).data
        rewriter.replace_op(target, [result])

    return rewrite
