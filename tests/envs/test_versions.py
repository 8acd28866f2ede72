"""The tests of the v1 adapter with the versions of verifiers that we know, and as if we did not know them: over HTTP."""

import pytest

from tests.interpreters import run_tests

OVER_HTTP = ("-p", "tests.envs.over_http")


def passed(version: str, *arguments: str) -> int:
    """How many tests of the v1 adapter pass with a version of verifiers; all that are run have to."""
    return run_tests(version, "tests/envs/test_v1.py", *arguments)


def test_the_newest_version_that_we_know():
    """Without those whose subject does not touch verifiers; tools go over mcp 2."""
    assert passed("0.4.0", "-k", "exactly or extends or fail or room or agents or streams or dialects or continue") >= 17


def test_a_version_that_we_do_not_know_asks_over_http():
    assert passed("0.4.0", "-k", "exactly or extends or room or streams or dialects or continue", *OVER_HTTP) >= 5


@pytest.mark.proof
@pytest.mark.parametrize(("version", "plugin"), [("0.3.1", OVER_HTTP), ("0.4.0", ()), ("0.4.0", OVER_HTTP)])
def test_all_of_the_adapter_s_tests(version, plugin):
    """From within with 0.3.1 they are in test_in_a_home.py."""
    assert passed(version, *plugin) >= 42
