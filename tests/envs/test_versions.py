"""The tests of the v1 adapter with the newest version of verifiers that we know; with 0.3.1 they
are in test_in_a_home.py."""

import pytest

from tests.interpreters import run_tests


@pytest.mark.proof
def test_all_pass_with_the_newest():
    """Tools go over mcp 2 there."""
    assert run_tests("0.4.0", "tests/envs/test_v1.py") >= 42
