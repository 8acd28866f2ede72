"""A worker process without an environment, up in a fraction of a second: what its orders say is how long they take and what they do."""

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from rl.orchestrator.pool import WorkerPool
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import Close, EnvSpec, Heartbeat, Played, PlayGroup, PolicySpec, Ready, ToWorker, WorkerSetup

ROOT = Path(__file__).parents[2]
BOOTSTRAP = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from tests.orchestrator.light_worker import main; main(sys.argv[2])"


def start(pool: WorkerPool, monkeypatch, name: str = "light", **args) -> None:
    """Starts one in `pool`, as a worker with an interpreter of its own."""
    monkeypatch.setattr("rl.orchestrator.pool_worker.BOOTSTRAP", BOOTSTRAP)
    spec, identity = EnvSpec(name=name, args=args), f"{name}-0"
    pool.start(
        WorkerSetup(
            env=spec,
            policy=PolicySpec(),
            orchestrator=pool.address,
            worker_id=identity,
            max_tokens=1,
            retries=0,
            python=sys.executable,
        )
    )


async def work(setup: WorkerSetup) -> None:
    encode = msgspec.msgpack.Encoder().encode
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, setup.worker_id.encode())
    socket.connect(setup.orchestrator)
    await socket.send(encode(Ready(100, len(repr(setup.env.args)))))
    plays: dict[int, asyncio.Task[None]] = {}

    async def play(order: PlayGroup) -> None:
        await asyncio.sleep(order.sampling.get("seconds", 0.0))
        if order.sampling.get("kills"):
            os.abort()
        rollouts = [Rollout(episode=i, reward=float(order.task)) for i in range(order.num_episodes)]
        await socket.send(encode(Played(order.play_id, rollouts)))

    while True:
        await socket.send(encode(Heartbeat()))
        match msgspec.msgpack.decode(await socket.recv(), type=ToWorker):
            case PlayGroup() as order:
                plays[order.play_id] = asyncio.create_task(play(order))
            case Close():
                os._exit(0)


def main(setup_path: str) -> None:
    asyncio.run(work(msgspec.json.decode(Path(setup_path).read_bytes(), type=WorkerSetup)))
