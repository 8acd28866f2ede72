"""What ends a run."""

import pytest

from rl.system.errors import RunError


def run_error(said: str) -> "pytest.RaisesExc[RunError]":
    """What is raised in the block ends the run with this text."""
    return pytest.raises(RunError, match=said)
