"""Starts a policy and environments, plays tasks and stops both: the common part of `rl eval`,
`rl collect` and `rl env`."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rl.commands.options import PolicySource
from rl.config.command_line import from_toml, write_config
from rl.config.orchestrator import EnvConfig
from rl.config.run import RLConfig
from rl.config.trainer import LoraConfig
from rl.homes.resolve import Homes, entries, in_homes
from rl.launch import devices, roles
from rl.launch.children import Children
from rl.launch.role_state import failure
from rl.models.folder import read_json, resolve_model
from rl.orchestrator.groups.group_credit import metrics_function
from rl.orchestrator.workers.setups import policy_spec, worker_setups
from rl.run_dir.checksums import is_delta, readable
from rl.run_dir.files import clean_leftovers, temporary_name, write_file
from rl.run_dir.logs import last_lines
from rl.run_dir.status import describe, read_status
from rl.system.children import STOP_DEADLINE_S, Child, descendants, kill_descendants
from rl.system.errors import WRONG_SETTINGS, ConfigError, RunError
from rl.system.machine import machine
from rl.system.terminal import say
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import Description, Endpoint, PolicySpec, Ready

if TYPE_CHECKING:
    from rl.orchestrator.workers.pool import PlayJob, WorkerPool
    from rl.wire.inference_client import InferenceServers

POLL_S = 0.2
CONCURRENCY = 64
HOPELESS = 16
"""Rollouts after which playing ends if all of them have failed."""
TOO_LONG = "the prompt leaves no room for an answer: raise model.max_model_len, or shorten it"
NOBODY = "http://127.0.0.1:9/v1"
"""Address of the policy of environments that are only described; it is never asked."""
PROGRESS_S = 20.0
"""Seconds between two progress lines."""


def run(program: str, children: Children, work: Coroutine[Any, Any, int]) -> int:
    """Runs a command and returns its exit code: 1 after printing an error that the user can fix,
    2 if the error is in the arguments, 128 + N after signal N. Ends every process that the
    command started."""
    before = set(descendants())
    try:
        return asyncio.run(until_stopped(children, work))
    except RunError as error:
        say(f"{program}: {error}")
        return WRONG_SETTINGS if isinstance(error, ConfigError) else 1
    except OSError as error:
        say(f"{program}: {error.filename or 'input or output'}: {error.strerror or error}")
    finally:
        children.stop_on_signals()
        children.stop()
        kill_descendants(without=before)  # orphans of environments and their workers
    return 1


async def until_stopped(children: Children, work: Coroutine[Any, Any, int]) -> int:
    """Awaits the work; the first SIGINT or SIGTERM cancels it, a second one kills everything."""
    loop, task, caught = asyncio.get_running_loop(), asyncio.ensure_future(work), []

    def on_signal(signum: int) -> None:
        if children.stopping:
            children.kill()
            os._exit(128 + signum)
        children.stopping = True
        caught.append(signum)
        say(f"{signal.Signals(signum).name}: stopping (a second signal kills at once)")
        task.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal, signum)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + caught[0]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as JSONL."""
    write_file(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


# The policy ---------------------------------------------------------------------------------------


@dataclass
class PolicyServer:
    """An inference server of rl as a child of this command, in its own run directory."""

    config: RLConfig
    model: str
    """The model's folder."""
    child: Child

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator["InferenceServers"]:
        """Waits until it is ready, and yields what asks it. Raises RunError."""
        from rl.wire.inference_client import InferenceServers

        timeout_s = self.config.orchestrator.inference_timeout_s
        servers = InferenceServers([], self.config.run_dir.status("inference"), timeout_s)
        try:
            await self.ready()
            yield servers
        finally:
            await servers.close()

    def check(self) -> None:
        """Raises RunError if the server has ended."""
        if self.child.exit_code is not None:
            raise failure(self.child, self.child.ending())

    async def ready(self) -> None:
        """Waits until the server is ready. Raises RunError if that takes longer than
        inference.startup_timeout_s."""
        limit_s, shown = self.config.inference.startup_timeout_s, time.monotonic()
        while True:
            status = read_status(self.config.run_dir.status("inference"))
            if status and status.address:
                return
            self.check()
            now, doing = time.monotonic(), describe(status)
            if now - self.child.started > limit_s:
                limit = f"inference.startup_timeout_s = {limit_s:g} s"
                raise failure(self.child, f"is not ready after {limit}; last status: {doing}")
            if now - shown > PROGRESS_S:
                shown, waited_s = now, now - self.child.started
                say(
                    f"  waiting for inference for {waited_s:.0f} s: {doing} (log: {self.child.log})"
                )
            await asyncio.sleep(POLL_S)


def server_config(config: RLConfig, model: str, folder: Path, adapter: str = "") -> RLConfig:
    """Returns the configuration of a server that has the whole machine, and `folder`, to itself."""
    config = config.model_copy(deep=True)
    config.output_dir, config.name, config.model.name = str(folder), "server", model
    config.cluster = None
    trainer, orchestrator = config.trainer, config.orchestrator
    trainer.lora, trainer.router_replay, trainer.gpus = None, "off", 0
    trainer.cpus = trainer.ranks = trainer.weights.dir = None
    if adapter:  # a server needs rank and alpha before it loads the adapters
        fields = read_json(Path(adapter) / "adapter_config.json")
        trainer.lora = LoraConfig(rank=fields["r"], alpha=fields["lora_alpha"])
    orchestrator.inference_urls, orchestrator.eval = [], []
    orchestrator.environment = [EnvConfig(id="none")]  # unused, but a configuration needs one
    return config.with_absolute_paths()


@contextlib.asynccontextmanager
async def policy_server(
    config: RLConfig, model: str, work: Path, children: Children, adapter: str = ""
) -> AsyncIterator[PolicyServer]:
    """Finds or downloads the model and starts its server, with the adapters in folder `adapter`
    if given, without waiting until it is ready; ends it on exit. Its log goes to `work`, which may
    be the user's folder, and another command's. Raises RunError."""
    work.mkdir(parents=True, exist_ok=True)
    folder, server = own_folder(work / "server"), None
    try:
        server = await start_in(folder, config, model, work / "logs", children, adapter)
        yield server
    finally:
        if server:
            server.child.terminate()
            await server.child.wait_async(STOP_DEADLINE_S)
            children.kill_tree(server.child)
        shutil.rmtree(folder, ignore_errors=True)


async def start_in(
    folder: Path, config: RLConfig, model: str, logs: Path, children: Children, adapter: str
) -> PolicyServer:
    """Starts a server as `policy_server` says, in a folder of its own, which has its run."""
    if is_delta(Path(model)):
        with readable(Path(model)) as whole:
            model = str(shutil.copytree(whole, folder / "model"))
    config, box = server_config(config, model, folder, adapter), machine()
    devices.check_build(config, box)
    division = devices.split(config, box)
    run_dir = config.run_dir
    write_config(run_dir.config, config)
    if adapter:  # a server starts at its run's newest version
        name = Path(adapter).name
        run_dir.weights_dir.mkdir()
        run_dir.weights(int(name) if name.isdigit() else 1).symlink_to(adapter)
    finder = children.start("model", roles.command("model", run_dir, 1), {}, logs)
    while await finder.wait_async(PROGRESS_S) is None:  # a download has no deadline
        say(f"  waiting for the model {model} (log: {finder.log})")
    if finder.exit_code:
        fault = (last_lines(finder.log) or [f"the model: {finder.ending()}"])[-1]
        raise RunError(f"{fault}\n  the whole log: {finder.log}")
    config = from_toml(run_dir.config)
    weights = resolve_model(config.model)
    child = roles.start(children, "inference", run_dir, division, logs)
    return PolicyServer(config, weights, child)


def own_folder(path: Path) -> Path:
    """Makes a folder whose name is made of `path` and of this process, and deletes such folders of
    processes that have ended without doing so."""
    clean_leftovers(path.parent)
    folder = temporary_name(path)
    folder.mkdir(0o700)
    return folder


@contextlib.contextmanager
def scratch(label: str) -> Iterator[Path]:
    """Provides a new directory and deletes it at the end or when a signal stops the command.
    After an error, which may refer to a log in it, the directory stays until the next call."""
    work = own_folder(Path(tempfile.gettempdir(), f"rl-env-{label}"))
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, work, ignore_errors=True)
        try:
            yield work
        except (RunError, OSError):
            cleanup.pop_all()
            raise


# Environments -------------------------------------------------------------------------------------


@dataclass
class PlaySession:
    """Environment workers that are ready, and the policy that they sample from."""

    pool: "WorkerPool"
    ready: dict[str, Ready]
    config: RLConfig
    server: PolicyServer | None

    async def play(
        self, label: str, jobs: list["PlayJob"], concurrency: int | None
    ) -> AsyncGenerator[tuple["PlayJob", list[Rollout]]]:
        """Plays jobs, `concurrency` rollouts at once, and yields each job with its rollouts when it
        is finished. `label` is the label of the progress output.

        Close it with `contextlib.aclosing`, which cancels unfinished rollouts. Raises RunError if
        nothing finishes for longer than the rollouts' own deadlines allow, or if all rollouts fail
        from the start.
        """
        from rl.orchestrator.workers.pool import play_all

        check = self.server.check if self.server else lambda: None
        if self.server:
            say(f"waiting for inference to serve {label} (log: {self.server.child.log})")
            await self.server.ready()
        plays = play_all(self.pool, jobs, concurrency or CONCURRENCY, self.patience_s(), check)
        finished, failures = 0, list[str]()
        with progress(label, sum(job.num_episodes for job in jobs)) as show:
            async with contextlib.aclosing(plays):
                async for job, rollouts in plays:
                    for rollout in rollouts:
                        is_too_long = rollout.overlong and not rollout.num_tokens
                        if rollout.error or is_too_long:
                            failures.append(rollout.error or TOO_LONG)
                    finished += len(rollouts)
                    show(job.num_episodes)
                    yield job, rollouts
                    all_failed = len(failures) == finished
                    if finished >= HOPELESS and all_failed and TOO_LONG not in failures:
                        break
        if failures and len(failures) == finished:
            raise RunError(
                f"all of the first {finished} rollouts failed; one of them:\n{failures[0]}\n"
                f"See {self.pool.log_dir}"
            )

    def sizes(self, env: str) -> dict[str, int | None]:
        """Returns the number of tasks of each split, None if endless."""
        return {"train": self.ready[env].num_train, "eval": self.ready[env].num_eval}

    async def describe(self, env: str, split: str, num: int, first: int = 0) -> Description:
        """Describes an environment and up to `num` tasks (-1: as many as come at once)."""
        timeout_s = self.config.orchestrator.worker_timeout_s
        return await self.pool.describe(env, split, num, timeout_s, first)

    async def tasks(self, env: str, split: str, limit: int | None) -> list[dict[str, Any]]:
        """Returns the first `limit` tasks of a split, or all. Raises RunError for endless ones
        without a limit."""
        if self.sizes(env)[split] is None and not limit:
            raise RunError(f"{env}: its {split} tasks are endless; give a number with --limit")
        tasks = list[dict[str, Any]]()
        while True:
            num = limit - len(tasks) if limit else -1
            new = (await self.describe(env, split, num, len(tasks))).tasks
            if not new:
                return tasks
            tasks += new

    def patience_s(self) -> float:
        """Returns the longest time in seconds that a rollout may take: generation and scoring,
        repeated for every retry."""
        settings = self.config.orchestrator
        limits = [
            entry.timeout_s or settings.rollout_timeout_s for entry in settings.entries.values()
        ]
        return 2 * max(limits) * (settings.rollout_retries + 1) + 60.0


@contextlib.asynccontextmanager
async def play_session(
    config: RLConfig,
    homes: Homes,
    source: PolicySource | None,
    work: Path,
    children: Children,
    *,
    model: str = "",
    head_server: str = "",
) -> AsyncIterator[PlaySession]:
    """Starts the configured environments in their homes and, if the policy is a model, its server;
    ends them on exit. `play` waits for the server.

    Without a source the environments can only be described; `model` is a model folder against whose
    context their prompts are measured, `head_server` one of NeMo Gym, whose model server is the
    policy.
    """
    from rl.orchestrator.workers.pool import WorkerPool  # takes 0.2 s, which `--help` should not

    server = None
    add_metrics = metrics_function(config.orchestrator)  # before anything starts: loading may fail
    endpoint = source.endpoint if source else None
    for entry in entries(config).values() if endpoint or head_server else ():
        if entry.isolation == "sandbox" and not entry.network:
            raise RunError(
                f"environment {entry.label} is in a sandbox without network access and cannot "
                f"reach {head_server or (source and source.label)}: set its network = true, or use "
                "a model served on this machine"
            )
    async with contextlib.AsyncExitStack() as on_exit:
        if model:
            policy = policy_spec(config, model)
        elif head_server:  # what its model server holds is not known here
            policy = PolicySpec(head_server=head_server, max_model_len=sys.maxsize)
        elif source is None or endpoint:
            endpoint = endpoint or Endpoint(base_url=NOBODY, model="none")
            policy = PolicySpec(endpoint=endpoint, max_model_len=config.model.max_model_len)
        elif not source.model:
            config = config.with_absolute_paths()
            policy = policy_spec(config, resolve_model(config.model))
        else:
            starting = policy_server(config, source.model, work, children, source.adapter)
            server = await on_exit.enter_async_context(starting)
            policy = policy_spec(server.config, server.model)
        settings = config.orchestrator
        limits = {"memory_gib": settings.worker_memory_gib, "silence_s": settings.worker_silence_s}
        pool = WorkerPool(work / "logs", **limits)
        on_exit.push_async_callback(pool.close)
        pool.add_metrics = add_metrics
        await pool.start_all(worker_setups(in_homes(config, homes), policy, pool.address))
        ready = await pool.sizes(settings.worker_timeout_s)
        yield PlaySession(pool, ready, config, server)


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts finished rollouts, and shows them: a bar on a terminal, a line
    every PROGRESS_S elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    is_terminal, done, shown = sys.stderr.isatty(), 0, time.monotonic()
    with Progress(console=Console(stderr=True), transient=True, disable=not is_terminal) as bar:
        task = bar.add_task(label, total=total)

        def advance(count: int) -> None:
            nonlocal done, shown
            done += count
            bar.update(task, completed=done)
            if not is_terminal and time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                say(f"  {label}: {done} of {total} rollouts")

        yield advance
