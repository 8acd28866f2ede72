"""A worker process: plays groups of one environment and nothing else. `python -m rl.orchestrator.worker '<WorkerSetup as JSON>'`."""

import asyncio
import logging
import os
import sys
import traceback
from typing import Any, NoReturn

import msgspec
import zmq
import zmq.asyncio

from rl.credentials import CredentialError, Redacting, redact, redact_json, resolve
from rl.orchestrator.env_ids import EnvLoadError
from rl.orchestrator.rollouts import (
    Cancel,
    Close,
    Describe,
    Description,
    Episode,
    Heartbeat,
    LoadFailed,
    Played,
    PlayGroup,
    Ready,
    Rollout,
    ToWorker,
    WorkerSetup,
)
from rl.processes import die_with_parent

ENCODER = msgspec.msgpack.Encoder()
ORDERS = msgspec.msgpack.Decoder(ToWorker)
RETRY_PAUSE_S = 1.0
HEARTBEAT_S = 2.0
PLAYED = msgspec.msgpack.Decoder(Played)
MAX_NESTING = 64
"""Of messages. Decoders go down to several hundred, but not from everywhere."""
MAX_ERROR = 4000
"""Characters of a failure's text that are kept."""


class Worker:
    """Takes orders from the orchestrator's pool and answers each group when all its episodes are finished."""

    def __init__(self, setup: WorkerSetup):
        from rl.orchestrator.envs.environment import load
        from rl.orchestrator.envs.policy import Policy

        self.setup = setup
        self.policy = Policy(setup.policy, setup.env.timeout_s)
        self.env = load(setup.env, self.policy)
        self.plays: dict[int, asyncio.Task[None]] = {}

    async def run(self, socket: zmq.asyncio.Socket) -> None:
        """Consumes orders, produces Played; ends with the process."""
        try:
            await self.env.start()
        except EnvLoadError as error:
            await refuse(socket, str(error))
        await socket.send(ENCODER.encode(Ready(self.env.num_tasks("train"), self.env.num_tasks("eval"))))
        beating = asyncio.create_task(self.beat(socket))
        try:
            while True:
                match ORDERS.decode(await socket.recv()):
                    case PlayGroup() as order:
                        self.plays[order.play_id] = asyncio.create_task(self.play(order, socket))
                    case Cancel(play_id) if play_id in self.plays:
                        self.plays.pop(play_id).cancel()
                    case Close():
                        return
                    case Describe() as question:
                        await socket.send(ENCODER.encode(self.describe(question)))
        finally:
            beating.cancel()
            await self.env.close()

    async def beat(self, socket: zmq.asyncio.Socket) -> None:
        """Loop. Says that the event loop runs, which no thread could say for it."""
        while True:
            await socket.send(ENCODER.encode(Heartbeat()))
            await asyncio.sleep(HEARTBEAT_S)

    def describe(self, question: Describe) -> Description:
        size = self.env.num_tasks(question.split)
        count = question.num_tasks if size is None or question.num_tasks < 0 else min(size, question.num_tasks)
        answer = Description(
            about={"kind": self.env.kind, **self.env.describe()},
            tasks=[self.env.task(question.split, i) for i in range(size if count < 0 and size is not None else count)],
        )
        return msgspec.json.decode(redact_json(msgspec.json.encode(answer)), type=Description)

    async def play(self, order: PlayGroup, socket: zmq.asyncio.Socket) -> None:
        """Plays one group and answers."""
        if self.env.scores_groups:
            episodes = await self.retried(order, order.num_episodes)
        else:
            each = await asyncio.gather(*(self.retried(order, 1) for _ in range(order.num_episodes)))
            episodes = [episode for one in each for episode in one]
        for i, episode in enumerate(episodes):
            for rollout in episode:
                rollout.episode = i
        await socket.send(encoded(order, [rollout for episode in episodes for rollout in episode]))
        self.plays.pop(order.play_id, None)

    async def retried(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        """Plays episodes together; when one fails, all of them again with fresh state, as often as allowed."""
        for attempt in range(self.setup.retries + 1):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            episodes = await self.guarded(order, num_episodes)
            for rollout in (rollout for episode in episodes for rollout in episode):
                rollout.retries = attempt
            failed = [rollout for episode in episodes for rollout in episode if rollout.error]
            if not failed or failed[0].cause == "not_append_only":  # the same template would refuse it again
                break
        return episodes

    async def guarded(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        """The one broad catch around rollouts: an environment may raise anything, and that is a failed rollout, not a failed run."""
        from rl.orchestrator.envs.environment import RolloutError
        from rl.orchestrator.inference_client import InferenceLostError

        try:
            return await self.env.play(order, num_episodes)
        except RolloutError as error:
            failed = Rollout(stop="error", cause=error.cause, error=str(error)[:MAX_ERROR])
        except InferenceLostError as error:
            failed = Rollout(stop="error", cause="inference", error=str(error))
        except (Exception, SystemExit) as error:  # an environment's exit() must not end the others' rollouts
            text = "".join(traceback.format_exception(error))
            failed = Rollout(stop="error", cause="environment", error=f"{type(error).__name__}: {error}\n{text[-MAX_ERROR:]}")
        return [[msgspec.structs.replace(failed)] for _ in range(num_episodes)]


def encoded(order: PlayGroup, rollouts: list[Rollout]) -> bytes:
    """The answer to an order. Messages are the environment's, and may hold what cannot be written: half a surrogate, an object, a huge
    number; or a secret, which must not be."""
    try:
        for rollout in rollouts:
            rollout.messages = plain(rollout.messages)
            rollout.error = redact(rollout.error) if rollout.error else rollout.error
        data = ENCODER.encode(Played(order.play_id, rollouts))
        PLAYED.decode(data)  # the pool ends a worker whose message it cannot read
        return data
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.ValidationError) as error:
        text = redact(f"its messages or metrics cannot be written: {type(error).__name__}: {error}")
        failed = [Rollout(episode=i, stop="error", cause="environment", error=text) for i in range(order.num_episodes)]
        return ENCODER.encode(Played(order.play_id, failed))


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as they will stand in JSON. Raises ValueError for those nested too deep for whoever writes them there."""
    written = msgspec.json.decode(redact_json(msgspec.json.encode(messages)), type=list[dict[str, Any]])
    depth, tables = 0, [written]
    while tables:
        depth += 1
        items = [item for table in tables for item in (table.values() if isinstance(table, dict) else table)]
        tables = [item for item in items if isinstance(item, (dict, list))]
    if depth > MAX_NESTING:
        raise ValueError(f"nested {depth} deep, {MAX_NESTING} are allowed")
    return written


async def refuse(socket: zmq.asyncio.Socket, problem: str) -> NoReturn:
    """Says why the environment cannot be played, and ends the process."""
    await socket.send(ENCODER.encode(LoadFailed(redact(problem))))
    socket.close(linger=5000)
    zmq.asyncio.Context.instance().term()
    raise SystemExit(1)


async def serve(setup: WorkerSetup, worker: Worker | None, problem: str) -> None:
    """Reports a failed load, or plays until the process ends."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, setup.worker_id.encode())
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(setup.orchestrator)
    if worker is None:
        await refuse(socket, problem)
    await worker.run(socket)


def use_uvloop() -> None:
    """uvloop comes with verifiers; where it cannot be had, asyncio's own loop does."""
    try:
        import uvloop
    except ImportError:
        return
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


def main() -> None:
    from rl.renderer import RendererError

    logging.getLogger("verifiers").setLevel(logging.WARNING)  # it tells of every rollout
    setup = msgspec.json.decode(sys.argv[1], type=WorkerSetup)
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)  # they end in a log
    worker, problem = None, None
    try:  # in the main thread and outside of an event loop: an environment's constructor may need the one and start the other
        for key, table in (("args", setup.env.args), ("set_kwargs", setup.env.set_kwargs)):
            setattr(setup.env, key, resolve(table, f"environment {setup.env.name}: {key}"))
        worker = Worker(setup)
        problem = worker.env.check_prompts(setup.max_tokens)
    except (CredentialError, EnvLoadError, RendererError, ValueError) as error:
        problem = str(error)
    use_uvloop()
    with asyncio.Runner() as runner:
        try:
            runner.run(serve(setup, None if problem else worker, problem or ""))
        except SystemExit as end:  # also raised by an environment in a task of its own; then nothing may hold up the end
            os._exit(end.code if isinstance(end.code, int) else 1)
    sys.stdout.flush()
    os._exit(0)  # the environment is closed; taking the interpreter down would cost two seconds more


if __name__ == "__main__":
    die_with_parent()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
