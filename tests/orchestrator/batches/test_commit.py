"""The orchestrator dies repeatedly between any two steps of writing: every finished group counts
exactly once."""

import asyncio
import json
import math
import random
import sys
import tempfile
import threading
import time
from asyncio import to_thread
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.orchestrator.batches.batch_files import decode_state
from rl.orchestrator.batches.early_stop import RewardHistory
from rl.orchestrator.evals.evaluator import Evaluator
from rl.orchestrator.groups.group_credit import Rules, credit_group
from rl.orchestrator.orchestrator import Orchestrator
from rl.orchestrator.pipeline import MAX_FAILED, MAX_WITHOUT_SIGNAL
from rl.orchestrator.policy.served_policy import ServedPolicy
from rl.orchestrator.progress import StepClock
from rl.orchestrator.tasks.admission import InFlight
from rl.orchestrator.tasks.task_source import MEMORY, UNPLAYED, EnvTasks, TaskRef, TaskSource
from rl.run_dir.files import clean_leftovers
from rl.run_dir.metrics import read_metrics, source_files
from rl.run_dir.paths import BranchOrigin, numbered
from rl.run_dir.status import RoleStatus
from rl.system import faults
from rl.system.functions import UserFunction
from rl.wire.batch_file import check_rollouts, decode_batch
from rl.wire.rollouts import Group, Rollout, read_records, waiting_lines
from tests.orchestrator.made import run_config, turn
from tests.raised import run_error

STEPS = 4


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)  # no power failures here, and syncing is slow


@pytest.fixture(autouse=True)
def no_threads(monkeypatch):
    """Runs thread calls inline, so that a death in a thread ends this one, and `now` needs no
    event loop."""

    async def at_once(function, *args):
        return function(*args)

    monkeypatch.setattr("asyncio.to_thread", at_once)
    monkeypatch.setattr("rl.orchestrator.pipeline.in_thread", at_once)


def now(work):
    """Returns the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


class KilledError(BaseException):
    """Stands for SIGKILL: no `except OSError` catches it."""


class Dying:
    """Replaces faults.FaultPlan: the process dies at the k-th point that is reached."""

    def __init__(self, points):
        self.left = points

    def reach(self, name):
        self.left -= 1
        if self.left == 0:
            raise KilledError(name)


class Nothing:
    """A pool, servers and a status that do nothing."""

    lost: dict[str, str] = {}
    current = RoleStatus()

    def __init__(self):
        self.warned = {}

    def warn(self, warning):
        self.warned[warning.about, warning.env] = warning.text

    def advance(self, count=1): ...

    def enter(self, phase, step, detail, **counts):
        self.counts, self.detail = counts, detail


class World:
    """A run whose orchestrator is restarted several times, and what it is known to have
    finished."""

    def __init__(self, root, dice, *more, max_lag=1):
        envs = '[{id = "a", weight = 2.0, difficulty = {}}, {id = "b"}]'
        flags = (
            f"--max_steps {STEPS} --max_lag {max_lag} --orchestrator.batch_size 4 "
            "--orchestrator.group_size 2 --orchestrator.max_off_policy_steps 2"
        )
        self.config = run_config(root, flags, *more, env=envs)
        self.run_dir, self.dice = self.config.run_dir, dice
        self.published, self.nonces, self.missing, self.surplus = 0, 0, 0, 0
        self.durable = {}
        self.asked = {}
        self.late = set()
        """Groups that finished after their tasks had been given back."""

    def orchestrator(self):
        pool = Nothing()
        evaluator = Evaluator(self.config, pool, {}, StepClock())
        policy = ServedPolicy(pool, self.run_dir, "/base", evaluator, pool)
        source = TaskSource(
            {
                "a": EnvTasks(7, 2.0, 2, self.config.orchestrator.environment[0].difficulty),
                "b": EnvTasks(None, 1.0, 2),
            },
            3,
        )
        one = Orchestrator(self.config, pool, policy, source, evaluator, Nothing(), {})
        policy.loaded = self.published
        evaluator.clock.start()
        return one

    def started(self):
        one = self.orchestrator()
        now(one.pipeline.restore())
        return one

    def live(self, points):
        """Runs one process until the run is over or the process dies at the given point."""
        clean_leftovers(*self.run_dir.folders)
        faults.plan = Dying(points) if points else None
        try:
            one = self.started()
            assert set(numbered(self.run_dir.rollouts(0).parent, ".jsonl")) <= set(
                numbered(self.run_dir.batches, ".batch")
            )
            now(one.pipeline.commit_full_batches())
            for _ in range(200):
                if one.progress.newest == STEPS:
                    return
                self.play(one)
                assert waiting_ids(self.run_dir) == [
                    group.group_id for group in one.pipeline.pending.groups
                ]
            raise AssertionError("the run does not get on")
        except KilledError:
            pass
        finally:
            faults.plan = None

    def play(self, one):
        """Groups start as admission lets them, some finish, and the trainer publishes."""
        while envs := one.eligible():
            ref = one.source.next(envs)
            one.admission.in_flight[ref.group_id] = InFlight(
                ref, 2, one.policy.loaded, time.monotonic(), NoTask()
            )
        refs = [play.ref for play in one.admission.in_flight.values()]
        versions = {
            group_id: play.start_version for group_id, play in one.admission.in_flight.items()
        }
        done = [
            self.group(ref, one.admission.in_flight[ref.group_id].start_version)
            for ref in refs
            if self.dice.random() < 0.5
        ]
        for group in done:
            self.asked[nonce(group)] = group
        if done:
            now(one.pipeline.add(done))
            now(one.pipeline.commit_full_batches())
            given_back = (
                {*refs}
                - {*(play.ref for play in one.admission.in_flight.values())}
                - {*map(ref_of, done)}
            )
            late = [
                self.group(ref, versions[ref.group_id])
                for ref in refs
                if ref in given_back and self.dice.random() < 0.2
            ]
            self.asked |= {nonce(group): group for group in late}
            now(one.pipeline.add(late))
            self.durable |= {nonce(group): group for group in [*done, *late]}
            self.late |= {group.group_id for group in late}
        if self.published < one.progress.newest and self.dice.random() < 0.5:
            self.published += 1
            one.policy.loaded = self.published
            one.cancel_stale()

    def group(self, ref, version):
        self.nonces += 1
        metrics, turns = {"nonce": float(self.nonces)}, [turn(version=version)]
        rollouts = [
            Rollout(turns=turns, reward=self.dice.choice([0.0, 1.0]), episode=i, metrics=metrics)
            for i in range(2)
        ]
        if not self.dice.randrange(9):
            rollouts[1].error, rollouts[1].cause = "failed", "environment"
        return Group(group_id=ref.group_id, env=ref.env, task=ref.task, rollouts=rollouts)

    def rewarded(self, ref, *rewards):
        group = self.group(ref, 0)
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            rollout.reward, rollout.error, rollout.cause = reward, None, None
        return group


class NoTask:
    """A member of a group in flight."""

    def cancel(self): ...


def test_the_first_failures_and_the_loss_of_an_environment_are_for_the_user(tmp_path):
    one = World(tmp_path, random.Random(0)).started()
    bad = Group(
        group_id=0,
        env="a",
        task=0,
        rollouts=[Rollout(episode=i, error=f"no {i}\nmore", cause="reward") for i in range(2)],
    )
    now(one.pipeline.add([bad, msgspec.structs.replace(bad, group_id=1)]))
    one.lose_env("only evaluated", "it died")
    one.lose_env("b", "its workers died")
    assert one.status.warned == {
        ("failed", "a"): "environment a: 2 of 2 rollouts of a group failed for good (reward): no 0",
        (
            "lost",
            "only evaluated",
        ): "environment only evaluated is lost until the next start: it died",
        (
            "lost",
            "b",
        ): "environment b is lost until the next start, its share goes to the others: its "
        "workers died",
    }
    with run_error("environment a cannot be played: it died, too"):
        one.lose_env("a", "it died, too")


def test_a_batch_that_waited_for_a_lost_environment_is_made_without_it(tmp_path):
    """Regression: nothing else would trigger a check for full batches, so the run waited for the
    trainer, which waited for the batch."""
    world = World(tmp_path, random.Random(0), max_lag=0)
    one = world.started()
    refs = [one.source.next([env]) for env in "baa"]
    one.admission.in_flight |= {
        ref.group_id: InFlight(ref, 2, 0, time.monotonic(), NoTask()) for ref in refs
    }
    groups = [world.rewarded(ref, 0.0, 1.0) for ref in refs[1:]]

    async def loop():
        taking = asyncio.create_task(one.take_in())
        one.played += groups
        for told in (lambda: None, lambda: one.lose_env("b", "it died")):
            told()
            await one.progress.notify()
            for _ in range(9):
                await asyncio.sleep(0)
            numbers.append(
                (one.progress.newest, one.status.counts["batch_done"], one.status.detail)
            )
        taking.cancel()

    numbers = []
    asyncio.run(loop())
    # Groups count only once all that started earlier have finished.
    assert numbers == [
        (0, 0, "enough later groups have finished; waiting for group 0 of b (task 0)"),
        (1, 0, ""),
    ]


def test_failures_of_an_earlier_process_do_not_end_the_next_one(tmp_path):
    """Regression: a judge was down for a minute, and the run that ended because of it could
    never be resumed."""
    world = World(tmp_path, random.Random(0))
    for life in range(2):
        one = world.started()
        now(one.pipeline.commit_full_batches())
        assert len(one.pipeline.pending.groups) == 2 * MAX_FAILED * life
        # a batch is two groups
        failed = [world.group(one.source.next(["a"]), 0) for _ in range(2 * MAX_FAILED)]
        for group in failed:
            group.rollouts[0].error, group.rollouts[0].cause = "the judge is down", "reward"
        now(one.pipeline.add(failed))
        with run_error(
            f"the last {2 * MAX_FAILED} groups all failed; the newest error:\nthe judge is down"
        ):
            now(one.pipeline.commit_full_batches())


def test_a_run_that_ended_without_any_signal_can_be_resumed_once_the_cause_is_fixed(tmp_path):
    """Regression: it asked for the reward function to be mended, and ended again before it had
    played anything with the mended one."""
    world = World(tmp_path, random.Random(0))

    def play(one, *rewards):
        now(one.pipeline.add([world.rewarded(one.source.next(["a"]), *rewards)]))
        now(one.pipeline.commit_full_batches())

    for num_groups in (2 * MAX_WITHOUT_SIGNAL, 2):  # a batch is two groups
        one = world.started()
        now(one.pipeline.commit_full_batches())
        for _ in range(num_groups - 1):
            play(one, 0.0, 0.0)
        with run_error(
            f"^{4 * MAX_WITHOUT_SIGNAL + (4 if num_groups == 2 else 0)} rollouts in a row "
            "without any signal"
        ):
            play(one, 0.0, 0.0)
    one = world.started()
    for _ in range(4):
        play(one, 0.0, 1.0)
    assert one.progress.newest == 2


def test_what_follows_from_a_batch_is_written_if_the_run_ends_meanwhile(tmp_path, monkeypatch):
    """The end of a run stops the loops: the newest step had no line in metrics.jsonl."""
    world = World(tmp_path, random.Random(0))
    one = world.started()
    pending = one.pipeline.pending
    now(one.pipeline.add([world.rewarded(one.source.next(["a"]), 0.0, 1.0) for _ in range(2)]))
    rewrite, begun, go_on = pending.rewrite, threading.Event(), threading.Event()

    def slow_rewrite():
        begun.set()
        go_on.wait(10)
        rewrite()

    async def end():
        committing = asyncio.create_task(one.pipeline.commit_full_batches())
        await asyncio.to_thread(begun.wait, 10)
        committing.cancel()
        go_on.set()
        await asyncio.wait([committing])

    pending.rewrite = slow_rewrite
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    asyncio.run(end())
    assert [*read_metrics(one.pipeline.run_dir.metrics)] == [(1, "orchestrator")]


def test_the_batch_that_a_branch_begins_with_is_none_of_its_own_numbers(tmp_path):
    """Regression: it counted as the branch's first rollouts, with a reward that another run had
    earned."""
    world = World(tmp_path, random.Random(0))
    for life, step in enumerate((1, 0, 0)):
        one = world.orchestrator()
        files = one.pipeline.run_dir
        now(one.pipeline.restore())
        for _ in range(0 if life else 2):
            now(one.pipeline.add([world.rewarded(one.source.next(["a"]), 0.0, 1.0)]))
        now(one.pipeline.commit_full_batches())
        lines = read_metrics(files.metrics)
        assert [*lines] == ([] if life == 1 else [(1, "orchestrator")])
        files.origin.write_bytes(msgspec.json.encode(BranchOrigin("x", step, 0.0, [])))
        for path in (files.metrics, *source_files(files.metrics)):
            path.unlink(missing_ok=True)


def ref_of(group):
    return TaskRef(group.group_id, group.env, group.task)


def nonce(group):
    return group.rollouts[0].metrics["nonce"]


def batch_of(run_dir, step):
    return decode_batch(run_dir.batch(step).read_bytes(), "x")


def lines_of(run_dir, step):
    return [json.loads(line) for line in run_dir.rollouts(step).read_bytes().splitlines()]


def finished_groups(run_dir):
    records, remarks = read_records(run_dir.pending)
    return [record for record in records if isinstance(record, Group)], remarks


def waiting_ids(run_dir):
    """Returns the finished groups of pending.log, which has two rollouts of each."""
    lines = [json.loads(line) for line in waiting_lines(run_dir.pending).splitlines()]
    assert not any(line["trained"] or line["step"] for line in lines)
    assert {line["why"] for line in lines} <= {
        "pending",
        "no_signal",
        "error",
        "environment",
        "stale",
        "surplus",
    }
    return [line["group_id"] for line in lines if line["rollout_id"] == 0]


def check(world):
    """Checks what is guaranteed whatever deaths there were."""
    run_dir = world.run_dir
    assert (
        list(numbered(run_dir.batches, ".batch"))
        == list(numbered(run_dir.rollouts_dir, ".jsonl"))
        == [1, 2, 3, 4]
    )
    said, trained, taken = [], [], []
    for step in range(1, STEPS + 1):
        check_rollouts(run_dir.rollouts(step))
        content, lines = batch_of(run_dir, step), lines_of(run_dir, step)
        said += [line["metrics"]["nonce"] for line in lines if line["rollout_id"] == 0]
        in_words = {(line["group_id"], line["rollout_id"]) for line in lines if line["trained"]}
        assert content.batch.step == step and in_words == {
            (s.group_id, s.rollout_id) for s in content.batch.samples
        }
        trained += in_words
        lags = [step - 1 - span.policy_version for s in content.batch.samples for span in s.spans]
        assert min(lags) >= 0 and max(lags) <= 2 * world.config.max_lag
        if not world.config.max_lag:
            newest = [
                line for line in lines if line["versions"] == [step - 1] and line["rollout_id"] == 0
            ]
            # of a full batch
            last = max(group_id for group_id, _ in in_words) if len(in_words) == 4 else math.inf
            taken += sorted(
                (line["group_id"], line["task"])
                for line in newest
                if line["env"] == "b" and line["group_id"] <= last
            )
            assert not any(line["why"] == "surplus" for line in newest if line["group_id"] <= last)
            assert {line["why"] for line in lines if line["group_id"] in world.late} <= {
                "surplus",
                "environment",
            }
            world.surplus += sum(line["why"] == "surplus" for line in newest)
    # On-policy, each task of an environment has its turn once, in order, as if no surplus groups
    # were ever started.
    assert [task for _, task in taken] == list(range(len(taken)))
    waiting, remarks = finished_groups(run_dir)
    assert waiting_ids(run_dir) == [group.group_id for group in waiting]
    said += [nonce(group) for group in waiting]
    # nothing twice
    assert not remarks and len(set(said)) == len(said) and len(set(trained)) == len(trained)
    assert set(world.durable) <= set(said) <= set(world.asked)  # nothing lost, nothing made up
    metrics = read_metrics(run_dir.metrics)
    for step in range(1, STEPS + 1):
        numbers = metrics[step, "orchestrator"]
        assert numbers["rollouts/trained"] == len(batch_of(run_dir, step).batch.samples)
        # of batches of 4
        assert numbers["rollouts/missing"] == 4 - numbers["rollouts/trained"]
        world.missing += numbers["rollouts/missing"]
        # each rollout has one token of a prompt and one of an answer
        whys = Counter(line["why"] for line in lines_of(run_dir, step))
        assert numbers["tokens/sampled"] == numbers["tokens/prefilled"] == whys.total()
        assert numbers["tokens/cached"] == 0
        assert whys.pop(None) == batch_of(run_dir, step).batch.num_loss_tokens
        dropped = {key: n for key, n in numbers.items() if key.startswith("tokens/dropped_")}
        assert dropped == {f"tokens/dropped_{why}": count for why, count in whys.items()}
    once, rates = RewardHistory(), dict[int, float]()
    for number in sorted(said):  # groups become durable in the order in which they were made
        group = credit_group(world.asked[number], Rules())
        once.add(group)
        if group.env == "a" and group.rewards:
            reward = sum(group.rewards) / len(group.rewards)
            rates[group.task] = MEMORY * rates.get(group.task, reward) + (1 - MEMORY) * reward
    last = world.started()
    last.source.update_solve_rates()
    history = last.pipeline.history
    assert sorted(history.without_signal) == sorted(once.without_signal)
    assert history.ranges == once.ranges
    assert {
        task: rate for task, rate in enumerate(last.source.rates["a"]) if rate != UNPLAYED
    } == rates


@settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**20), st.lists(st.integers(1, 70), max_size=5), st.integers(0, 1))
def test_whatever_point_is_the_last_every_group_counts_once(seed, deaths, max_lag):
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), random.Random(seed), max_lag=max_lag)
        for points in deaths:
            world.live(points)
        world.live(0)
        check(world)


def test_on_policy_what_a_batch_does_without_is_settled_with_it(tmp_path):
    worlds = [World(tmp_path / str(seed), random.Random(seed), max_lag=0) for seed in range(5)]
    for world in worlds:
        world.live(0)
        check(world)
    assert sum(world.surplus for world in worlds) > 0


def test_groups_that_pending_log_has_lost_are_played_again(tmp_path):
    """They finished before the newest batch, so only its state still has them."""
    for seed in range(30):
        world = World(tmp_path / str(seed), random.Random(seed))
        world.live(45)
        newest = world.run_dir.newest_batch()
        if newest and (waiting := decode_state(batch_of(world.run_dir, newest).state).pending):
            break
    world.run_dir.pending.unlink()
    one = world.started()
    assert set(waiting) <= set(one.source.retry)
    world.live(0)
    found = {group.group_id for group in finished_groups(world.run_dir)[0]}
    for step in range(1, STEPS + 1):
        found |= {line["group_id"] for line in lines_of(world.run_dir, step)}
    assert {ref.group_id for ref in waiting} <= found


def test_a_death_at_each_point_in_turn(tmp_path):
    for points in range(1, 60):
        world = World(tmp_path / str(points), random.Random(points % 3))
        world.live(points)
        world.live(0)
        check(world)


def test_a_short_batch_says_what_it_lacks(tmp_path):
    world = World(tmp_path, random.Random(0), "--orchestrator.max_refill 1")
    world.live(0)
    check(world)
    assert world.missing > 0


def test_what_a_function_fails_with_is_not_played_again(tmp_path, monkeypatch):
    """Groups that finished at the same time are not lost either; waiting groups are judged by
    the function as it is after the resume."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def credit(group, config):\n    return [1 / (group.group_id - 1)] * len(group.rollouts)\n"
    )
    world = World(
        tmp_path / "run", random.Random(0), "--orchestrator.credit.function", f"{mine}:credit"
    )
    monkeypatch.setattr(
        "rl.orchestrator.groups.group_credit.user_function",
        lambda key, name: UserFunction(key, name, "group, config"),
    )  # no cache
    one = world.started()
    groups = [world.group(one.source.next(["a"]), 0) for _ in range(3)]
    with run_error(r"mine\.py:2"):
        now(one.pipeline.add(groups))
    assert waiting_ids(world.run_dir) == [0, 1, 2]  # which shows what it failed with
    mine.write_text(
        "def credit(group, config):\n    return [group.group_id] * len(group.rollouts)\n"
    )
    for name in [name for name in sys.modules if name.startswith("functions_of_mine_")]:
        monkeypatch.delitem(sys.modules, name)
    again = world.started()
    assert [group.advantages for group in again.pipeline.pending.groups] == [
        [0.0, 0.0],
        [1.0, 1.0],
        [2.0, 2.0],
    ]
    assert not again.source.retry


def test_groups_are_durable_while_a_users_function_judges_them(tmp_path):
    """Regression: it may take a minute for each, and what had finished was lost with the process."""
    mine = tmp_path / "mine.py"
    mine.write_text("def credit(group, config):\n    return [0.0] * len(group.rollouts)\n")
    flags = ("--orchestrator.credit.function", f"{mine}:credit")
    world = World(tmp_path / "run", random.Random(0), *flags)
    one, waiting = world.orchestrator(), []
    now(one.pipeline.restore())
    one.pipeline._judge = lambda groups: waiting.extend(waiting_ids(world.run_dir))
    now(one.pipeline.add([world.group(one.source.next(["a"]), 0)]))
    assert waiting == waiting_ids(world.run_dir) == [0]


def test_rewards_that_differ_by_rounding_are_solved():
    """The highest reward was 1.0, once, and 0.7 + 0.2 + 0.1 never reached it."""
    history = RewardHistory()
    for rewards in ([0.0, 1.0], [0.7 + 0.2 + 0.1, 1.0], [0.7 + 0.2 + 0.1] * 2):
        history.add(SimpleNamespace(env="e", rewards=rewards, signal=None, why=None, rewarded=[]))
    assert history.is_solved() and history.histogram() == "rewards of e: 4 times 1"
    history.add(SimpleNamespace(env="e", rewards=[0.999] * 2, signal=False, why=None, rewarded=[]))
    assert not history.is_solved()
