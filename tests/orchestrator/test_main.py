import errno

import pytest

from rl.orchestrator.main import exit_code
from rl.orchestrator.pool import EnvLostError
from rl.run_dir.files import CorruptFileError
from rl.system.errors import RESTART, RunError
from rl.wire.http import RefusedError
from rl.wire.inference_client import InferenceLostError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CorruptFileError("batch 3 is damaged"), 4),
        (RunError("no such model"), 3),
        (EnvLostError("its workers die"), 3),
        (RefusedError(422, "does not fit"), 3),
        (OSError(errno.ENOSPC, "disk full"), 3),
        (OSError(errno.EADDRINUSE, "address in use"), 3),
        (OSError(errno.EIO, "input/output error"), 1),
        (InferenceLostError("waited 60 s"), 1),
        (RunError("already running", RESTART), 1),
    ],
)
def test_the_exit_code_says_what_to_do_about_an_error(error, code):
    assert exit_code(error) == code
