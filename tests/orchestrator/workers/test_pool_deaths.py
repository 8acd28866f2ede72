"""What happens to the groups that a worker was playing when it died, and which one is given up."""

import asyncio
import os
import signal

import pytest

from rl.system.errors import RunError
from tests.orchestrator.light_worker import run

IN_FLIGHT = 20


def test_after_a_death_all_groups_are_played_at_once_again(tmp_path, monkeypatch):
    """Groups arrive steadily, so the worker's queue is never empty. Regression: after a death they were played one by one."""

    async def feed(pool, seconds):
        while True:
            await pool.play("light", "train", 0, 1, {"seconds": seconds}, 0)

    async def until_all_are_sent(pool, started):
        while pool.num_started < started or len(pool.workers["light-0"].sent) < IN_FLIGHT:
            await asyncio.sleep(0.01)

    async def work(pool):
        feeds = [asyncio.create_task(feed(pool, 0.1 + 0.01 * i)) for i in range(IN_FLIGHT)]
        await until_all_are_sent(pool, 1)
        os.kill(pool.workers["light-0"].child.pid, signal.SIGKILL)
        await until_all_are_sent(pool, 2)
        for task in feeds:
            task.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)

    run(tmp_path, monkeypatch, work)


def test_a_group_that_kills_workers_is_given_up_alone_and_once_under_a_steady_feed(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.orchestrator.workers.pool.RESTART_S", 0.05)
    outcomes = []

    async def feed(pool):
        while True:
            outcomes.extend(await pool.play("light", "train", 0, 2, {"seconds": 0.05}, 0))

    async def work(pool):
        feeds = [asyncio.create_task(feed(pool)) for _ in range(IN_FLIGHT)]
        poison = await pool.play("light", "train", 1, 2, {"seconds": 0.02, "kills": True}, 0)
        finished = len(outcomes)
        while len(outcomes) < finished + 5 * IN_FLIGHT:
            await asyncio.sleep(0.05)
        for task in feeds:
            task.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)
        return poison, pool.num_started

    poison, started = run(tmp_path, monkeypatch, work)
    assert [(rollout.cause, rollout.episode) for rollout in poison] == [("worker", 0), ("worker", 1)] and "died 3 times" in poison[0].error
    assert started == 4 and not any(rollout.error for rollout in outcomes)


def test_a_worker_that_dies_of_a_description_or_gives_none(tmp_path, monkeypatch):
    def told(timeout_s, **args):
        async def work(pool):
            with pytest.raises(RunError) as error:
                await pool.describe("light", "train", 1, timeout_s)
            return str(error.value)

        return run(tmp_path, monkeypatch, work, **args)

    log = tmp_path / "logs" / "worker-light-0.log"
    assert told(20.0) == f"environment light: its worker died while describing it: it ended with code 3; see {log}"
    limit = "orchestrator.worker_timeout_s = 0.5"
    assert told(0.5, deaf=True) == f"environment light was not described within {limit}; see {log}"


def test_a_setup_that_is_longer_than_an_argument_may_be(tmp_path, monkeypatch):
    """For example with a system prompt of 140 kB; Linux limits arguments to 128 KiB."""

    async def work(pool):
        return pool.workers["light-0"].ready.result().num_eval

    assert run(tmp_path, monkeypatch, work, system_prompt="x" * 140_000) > 140_000
