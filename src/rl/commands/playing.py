"""A policy and environments, brought up, played with, and ended again: what `rl eval`, `rl collect` and `rl env` have in common."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rl import devices
from rl import main as launcher
from rl.cli import to_toml
from rl.commands.policy import PolicyError, Source
from rl.config import RLConfig
from rl.files import write_file
from rl.lives import failure
from rl.models import ModelError, resolve_model
from rl.orchestrator.config import EnvConfig, EnvSource
from rl.orchestrator.env_ids import EnvLoadError, check_installed
from rl.orchestrator.main import policy_spec, worker_setups
from rl.orchestrator.rollouts import PolicySpec, Ready, Rollout, Split
from rl.orchestrator.workers import WorkerError, WorkerPool
from rl.prepare import RunError, with_absolute_paths
from rl.processes import LAUNCHER, STOP_DEADLINE_S, Child, Children, last_lines
from rl.status import read_status
from rl.trainer.config import LoraConfig

POLL_S = 0.2
CONCURRENCY = 64
HOPELESS = 16
"""When so many rollouts are over and all have failed, the rest would, too."""
SAY_EVERY_S = 20.0


class PlayError(Exception):
    """A command cannot go on; the message names the remedy."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(program: str, children: Children, work: Coroutine[Any, Any, int]) -> int:
    """Runs a command to its exit code: 1 with a message for what is the user's to mend, 128 + signal after one. Leaves no process."""
    os.environ[LAUNCHER] = str(os.getpid())  # workers end with us, however we end
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        return asyncio.run(until_stopped(children, work))
    except (PlayError, PolicyError, WorkerError, EnvLoadError, ModelError, RunError, devices.DeviceError) as error:
        say(f"{program}: {error}")
    except OSError as error:
        say(f"{program}: {error.filename or 'input or output'}: {error.strerror or error}")
    finally:
        children.stop_on_signals()
        children.stop()
        for process in psutil.Process().children(recursive=True):  # what environments started and their workers left to us
            if process.pid not in before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
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
        say(f"{signal.Signals(signum).name}: stopping (once more kills at once)")
        task.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal, signum)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + caught[0]


def check_environments(entries: Iterable[EnvSource]) -> None:
    """Names a missing environment with the command that installs it, before anything is started. Raises EnvLoadError."""
    for entry in entries:
        if entry.id and not entry.python:
            check_installed(entry.id)


# The policy -------------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """Our inference server as a child of this command."""

    child: Child
    config: RLConfig

    def check(self) -> None:
        """Raises RunError when it has ended."""
        if self.child.exit_code is not None:
            raise failure(self.child, self.child.ending())

    async def ready(self) -> None:
        """Waits until it serves. Raises RunError when it does not within inference.startup_timeout_s."""
        limit, told = self.config.inference.startup_timeout_s, time.monotonic()
        while "address" not in (status := read_status(self.config.run_dir.status("inference")) or {}):
            self.check()
            doing, now = status.get("doing", "nothing that it told"), time.monotonic()
            if now - self.child.started > limit:
                raise failure(self.child, f"is not ready after inference.startup_timeout_s = {limit:g} s; it was doing: {doing}")
            if now - told > SAY_EVERY_S:
                told = now
                say(f"  waiting for inference for {now - self.child.started:.0f} s: {doing} (log: {self.child.log})")
            await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """SIGTERM, and SIGKILL to what is left of its group after the deadline."""
        self.child.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + STOP_DEADLINE_S
        while self.child.exit_code is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S / 4)
        self.child.signal_group(signal.SIGKILL)
        shutil.rmtree(self.config.run_dir.root, ignore_errors=True)


def server_config(config: RLConfig, model: str, work: Path, adapter: str = "") -> RLConfig:
    """The configuration of a server alone: all of the box is its own."""
    config = config.model_copy(deep=True)
    config.output_dir, config.name = str(work), "server"
    config.model.name = model
    config.trainer.lora = lora_of(Path(adapter)) if adapter else None
    config.trainer.gpus, config.trainer.cpus, config.trainer.ranks, config.trainer.weights.dir = 0, None, None, None
    config.orchestrator.inference_urls, config.orchestrator.eval = [], []
    config.orchestrator.environment = [EnvConfig(id="none")]  # a server has nothing to do with them, but each configuration names one
    return with_absolute_paths(config)


def lora_of(adapter: Path) -> LoraConfig:
    """What a server must know of adapters in advance."""
    fields = json.loads((adapter / "adapter_config.json").read_text())
    return LoraConfig(rank=fields["r"], alpha=fields["lora_alpha"])


async def start_server(config: RLConfig, model: str, work: Path, children: Children, adapter: str = "") -> tuple[Server, str]:
    """Finds the model, which may be a download, and starts its server, with a folder of adapters if one is given. Returns it with the
    model's folder."""
    config = server_config(config, model, work, adapter)
    division = devices.split(config, devices.machine())
    config = devices.write_into(config, division)
    run_dir, logs = config.run_dir, work / "logs"
    shutil.rmtree(run_dir.root, ignore_errors=True)
    write_file(run_dir.config, to_toml(config).encode())
    if adapter:  # a server starts at its run's newest version
        name = Path(adapter).name
        run_dir.weights_dir.mkdir()
        run_dir.weights(int(name) if name.isdigit() else 1).symlink_to(adapter)
    found = children.start("model", launcher.command("model", run_dir, 1), dict(os.environ), logs)
    told = time.monotonic()
    while found.exit_code is None:  # a download has no deadline of ours; it says that it goes on
        await asyncio.sleep(POLL_S / 4)
        if time.monotonic() - told > SAY_EVERY_S:
            told = time.monotonic()
            say(f"  waiting for the model {model} (log: {found.log})")
    if found.exit_code:
        said = last_lines(found.log)
        raise RunError(f"{said[-1] if said else 'the model: ' + found.ending()}\n  the whole log: {found.log}")
    environment, cores = {**os.environ, **division.inference.env}, division.inference.cores
    child = children.start("inference", launcher.command("inference", run_dir, 1), environment, logs, cores)
    return Server(child, config), resolve_model(config.model)


# Environments -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A task to be played."""

    env: str
    split: Split
    task: int
    num_episodes: int
    sampling: dict[str, Any]


@dataclass
class Arena:
    """Environments' workers that are ready, and the policy that they sample from."""

    pool: WorkerPool
    ready: dict[str, Ready]
    config: RLConfig
    server: Server | None

    async def play(self, jobs: Iterable[Job], concurrency: int | None, on_done: Callable[[Job, list[Rollout]], None]) -> None:
        """Plays jobs, `concurrency` rollouts at once, and hands each one over when it is finished.

        Raises PlayError when nothing finishes for longer than the rollouts' own deadlines allow, or when all fail from the start.
        """
        todo, playing = iter(jobs), {}
        finished, failures, last = 0, [], time.monotonic()
        patience_s = self.patience_s()
        try:
            while True:
                while sum(job.num_episodes for job in playing.values()) < (concurrency or CONCURRENCY) and (job := next(todo, None)):
                    playing[asyncio.create_task(self.pool.play(job.env, job.split, job.task, job.num_episodes, job.sampling, job.task))] = (
                        job
                    )
                if not playing:
                    break
                done, _ = await asyncio.wait({*playing, self.pool.failed}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if self.pool.failed in done:
                    self.pool.failed.result()
                for task in done:
                    job, rollouts = playing.pop(task), task.result()
                    last, finished = time.monotonic(), finished + len(rollouts)
                    failures += [rollout.error for rollout in rollouts if rollout.error]
                    on_done(job, rollouts)
                if finished >= HOPELESS and len(failures) == finished:
                    break
                if self.server:
                    self.server.check()
                if time.monotonic() - last > patience_s:
                    names = sorted({job.env for job in playing.values()})
                    raise PlayError(
                        f"waited {patience_s:.0f} s for any of {len(playing)} tasks of {', '.join(names)} to finish, longer than their "
                        f"deadlines (orchestrator.rollout_timeout_s, timeout_s); see {self.pool.log_dir}"
                    )
            if failures and len(failures) == finished:
                raise PlayError(f"all of the first {finished} rollouts failed; one of them:\n{failures[0]}\nSee {self.pool.log_dir}")
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    def patience_s(self) -> float:
        """The longest that a rollout may take: generated and scored, and that again for every retry."""
        settings = self.config.orchestrator
        limits = [entry.timeout_s or settings.rollout_timeout_s for entry in [*settings.environment, *settings.eval]]
        return 2 * max(limits) * (settings.rollout_retries + 1) + 60.0


@contextlib.asynccontextmanager
async def arena(config: RLConfig, source: Source | PolicySpec, work: Path, children: Children) -> AsyncIterator[Arena]:
    """Brings up the environments of the configuration and, where the policy is a model, its server; ends them on the way out.

    A PolicySpec is taken as it is: environments that are only to be described need no policy that answers.
    """
    server, pool, receiver = None, None, None
    try:
        if isinstance(source, PolicySpec):
            policy = source
        elif source.endpoint:
            policy = PolicySpec(endpoint=source.endpoint, max_model_len=config.model.max_model_len)
        elif source.urls:
            config = with_absolute_paths(config)
            policy = policy_spec(config, resolve_model(config.model))
        else:
            server, folder = await start_server(config, source.model, work, children, source.adapter)
            policy = policy_spec(server.config, folder)
        settings = config.orchestrator
        pool = WorkerPool(work / "logs", memory_gib=settings.worker_memory_gib, silence_s=settings.worker_silence_s)
        receiver = asyncio.create_task(pool.receive())
        for setup in worker_setups(config, policy, pool.address):
            await pool.start(setup)
        ready = await pool.sizes(settings.worker_timeout_s)
        if server:
            say(f"environments are ready; waiting for inference to serve {source.label} (log: {server.child.log})")
            await server.ready()
        yield Arena(pool, ready, config, server)
    finally:
        if receiver:
            receiver.cancel()
        if pool:
            await pool.close()
        if server:
            await server.end()


# What the user sees -----------------------------------------------------------------------------------------------------


class Progress:
    """How many rollouts are over: a bar on a terminal, a line from time to time elsewhere."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.done, self.told, self.bar = what, total, 0, time.monotonic(), None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self.bar = Bar(console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(what, total=total)
            self.bar.start()

    def advance(self, count: int, note: str = "") -> None:
        self.done += count
        if self.bar:
            self.bar.update(self.task, completed=self.done, description=f"{self.what} {note}".strip())
        elif time.monotonic() - self.told > SAY_EVERY_S:
            self.told = time.monotonic()
            say(f"  {self.what}: {self.done} of {self.total} rollouts {note}".rstrip())

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
