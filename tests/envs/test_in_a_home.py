"""Runs the tests that import verifiers, which our own environment has not, in a home with the newest version of the classic API."""

import pytest

from tests.interpreters import IN_A_HOME, run_tests


@pytest.mark.parametrize(("part", "at_least"), [("test_classic", 55), ("test_v1", 40), ("", 100)], ids=["classic", "v1", "all others"])
def test_in_a_home(part, at_least):
    """Every file is in one of the parts."""
    alone = [name for name in IN_A_HOME if "test_classic" in name or "test_v1" in name]
    files = [name for name in alone if part in name] if part else [name for name in IN_A_HOME if name not in alone]
    assert files and run_tests("0.3.1", *(f"tests/{name}" for name in files)) >= at_least
