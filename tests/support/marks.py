"""Marks of tests that many files need."""

from typing import Any

import pytest


def long(*values: Any) -> Any:
    """A parameter of a test, of one value or of several, that is for `make test-long`."""
    return pytest.param(*values, marks=pytest.mark.long)
