"""Triton's interpreter for tests: see kiln.tools.interpreter."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module

from kiln.tools import interpreter
from kiln.tools.interpreter import Argument, Array, Constant, View, interpret

__all__ = ["View", "interpret", "interpret_with"]


def _run_with(
    module: str, numbers: Mapping[str, int], kernel: str, grid: tuple[int, ...],
    arguments: tuple[Argument, ...], constants: dict[str, Constant], path: list[str],
) -> list[Array]:  # fmt: skip
    sys.path[:] = path
    import triton.language as tl

    names = vars(import_module(module))
    before = {n: names[n] for n in numbers}
    names.update({n: tl.constexpr(value) for n, value in numbers.items()})
    try:
        return interpreter._run(kernel, grid, arguments, constants, path)
    finally:
        names.update(before)


def interpret_with(
    numbers: Mapping[str, int],
    kernel: str,
    grid: tuple[int, ...],
    *arguments: Argument,
    **constants: Constant,
) -> list[Array]:
    """`interpret` with other values of constexprs of the kernel's module, which are fixed in what ships."""
    module = kernel.partition(":")[0]
    done = interpreter._worker().submit(
        _run_with, module, dict(numbers), kernel, grid, arguments, constants, sys.path
    )
    return done.result()
