"""The command `rl`: loads the configuration and launches the run, or passes its arguments to a
subcommand.

rl -> launch -> Supervisor -> Keeper -> Children.start -> [torchrun ->] rl.trainer.main,
rl.orchestrator.main, rl.inference.main
"""

import io
import os
import pkgutil
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from rl.cluster.submit import dry_run, start
from rl.config.command_line import fail, load_config_or_exit
from rl.config.help import COMMANDS
from rl.launch.children import Children
from rl.launch.devices import mend_vllm_cpu
from rl.launch.run import resume_command
from rl.system.children import Stopped
from rl.system.errors import ConfigError, RunError, system_error
from rl.system.linux import spare_loopback
from rl.system.machine import DISTRIBUTION
from rl.system.terminal import discard_output, nearest


def subcommand(word: str, args: list[str], children: Children) -> int:
    """Runs a subcommand and returns its exit code, 1 for a RunError. Exits with 2 if `word` is
    not a command, or for a ConfigError."""
    if word not in COMMANDS:
        near = nearest(word, COMMANDS)
        meant = f"rl {near}" if near else ""
        if word.endswith(".toml"):
            meant = f"rl @ {word}"
        elif "=" in word:
            meant = f"rl --{word.replace('=', ' ', 1)}"
        others = (
            f"files are given as `@ FILE`, the commands are {', '.join(COMMANDS)}; see rl --help"
        )
        remedy = f"did you mean `{meant}`? ({others})" if meant else others
        fail("rl", f"{word}: no such command; {remedy}")
    program = f"rl {word}"
    try:
        return pkgutil.resolve_name(COMMANDS[word][0])(args, children)
    except ConfigError as error:
        fail(program, str(error))
    except RunError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1


def commit() -> str:
    """Returns ` (commit 1a2b3c4)` in a clone, with `-dirty` appended to the hash if files have
    changed; empty elsewhere, or if git does not answer."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or not (git := shutil.which("git")):
        return ""
    try:
        described = subprocess.run(
            [git, "-C", root, "describe", "--always", "--dirty", "--exclude", "*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except subprocess.TimeoutExpired:
        return ""
    return f" (commit {described.stdout.strip()})" if described.returncode == 0 else ""


def main() -> int:
    """Runs `rl` and returns its exit code."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None after `>&-`
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # also into a file: others follow it
    mend_vllm_cpu()
    spare_loopback()
    args, children = sys.argv[1:], Children()
    children.stop_on_signals()
    try:
        if "--version" in args:
            print(f"rl {metadata.version(DISTRIBUTION)}{commit()}")
            return 0
        if args and not args[0].startswith(("-", "@")):
            return subcommand(args[0], args[1:], children)
        config, line = load_config_or_exit(args, variables=os.environ, dry_run=dry_run)
        return start(config, line, children, resume_command(args))
    except ConfigError as error:
        fail("rl", str(error))
    except RunError as error:
        print(f"rl: {error}", file=sys.stderr)
    except BrokenPipeError:
        return discard_output()
    # a full or read-only disk, or missing permission: the user can fix these
    except OSError as error:
        print(f"rl: {system_error(error)}", file=sys.stderr)
    except Stopped as stop:
        children.stop_caught()
        return 128 + stop.signum
    finally:
        children.stop()
    return 1


if __name__ == "__main__":
    sys.exit(main())
