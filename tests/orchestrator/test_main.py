import errno
import os
import subprocess
import sys

import pytest

from rl.orchestrator import main
from rl.orchestrator.main import exit_code
from rl.orchestrator.pool import EnvLostError
from rl.run_dir.files import CorruptFileError
from rl.run_dir.lease import hold_role
from rl.run_dir.paths import RunDir
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


@pytest.mark.parametrize("role", ["orchestrator.main", "trainer.main", "inference.main", "envs.worker"])
def test_a_role_is_imported_without_a_thread(role):
    """One with a thread leaves no copy of itself behind, and starts from nothing when it has died. numpy starts one."""
    code = f"import os, rl.{role}; print(len(os.listdir('/proc/self/task')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "1\n"


def test_a_second_orchestrator_on_one_directory_ends_and_touches_nothing(tmp_path, monkeypatch, capsys):
    run_dir = RunDir(tmp_path / "r", tmp_path / "r" / "weights")
    lease = hold_role(run_dir.lock("orchestrator"))
    before = {path: path.read_bytes() for path in run_dir.root.rglob("*") if path.is_file()}
    monkeypatch.setattr(main, "ROLE_WAIT_S", 0.1)
    monkeypatch.setattr(main, "die_with_parent", lambda: None)
    flags = ["--name", "r", "--output_dir", str(tmp_path), "--orchestrator.environment.id", "e"]
    monkeypatch.setattr(sys, "argv", ["orchestrator", *flags])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == RESTART
    assert f"orchestrator of this run is already running (pid {os.getpid()} on " in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in run_dir.root.rglob("*") if path.is_file()}
    lease.close()
