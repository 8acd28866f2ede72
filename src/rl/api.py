"""The Python API, for scripts and notebooks: `rl.open`, `rl.train`, `rl.evaluate`, `rl.record`.
See docs/python.md."""

import json
import os
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from rl.commands.options import named_run
from rl.config.base import Settings
from rl.config.command_line import build, parse_args, parse_toml, to_toml
from rl.config.run import RLConfig
from rl.records.run import Run
from rl.system.children import PYTHON
from rl.system.errors import ConfigError, RunError
from rl.system.linux import spare_loopback

if TYPE_CHECKING:
    from rl.commands.record import Recorder

Given = Mapping[str, Any] | RLConfig | str | Path
"""A configuration: nested tables, a validated RLConfig, or the path of a TOML file."""
LAST_LINES = 30
"""Number of lines of a failed command's output that the error quotes."""
FAULTY = 2
"""Exit code of a command whose configuration is invalid."""
STOP_S = 60.0
"""How long an interrupted run may take to stop its processes."""


def open(run: str | Path) -> Run:
    """Opens a run, live or finished, by its directory or its name under outputs/. Raises
    RunError or ConfigError if there is none."""
    if not str(run):
        raise ConfigError(
            "the name of the run is empty: give its directory, or its name under outputs/"
        )
    return Run(named_run(str(run)))


def train(
    config: Given | None = None,
    *,
    resume: bool | int = False,
    clean: bool = False,
    quick: bool = False,
    **settings: Any,
) -> Run:
    """Runs `rl` in a subprocess whose output appears here, and returns the run.

    config: tables, an RLConfig, or the path of a TOML file. settings: overrides of single keys,
    with two underscores for each dot: `trainer__optim__lr=1e-6`. resume: True for the newest
    checkpoint, or a step. clean, quick: see the flags of `rl`.

    Raises ConfigError for an invalid configuration, RunError with the last lines of output if the
    run fails. An interrupt stops the run.
    """
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        try:
            step = None if isinstance(resume, bool) else index(resume)
        except TypeError:
            raise ConfigError(
                f"resume = {resume!r}: give True, or the step to resume at as a number"
            ) from None
        switches = {
            "--clean": clean,
            "--quick": quick,
            "--resume": resume is True,
            f"--resume={step}": step is not None,
        }
        args = [
            *arguments(config, settings, Path(folder)),
            *(name for name, is_on in switches.items() if is_on),
        ]
        checked = build(parse_args(args, os.environ), outside=True)
        run_command(args)
    return Run(checked.run_dir.root)


def evaluate(
    policy: str | None = None,
    config: Given | None = None,
    *,
    compare: str | None = None,
    limit: int | None = None,
    samples: int | None = None,
    output: str | Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Runs `rl eval` in a subprocess and returns its report (report.json).

    policy, compare: see `--policy` and `--compare`: a run (`outputs/x@best`), a model, or an
    endpoint. limit: examples per evaluation. samples: rollouts per example. output: directory for
    report and rollouts; by default they are not kept. config, settings: see `train`.

    Raises ConfigError for an invalid configuration, and RunError with the last lines of output if
    the evaluation fails.
    """
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        report = Path(output).expanduser().absolute() if output else Path(folder) / "report"
        options = {
            "policy": policy,
            "compare": compare,
            "limit": limit,
            "samples": samples,
            "output": report,
        }
        flags = [
            word
            for name, value in options.items()
            if value is not None
            for word in (f"--{name}", str(value))
        ]
        run_command(["eval", *arguments(config, settings, Path(folder)), *flags])
        return json.loads((report / "report.json").read_bytes())


def record(
    policy: str | None = None,
    output: str | Path = "rollouts.jsonl",
    config: Given | None = None,
    **settings: Any,
) -> "Recorder":
    """Serves a policy and records what your program plays with it, for `rl train --from`; use it in
    a `with` block.

    policy: a run's version (`outputs/x@40`) or a model, see `--policy`; by default the
    configuration's model, or the servers in orchestrator.inference_urls. output: the file that
    rollouts are appended to. config, settings: see `train`.

    Raises ConfigError for an invalid configuration, and RunError if the policy cannot be served.
    """
    from rl.commands.record import Recorder

    spare_loopback()
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        args = [
            *arguments(config, settings, Path(folder)),
            *(["--policy", policy] if policy else []),
        ]
        return Recorder.of(args, Path(output))


def arguments(config: Given | None, settings: Mapping[str, Any], folder: Path) -> list[str]:
    """Returns the command-line arguments for a configuration; tables are written to a file in
    `folder`."""
    words = []
    if isinstance(config, (str, Path)):
        words = ["@", str(config)]
    elif config is not None:
        path = folder / "config.toml"
        try:
            path.write_text(
                to_toml(config) if isinstance(config, RLConfig) else tomli_w.dumps(dict(config))
            )
        except TypeError as error:
            raise ConfigError(
                f"{error}: give tables, numbers, strings and lists; leave out keys that are None"
            ) from None
        words = ["@", str(path)]
    for key, value in settings.items():
        words += [f"--{key.replace('__', '.')}", flag_text(value)]
    return words


def flag_text(value: Any) -> str:
    """Formats a value for a flag. Raises ConfigError for a value that no setting can have."""
    if isinstance(value, Settings):
        value = value.model_dump(exclude_none=True)
    value = str(value) if isinstance(value, Path) else value
    plain = isinstance(value, str) and parse_toml(value) == value
    try:
        text = value if plain else toml_value(value)
    except TypeError:
        raise ConfigError(
            f"{value!r}: is not a valid setting; give a number, string, list or table"
        ) from None
    if parse_toml(text) != value:
        raise ConfigError(
            f"{value!r}: is not a valid setting; give a number, string, list or table"
        )
    return text


def toml_value(value: Any) -> str:
    """Formats a number, list or table as TOML on one line."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)} = {toml_value(inner)}" for key, inner in value.items())
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return tomli_w.dumps({"value": value}).partition("=")[2].strip() if value is not None else ""


def run_command(args: list[str]) -> None:
    """Runs `rl ARGS` and prints its output except for the final error, with which it raises
    ConfigError or RunError if the command fails. An interrupt is passed on to the command, and
    waits until it has ended."""
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    # In its own session, so that it receives an interrupt only once: a second one would kill a run
    # while it is stopping.
    with subprocess.Popen(
        [*PYTHON, "-m", "rl.main", *args], **pipes, start_new_session=True
    ) as process:
        assert process.stdout
        last, held = deque[str](maxlen=LAST_LINES), list[str]()
        name = f"rl {args[0]}" if args and args[0].isalpha() else "rl"
        try:
            for line in process.stdout:
                last.append(line)
                # the final error, which the exception repeats
                if held or line.startswith(f"{name}: "):
                    held.append(line)
                    if len(held) <= LAST_LINES:
                        continue
                    line, held = "".join(held), []
                print(line, end="", flush=True)
            code = process.wait()
        finally:
            if process.poll() is None:
                stop(process)
    if code:
        raise (ConfigError if code == FAULTY else RunError)(
            f"{name} ended with {code}:\n" + "".join(held or last).rstrip()
        )
    print("".join(held), end="", flush=True)


def stop(process: "subprocess.Popen[str]") -> None:
    """Interrupts a command, prints its remaining output, and kills it if it does not end within
    STOP_S."""
    process.send_signal(signal.SIGINT)
    try:
        print(process.communicate(timeout=STOP_S)[0], end="", flush=True)
    except subprocess.TimeoutExpired:
        process.kill()
