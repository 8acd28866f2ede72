"""Scaling of an environment's workers with the load: the rule, and real processes that follow it."""

import asyncio

import pytest

from rl.config.command_line import build, parse_args
from rl.envs import worker
from rl.envs.worker import Clocks
from rl.orchestrator.workers import autoscaler as elastic
from rl.orchestrator.workers import pool
from rl.orchestrator.workers.autoscaler import CHECKS_DOWN, CHECKS_UP, Autoscaler
from rl.orchestrator.workers.setups import worker_setups
from rl.system.errors import RunError
from rl.wire.worker_messages import PolicySpec
from tests.orchestrator import light_worker


def changes(load, *looks):
    return [load.change(busy) for busy in looks]


def test_more_when_all_are_busy_for_a_while_and_never_more_than_allowed():
    load = Autoscaler(2)
    assert changes(load, *[[0.95]] * CHECKS_UP) == [0] * (CHECKS_UP - 1) + [1]
    assert changes(load, *[[1.0, 1.0]] * 20) == [0] * 20
    assert changes(Autoscaler(8), [0.95], [0.2], [0.95], [0.95]) == [0] * 4, "a moment is no load"
    assert changes(Autoscaler(8), *[[1.0, 0.4]] * 20) == [0] * 20, "the next groups go to the one that has less"


def test_fewer_when_one_less_would_be_far_from_busy():
    assert changes(Autoscaler(8), *[[0.2, 0.3]] * CHECKS_DOWN) == [0] * (CHECKS_DOWN - 1) + [-1]
    assert changes(Autoscaler(8), *[[0.4, 0.4]] * 99) == [0] * 99, "one would have 0.8"
    assert changes(Autoscaler(8), *[[0.0]] * 99) == [0] * 99, "the last one stays"


def test_a_worker_is_busy_while_it_computes_or_is_blocked_and_not_while_others_compute():
    start = Clocks(100.0, 5.0, 1.0)
    period = worker.HEARTBEAT_S
    assert Clocks(100.0 + period, 5.0 + period / 2, 1.0).busy_since(start) == pytest.approx(0.5)
    assert Clocks(100.0 + 4 * period, 5.0, 1.0).busy_since(start) == pytest.approx(0.75), "it slept for three periods"
    assert Clocks(100.0 + 4 * period, 5.0, 1.0 + 3 * period).busy_since(start) == pytest.approx(0.0), "it was not let"
    assert 0.0 <= Clocks.now().busy_since(Clocks.now()) <= 1.5


def test_workers_come_and_go_with_the_load(tmp_path, monkeypatch):
    """Two are added while all report that they are busy; they get groups, and end when they are no longer needed."""
    monkeypatch.setattr(pool, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(elastic, "CHECKS_DOWN", 3)
    busy = tmp_path / "busy"
    busy.write_text("1.0")

    async def work(workers):
        async def until(count):
            while len(workers.workers) != count or not all(one.ready.done() for one in workers.workers.values()):
                await asyncio.sleep(0.02)

        await until(3)
        plays = [asyncio.create_task(workers.play("light", "train", task, 1, {"seconds": 0.6}, 0)) for task in range(9)]
        while sum(one.num_plays for one in workers.workers.values()) < len(plays):
            await asyncio.sleep(0)
        spread = sorted(one.num_plays for one in workers.workers.values())
        busy.write_text("0.1")
        rewards = [(await play)[0].reward for play in plays]
        await until(1)
        (left,) = workers.workers.values()
        return spread, rewards, left.child.exit_code, workers.num_started

    assert light_worker.run(tmp_path, monkeypatch, work, most=3, busy=str(busy)) == ([3, 3, 3], [float(task) for task in range(9)], None, 3)


def test_what_auto_means_in_a_configuration():
    flags = ["--orchestrator.environment.id", "x", "--orchestrator.environment.workers", "auto"]
    config = build(parse_args(flags))
    (setup,) = worker_setups(config, PolicySpec(), "")
    assert setup.worker_id == "x-0" and setup.most >= 1
    with pytest.raises(RunError, match="give a number, or leave those out"):
        build(parse_args([*flags, "--orchestrator.environment.max_scoring", "4"]))
