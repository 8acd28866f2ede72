"""Runs the tests that import verifiers, which our own environment has not, in a home with the newest version of the classic API."""

import pytest

from tests.interpreters import IN_A_HOME, run_tests


@pytest.mark.parametrize(
    ("files", "at_least"),
    [(IN_A_HOME[0], 55), (IN_A_HOME[2], 40), ((IN_A_HOME[1], *IN_A_HOME[3:]), 100)],
    ids=["classic", "v1", "rows and examples"],
)
def test_in_a_home(files, at_least):
    names = [files] if isinstance(files, str) else files
    assert run_tests("0.3.1", *(f"tests/{name}" for name in names)) >= at_least
