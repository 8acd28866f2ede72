"""A worker process without an environment, up in a fraction of a second: what its orders say is how long they take and what they do."""

import asyncio
import os
import sys
import urllib.request
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from rl.orchestrator.pool import WorkerPool
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Rollout, Turn
from rl.wire.worker_messages import Close, EnvSpec, Heartbeat, Played, PlayGroup, PolicySpec, Ready, ToWorker, WorkerSetup

ROOT = Path(__file__).parents[2]
BOOTSTRAP = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from tests.orchestrator.light_worker import main; main(sys.argv[2])"


def start(pool: WorkerPool, monkeypatch, name: str = "light", most: int = 0, **args) -> None:
    """Starts one in `pool`, as a worker with an interpreter of its own. `args`: see `work`."""
    monkeypatch.setattr("rl.orchestrator.nursery.BOOTSTRAP", BOOTSTRAP)
    spec, place = EnvSpec(name=name, args=args), {"orchestrator": pool.address, "worker_id": f"{name}-0", "python": sys.executable}
    pool.start(WorkerSetup(env=spec, policy=PolicySpec(), max_tokens=1, retries=0, most=most, **place))


async def work(setup: WorkerSetup) -> None:
    """Plays each episode in as many seconds as the order's sampling says, or `args.seconds` for each of a group, and sends it at once; with
    `args.lies` it says that -1 are left.

    `args.log` gets a line `task episode` for each that is finished; the file `args.busy` says how busy it is. With `args.address` the
    reward is what that answers, 0 for nothing, and the message which variables there are.
    """
    encode, args = msgspec.msgpack.Encoder().encode, setup.env.args
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, setup.worker_id.encode())
    socket.connect(setup.orchestrator)
    await socket.send(encode(Ready(100, len(repr(args)))))
    plays: set[asyncio.Task[None]] = set()

    async def play(order: PlayGroup) -> None:
        left = [i for i in range(order.num_episodes) if i not in order.done]

        async def episode(i: int) -> None:
            await asyncio.sleep(args["seconds"][i] if "seconds" in args else order.sampling.get("seconds", 0.0))
            if order.sampling.get("kills"):
                os.abort()
            if "log" in args:
                with open(args["log"], "a") as file:
                    file.write(f"{order.task} {i}\n")
            left.remove(i)
            turn = Turn(prompt_ids=[1], completion_ids=[2 + i], logprobs=[-1.0], policy_versions=[VersionSpan(0, 1)], finish_reason="stop")
            rollout = Rollout(turns=[turn], episode=i, reward=float(order.task + i))
            if "address" in args:
                rollout.reward, rollout.messages = answer_of(args["address"]), [{"role": "user", "content": " ".join(sorted(os.environ))}]
            await socket.send(encode(Played(order.play_id, [rollout], -1 if args.get("lies") else len(left))))

        await asyncio.gather(*map(episode, list(left)))

    async def say_how_busy() -> None:
        while True:
            await socket.send(encode(Heartbeat(float(Path(args["busy"]).read_text() or 0.5))))
            await asyncio.sleep(0.05)

    if "busy" in args:
        plays.add(asyncio.create_task(say_how_busy()))
    while True:
        await socket.send(encode(Heartbeat(0.5)))
        match msgspec.msgpack.decode(await socket.recv(), type=ToWorker):
            case PlayGroup() as order:
                plays.add(asyncio.create_task(play(order)))
            case Close():
                os._exit(0)


def answer_of(address: str) -> float:
    """The number that an HTTP server answers; 0 where it cannot be reached."""
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return float(answer.read())
    except OSError:
        return 0.0


def main(setup_path: str) -> None:
    asyncio.run(work(msgspec.json.decode(Path(setup_path).read_bytes(), type=WorkerSetup)))
