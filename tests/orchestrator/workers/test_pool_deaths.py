"""What happens to the groups that a worker was playing when it died, and which one is given up."""

import asyncio
import os
import signal

import pytest

from rl.orchestrator.workers.pool import EnvLostError
from rl.system.errors import RunError
from tests.orchestrator.light_worker import play, run

IN_FLIGHT = 20


def test_after_a_death_all_groups_are_played_at_once_again(tmp_path, monkeypatch):
    """Groups arrive steadily, so the worker's queue is never empty. Regression: after a death
    they were played one by one."""

    async def feed(pool, seconds):
        while True:
            await play(pool, 0, seconds=seconds)

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


def test_a_group_that_kills_workers_is_given_up_alone_and_once_under_a_steady_feed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("rl.orchestrator.workers.pool.RESTART_S", 0.05)
    outcomes = []

    async def feed(pool):
        while True:
            outcomes.extend(await play(pool, 0, 2, seconds=0.05))

    async def work(pool):
        feeds = [asyncio.create_task(feed(pool)) for _ in range(IN_FLIGHT)]
        poison = await play(pool, 1, 2, seconds=0.02, kills=True)
        finished = len(outcomes)
        while len(outcomes) < finished + 5 * IN_FLIGHT:
            await asyncio.sleep(0.05)
        for task in feeds:
            task.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)
        return poison, pool.num_started

    poison, started = run(tmp_path, monkeypatch, work)
    assert [(rollout.cause, rollout.episode) for rollout in poison] == [
        ("worker", 0),
        ("worker", 1),
    ] and "died 3 times" in poison[0].error
    assert started == 4 and not any(rollout.error for rollout in outcomes)


@pytest.mark.parametrize("kind", ["idle", "busy", "suspect"])
def test_groups_of_a_worker_that_does_not_come_back_go_to_another(tmp_path, monkeypatch, kind):
    """Regression: they waited for it without end, or until its failed starts made the
    environment lost and killed the healthy worker."""
    monkeypatch.setattr("rl.orchestrator.workers.pool.RESTART_S", 0.02)
    monkeypatch.setattr("rl.orchestrator.workers.pool.RESTART_LIMIT_S", 0.05)
    monkeypatch.setattr("rl.orchestrator.workers.pool.BARREN_DEATHS", 1)
    monkeypatch.setattr("rl.orchestrator.workers.pool_worker.COPY_S", 0.05)

    async def feed(pool):
        while True:
            await play(pool, 0, seconds=0.05)

    def start(pool, task, seconds):
        return asyncio.create_task(play(pool, task, seconds=seconds))

    async def work(pool):
        pool.on_lost = lambda env, reason: None
        held, _, long = start(pool, 7, 3600), start(pool, 8, 0.0), start(pool, 9, 3600)
        await asyncio.sleep(0)
        dying, healthy = pool.workers.values()
        play, _ = dying.sent.values()
        play.order.sampling["seconds"], play.kills = 0.0, int(kind == "suspect")
        feeding = asyncio.create_task(feed(pool)) if kind == "busy" else None
        monkeypatch.setattr("rl.orchestrator.workers.pool_worker.BOOTSTRAP", "raise SystemExit(1)")
        os.kill(dying.child.pid, signal.SIGKILL)
        assert [rollout.reward for rollout in await held] == [7.0]
        # it goes on being started, and is no reason to lose the environment
        while pool.num_started < 6:
            await asyncio.sleep(0.05)
        assert pool.lost == {} and 9 in [play.order.task for play in healthy.sent.values()]
        long.cancel()
        if feeding:
            feeding.cancel()
        await asyncio.gather(long, *([feeding] if feeding else []), return_exceptions=True)
        assert healthy.sent == {}
        os.kill(healthy.child.pid, signal.SIGKILL)
        with pytest.raises(EnvLostError, match="finished nothing in between"):
            await start(pool, 1, 3600)

    run(tmp_path, monkeypatch, work, workers=2)


def test_a_worker_that_dies_of_a_description_or_gives_none(tmp_path, monkeypatch):
    def told(timeout_s, **args):
        async def work(pool):
            with pytest.raises(RunError) as error:
                await pool.describe("light", "train", 1, timeout_s)
            return str(error.value)

        return run(tmp_path, monkeypatch, work, **args)

    log = tmp_path / "logs" / "worker-light-0.log"
    assert (
        told(20.0)
        == "environment light: its worker died while describing it: it ended with code 3; see "
        f"{log}"
    )
    limit = "orchestrator.worker_timeout_s = 0.5"
    assert told(0.5, deaf=True) == f"environment light was not described within {limit}; see {log}"


def test_a_setup_that_is_longer_than_an_argument_may_be(tmp_path, monkeypatch):
    """For example with a system prompt of 140 kB; Linux limits arguments to 128 KiB."""

    async def work(pool):
        return pool.workers["light-0"].ready.result().num_eval

    assert run(tmp_path, monkeypatch, work, system_prompt="x" * 140_000) > 140_000
