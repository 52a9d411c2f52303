"""Triton's interpreter for tests: see kiln.tools.interpreter."""

from kiln.tools.interpreter import View, interpret

__all__ = ["View", "interpret"]
