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
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rl.commands.policy_spec import Source
from rl.config.command_line import write_config
from rl.config.orchestrator import EnvConfig
from rl.config.run import RLConfig
from rl.config.trainer import LoraConfig
from rl.homes.resolve import Homes, entries, in_homes
from rl.launch import devices, roles
from rl.launch.children import Children
from rl.launch.role_state import failure
from rl.models.folder import read_json, resolve_model
from rl.orchestrator.groups.functions import metrics_function
from rl.orchestrator.workers.setups import policy_spec, worker_setups
from rl.run_dir.checksums import is_delta, readable
from rl.run_dir.logs import last_lines
from rl.run_dir.status import describe, read_status
from rl.system.children import STOP_DEADLINE_S, Child, descendants, kill_descendants
from rl.system.errors import WRONG_SETTINGS, ConfigError, RunError
from rl.system.linux import pid_scope
from rl.system.machine import machine
from rl.system.terminal import say
from rl.wire.rollouts import Rollout, Split
from rl.wire.worker_messages import Endpoint, PolicySpec, Ready

if TYPE_CHECKING:
    from rl.orchestrator.workers.pool import WorkerPool

POLL_S = 0.2
CONCURRENCY = 64
HOPELESS = 16
"""Rollouts after which playing ends if all of them have failed."""
TOO_LONG = "the prompt leaves no room for an answer: raise model.max_model_len, or shorten it"
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


def task_count(limit: int, size: int | None) -> int | None:
    """Returns the number of tasks to play, None if endless. `size`: tasks available (None:
    endless); `limit`: negative for no limit."""
    return size if limit < 0 else limit if size is None else min(size, limit)


# The policy ---------------------------------------------------------------------------------------


@dataclass
class Server:
    """An inference server of rl as a child of this command, in its own run directory."""

    children: Children
    config: RLConfig
    model: str
    """The model's folder."""
    child: Child
    folder: Path
    """A folder for this server alone, which is deleted with it; the run directory is in it."""

    def check(self) -> None:
        """Raises RunError if the server has ended."""
        if self.child.exit_code is not None:
            raise failure(self.child, self.child.ending())

    async def ready(self) -> None:
        """Waits until the server is ready. Raises RunError if that takes longer than
        inference.startup_timeout_s."""
        limit, shown = self.config.inference.startup_timeout_s, time.monotonic()
        while not (
            (status := read_status(self.config.run_dir.status("inference"))) and status.address
        ):
            self.check()
            doing, now = describe(status), time.monotonic()
            if now - self.child.started > limit:
                raise failure(
                    self.child,
                    f"is not ready after inference.startup_timeout_s = {limit:g} s; last "
                    f"status: {doing}",
                )
            if now - shown > PROGRESS_S:
                shown = now
                say(
                    f"  waiting for inference for {now - self.child.started:.0f} s: {doing} "
                    f"(log: {self.child.log})"
                )
            await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """Stops the server and its processes with SIGTERM, then SIGKILL after the deadline.
        Deletes its folder."""
        self.child.terminate()
        await self.child.wait_async(STOP_DEADLINE_S)
        self.children.kill_tree(self.child)
        shutil.rmtree(self.folder, ignore_errors=True)


def server_config(config: RLConfig, model: str, folder: Path, adapter: str = "") -> RLConfig:
    """Returns the configuration of a server that has the whole machine, and `folder`, to itself."""
    config = config.model_copy(deep=True)
    config.output_dir, config.name = str(folder), "server"
    config.model.name = model
    config.trainer.lora, config.trainer.router_replay = None, "off"
    if adapter:  # a server needs rank and alpha before it loads the adapters
        fields = read_json(Path(adapter) / "adapter_config.json")
        config.trainer.lora = LoraConfig(rank=fields["r"], alpha=fields["lora_alpha"])
    config.trainer.gpus, config.trainer.cpus, config.trainer.ranks, config.trainer.weights.dir = (
        0,
        None,
        None,
        None,
    )
    config.orchestrator.inference_urls, config.orchestrator.eval = [], []
    # unused by a server, but a configuration needs one
    config.orchestrator.environment = [EnvConfig(id="none")]
    return config.with_absolute_paths()


async def start_server(
    config: RLConfig, model: str, work: Path, children: Children, adapter: str = ""
) -> Server:
    """Finds or downloads the model and starts its server, with the adapters in folder `adapter`
    if given, without waiting until it is ready. Its log goes to `work`, which may be the user's
    folder, and another command's. Raises RunError."""
    work.mkdir(parents=True, exist_ok=True)
    folder = own_folder(work, "server")
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(shutil.rmtree, folder, ignore_errors=True)
        server = await start_in(folder, config, model, work / "logs", children, adapter)
        on_failure.pop_all()
    return server


async def start_in(
    folder: Path, config: RLConfig, model: str, logs: Path, children: Children, adapter: str
) -> Server:
    """Starts a server as `start_server` says, in a folder of its own."""
    if is_delta(Path(model)):
        with readable(Path(model)) as whole:
            model = str(shutil.copytree(whole, folder / "model"))
    config = server_config(config, model, folder, adapter)
    devices.check_build(config, box := machine())
    division = devices.split(config, box)
    config = devices.write_into(config, division)
    run_dir = config.run_dir
    write_config(run_dir.config, config)
    if adapter:  # a server starts at its run's newest version
        name = Path(adapter).name
        run_dir.weights_dir.mkdir()
        run_dir.weights(int(name) if name.isdigit() else 1).symlink_to(adapter)
    found = children.start("model", roles.command("model", run_dir, 1), {}, logs)
    while await found.wait_async(PROGRESS_S) is None:  # a download has no deadline
        say(f"  waiting for the model {model} (log: {found.log})")
    if found.exit_code:
        lines = last_lines(found.log)
        raise RunError(
            f"{lines[-1] if lines else 'the model: ' + found.ending()}\n  the whole log: "
            f"{found.log}"
        )
    weights = resolve_model(config.model)
    return Server(
        children,
        config,
        weights,
        roles.start(children, "inference", run_dir, division.inference, 1, logs),
        folder,
    )


def own_folder(parent: Path, label: str) -> Path:
    """Makes a folder that has this process in its name, and deletes those of processes that have
    ended without doing so."""
    prefix = f"{label}-{pid_scope()}-"
    for old in parent.glob(f"{prefix}*"):
        pid = old.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))


@contextlib.contextmanager
def scratch(label: str) -> Iterator[Path]:
    """Provides a new directory and deletes it at the end or when a signal stops the command.
    After an error, which may refer to a log in it, the directory stays until the next call."""
    work = own_folder(Path(tempfile.gettempdir()), f"rl-env-{label}")
    named = False
    try:
        yield work
    except (RunError, OSError):
        named = True
        raise
    finally:
        if not named:
            shutil.rmtree(work, ignore_errors=True)


# Environments -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A task to play and how often."""

    env: str
    split: Split
    task: int
    num_episodes: int
    sampling: dict[str, Any]
    label: str = ""
    """The evaluation it is played for, where several share an environment."""
    seed: int | None = None
    """Seed of its random draws; see PlayGroup."""


@dataclass
class PlaySession:
    """Environment workers that are ready, and the policy that they sample from."""

    pool: "WorkerPool"
    ready: dict[str, Ready]
    config: RLConfig
    server: Server | None

    async def play(
        self, label: str, jobs: list[Job], concurrency: int | None
    ) -> AsyncGenerator[tuple[Job, list[Rollout]]]:
        """Plays jobs, `concurrency` rollouts at once, and yields each job with its rollouts when it
        is finished. `label` is the label of the progress output.

        Close it with `contextlib.aclosing`, which cancels unfinished rollouts. Raises RunError if
        nothing finishes for longer than the rollouts' own deadlines allow, or if all rollouts fail
        from the start.
        """
        if self.server:
            say(f"waiting for inference to serve {label} (log: {self.server.child.log})")
            await self.server.ready()
        todo, playing = iter(jobs), {}
        finished, failures, last = 0, [], time.monotonic()
        patience_s = self.patience_s()
        progress = Progress(label, sum(job.num_episodes for job in jobs))
        try:
            while True:
                while sum(job.num_episodes for job in playing.values()) < (
                    concurrency or CONCURRENCY
                ) and (job := next(todo, None)):
                    rollouts = self.pool.play(
                        job.env,
                        job.split,
                        job.task,
                        job.num_episodes,
                        job.sampling,
                        job.task,
                        seed=job.seed,
                    )
                    playing[asyncio.create_task(rollouts)] = job
                if not playing:
                    break
                done, _ = await asyncio.wait(
                    {*playing, self.pool.failed},
                    timeout=POLL_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if self.pool.failed in done:
                    self.pool.failed.result()
                for task in done:
                    job, rollouts = playing.pop(task), task.result()
                    last, finished = time.monotonic(), finished + len(rollouts)
                    failures += [
                        one.error or TOO_LONG
                        for one in rollouts
                        if one.error or (one.overlong and not one.num_tokens)
                    ]
                    progress.advance(job.num_episodes)
                    yield job, rollouts
                if finished >= HOPELESS and len(failures) == finished and TOO_LONG not in failures:
                    break
                if self.server:
                    self.server.check()
                if time.monotonic() - last > patience_s:
                    names = sorted({job.env for job in playing.values()})
                    raise RunError(
                        f"waited {patience_s:.0f} s for any of {len(playing)} tasks of "
                        f"{', '.join(names)} to finish, longer than their "
                        "deadlines (orchestrator.rollout_timeout_s, timeout_s); see "
                        f"{self.pool.log_dir}"
                    )
            if failures and len(failures) == finished:
                raise RunError(
                    f"all of the first {finished} rollouts failed; one of "
                    f"them:\n{failures[0]}\nSee {self.pool.log_dir}"
                )
        finally:
            progress.close()
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    def patience_s(self) -> float:
        """Returns the longest time in seconds that a rollout may take: generation and scoring,
        repeated for every retry."""
        settings = self.config.orchestrator
        limits = [
            entry.timeout_s or settings.rollout_timeout_s
            for entry in [*settings.environment, *settings.eval]
        ]
        return 2 * max(limits) * (settings.rollout_retries + 1) + 60.0


@contextlib.asynccontextmanager
async def play_session(
    config: RLConfig,
    homes: Homes,
    source: Source | None,
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

    server, pool = None, None
    add_metrics = metrics_function(config.orchestrator)  # before anything starts: loading may fail
    try:
        closed = [
            entry.label
            for entry in entries(config).values()
            if entry.isolation == "sandbox" and not entry.network
        ]
        if closed and (head_server or (source and source.endpoint)):
            remedy = "set its network = true, or use a model served on this machine"
            where = head_server or (source.label if source else "")
            raise RunError(
                f"environment {closed[0]} is in a sandbox without network access and cannot "
                f"reach {where}: {remedy}"
            )
        if model:
            policy = policy_spec(config, model)
        elif head_server:
            # what its model server holds is not known here
            policy = PolicySpec(head_server=head_server, max_model_len=sys.maxsize)
        elif source is None or source.endpoint:
            # never contacted
            endpoint = (
                source.endpoint
                if source
                else Endpoint(base_url="http://127.0.0.1:9/v1", model="none")
            )
            policy = PolicySpec(endpoint=endpoint, max_model_len=config.model.max_model_len)
        elif not source.model:
            config = config.with_absolute_paths()
            policy = policy_spec(config, resolve_model(config.model))
        else:
            server = await start_server(config, source.model, work, children, source.adapter)
            policy = policy_spec(server.config, server.model)
        settings = config.orchestrator
        pool = WorkerPool(
            work / "logs",
            memory_gib=settings.worker_memory_gib,
            silence_s=settings.worker_silence_s,
        )
        pool.add_metrics = add_metrics
        await pool.start_all(worker_setups(in_homes(config, homes), policy, pool.address))
        ready = await pool.sizes(settings.worker_timeout_s)
        yield PlaySession(pool, ready, config, server)
    finally:
        if pool:
            await pool.close()
        if server:
            await server.end()


class Progress:
    """Shows how many rollouts are finished: a bar on a terminal, a line every PROGRESS_S
    elsewhere."""

    def __init__(self, label: str, total: int):
        self.label, self.total, self.done, self.printed, self.bar = (
            label,
            total,
            0,
            time.monotonic(),
            None,
        )
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self.bar = Bar(console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(label, total=total)
            self.bar.start()

    def advance(self, count: int) -> None:
        self.done += count
        if self.bar:
            self.bar.update(self.task, completed=self.done)
        elif time.monotonic() - self.printed > PROGRESS_S:
            self.printed = time.monotonic()
            say(f"  {self.label}: {self.done} of {self.total} rollouts")

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
