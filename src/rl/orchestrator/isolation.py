"""What an environment's worker sees in its sandbox: its interpreter, its packages, its files and the tokenizer, the pool's socket and the
relay's; of the environment variables those that it needs, and the keys that its settings name.

The standby of a warm start (`nursery`) is not made for it: whoever loses its parent in a pid namespace becomes a child of that namespace's
first process, never of the orchestrator, and the namespace ends with the worker. So each starts from nothing, and takes all with it.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl.orchestrator.relay import RELAYED, Relay
from rl.orchestrator.seen import followed, hidden_places, interpreter_places, named_files, straight, with_targets
from rl.system.credentials import REFERENCE, strings
from rl.system.errors import RunError
from rl.system.process_table import MARKER
from rl.system.sandbox import Sandbox, fault, reap_ended
from rl.wire.worker_messages import WorkerSetup

log = logging.getLogger(__name__)

VARIABLES = ("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "PYTHONUNBUFFERED", "PYTHONPATH", "OMP_NUM_THREADS", MARKER)
PREFIXES = ("LC_",)
OWN = ("/", "/tmp", "/dev", "/dev/shm", "/proc")
"""What a sandbox has of its own, and nothing puts this machine's in place of."""


class Isolation:
    """The sandboxes of a pool's workers, and the relay that they share. `directory` is the pool's own, `run_dir` what none of them sees."""

    def __init__(self, directory: Path, run_dir: Path):
        self.directory, self.run_dir = directory, run_dir
        self.relay: Relay | None = None
        self.told: set[str] = set()
        """Environments of which was said what they see."""

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
        try:
            sandbox = sandbox_of(setup, setup_path, self.run_dir)
        except RunError as error:
            raise RunError(f'environment {setup.env.name}, isolation = "sandbox": {error}') from None
        if setup.env.name not in self.told:
            self.told.add(setup.env.name)
            log.info("%s", view(setup, self.run_dir))
        return setup, sandbox

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
    """The sandbox of a confined setup, which is in the file `setup_path`. `run_dir` cannot be seen in it. Raises RunError."""
    interpreter, links = interpreter_places(Path(setup.python or sys.executable))
    read = {Path(setup.orchestrator.removeprefix("ipc://")), Path(__file__).parents[1], *interpreter, *listed()}
    if setup.policy.relay:
        read.add(Path(setup.policy.relay))
    for folder in (setup.policy.tokenizer, setup.policy.model_path):
        if folder:
            read |= set(with_targets(Path(folder)))
    read |= named_files(setup.env, setup.python, run_dir).shown
    existing = followed({straight(path) for path in read if path.exists()})
    existing = {path for path in existing if str(path.resolve()) not in OWN and not path.is_relative_to("/proc")} | {setup_path.absolute()}
    return Sandbox(frozenset(existing), frozenset(hidden_places(run_dir, existing)), Path.cwd(), setup.network, links)


def listed() -> set[Path]:
    """The directories that PYTHONPATH lists."""
    return {Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part}


def view(setup: WorkerSetup, run_dir: Path) -> str:
    """What the sandbox shows of this machine's files by the user's settings, in one line."""
    named = named_files(setup.env, setup.python, run_dir)
    shown = [str(path) for path in sorted({*named.shown, *interpreter_places(Path(setup.python or sys.executable))[0], *listed()})]
    text = f"environment {setup.env.name}: beside programs, libraries and the model its sandbox shows, read only, {', '.join(shown)}"
    if named.left_out:
        left_out = ", ".join(map(repr, sorted(named.left_out)))
        text += f"; of its arguments not {left_out}: what holds the working, home or run directory, and what is the system's own or the"
        text += " run's, is never opened; name what lies in it"
    return text


def variables_of(setup: WorkerSetup, given: Mapping[str, str]) -> dict[str, str]:
    """Of the environment variables those that a confined worker gets; its HOME is its /tmp."""
    tables: list[dict[str, Any]] = [setup.env.args, setup.env.set_kwargs]
    named = {match[1] for table in tables for _, text in strings(table) if (match := REFERENCE.fullmatch(text))}
    named |= {*setup.keys, *VARIABLES}
    if setup.policy.endpoint:
        named.add(setup.policy.endpoint.api_key_var)
    kept = {name: value for name, value in given.items() if name in named or name.startswith(PREFIXES)}
    return kept | {"HOME": "/tmp"}
