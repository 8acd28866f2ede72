"""What `import rl` gives to a script or a notebook: `rl.open`, `rl.train`, `rl.evaluate`. docs/python.md shows them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any

import tomli_w

from rl.commands.policy_spec import named_run
from rl.config.base import Settings
from rl.config.command_line import build, parse_args, parse_value, to_toml
from rl.config.run import RLConfig
from rl.records.run import Run
from rl.system.errors import ConfigError, RunError

Given = Mapping[str, Any] | RLConfig | str | Path
"""A configuration: nested tables, a checked one, or the path of a TOML file."""
LAST_LINES = 30
"""Of what a command printed, in the error if it fails."""
FAULTY = 2
"""The exit code of a command whose configuration has faults."""
STOP_S = 60.0
"""A run that is interrupted has so long to stop its processes."""


def open(run: str | Path, *, cache: bool = True) -> Run:
    """A run, live or finished: its directory, or its name under outputs/. Raises RunError or ConfigError where there is none."""
    if not str(run):
        raise ConfigError("the name of the run is empty: give its directory, or its name under outputs/")
    return Run(named_run(str(run)), cache=cache)


def train(config: Given | None = None, *, resume: bool | int = False, clean: bool = False, quick: bool = False, **settings: Any) -> Run:
    """Does what `rl` does, in a process of its own whose output appears here, and returns the run.

    config: tables, an RLConfig, or the path of a TOML file. settings: keys on top, with two underscores for each dot:
    `trainer__optim__lr=1e-6`. resume: True at the newest checkpoint, or a step. clean, quick: as the flags.

    Raises ConfigError for a configuration with faults, RunError with the last lines if the run fails. An interrupt stops the run.
    """
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        try:
            step = None if isinstance(resume, bool) else index(resume)
        except TypeError:
            raise ConfigError(f"resume = {resume!r}: give True, or the step to go on at as a number") from None
        switches = {"--clean": clean, "--quick": quick, "--resume": resume is True, f"--resume={step}": step is not None}
        args = [*arguments(config, settings, Path(folder)), *(name for name, is_on in switches.items() if is_on)]
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
    """Does what `rl eval` does, in a process of its own, and returns its report (report.json).

    policy, compare: as `--policy` and `--compare`: a run (`outputs/x@best`), a model, or an endpoint. limit, samples: examples of every
    evaluation, and rollouts an example. output: where report and rollouts go; default: nowhere that stays. config, settings: as of `train`.

    Raises ConfigError for a configuration with faults, RunError with the last lines if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="rl-") as folder:
        place = Path(output).expanduser().absolute() if output else Path(folder) / "report"
        options = {"policy": policy, "compare": compare, "limit": limit, "samples": samples, "output": place}
        flags = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        run_command(["eval", *arguments(config, settings, Path(folder)), *flags])
        return json.loads((place / "report.json").read_bytes())


def arguments(config: Given | None, settings: Mapping[str, Any], folder: Path) -> list[str]:
    """The arguments of a command that give a configuration; tables go to a file in `folder`."""
    words = []
    if isinstance(config, (str, Path)):
        words = ["@", str(config)]
    elif config is not None:
        path = folder / "config.toml"
        try:
            path.write_text(to_toml(config) if isinstance(config, RLConfig) else tomli_w.dumps(dict(config)))
        except TypeError as error:
            raise ConfigError(f"{error}: give tables, numbers, texts and lists; leave out what is None") from None
        words = ["@", str(path)]
    for key, value in settings.items():
        words += [f"--{key.replace('__', '.')}", flag_text(value)]
    return words


def flag_text(value: Any) -> str:
    """A value as a flag has it. Raises ConfigError for one that no setting can have."""
    if isinstance(value, Settings):
        value = value.model_dump(exclude_none=True)
    value = str(value) if isinstance(value, Path) else value
    plain = isinstance(value, str) and parse_value(value) == value
    try:
        text = value if plain else toml_value(value)
    except TypeError:
        raise ConfigError(f"{value!r}: is no value of a setting; give a number, text, list or table") from None
    if parse_value(text) != value:
        raise ConfigError(f"{value!r}: is no value of a setting; give a number, text, list or table")
    return text


def toml_value(value: Any) -> str:
    """A number, list or table on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return tomli_w.dumps({"value": value}).partition("=")[2].strip() if value is not None else ""


def run_command(args: list[str]) -> None:
    """Runs `rl ARGS` and shows what it prints, but for the error that it ends with. Raises ConfigError or RunError with that if it fails;
    an interrupt is passed on to it, and waits for its end."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    # In a session of its own, so that an interrupt reaches it once: a second one kills a run in the middle of its stop.
    with subprocess.Popen([sys.executable, "-m", "rl.main", *args], **pipes, start_new_session=True) as process:
        assert process.stdout
        last, held = deque[str](maxlen=LAST_LINES), list[str]()
        name = f"rl {args[0]}" if args and args[0].isalpha() else "rl"
        try:
            for line in process.stdout:
                last.append(line)
                if held or line.startswith(f"{name}: "):  # the error that ends it, which the exception says
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
        raise (ConfigError if code == FAULTY else RunError)(f"{name} ended with {code}:\n" + "".join(held or last).rstrip())
    print("".join(held), end="", flush=True)


def stop(process: "subprocess.Popen[str]") -> None:
    """Interrupts a command, shows what it says then, and kills it if it does not end."""
    process.send_signal(signal.SIGINT)
    try:
        print(process.communicate(timeout=STOP_S)[0], end="", flush=True)
    except subprocess.TimeoutExpired:
        process.kill()
