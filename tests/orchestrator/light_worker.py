"""A worker process without an environment that starts in a fraction of a second: orders say how
long they take and what they do."""

import asyncio
import os
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl.orchestrator.workers.pool import WorkerPool
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import (
    Close,
    Describe,
    Heartbeat,
    MessageStream,
    Played,
    PlayOrder,
    Ready,
    ToWorker,
    WorkerSetup,
)
from tests.orchestrator.made import turn, worker_setup

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
BOOTSTRAP = (
    f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from tests.orchestrator.light_worker import "
    "main; main(sys.argv[2])"
)


def start(pool: WorkerPool, monkeypatch, name: str = "light", workers: int = 1, **args) -> None:
    """Starts light workers in `pool`, as workers with their own interpreter. `args`: see `work`."""
    monkeypatch.setattr("rl.orchestrator.workers.pool_worker.BOOTSTRAP", BOOTSTRAP)
    for i in range(workers):
        pool.start(
            worker_setup(
                name,
                worker_id=f"{name}-{i}",
                args=args,
                orchestrator=pool.address,
                python=sys.executable,
            )
        )


def play(pool: WorkerPool, task: int, num_episodes: int = 1, *done: Any, **sampling: Any) -> Any:
    return pool.play("light", "train", task, num_episodes, sampling, 0, *done)


def run(tmp_path: Path, monkeypatch, work: Callable[[WorkerPool], Awaitable[T]], **args: Any) -> T:
    """Runs `work(pool)` with light workers; `args`: see `start`."""

    async def main() -> T:
        pool = WorkerPool(tmp_path / "logs")
        try:
            start(pool, monkeypatch, **args)
            async with asyncio.timeout(250):
                await pool.sizes(120.0)
                return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


async def work(setup: WorkerSetup) -> None:
    """Plays each episode for the seconds given by the order's sampling, and sends it at once; those
    from number `args.held` on take as long as the file `args.hold` is there. With `args.lies` it
    reports -1 unfinished episodes.

    It dies when asked for a description, or with `args.deaf` never answers. `args.log` gets a line
    `task episode` for each finished episode. With `args.address` the reward is the answer of that
    address, 0 for none, and the message lists the environment variables.
    """
    encode, args = msgspec.msgpack.Encoder().encode, setup.env.args
    pool = await MessageStream.connect(setup.orchestrator)
    await pool.send(setup.worker_id.encode())
    await pool.send(encode(Ready(100, len(repr(args)))))
    plays: set[asyncio.Task[None]] = set()

    async def play(order: PlayOrder) -> None:
        left = [i for i in range(order.num_episodes) if i not in order.done]

        async def episode(i: int) -> None:
            await asyncio.sleep(order.sampling.get("seconds", 0.0))
            while i >= args.get("held", i + 1) and Path(args["hold"]).exists():
                await asyncio.sleep(0.02)
            if order.sampling.get("kills"):
                os.abort()
            if "log" in args:
                with open(args["log"], "a") as file:
                    file.write(f"{order.task} {i}\n")
            left.remove(i)
            rollout = Rollout(
                turns=[turn(completion=[2 + i])], episode=i, reward=float(order.task + i)
            )
            if "address" in args:
                rollout.reward = answer_of(args["address"])
                rollout.text = [{"role": "user", "content": " ".join(sorted(os.environ))}]
            await pool.send(
                encode(Played(order.play_id, [rollout], -1 if args.get("lies") else len(left)))
            )

        await asyncio.gather(*map(episode, list(left)))

    while True:
        await pool.send(encode(Heartbeat()))
        match msgspec.msgpack.decode(await pool.receive() or encode(Close()), type=ToWorker):
            case PlayOrder() as order:
                plays.add(asyncio.create_task(play(order)))
            case Describe() if "deaf" not in args:
                os._exit(3)
            case Close():
                os._exit(0)


def answer_of(address: str) -> float:
    """Returns the number that an HTTP server answers; 0 if it cannot be reached."""
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return float(answer.read())
    except OSError:
        return 0.0


def main(setup_path: str) -> None:
    asyncio.run(work(msgspec.json.decode(Path(setup_path).read_bytes(), type=WorkerSetup)))
