"""No work that grows with tokens blocks the orchestrator's event loop."""

import asyncio
import itertools
import random
from types import SimpleNamespace

import msgspec
import pytest

from rl.config.orchestrator import DifficultyConfig
from rl.orchestrator.evals.evaluator import EvalEnv, Evaluator
from rl.orchestrator.groups.group_credit import Rules
from rl.orchestrator.pipeline import Pipeline
from rl.orchestrator.progress import Progress, StepClock
from rl.orchestrator.tasks.admission import Admission
from rl.orchestrator.tasks.task_source import EnvTasks, TaskSource
from rl.orchestrator.workers.pool_worker import ANSWERS
from rl.wire.rollouts import Group, Rollout
from rl.wire.worker_messages import Played
from tests.loop_lag import LoopLag
from tests.orchestrator.made import run_config, turn

HELD_S = 0.05


def least_hold(make, attempts=12):
    """Returns the longest block in the first attempt in which it is below HELD_S, as others use
    the machine, too; if there is none, the minimum over all attempts. `make()` is what is
    measured."""

    async def attempt():
        with LoopLag() as lag:
            await make()
            await asyncio.sleep(0)
        return lag.longest_s

    holds = []
    while len(holds) < attempts and min(holds, default=HELD_S) >= HELD_S:
        holds.append(asyncio.run(attempt()))
    print(f"longest holds: {[round(hold, 3) for hold in holds]} s")
    return min(holds)


def config(tmp_path, *flags):
    return run_config(tmp_path, "--max_steps 9", *flags)


def builder(tmp_path, size, difficulty=None):
    settings = config(tmp_path, "--orchestrator.batch_size 8 --orchestrator.group_size 8")
    source, clock = TaskSource({"e": EnvTasks(size, difficulty=difficulty)}, seed=3), StepClock()
    clock.start()
    return Pipeline(
        settings,
        Admission(settings, source),
        {"e": Rules()},
        Progress(9),
        clock,
        {},
        lambda warning: None,
    )


def long_group(group_id, turns, new):
    """Returns a group of eight rollouts, each turn with `new` prompt tokens and as many answer
    tokens; and its number of tokens."""
    rollouts = []
    for episode in range(8):
        history, made = [], []
        for number in range(turns):
            history = history + [1000 + number] * new
            answer = [2000 + number] * new
            made.append(turn(history, answer))
            history = history + answer
        messages = [{"role": "assistant", "content": "word " * new}] * turns
        rollouts.append(
            Rollout(turns=made, text=messages, reward=float(episode % 2), episode=episode)
        )
    return Group(group_id=group_id, env="e", task=group_id, rollouts=rollouts)


def test_a_batch_of_many_tokens_is_taken_in_and_committed_beside_the_loop(tmp_path):
    """A million tokens, three quarters of a second of work."""
    groups = [long_group(0, 100, 600)]
    sent = msgspec.msgpack.encode(Played(1, groups[0].rollouts))
    tokens = sum(
        chain.num_tokens for rollout in groups[0].rollouts for chain in rollout.turns.chains
    )
    assert tokens == 960_000 and len(sent) < 40 * tokens

    async def work():
        one = builder(tmp_path / str(random.random()), 7)
        await one.restore()
        played = ANSWERS.decode(sent)
        await one.add([msgspec.structs.replace(groups[0], rollouts=played.rollouts)])
        await one.commit_full_batches()
        assert one.progress.newest == 1

    assert least_hold(work) < HELD_S


@pytest.mark.timeout(120)
def test_a_million_solve_rates_are_settled_and_written_beside_the_loop(tmp_path):
    """Regression: they made each batch 13.9 MB larger, and blocked the loop for 0.16 s."""
    one = builder(tmp_path, 1_000_000, DifficultyConfig())
    asyncio.run(one.restore())
    random.seed(1)
    for task in range(1_000_000):
        one.source.note("e", task, [random.randrange(9) / 8])
    assert sum(one.source.update_solve_rates().values()) == 1_000_000

    async def work():
        step = one.progress.newest
        await one.add(
            [Group(group_id=step, env="e", task=step, rollouts=long_group(0, 1, 5).rollouts)]
        )
        await one.commit_full_batches()
        assert one.progress.newest == step + 1

    assert least_hold(work) < HELD_S
    assert one.run_dir.batch(1).stat().st_size < 2_000_000


def test_an_evaluation_of_many_rollouts_is_written_beside_the_loop(tmp_path):
    """Regression: 2,000 tasks of 8 rollouts took 0.55 s."""
    settings = config(tmp_path, "--orchestrator.eval.samples 8 --orchestrator.eval.interval 1")
    results = [(task, long_group(0, 2, 20).rollouts) for task in range(2000)]
    evaluator = Evaluator(
        settings, SimpleNamespace(lost={}), {"e": EvalEnv("e", 2000)}, StepClock()
    )
    evaluator.clock.start()

    async def play(*_):
        return results

    evaluator._play = play
    versions = itertools.count()

    async def work():
        version = next(versions)
        await evaluator.evaluate(settings.orchestrator.eval[0], version, lambda: asyncio.sleep(0))
        assert settings.run_dir.eval(version, "e").exists() and evaluator.best["e"] == (
            True,
            0.5,
            0,
        )

    assert least_hold(work) < HELD_S


def test_an_evaluation_plays_as_many_rollouts_at_once_as_training_may(tmp_path):
    """Results are in the order of the tasks, whichever finishes first."""
    settings = config(
        tmp_path,
        "--orchestrator.batch_size 8 --orchestrator.group_size 8",
        "--orchestrator.max_off_policy_steps 1 --orchestrator.eval.samples 3",
    )

    class Pool:
        lost: dict[str, str] = {}
        failed = SimpleNamespace(done=lambda: False)
        playing = peak = 0

        async def play(self, env, split, task, num_episodes, sampling, server, seed):
            self.playing += num_episodes
            self.peak = max(self.peak, self.playing)
            await asyncio.sleep(random.random() / 100)
            self.playing -= num_episodes
            return [Rollout(episode=i, reward=task / 100) for i in range(num_episodes)]

    async def main():
        evaluator = Evaluator(settings, Pool(), {"e": EvalEnv("e", 50)}, StepClock())
        evaluator.clock.start()
        await evaluator.evaluate(settings.orchestrator.eval[0], 0, lambda: asyncio.sleep(0))
        return evaluator.pool.peak

    assert asyncio.run(main()) == 15 < settings.orchestrator.max_in_flight == 16
    lines = [
        msgspec.json.decode(line)
        for line in settings.run_dir.eval(0, "e").read_bytes().splitlines()
    ]
    assert [line["task"] for line in lines] == [task for task in range(50) for _ in range(3)]
