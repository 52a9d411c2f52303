"""The Python runtime's tests of manifests that no compiler writes, with libkiln in its place."""

from kiln.tests.runtime.c.test_calls import _opened_by_libkiln  # noqa: F401
from kiln.tests.runtime.test_strange_manifests import (  # noqa: F401
    test_a_temp_like_an_absent_operand,
    test_a_temp_like_an_earlier_one,
    test_a_temp_like_no_earlier_one,
    test_both_sides_of_an_in_place_operand_are_aligned,
    test_no_expression_leaves_as_anything_else,
    test_numbers_that_a_step_cannot_pass,
    test_sizes_of_outputs,
    test_sizes_of_temps,
)
