"""What an environment's worker sees in its sandbox: its interpreter, packages and files, the
tokenizer, the sockets of the pool and the inference proxy (inference_proxy.py), the environment
variables that it needs, and the keys that its settings name.

Sandboxed workers are not forked from a copy (see worker_launcher.py): an orphan in a pid namespace
becomes a child of that namespace's first process, never of the orchestrator, and the namespace ends
with the worker. So each worker starts cold.
"""

import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl.orchestrator.workers.inference_proxy import RELAYED, InferenceProxy
from rl.orchestrator.workers.sandbox_mounts import (
    followed,
    hidden_places,
    interpreter_places,
    named_files,
    straight,
    with_targets,
)
from rl.system.credentials import REFERENCE, strings
from rl.system.errors import RunError
from rl.system.process_table import MARKER
from rl.system.sandbox import OWN, Sandbox, fault, reap_ended
from rl.wire.worker_messages import WorkerSetup

log = logging.getLogger(__name__)

VARIABLES = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TERM",
    "PYTHONUNBUFFERED",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    MARKER,
)
PREFIXES = ("LC_",)


class WorkerSandbox:
    """The sandboxes of a pool's workers, and their inference proxy. `directory` is the pool's
    own; `run_dir` is hidden from all of them."""

    def __init__(
        self, directory: Path, run_dir: Path, watch: Callable[[Coroutine[Any, Any, None]], None]
    ):
        """`watch` runs a coroutine in the background."""
        self.directory, self.run_dir, self.watch = directory, run_dir, watch
        self.inference_proxy: InferenceProxy | None = None
        self.told: set[str] = set()
        """Environments whose view was logged already."""

    def enter(self, setup: WorkerSetup, setup_path: Path) -> tuple[WorkerSetup, Sandbox | None]:
        """Returns the setup to write to `setup_path` for the worker, and the worker's sandbox,
        if it is to have one. Raises RunError."""
        if not setup.sandbox:
            return setup, None
        if problem := fault():
            raise RunError(f'environment {setup.env.name}, isolation = "sandbox": {problem}')
        if unset := [key for key in setup.keys if key not in os.environ]:
            raise RunError(
                f"environment {setup.env.name}: keys names {', '.join(unset)}, not set in "
                "the shell; set it, or leave it out"
            )
        policy = setup.policy
        if self.inference_proxy is None and policy.endpoint is None:
            status = Path(policy.inference_status)
            self.inference_proxy = InferenceProxy(
                self.directory / "inference", policy.inference_urls, status, self.watch
            )
        reap_ended()  # the sandboxes of dead workers
        setup = confined(setup, str(self.inference_proxy.path) if self.inference_proxy else "")
        try:
            sandbox = sandbox_of(setup, setup_path, self.run_dir)
        except RunError as error:
            raise RunError(
                f'environment {setup.env.name}, isolation = "sandbox": {error}'
            ) from None
        if setup.env.name not in self.told:
            self.told.add(setup.env.name)
            log.info("%s", view(setup, self.run_dir))
        return setup, sandbox

    async def close(self) -> None:
        if self.inference_proxy:
            await self.inference_proxy.close()


def confined(setup: WorkerSetup, inference_proxy: str) -> WorkerSetup:
    """The setup for a worker in a sandbox: it gets tokens through the inference proxy without
    the credential, and writes no spans."""
    policy = setup.policy
    if policy.endpoint is None:
        policy = msgspec.structs.replace(
            policy, inference_urls=[RELAYED], inference_status="", inference_proxy=inference_proxy
        )
    return msgspec.structs.replace(setup, policy=policy, spans="")


def sandbox_of(setup: WorkerSetup, setup_path: Path, run_dir: Path) -> Sandbox:
    """Returns the sandbox for a confined setup, which is in the file `setup_path`; it hides
    `run_dir`. Raises RunError."""
    interpreter, links = interpreter_places(Path(setup.python or sys.executable))
    read = {Path(setup.orchestrator), Path(__file__).parents[2], *interpreter, *listed()}
    if setup.policy.inference_proxy:
        read.add(Path(setup.policy.inference_proxy))
    if setup.policy.model_path:
        read |= set(with_targets(Path(setup.policy.model_path)))
    read |= named_files(setup.env, setup.python, setup.read, run_dir)
    existing = followed({straight(path) for path in read if path.exists()})
    existing = {
        path
        for path in existing
        if str(path.resolve()) not in OWN and not path.is_relative_to("/proc")
    } | {setup_path.absolute()}
    return Sandbox(
        frozenset(existing),
        frozenset(hidden_places(run_dir, existing)),
        Path.cwd(),
        setup.network,
        links,
    )


def listed() -> set[Path]:
    """Returns the directories that PYTHONPATH lists."""
    return {Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part}


def view(setup: WorkerSetup, run_dir: Path) -> str:
    """Describes in one line which of this machine's files the sandbox shows because of the
    user's settings."""
    named = named_files(setup.env, setup.python, setup.read, run_dir)
    shown = sorted(
        {*named, *interpreter_places(Path(setup.python or sys.executable))[0], *listed()}
    )
    text = (
        f"environment {setup.env.name}: besides programs, libraries and model, its sandbox "
        f"shows, read-only, {', '.join(map(str, shown))}"
    )
    return f"{text}; add anything else it needs with `read`"


def variables_of(setup: WorkerSetup, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that a confined worker gets; its HOME is its /tmp."""
    tables: list[dict[str, Any]] = [setup.env.args, setup.env.set_kwargs]
    named = {
        match[1]
        for table in tables
        for _, text in strings(table)
        if (match := REFERENCE.fullmatch(text))
    }
    named |= {*setup.keys, *VARIABLES}
    if setup.policy.endpoint:
        named.add(setup.policy.endpoint.api_key_var)
    kept = {
        name: value
        for name, value in variables.items()
        if name in named or name.startswith(PREFIXES)
    }
    return kept | {"HOME": "/tmp"}
