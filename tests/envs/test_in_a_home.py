"""Runs the tests that import verifiers, which our own environment has not, in a home with the
newest version of the classic API."""

import pytest

from tests.interpreters import IN_A_HOME, run_tests


@pytest.mark.timeout(500)
def test_in_a_home():
    """All in one process: importing verifiers and what comes with it takes as long as a dozen of
    them."""
    assert run_tests("0.3.1", *(f"tests/{name}" for name in IN_A_HOME)) >= 244
