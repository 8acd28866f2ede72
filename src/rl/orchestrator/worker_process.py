"""One worker process: how it is started, what the pool knows of it, what it says, and how it and all that it has started end."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rl import guard
from rl.orchestrator.rollouts import Description, FromWorker, PlayGroup, Ready, Rollout, WorkerSetup

ANSWERS = msgspec.msgpack.Decoder(FromWorker)
MAX_ANSWER_BYTES = 1 << 32
"""A group of rollouts of millions of tokens has a tenth of it."""
STOPPED_S = 10.0
"""How long a worker may be stopped (SIGSTOP) before it is ended; a busy one may be silent for longer."""
GIB = 2**30
BOOTSTRAP = """
import importlib.util, runpy, sys
folder, setup = sys.argv[1:]
spec = importlib.util.spec_from_file_location("rl", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["rl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["rl"])
sys.argv = ["worker", setup]
runpy.run_module("rl.orchestrator.worker", run_name="__main__")
"""
"""Runs the worker in another virtual environment: of ours it sees this package alone, nothing that is installed beside it."""


class WorkerError(Exception):
    """An environment cannot be played; the message names the remedy."""


class EnvLostError(WorkerError):
    """An environment cannot be played any more: its workers die whatever they play, or do not come back."""


@dataclass
class Play:
    """A group at a worker, and who waits for it."""

    order: PlayGroup
    done: "asyncio.Future[list[Rollout]]"
    kills: int = 0


@dataclass
class Worker:
    """One process and what the pool knows of it."""

    setup: WorkerSetup
    process: asyncio.subprocess.Process
    log_path: Path
    ready: "asyncio.Future[Ready]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent: dict[int, Play] = field(default_factory=dict)
    waiting: deque[Play] = field(default_factory=deque)
    one_by_one: bool = False
    heard: float = field(default_factory=time.monotonic)
    verdict: str = ""
    """Why we ended it."""
    marker: str = ""
    """The word that all that it starts bears in its environment; see guard.py."""
    descriptions: "deque[asyncio.Future[Description]]" = field(default_factory=deque)

    @property
    def load(self) -> int:
        return len(self.sent) + len(self.waiting)


def read_answer(frames: list[bytes]) -> FromWorker:
    """A worker's message. Raises what UNREADABLE lists."""
    if len(frames) != 1 or len(frames[0]) > MAX_ANSWER_BYTES:
        raise msgspec.DecodeError(f"{len(frames)} frames of {sum(map(len, frames))} bytes")
    return ANSWERS.decode(frames[0])


def end_group(process: asyncio.subprocess.Process) -> None:
    """Ends a worker and what its environment started: tool servers, sandboxes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_leftovers(worker: Worker) -> None:
    """Ends what a dead worker's environment has started in sessions of its own."""
    processes = guard.table()
    guard.send(guard.marked(processes, processes, worker.marker, ()), signal.SIGKILL)


async def start_worker(setup: WorkerSetup, log_path: Path, marker: str) -> Worker:
    """Starts a process; what it starts bears `marker` in its environment. Raises WorkerError when its interpreter is not there."""
    environment = os.environ | {guard.MARKER: f"{os.environ.get(guard.MARKER, '')} {marker}".strip()}
    encoded = msgspec.json.encode(setup).decode()
    command = [sys.executable, "-m", "rl.orchestrator.worker", encoded]
    if setup.python:
        command = [setup.python, "-c", BOOTSTRAP, str(Path(__file__).parents[1]), encoded]
    with log_path.open("ab") as output:
        try:
            streams: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stdout": output, "stderr": output}
            process = await asyncio.create_subprocess_exec(*command, **streams, process_group=0, env=environment)
        except OSError as error:
            raise WorkerError(f"environment {setup.env.name}: {setup.python} does not start: {error.strerror}") from None
    return Worker(setup, process, log_path, marker=marker)


def verdict(worker: Worker, memory_gib: float, silence_s: float) -> str:
    """Why a worker is to be ended: it is stopped, holds too much memory, or its environment blocks its event loop; mostly empty."""
    try:
        process = psutil.Process(worker.process.pid)
        memory, stopped = process.memory_info(), process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return ""
    own_gib = (memory.rss - memory.shared) / GIB
    if own_gib > memory_gib:
        return f"it held {own_gib:.1f} GiB (orchestrator.worker_memory_gib = {memory_gib:g})"
    silent_s = time.monotonic() - worker.heard
    if stopped and silent_s > STOPPED_S:
        return f"it was stopped (SIGSTOP) for {silent_s:.0f} s"
    if not worker.ready.done():
        return ""
    blocked = f"its environment blocked the event loop for {silent_s:.0f} s"
    return f"{blocked} (a call that does not return, or time.sleep; orchestrator.worker_silence_s)" if silent_s > silence_s else ""
