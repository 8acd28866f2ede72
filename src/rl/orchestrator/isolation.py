"""What an environment's worker sees in its sandbox: its interpreter, its packages, its files and the tokenizer, the pool's socket and the
relay's; of the environment variables those that it needs, and the keys that its settings name.

The standby of a warm start (`nursery`) is not made for it: whoever loses its parent in a pid namespace becomes a child of that namespace's
first process, never of the orchestrator, and the namespace ends with the worker. So each starts from nothing, and takes all with it.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl.config.environment_id import module_file, module_name
from rl.homes.build import outside
from rl.homes.home import is_of_package
from rl.orchestrator.relay import RELAYED, Relay
from rl.system.credentials import REFERENCE, strings
from rl.system.errors import RunError
from rl.system.process_table import MARKER
from rl.system.sandbox import Sandbox, fault, reap_ended
from rl.wire.worker_messages import WorkerSetup

VARIABLES = ("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "PYTHONUNBUFFERED", "PYTHONPATH", "OMP_NUM_THREADS", MARKER)
PREFIXES = ("LC_",)
OWN = ("/", "/tmp", "/dev", "/dev/shm", "/proc")
"""What a sandbox has of its own: an argument that names it means that."""


class Isolation:
    """The sandboxes of a pool's workers, and the relay that they share. `directory` is the pool's own, `run_dir` what none of them sees."""

    def __init__(self, directory: Path, run_dir: Path):
        self.directory, self.run_dir = directory, run_dir
        self.relay: Relay | None = None

    def enter(self, setup: WorkerSetup, setup_path: Path) -> tuple[WorkerSetup, Sandbox | None]:
        """The setup as its worker gets it in the file `setup_path`, and the worker's sandbox, if it is to be in one. Raises RunError."""
        if not setup.sandbox:
            return setup, None
        if problem := fault():
            raise RunError(f'environment {setup.env.name}, isolation = "sandbox": {problem}')
        if unset := [key for key in setup.keys if key not in os.environ]:
            raise RunError(f"environment {setup.env.name}: keys names {', '.join(unset)}, and the shell has none; set it, or leave it out")
        policy = setup.policy
        if self.relay is None and policy.endpoint is None:
            self.relay = Relay(self.directory / "inference", policy.inference_urls, Path(policy.inference_status))
        reap_ended()  # those of dead workers
        setup = confined(setup, str(self.relay.socket) if self.relay else "")
        return setup, sandbox_of(setup, setup_path, self.run_dir)

    def close(self) -> None:
        if self.relay:
            self.relay.close()


def confined(setup: WorkerSetup, relay: str) -> WorkerSetup:
    """The setup as the worker in the sandbox gets it: it asks the relay for tokens, without the run's token, and writes no spans."""
    policy = setup.policy
    if policy.endpoint is None:
        policy = msgspec.structs.replace(policy, inference_urls=[RELAYED], inference_status="", relay=relay)
    return msgspec.structs.replace(setup, policy=policy, spans="")


def sandbox_of(setup: WorkerSetup, setup_path: Path, run_dir: Path) -> Sandbox:
    """The sandbox of a confined setup, which is in the file `setup_path`. `run_dir` cannot be seen in it, and a text among the settings
    that happens to be a path, `../` or `//`, does not show what holds it, the current directory or the home directory."""
    directory = Path.cwd()
    read = {Path(setup.orchestrator.removeprefix("ipc://")), Path(__file__).parents[1]}
    if setup.policy.relay:
        read.add(Path(setup.policy.relay))
    read |= set(interpreter_places(Path(setup.python or sys.executable)))
    for folder in (setup.policy.tokenizer, setup.policy.model_path):
        if folder:
            read |= set(with_targets(Path(folder)))
    inside = run_dir.resolve()
    holds = {place for one in (directory, Path("~").expanduser(), inside) for place in (one, *one.parents)}
    named = [path for path in map(plain, named_files(setup)) if os.path.exists(path)]  # Path.exists raises for what is too long for a name
    read |= {path for path in named if path.resolve() not in holds and not path.resolve().is_relative_to(inside)}
    read |= {Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part}
    existing = {place for place in map(plain, read) if place.exists() and str(place.resolve()) not in OWN}
    existing = {place for place in existing if not place.is_relative_to("/proc")}
    return Sandbox(frozenset(existing | {setup_path.absolute()}), frozenset({run_dir.absolute(), inside}), directory, setup.network)


def plain(path: Path) -> Path:
    """An absolute path without `..` and with one slash in front."""
    return Path(os.path.normpath(Path("/", *path.absolute().parts[1:])))


def interpreter_places(python: Path) -> Iterator[Path]:
    """The directories of a virtual environment, of the interpreter that it was made from, and of packages that lie elsewhere."""
    place = python.parent.parent
    if not (place / "pyvenv.cfg").is_file():
        yield from (python, python.resolve().parent.parent)
        return
    yield place
    yield from outside(place)
    lines = (line.partition("=") for line in (place / "pyvenv.cfg").read_text().splitlines())
    for home in (value.strip() for key, _, value in lines if key.strip() == "home"):
        yield from (Path(home).parent, Path(home).resolve().parent)


def with_targets(folder: Path) -> Iterator[Path]:
    """A model's folder, and the directories that its links lead to: a hub's cache keeps the content elsewhere."""
    yield folder
    if folder.is_dir():
        yield from {path.resolve().parent for path in folder.iterdir() if path.is_symlink()}


def named_files(setup: WorkerSetup) -> Iterator[Path]:
    """The files and directories that the environment's settings name: a module, rows, the reward's file, paths in its arguments."""
    env = setup.env
    if env.id and not is_of_package(setup.python) and (file := module_file(Path.cwd(), module_name(env.id))):
        yield file.parent if file.name == "__init__.py" else file
    yield from (Path(text).expanduser() for text in (env.dataset, env.eval_dataset) if text)
    if env.reward and env.reward.rpartition(":")[0].endswith(".py"):
        yield Path(env.reward.rpartition(":")[0]).expanduser()
    texts: list[str] = [env.id] if env.id and "/" in env.id else []
    texts += [text for table in (env.args, env.set_kwargs) for _, text in strings(table) if "/" in text and len(text) < 4096]
    yield from (Path(text).expanduser() for text in texts if "\0" not in text and "://" not in text)


def variables_of(setup: WorkerSetup, given: Mapping[str, str]) -> dict[str, str]:
    """Of the environment variables those that a confined worker gets; its HOME is its /tmp."""
    tables: list[dict[str, Any]] = [setup.env.args, setup.env.set_kwargs]
    named = {match[1] for table in tables for _, text in strings(table) if (match := REFERENCE.fullmatch(text))}
    named |= {*setup.keys, *VARIABLES}
    if setup.policy.endpoint:
        named.add(setup.policy.endpoint.api_key_var)
    kept = {name: value for name, value in given.items() if name in named or name.startswith(PREFIXES)}
    return kept | {"HOME": "/tmp"}
