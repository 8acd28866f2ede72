"""Runs `rl` as a user does, in a directory of its own, with the test environments installed."""

import os
import subprocess
import sys
from pathlib import Path

from rl.launch.children import Children
from rl.main import subcommand
from tests.flags import flags

ENVIRONMENTS = Path(__file__).parent.parent / "environments"
CODE = "import sys; from rl.main import main; sys.exit(main())"

FAKE_SERVER = """
import sys, rl.main
scripts = {"model": "", "inference": SCRIPT}
rl.launch.roles.command = lambda name, run_dir, ranks: [sys.executable, "-c", scripts[name], str(run_dir.root)]
sys.exit(rl.main.main())
"""


def words(first: object, *args: object) -> list[str]:
    """The words of a command line; the first text, and one that begins with a flag, may hold several."""
    return [*str(first).split(), *flags(*args)]


def with_server(script: str) -> str:
    """`rl` whose inference server is this program."""
    return FAKE_SERVER.replace("SCRIPT", repr(script))


def start(directory: Path, *args: str, code: str = CODE, **env: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ENVIRONMENTS), "COLUMNS": "200", **env}
    return subprocess.Popen(
        [sys.executable, "-c", code, *words(*args)],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def called(capsys, command: str, *args: object) -> tuple[int, str, str]:
    """Exit code, output and errors of a subcommand in this process."""
    try:
        command, *args = words(command, *args)
        code = subcommand(command, args, Children())
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def rl(directory: Path, *args: str, code: str = CODE, **env: str) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    process = start(directory, *args, code=code, **env)
    try:
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
    return process.returncode, out, err
