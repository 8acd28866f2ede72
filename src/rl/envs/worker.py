"""A worker process: plays groups of one environment and nothing else. `python -m rl.envs.worker FILE`, a WorkerSetup as JSON."""

import asyncio
import contextlib
import importlib
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from rl.run_dir import spans
from rl.system.credentials import Redacting, redact, redact_json, resolve
from rl.system.errors import RunError
from rl.system.linux import die_with_parent, raise_open_files
from rl.system.warm_start import leave
from rl.wire.rollouts import Episode, Rollout, unfit
from rl.wire.turns import unpack_logprobs
from rl.wire.worker_messages import (
    Cancel,
    Close,
    Describe,
    Description,
    Fleet,
    Heartbeat,
    LoadFailed,
    Played,
    PlayGroup,
    Ready,
    ToWorker,
    WorkerSetup,
)

ENCODER = msgspec.msgpack.Encoder()
ORDERS = msgspec.msgpack.Decoder(ToWorker)
RETRY_PAUSE_S = 1.0
HEARTBEAT_S = 2.0
GATHER_S = 1.0
"""How long a finished episode waits for others of its group: a group of short ones is one message."""
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What encoding raises for values that no message can have; msgspec's errors are among them."""
PLAYED = msgspec.msgpack.Decoder(Played)
MAX_NESTING = 64
"""Levels of a rollout's messages. Decoders go down to several hundred, but fewer from deep inside a call stack."""
MAX_MESSAGES = 16 << 20
"""Bytes of a rollout's messages in JSON: they are kept in rollouts/, for every rollout."""
MAX_ERROR = 8000
"""Characters of a failure's text that are kept; half of them may be the end of a traceback."""


class Clocks(NamedTuple):
    """What tells how busy this process is, in seconds."""

    wall: float
    cpu: float
    kept_waiting: float
    """Time in which it could have run, and others did."""

    @classmethod
    def now(cls) -> "Clocks":
        delay_ns = int(Path("/proc/self/schedstat").read_bytes().split()[1])
        return cls(time.monotonic(), time.process_time(), delay_ns / 1e9)

    def busy_since(self, before: "Clocks") -> float:
        """The share of the time since then in which it computed, or its event loop was blocked, as the late heartbeat shows: by whichever
        is more. What other processes took is no load of its own."""
        passed, cpu, kept = (after - earlier for after, earlier in zip(self, before, strict=True))
        return max(cpu, passed - HEARTBEAT_S - kept) / passed if passed > 0 else 0.0


class Worker:
    """Takes orders from the orchestrator's pool and answers with the episodes of each group as they finish."""

    def __init__(self, setup: WorkerSetup):
        from rl.envs.load import load
        from rl.envs.policy import Policy

        self.setup = setup
        self.policy = Policy(setup.policy, setup.env.timeout_s)
        self.env = load(setup.env, self.policy)
        self.plays: dict[int, asyncio.Task[None]] = {}

    async def run(self, socket: zmq.asyncio.Socket) -> None:
        """Plays what the pool orders until it closes the worker."""
        env = self.env
        ready = Ready(env.num_tasks("train"), env.num_tasks("eval"), env.scores_groups, env.notice)
        await socket.send(ENCODER.encode(ready))
        heartbeats = asyncio.create_task(self.send_heartbeats(socket))
        try:
            while True:
                match ORDERS.decode(await socket.recv()):
                    case PlayGroup() as order:
                        self.plays[order.play_id] = asyncio.create_task(self.play(order, socket))
                    case Fleet() as fleet if self.policy.endpoint is None:
                        self.policy.servers.follow(fleet)
                    case Cancel(play_id) if play_id in self.plays:
                        self.plays.pop(play_id).cancel()
                    case Close():
                        return
                    case Describe() as question:
                        await socket.send(ENCODER.encode(self.describe(question)))
        finally:
            heartbeats.cancel()
            await self.env.close()

    async def send_heartbeats(self, socket: zmq.asyncio.Socket) -> None:
        """Shows that the event loop runs, which a thread could not."""
        before = Clocks.now()
        while True:
            now = Clocks.now()
            await socket.send(ENCODER.encode(Heartbeat(now.busy_since(before))))
            before = now
            spans.gauges(playing=len(self.plays))
            for _ in range(spans.FLUSHES):
                spans.flush()
                await asyncio.sleep(HEARTBEAT_S / spans.FLUSHES)

    def describe(self, question: Describe) -> Description:
        limits = (self.env.num_tasks(question.split), question.num_tasks)
        count = min((limit for limit in limits if limit is not None and limit >= 0), default=0)
        answer = Description(
            about={"kind": self.env.kind, **self.env.describe()},
            tasks=[self.env.task(question.split, i) for i in range(count)],
        )
        return msgspec.json.decode(redact_json(msgspec.json.encode(answer)), type=Description)

    async def play(self, order: PlayGroup, socket: zmq.asyncio.Socket) -> None:
        """Plays one group and sends its episodes as they finish. Those that do so within GATHER_S go in one message."""
        if self.env.scores_groups:
            parts = {asyncio.create_task(self.play_with_retries(order, order.num_episodes)): range(order.num_episodes)}
        else:
            left = [i for i in range(order.num_episodes) if i not in order.done]
            parts = {asyncio.create_task(self.play_with_retries(order, 1)): [i] for i in left}
        playing = set(parts)
        try:
            if not playing:
                await socket.send(encode_result(order, []))
            while playing:
                finished, playing = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
                if playing:
                    more, playing = await asyncio.wait(playing, timeout=GATHER_S)
                    finished |= more
                await socket.send(encode_result(order, numbered(finished, parts), sum(len(parts[part]) for part in playing)))
        finally:
            for part in playing:
                part.cancel()
        self.plays.pop(order.play_id, None)

    async def play_with_retries(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        """Plays episodes together; when one fails, all of them again with fresh state, as often as allowed."""
        for attempt in range(self.setup.retries + 1):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            episodes = await self.play_once(order, num_episodes)
            for rollout in chain(*episodes):
                rollout.retries = attempt
                refuse_unfit(rollout)
                if order.split == "train":
                    refuse_logprobs(rollout)
            failed = next((rollout for rollout in chain(*episodes) if rollout.error), None)
            if not failed or failed.cause == "not_append_only":  # the same template would refuse it again
                break
        return episodes

    async def play_once(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        """The one broad catch around rollouts: an environment may raise anything, and that is a failed rollout, not a failed run."""
        from rl.envs.policy import TALKS, RolloutError

        TALKS.set(talks := [])
        try:
            with spans.span("play", "rollouts", task=order.task, split=order.split):
                return await self.env.play(order, num_episodes)
        except RolloutError as error:
            failed = Rollout(stop="error", cause=error.cause, error=str(error))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            text = "the environment's own code was cancelled: it awaits a task that it has cancelled itself"
            failed = Rollout(stop="error", cause="environment", error=text)
        except (Exception, SystemExit) as error:  # an environment's exit() must not end the others' rollouts
            text = "".join(traceback.format_exception(error))
            failed = Rollout(stop="error", cause="environment", error=f"{type(error).__name__}: {error}\n{text[-MAX_ERROR // 2 :]}")
        return [[with_talk(failed, *talks[i : i + 1])] for i in range(num_episodes)]


def with_talk(failed: Rollout, talk: Any = None) -> Rollout:
    """A copy of a failed rollout, with what was said before the environment's code raised: a `Talk`, or None."""
    prompt, answered = talk.messages() if talk else ([], [])
    said = {"turns": talk.turns, "messages": [*prompt, *answered], "num_prompt_messages": len(prompt)} if talk else {}
    return msgspec.structs.replace(failed, **said)


def numbered(finished: Iterable[asyncio.Task[list[Episode]]], parts: Mapping[asyncio.Task[list[Episode]], Sequence[int]]) -> list[Rollout]:
    """The rollouts of finished parts of a group, with their episode's place in the group, in that order."""
    rollouts = []
    for part in sorted(finished, key=lambda part: parts[part][0]):
        for i, episode in zip(parts[part], part.result(), strict=True):
            for rollout in episode:
                rollout.episode = i
            rollouts += episode
    return rollouts


def refuse_unfit(rollout: Rollout) -> None:
    """Fails a rollout whose numbers or names cannot be used; one that has failed loses them."""
    if why := unfit(rollout):
        if not rollout.error:
            rollout.cause, rollout.error, rollout.stop = "reward", why, "error"
        rollout.reward, rollout.metrics = 0.0, {}
        rollout.agent = rollout.agent if not unfit(rollout) else "agent"


def refuse_logprobs(rollout: Rollout) -> None:
    """Fails a rollout with a log-probability that no ratio can be computed from: in a batch it would cost the whole step."""
    for number, answer in enumerate(rollout.turns.answers if not rollout.error else [], 1):
        for place, logprob in enumerate(unpack_logprobs(answer.logprobs), 1):
            if not math.isfinite(logprob):
                rollout.cause = "logprobs"
                rollout.error = f"inference gave token {place} of turn {number} the log-probability {logprob}, which cannot be trained"
                return


def encode_result(order: PlayGroup, rollouts: list[Rollout], unfinished: int = 0) -> bytes:
    """The Played that answers an order. Messages are the environment's: they may hold what cannot be encoded (half a surrogate, an object,
    a huge number), and then their rollout has failed; or a secret, which is redacted."""
    try:
        return encoded(Played(order.play_id, rollouts, unfinished))
    except UNSENDABLE:
        return encoded(Played(order.play_id, [sendable(rollout) for rollout in rollouts], unfinished))


def encoded(played: Played) -> bytes:
    """Raises what UNSENDABLE lists."""
    for rollout in played.rollouts:
        rollout.messages = json_messages(rollout.messages)
        rollout.error = rollout.error and redact(rollout.error)[:MAX_ERROR]  # in this order: half a secret is not recognised
    data = ENCODER.encode(played)
    PLAYED.decode(data)  # the pool ends a worker whose message it cannot read
    return data


def sendable(rollout: Rollout) -> Rollout:
    """The rollout, or a failed one in its place."""
    try:
        encoded(Played(0, [rollout]))
    except UNSENDABLE as error:
        text = redact(f"its messages or metrics cannot be written: {type(error).__name__}: {error}")
        return Rollout(episode=rollout.episode, stop="error", cause="environment", error=text)
    return rollout


def json_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as they will be in JSON, without secrets. Raises ValueError for those that are too long, or nested too deep for the writer
    of that JSON."""
    if len(data := msgspec.json.encode(messages)) > MAX_MESSAGES:
        raise ValueError(f"the messages have {len(data) / 2**20:.0f} MiB, {MAX_MESSAGES / 2**20:g} are allowed")
    decoded = msgspec.json.decode(redact_json(data), type=list[dict[str, Any]])
    depth, tables = 0, [decoded]
    while tables:
        depth += 1
        items = [item for table in tables for item in (table.values() if isinstance(table, dict) else table)]
        tables = [item for item in items if isinstance(item, (dict, list))]
    if depth > MAX_NESTING:
        raise ValueError(f"nested {depth} deep, {MAX_NESTING} are allowed")
    return decoded


async def serve(setup: WorkerSetup, worker: Worker | None, problem: str) -> None:
    """Connects to the pool and plays; or reports why the environment cannot be played, and ends the process."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, setup.worker_id.encode())
    socket.set_hwm(0)
    socket.connect(setup.orchestrator)
    try:
        if worker:
            await worker.env.start()
    except RunError as error:
        worker, problem = None, str(error)
    if worker is None:
        await socket.send(ENCODER.encode(LoadFailed(redact(problem)[:MAX_ERROR])))
        socket.close(linger=5000)
        zmq.asyncio.Context.instance().term()
        raise SystemExit(1)
    await worker.run(socket)


def main() -> None:
    import uvloop

    from rl.envs.environment import check_prompts

    logging.getLogger("verifiers").setLevel(logging.WARNING)  # it logs every rollout
    setup = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=WorkerSetup)
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)  # they end in a log
    if setup.spans:
        spans.start(Path(setup.spans), f"worker-{setup.worker_id}")
    worker, problem = None, None
    try:  # in the main thread and outside of an event loop: an environment's constructor may need the one and start the other
        for key, table in (("args", setup.env.args), ("set_kwargs", setup.env.set_kwargs)):
            setattr(setup.env, key, resolve(table, f"environment {setup.env.name}: {key}"))
        worker = Worker(setup)
        problem = check_prompts(worker.env, setup.max_tokens)
    except (RunError, ValueError) as error:
        problem = str(error)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(setup, None if problem else worker, problem or ""))
        except SystemExit as end:  # also raised by an environment in a task of its own; then nothing may hold up the end
            os._exit(end.code if isinstance(end.code, int) else 1)
    spans.stop()
    sys.stdout.flush()
    os._exit(0)  # the environment is closed; taking the interpreter down would cost two seconds more


def import_libraries() -> None:
    """Imports what the worker will need, but for the environment itself; see the pool's nursery. What fails here fails again, where it is
    reported. A copy may play another environment: this one's folder is left off the import path again."""
    from rl.envs.load import library

    setup = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=WorkerSetup)
    path = [*sys.path]
    with contextlib.suppress(ImportError, RunError):
        for module in ("uvloop", "jinja2", "tokenizers", "rl.envs.policy", "renderers.base", library(setup.env)):
            importlib.import_module(module)
    sys.path[:] = path


if __name__ == "__main__":
    die_with_parent()
    raise_open_files()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    leave(import_libraries)
    main()
