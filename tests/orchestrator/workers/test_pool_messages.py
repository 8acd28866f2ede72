"""Invalid messages to the pool of workers: garbage kills the worker that sends it, and nothing
else."""

import asyncio
import contextlib
import os

import msgspec
import psutil
import pytest

from rl.orchestrator.workers.pool import PoolWorker, WorkerPool
from rl.system.children import start
from rl.wire.worker_messages import MAX_MESSAGE_BYTES, MessageStream, Ready
from tests.orchestrator.made import worker_setup

GARBAGE = [b"garbage", b"", b"\x91" * 5000, b"\x82\xa4type\xaaLone\x85", b"\xdd\xff\xff\xff\xff"]


def sleeping_worker(pool, name):
    """Adds a worker to the pool whose process only sleeps."""
    child = start(
        name,
        ["sleep", "60"],
        dict(os.environ),
        pool.log_dir / "log",
        new_session=False,
    )
    pool.workers[f"{name}-0"] = PoolWorker(worker_setup(name), child)
    return pool.workers[f"{name}-0"]


async def told(pool, count):
    while pool.rejected.count < count:
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def brief_ends(monkeypatch):
    """The workers here are not real workers, and do not end when asked to."""
    monkeypatch.setattr("rl.orchestrator.workers.pool.CLOSE_S", 0.2)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_worker_that_sends_garbage_is_ended_and_the_others_are_heard(tmp_path, garbage):
    async def main():
        pool = WorkerPool(tmp_path)
        streams = {}
        try:
            for name in "ab":
                sleeping_worker(pool, name)
            for name in ("a-0", "b-0", "nobody", "\xff"):
                streams[name] = await MessageStream.connect(pool.address)
                await streams[name].send(name.encode("latin-1"))
            async with asyncio.timeout(20):
                await told(pool, 2)  # of "nobody" and "\xff", by their names alone
                assert [worker.child.exit_code for worker in pool.workers.values()] == [None, None]
                await streams["a-0"].send(garbage)
                code = await pool.workers["a-0"].child.wait_async()
                await streams["b-0"].send(msgspec.msgpack.encode(Ready(3, None)))
                ready = await pool.workers["b-0"].ready
            return (
                code,
                pool.workers["a-0"].kill_reason,
                pool.rejected.count,
                ready == Ready(3, None),
            )
        finally:
            for stream in streams.values():
                stream.writer.close()
            await pool.close()

    code, kill_reason, count, others_are_heard = asyncio.run(main())
    assert (
        code == -9
        and kill_reason.startswith("it sent an invalid message (")
        and count == 3
        and others_are_heard
    )


@pytest.mark.parametrize("announced", [MAX_MESSAGE_BYTES + 1, 1 << 31])
def test_no_worker_has_the_pool_keep_more_than_one_message(tmp_path, announced):
    """A worker that sends endlessly is killed before the pool has read any of it. Before, the
    pool took 617 MiB."""

    async def main():
        pool, grown = WorkerPool(tmp_path), 0
        worker = sleeping_worker(pool, "a")
        before = psutil.Process().memory_info().rss
        try:
            stream = await MessageStream.connect(pool.address)
            await stream.send(b"a-0")
            stream.writer.write(announced.to_bytes(4))
            async with asyncio.timeout(20):
                sent = 0
                with contextlib.suppress(ConnectionError):
                    while sent < announced:
                        stream.writer.write(bytes(1 << 20))
                        await stream.writer.drain()
                        sent += 1 << 20
                        grown = max(grown, psutil.Process().memory_info().rss - before)
                await worker.child.wait_async()
            return worker.kill_reason, sent, grown
        finally:
            await pool.close()

    kill_reason, sent, grown = asyncio.run(main())
    assert (
        kill_reason
        == f"it sent an invalid message (a message of {announced} bytes, {MAX_MESSAGE_BYTES} "
        "are allowed)"
    )
    assert sent < 32 << 20 and grown < 32 << 20


def test_nobody_has_the_pool_keep_messages_by_connecting_often(tmp_path):
    """Regression: 20 connections with half a message each took 160 MiB, whether a worker's name
    was given or another."""

    async def main():
        pool, streams = WorkerPool(tmp_path), []
        sleeping_worker(pool, "a")
        before = psutil.Process().memory_info().rss
        try:
            for name in [b"a-0", b"nobody"] * 10:
                streams.append(stream := await MessageStream.connect(pool.address))
                with contextlib.suppress(ConnectionError):
                    await stream.send(name)
                    stream.writer.write((16 << 20).to_bytes(4) + bytes(8 << 20))
                    await stream.writer.drain()
            await asyncio.sleep(0.2)
            return psutil.Process().memory_info().rss - before
        finally:
            for stream in streams:
                stream.writer.close()
            await pool.close()

    assert asyncio.run(main()) < 64 << 20
