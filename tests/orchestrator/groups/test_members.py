"""Members of a group that finish before the others: each is played once, whichever process dies
meanwhile."""

import asyncio
import os
import signal
import sys
from types import SimpleNamespace

import msgspec

from rl.envs.policy import TALKS
from rl.envs.worker import Worker
from rl.orchestrator.batches.batch_files import PendingLog
from rl.orchestrator.main import run
from rl.orchestrator.tasks.task_source import EnvTasks, TaskRef, TaskSource
from rl.run_dir.status import Status
from rl.wire.batch_file import decode_batch
from rl.wire.rollouts import Group, Rollout
from rl.wire.turns import Turns
from rl.wire.worker_messages import FromWorker, PlayOrder
from tests import steady
from tests.envs.stub_policy import worker_of
from tests.orchestrator import light_worker
from tests.orchestrator.made import run_config, turn
from tests.orchestrator.stub_inference import StubInference
from tests.orchestrator.test_loop_lag import builder
from tests.waiting import alive


class SlowLast:
    """An environment whose episodes take as long as they are told to, one after the other."""

    scores_groups = False

    def __init__(self, *seconds):
        self.seconds = list(seconds)

    async def play(self, order, num_episodes):
        seconds = [self.seconds.pop(0) for _ in range(num_episodes)]
        await asyncio.sleep(max(seconds))
        return [[Rollout(reward=one)] for one in seconds]


def sent(env, order):
    """Returns a worker's answers as (episodes, number of unfinished ones) for each message."""
    messages = []

    async def send(data):
        played = msgspec.msgpack.decode(data, type=FromWorker)
        messages.append(([rollout.episode for rollout in played.rollouts], played.unfinished))

    steady.run(Worker.play(worker_of(env), order, SimpleNamespace(send=send)))
    return messages


def test_a_worker_sends_episodes_as_they_finish_and_short_ones_together(monkeypatch):
    monkeypatch.setattr("rl.envs.worker.GATHER_S", 0.2)
    order = PlayOrder(1, "train", 0, 4, {}, 0)
    assert sent(SlowLast(0.6, 0.0, 0.05, 0.0), order) == [([1, 2, 3], 1), ([0], 0)]
    assert sent(SlowLast(0.0, 0.1, 0.0, 0.05), order) == [([0, 1, 2, 3], 0)]
    assert sent(SlowLast(0.0, 0.0), msgspec.structs.replace(order, done=[0, 2])) == [([1, 3], 0)]
    assert sent(SlowLast(), msgspec.structs.replace(order, done=[0, 1, 2, 3])) == [([], 0)]
    together = SlowLast(0.0, 0.4, 0.0, 0.0)
    together.scores_groups = True
    assert sent(together, order) == [([0, 1, 2, 3], 0)]


def test_a_worker_that_dies_leaves_its_finished_members(tmp_path, monkeypatch):
    async def work(pool):
        kept = []
        playing = asyncio.create_task(
            light_worker.play(pool, 7, 4, [Rollout(episode=1, reward=9.0)], kept.append)
        )
        while not kept:
            await asyncio.sleep(0.02)
        os.kill(pid := pool.workers["light-0"].child.pid, signal.SIGKILL)
        while alive(pid):
            await asyncio.sleep(0.02)
        hold.unlink()
        return await playing, kept, pool.num_started

    (hold := tmp_path / "hold").touch()
    args = {"held": 2, "hold": str(hold), "log": str(tmp_path / "log")}
    rollouts, kept, started = light_worker.run(tmp_path, monkeypatch, work, **args)
    assert started == 2 and [(rollout.episode, rollout.reward) for rollout in rollouts] == [
        (0, 7.0),
        (1, 9.0),
        (2, 9.0),
        (3, 10.0),
    ]
    assert sorted((tmp_path / "log").read_text().split("\n")[:-1]) == ["7 0", "7 2", "7 3"]
    assert [[rollout.episode for rollout in members] for members in kept] == [[0], [2]]


def test_after_a_death_of_the_orchestrator_only_what_is_left_is_played(
    tmp_path, model, monkeypatch
):
    monkeypatch.setattr("rl.orchestrator.workers.pool_worker.BOOTSTRAP", light_worker.BOOTSTRAP)
    log, hold = tmp_path / "log", tmp_path / "hold"
    hold.touch()
    env = (
        f'{{id = "say-digit", python = "{sys.executable}", args = {{held = 2, hold = "{hold}", '
        f'log = "{log}"}}}}'
    )
    # the stub server takes no more than 256 tokens
    config = run_config(
        tmp_path,
        "--max_steps 1 --max_lag 0 --model.max_model_len 256 --orchestrator.sampling.max_tokens 8",
        "--orchestrator.batch_size 8 --orchestrator.group_size 4",
        env=env,
    )

    async def life(until):
        status = Status(config.run_dir.status("orchestrator"), "orchestrator")
        async with StubInference(model, config.run_dir.status("inference")):
            runner = asyncio.create_task(run(config, status, str(model), {}))
            try:
                async with asyncio.timeout(120):
                    while not until():
                        await asyncio.sleep(0.02)
                        assert not runner.done() or runner.result()
            finally:
                runner.cancel()  # anything it writes now would be too late
                await asyncio.wait({runner})
                status.close()

    def members():
        found = PendingLog(tmp_path / "copy.log")
        found.path.write_bytes(
            config.run_dir.pending.read_bytes() if config.run_dir.pending.exists() else b""
        )
        found.load(set(), 9)
        return {
            (group_id, rollout.episode)
            for group_id, group in found.unfinished.items()
            for rollout in group.rollouts
        }

    asyncio.run(life(lambda: len(members()) == 4))
    before = log.read_text().split("\n")[:-1]
    assert len(before) == 4 and {line.split()[1] for line in before} == {"0", "1"}
    hold.unlink()
    asyncio.run(life(lambda: config.run_dir.newest_batch() == 1))
    played = log.read_text().split("\n")[:-1]
    tasks = {line.split()[0] for line in before}
    assert sorted(played) == sorted(f"{task} {episode}" for task in tasks for episode in range(4))
    samples = decode_batch(config.run_dir.batch(1).read_bytes(), "1").batch.samples
    assert sorted((sample.group_id, sample.token_ids.tolist()) for sample in samples) == [
        (group, [1, 2 + i]) for group in (0, 1) for i in range(4)
    ]


def test_what_a_user_adds_to_a_finished_group_is_not_in_its_members(tmp_path, monkeypatch):
    """They may be played to the end again: the same metric would then be added twice, and
    reported as the user's fault."""

    async def work(pool):
        old, kept = Rollout(episode=1, metrics={"own": 2.0}), []
        pool.add_metrics = lambda rollouts: [
            rollout.metrics.update(added=1.0) for rollout in rollouts
        ]
        return await light_worker.play(pool, 7, 3, [old], kept.append), [[old], *kept]

    rollouts, kept = light_worker.run(tmp_path, monkeypatch, work)
    assert [rollout.metrics for rollout in rollouts] == [
        {"added": 1.0},
        {"own": 2.0, "added": 1.0},
        {"added": 1.0},
    ]
    assert {key for members in kept for rollout in members for key in rollout.metrics} == {"own"}


class BreaksItsTalk:
    """An environment that fails, and whose conversation cannot be told."""

    scores_groups = False

    async def play(self, order, num_episodes):
        TALKS.get().append(SimpleNamespace(turns=Turns()))
        raise ValueError("broken")


def test_a_failure_that_cannot_be_told_is_one():
    """Regression: the group hung."""
    assert sent(BreaksItsTalk(), PlayOrder(1, "train", 0, 1, {}, 0)) == [([0], 0)]


def test_a_failed_member_is_played_again(tmp_path):
    sound, failed = (
        Rollout(episode=0),
        Rollout(episode=1, error="inference was away", cause="inference"),
    )
    made = builder(tmp_path, 1)
    made.pending.unfinished[5] = group(5, sound, failed)
    assert made.finished_of(5, oldest=0) == [sound] and made.finished_of(6, oldest=0) == []


def group(group_id, *rollouts, finished=False):
    return Group(group_id=group_id, env="e", task=3, rollouts=list(rollouts), finished=finished)


def member(group_id, episode, version=0, reward=0.5):
    rollout = Rollout(turns=[turn(version=version)], episode=episode, reward=reward)
    return group(group_id, rollout)


def test_members_are_durable_until_their_group_is(tmp_path):
    log = PendingLog(tmp_path / "pending.log")
    log.append([member(1, 0), member(2, 0), member(1, 2), member(1, 0, reward=0.75)])
    log.append([group(2, Rollout(), Rollout(episode=1), finished=True)])
    log.rewrite()
    log.append([member(4, 0, version=7), member(4, 1), member(5, 0)])
    again = PendingLog(tmp_path / "pending.log")
    assert again.load({5}, 6) == [] and [group.group_id for group in again.groups] == [2]
    assert {
        group_id: [(rollout.episode, rollout.reward) for rollout in group.rollouts]
        for group_id, group in again.unfinished.items()
    } == {
        1: [(2, 0.5), (0, 0.75)],
        4: [(1, 0.5)],
    }


def test_members_that_a_batch_gave_up_are_not_begun_again(tmp_path):
    """Regression: a death between the commit and the rewriting of the log played a task twice, since
    on-policy a batch gives the tasks of unfinished groups new numbers."""
    source = TaskSource({"e": EnvTasks(9)}, seed=3)
    refs = [source.next(["e"]) for _ in range(3)]
    drawn = source.newly_drawn()
    source.give_back([refs[2]])
    state = source.state([])
    again = TaskSource({"e": EnvTasks(9)}, seed=3)
    again.restore(state, done=[], begun=[refs[2]], drawn=drawn)
    assert [*again.retry] == [TaskRef(3, "e", refs[2].task)]
