import errno
import os
import signal
import subprocess
import sys

import pytest

from rl.orchestrator import main
from rl.orchestrator.workers.pool import EnvLostError
from rl.run_dir.files import CorruptFileError
from rl.run_dir.lease import hold_role
from rl.run_dir.paths import RunDir
from rl.system.errors import RESTART, RunError, exit_code_of
from rl.wire.http import RefusedError
from rl.wire.inference_client import InferenceLostError
from tests.waiting import until


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
    assert exit_code_of(error) == code


@pytest.mark.parametrize(
    "role", ["orchestrator.main", "trainer.main", "inference.main", "envs.worker"]
)
def test_a_role_is_imported_without_a_thread(role):
    """A worker with a thread leaves no copy of itself behind, and is restarted cold when it
    dies. numpy starts a thread."""
    code = f"import os, rl.{role}; print(len(os.listdir('/proc/self/task')))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        ).stdout
        == "1\n"
    )


def test_a_second_orchestrator_on_one_directory_ends_and_touches_nothing(
    tmp_path, monkeypatch, capsys
):
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
    assert (
        f"orchestrator of this run is already running (pid {os.getpid()} on "
        in capsys.readouterr().err
    )
    assert before == {path: path.read_bytes() for path in run_dir.root.rglob("*") if path.is_file()}
    lease.close()


def test_sigterm_ends_an_orchestrator_that_makes_a_home(tmp_path):
    """uv may take half an hour, but `rl` waits for at most 20 s."""
    (tmp_path / "uv").write_text("#!/bin/sh\ntouch $HOME/asked\nexec sleep 60\n")
    (tmp_path / "uv").chmod(0o755)
    variables = {"HOME": str(tmp_path), "PYTHONPATH": "", "RL_ENVIRONMENTS": ""}
    slow = (
        f"from rl.homes import uv; uv.find_uv_bin = lambda: '{tmp_path}/uv'; from "
        "rl.orchestrator import main"
    )
    program = f"{slow}; main.resolve_model = lambda *_, **__: ''; main.main()"
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "pyproject.toml").write_text(
        '[project]\nname = "pack"\nversion = "1"\ndependencies = ["verifiers"]\n'
    )
    (tmp_path / "pack" / "pack.py").write_text(
        "import verifiers as vf\n\n\ndef load_environment():\n    return None\n"
    )
    flags = [
        "--name",
        "r",
        "--output_dir",
        str(tmp_path),
        "--orchestrator.environment.id",
        str(tmp_path / "pack"),
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *flags],
            env=os.environ | variables,
            stdout=log,
            stderr=log,
        )
    until(lambda: (tmp_path / "asked").exists(), 60)
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM, (tmp_path / "log").read_text()
