"""The Python runtime's tests of bad inputs, with libkiln in its place."""

from kiln.tests.runtime.c.test_calls import _opened_by_libkiln  # noqa: F401
from kiln.tests.runtime.test_bad_input import (  # noqa: F401
    test_files_that_change_while_they_are_read,
    test_the_digest_of_nothing,
)
