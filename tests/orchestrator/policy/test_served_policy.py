"""How the orchestrator handles inference servers that die and come back with another version at
any moment."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import msgspec
import pytest

from rl.orchestrator.evals.evaluator import EvalEnv, Evaluator
from rl.orchestrator.policy.served_policy import ServedPolicy
from rl.orchestrator.progress import StepClock
from rl.run_dir.files import CorruptFileError, write_file
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import BranchOrigin
from rl.wire.http import RefusedError
from rl.wire.inference_client import InferenceLostError
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import ServerSet
from tests.launch.long_run import make_version
from tests.orchestrator.made import run_config, turn


class Servers:
    """The version each server holds; None if it is away. `loads` are the versions requested;
    `slow` servers never finish a load."""

    timeout_s = 5.0

    def __init__(self, *versions, slow=()):
        self.versions = list(versions)
        self.loads, self.refusal, self.slow, self.known, self.silent = [], None, slow, {}, set()
        self.contents = {}

    async def poll_versions(self):
        self.known = {
            str(i): version for i, version in enumerate(self.versions) if version is not None
        }
        return self.known

    async def wait_for_any(self):
        return await self.poll_versions()

    def follow(self, server_set):
        self.server_set = server_set

    async def load(self, url, version):
        if self.refusal:
            raise self.refusal
        self.loads.append(version.policy_version)
        if url in self.slow:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.versions[int(url)] = self.known[url] = version.policy_version
        return 0.25


class Pool:
    """Plays every task with the first server's version; `after` maps a number of plays to what
    happens after it."""

    failed = SimpleNamespace(done=lambda: False)

    def __init__(self, servers, after=None):
        self.servers, self.after, self.played, self.lost = servers, after or {}, [], {}
        self.seeds = []

    async def play(self, env, split, task, num_episodes, sampling, server, seed):
        version = self.servers.versions[0]
        self.played.append((task, version))
        self.seeds.append(seed)
        if (held := self.after.get(len(self.played))) is not None:
            self.servers.versions = [held]
        await asyncio.sleep(0)
        return [
            Rollout(turns=[turn(version=version)], reward=float(version), episode=i)
            for i in range(num_episodes)
        ]


@pytest.fixture
def world(tmp_path):
    """Returns (config, evaluator, policy) of a run with versions 1 to 5 on disk and an eval of
    four tasks at even versions."""

    def make(servers, pool=None):
        config = run_config(tmp_path, "--orchestrator.eval.interval 2")
        for number in range(1, 6):
            config.run_dir.weights(number).mkdir(parents=True, exist_ok=True)
        evaluator = Evaluator(config, pool or Pool(servers), {"e": EvalEnv("e", 4)}, StepClock())
        evaluator.clock.start()
        return (
            config,
            evaluator,
            ServedPolicy(servers, config.run_dir, str(tmp_path), evaluator, AsyncMock()),
        )

    return make


def evaluated(evaluator, *versions):
    evaluator.written |= {evaluator.run_dir.eval(version, "e") for version in versions}


@pytest.mark.parametrize(
    ("loaded", "held", "pinned", "loads", "then"),
    [
        (3, [3], False, [], 3),
        (3, [None], False, [], 3),  # away: polled again when it is back
        (3, [5], False, [], 5),  # newer: taken over
        (3, [5], True, [3], 3),  # an evaluation runs
        (3, [1], False, [3], 3),  # older: the newest was damaged, or not yet there
        (3, [0], True, [3], 3),
        (3, [3, 5], False, [], 3),  # tokens of a newer version do no harm
        (3, [3, 5], True, [3], 3),
        (3, [4, 5, None], False, [], 4),
        (3, [2, 5], False, [3], 3),
        (3, [7], False, [3], 3),  # of another history
        (9, [2], False, [], 2),  # the loaded version is gone
        (9, [7], False, [5], 5),  # and so is the one that they hold
        (9, [7, 4, 3], False, [], 3),
        (9, [7], True, [5], 5),
    ],
)
def test_a_server_that_comes_back(world, loaded, held, pinned, loads, then):
    servers = Servers(*held)
    _, evaluator, policy = world(servers)
    evaluated(evaluator, 0, 2, 4)
    policy.loaded, policy.num_pins = loaded, int(pinned)
    changed = asyncio.run(policy.reconcile())
    assert (servers.loads, policy.loaded, changed) == (loads, then, then != loaded)


def test_no_version_that_waits_for_its_eval_is_skipped(world):
    servers = Servers(5)
    _, evaluator, policy = world(servers)
    evaluated(evaluator, 0, 2)
    policy.loaded = 3
    assert not asyncio.run(policy.reconcile()) and servers.loads == [] and policy.loaded == 3
    assert policy.next_version(9).policy_version == 4 and policy.needed(9)[0] == 3


def test_what_a_version_costs_does_not_grow_with_those_before(world, monkeypatch):
    """The loop asks for the next version after every finished group, and does not wait for the
    disk."""
    servers = Servers(3)
    _, evaluator, policy = world(servers)
    evaluated(evaluator, *range(0, 4, 2))
    looked, exists = [], Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: looked.append(path) or exists(path))
    for version in range(1, 1001):
        policy.loaded = version
        policy.note(version)
        policy.forget(2000)
        assert policy.needed(2000)[0] == min(version, 4)
        del looked[:]
        for _ in range(3):
            assert policy.next_version(2000) is None or version < 5
        assert not looked
        if version != 4:
            evaluated(evaluator, version)
    assert list(policy.versions) == [0, 4, 1000]


def test_at_the_start_all_servers_get_one_version(world):
    servers = Servers(4, 2)
    _, _, policy = world(servers)

    async def start():
        await policy.start()
        first = servers.server_set
        await asyncio.sleep(0.01)
        await policy.reconcile()
        return first

    # the run continues with the server that is ready
    assert asyncio.run(start()) == ServerSet(["0"], ["1"], 4, 5)
    assert (servers.versions, servers.loads, policy.loaded, servers.server_set) == (
        [4, 4],
        [4],
        4,
        ServerSet(["0", "1"], [], 4, 5),
    )
    servers.versions = [12, 12]
    asyncio.run(policy.start())
    assert (servers.versions, policy.loaded) == ([5, 5], 5)


def test_what_inference_refuses(world, monkeypatch):
    monkeypatch.setattr("rl.orchestrator.policy.served_policy.RETRY_S", 0.0)
    servers = Servers(3)
    config, _, policy = world(servers)
    policy.loaded, servers.refusal = 3, RefusedError(422, "tensor w is damaged")
    with pytest.raises(
        CorruptFileError, match=r"000004: inference refused version 4: tensor w is damaged"
    ):
        asyncio.run(policy.load(policy.versions[4]))
    # intact: of another model, or for another kind of server, which no repair would fix
    make_version(config.run_dir, 5)
    with pytest.raises(
        RefusedError, match="000005: inference refused version 5: tensor w is damaged"
    ):
        asyncio.run(policy.load(policy.versions[5]))
    servers.refusal = RefusedError(401, "no token")
    with pytest.raises(RefusedError, match="no token"):
        asyncio.run(policy.load(policy.versions[4]))
    config.run_dir.weights(4).rmdir()  # retention, or the trainer that replaces it
    assert asyncio.run(policy.load(policy.versions[4])) == 0.0 and policy.loaded == 3


@pytest.mark.parametrize("after", [{2: 5}, {4: 5}, {1: 3, 4: 5, 6: 1}])
def test_an_eval_is_wholly_of_its_version(world, after):
    """The server dies after some plays and comes back with other versions, newer and older."""
    servers = Servers(4)
    pool = Pool(servers, after)
    config, evaluator, policy = world(servers, pool)
    policy.loaded = 4

    async def evaluate():
        async with policy.pin():
            await evaluator.evaluate(config.orchestrator.eval[0], 4, policy.reconcile)

    asyncio.run(evaluate())
    rows = [json.loads(line) for line in config.run_dir.eval(4, "e").read_bytes().splitlines()]
    assert [row["task"] for row in rows] == [0, 1, 2, 3] and all(
        row["versions"] == [4] for row in rows
    )
    assert read_metrics(config.run_dir.metrics)[4, "eval"]["eval/e/reward_mean"] == 4.0
    wrong = [task for task, version in pool.played if version != 4]
    assert len(pool.played) == 4 + len(wrong)  # only what was wrong was played again


def test_every_task_of_an_eval_has_a_seed_which_is_that_of_other_versions_and_of_other_runs_of_the_seed(
    world,
):
    def seeds(version, **changes):
        pool = Pool(Servers(version))
        config, evaluator, policy = world(pool.servers, pool)
        evaluator.config = config.model_copy(update=changes)
        asyncio.run(evaluator._play(config.orchestrator.eval[0], version, policy.reconcile))
        return sorted(pool.seeds)

    assert seeds(2) == seeds(4) and len({*seeds(4), *seeds(4, seed=1)}) == 8


def test_a_server_that_never_keeps_the_version_ends_the_eval(world):
    servers = Servers(4)
    pool = Pool(servers, dict.fromkeys(range(0, 200), 5))
    config, evaluator, policy = world(servers, pool)
    servers.versions, policy.loaded, policy.num_pins = [5], 4, 1

    async def in_vain(url, version):
        servers.known[url] = version.policy_version
        return 0.0

    servers.load = in_vain
    with pytest.raises(
        InferenceLostError, match="did not hold version 4 for long enough in 20 attempts"
    ):
        asyncio.run(evaluator.evaluate(config.orchestrator.eval[0], 4, policy.reconcile))
    assert not config.run_dir.eval(4, "e").exists()


def test_an_eval_that_died_before_its_file_is_played_again_and_its_target_is_remembered(world):
    servers = Servers(4)
    config, evaluator, _ = world(servers)
    evaluator.metrics.write(2, {"eval/e/reward_mean": 0.75})
    assert [entry.label for entry in evaluator.due(2, 9)] == ["e"]
    config.orchestrator.eval[0].target = 0.7
    again = Evaluator(config, Pool(servers), {"e": EvalEnv("e", 4)}, StepClock())
    assert again.reached_target() == "eval e reached 0.750 at version 2; its target is 0.7"
    assert again.best["e"] == (True, 0.75, 2)


def test_an_eval_of_which_many_rollouts_failed_is_neither_the_best_nor_reaches_a_target(
    world, caplog
):
    """Regression: with negative rewards a failure, which counts as 0, was the best reward, and
    ended the run as a success."""
    servers = Servers(2)
    config, evaluator, _ = world(servers, pool := Pool(servers))
    config.orchestrator.eval[0].target = -1.0
    away = [Rollout(error="judge away", cause="reward")] * 4
    played = iter([*away, *[Rollout(reward=-4.5)] * 4, *away])

    async def play(*_, **__):
        return [next(played)]

    pool.play = play
    for version, best in ((0, (False, 0.0, 0)), (2, (True, -4.5, 2)), (4, (True, -4.5, 2))):
        asyncio.run(evaluator.evaluate(config.orchestrator.eval[0], version, AsyncMock()))
        assert evaluator.best["e"] == best
    evaluator.metrics.write(6, {"eval/e/reward_mean": -4.0, "eval/e/errored": 0.0625})
    again = Evaluator(config, pool, evaluator.envs, StepClock())
    assert evaluator.best["e"] == (True, -4.5, 2) and again.best["e"] == (True, -4.0, 6)
    assert evaluator.reached_target() is again.reached_target() is None
    assert "eval e at version 4: 100% of its rollouts failed" in caplog.text
    assert "at version 6" not in caplog.text


def test_an_eval_whose_workers_are_lost_is_left_out(world):
    servers = Servers(4)
    pool = Pool(servers)
    _, evaluator, policy = world(servers, pool)
    assert evaluator.due(4, 9) and policy.needed(9)[0] == 0
    pool.lost["e"] = "it died"
    policy.loaded = 5
    assert not evaluator.due(4, 9) and policy.needed(9)[0] == 5


def test_a_branch_is_evaluated_from_its_first_version_on(tmp_path):
    """Regression: a branch at step 40 first loaded and evaluated the base model, and at step 37
    not the version that it begins with."""
    config = run_config(tmp_path, "--orchestrator.eval.interval 20 --max_steps 80")
    config.run_dir.weights(37).mkdir(parents=True)
    write_file(config.run_dir.origin, msgspec.json.encode(BranchOrigin("r", 37, 0.0, [])))
    servers = Servers(37)
    evaluator = Evaluator(config, Pool(servers), {"e": EvalEnv("e", 4)}, StepClock())
    policy = ServedPolicy(servers, config.run_dir, str(tmp_path), evaluator, AsyncMock())
    asyncio.run(policy.start())
    policy.forget(80)
    assert policy.available() == [0, 37] and policy.needed(80)[0] == 37
    assert [number for number in range(81) if evaluator.due(number, 80)] == [37, 40, 60, 80]
