"""What may arrive at the pool of workers: garbage ends the worker that sends it, and nothing else."""

import asyncio
import os
import signal
import subprocess

import msgspec
import pytest
import zmq
import zmq.asyncio

from rl.orchestrator.pool import Worker, WorkerPool
from rl.orchestrator.pool_worker import lacking_remedy
from rl.system import process_table
from rl.system.children import start
from rl.wire.rollouts import Rollout, Turn
from rl.wire.worker_messages import EnvSpec, Heartbeat, Played, PolicySpec, Ready, WorkerSetup

GARBAGE = [[b"garbage"], [b""], [b"a", b"b"], [b"\x91" * 5000], [b"\x82\xa4type\xaaLone\x85"], [b"\xdd\xff\xff\xff\xff"]]


async def told(pool: WorkerPool, count: int) -> None:
    while pool.rejected.count < count:
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def brief_ends(monkeypatch):
    """The workers here are no workers of ours, and do not end when they are asked to."""
    monkeypatch.setattr("rl.orchestrator.pool.CLOSE_S", 0.2)


@pytest.mark.parametrize("frames", GARBAGE)
def test_a_worker_that_sends_garbage_is_ended_and_the_others_are_heard(tmp_path, frames):
    async def main() -> tuple[int | None, str, int, bool]:
        pool = WorkerPool(tmp_path)
        sockets = {}
        try:
            for worker_id in ("a-0", "b-0"):
                child = start(worker_id, ["sleep", "60"], dict(os.environ), tmp_path / "log", new_session=False)
                setup = WorkerSetup(
                    env=EnvSpec(name=worker_id), policy=PolicySpec(), orchestrator="", worker_id=worker_id, max_tokens=1, retries=0
                )
                pool.workers[worker_id] = Worker(setup, child)
            for identity in ("a-0", "b-0", "nobody", "\xff"):
                sockets[identity] = zmq.asyncio.Context.instance().socket(zmq.DEALER)
                sockets[identity].setsockopt(zmq.IDENTITY, identity.encode("latin-1"))
                sockets[identity].connect(pool.address)
            async with asyncio.timeout(20):
                for identity in ("nobody", "\xff"):
                    await sockets[identity].send(msgspec.msgpack.encode(Heartbeat()))
                await told(pool, 2)
                assert [worker.child.exit_code for worker in pool.workers.values()] == [None, None]
                await sockets["a-0"].send_multipart(frames)
                code = await pool.workers["a-0"].child.wait_async()
                await sockets["b-0"].send(msgspec.msgpack.encode(Ready(3, None)))
                ready = await pool.workers["b-0"].ready
            return code, pool.workers["a-0"].verdict, pool.rejected.count, ready == Ready(3, None)
        finally:
            for socket in sockets.values():
                socket.close(linger=0)
            await pool.close()

    code, verdict, count, others_are_heard = asyncio.run(main())
    assert code == -9 and verdict.startswith("it sent what cannot be taken (") and count == 3 and others_are_heard


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"logprobs": [-1.0]}, r"differ in number: \[1, 2\]"),
        ({"policy_versions": [[0, 3]]}, r"differ in number: \[2, 3\]"),
        ({"policy_versions": [[0, -1], [0, 3]]}, "Expected `int` >= 0"),
        ({"prompt_ids": []}, "an answer to an empty prompt"),
        ({"teacher_logprobs": [0.0]}, "a teacher's logprobs are as many"),
        ({"completion_ids": [1, "x"]}, "Expected `int`, got `str`"),
    ],
)
def test_answers_of_the_policy_that_do_not_fit_together_are_no_message(changes, what):
    """They would end the orchestrator when the batch is made."""
    turn = {"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [-1.0, -2.0], "policy_versions": [[0, 2]], "finish_reason": "stop"}
    played = {"type": "Played", "play_id": 1, "rollouts": [{"turns": [turn | changes]}]}
    with pytest.raises(msgspec.ValidationError, match=what):
        msgspec.msgpack.decode(msgspec.msgpack.encode(played), type=Played)
    assert msgspec.convert(turn, Turn) and Rollout(turns=[])


def test_what_a_worker_has_started_ends_with_the_pool(tmp_path):
    """Also what is in a session of its own, as tool servers are, and was not ended by the worker itself."""

    async def main() -> int:
        pool = WorkerPool(tmp_path)
        marker = f"{os.getpid()}:pool:a-0:1"
        child = start("a-0", ["sleep", "60"], dict(os.environ), tmp_path / "log", new_session=False, marker=marker)
        setup = WorkerSetup(env=EnvSpec(name="a"), policy=PolicySpec(), orchestrator="", worker_id="a-0", max_tokens=1, retries=0)
        pool.workers["a-0"] = Worker(setup, child)
        server = subprocess.Popen(["sleep", "30"], env=os.environ | {process_table.MARKER: marker}, start_new_session=True)
        await pool.close()
        return server.wait(40)

    assert asyncio.run(main()) == -signal.SIGKILL


def test_what_an_interpreter_of_ones_own_needs():
    text = lacking_remedy("/opt/python")
    assert text.startswith("`uv pip install --python /opt/python 'aiohttp") and text.endswith("package, and verifiers (classic: <0.4)")
