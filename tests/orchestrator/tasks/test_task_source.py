import random
from collections import Counter

import msgspec
import pytest

from rl.config.orchestrator import DifficultyConfig
from rl.orchestrator.tasks.task_source import (
    UNPLAYED,
    EnvTasks,
    TaskRef,
    TaskSource,
    TaskState,
    pool,
    unpacked,
)


def test_every_task_once_an_epoch_in_an_order_that_seed_environment_and_epoch_give():
    """The same in every release: a resumed run may be of an earlier one."""
    source = TaskSource({"a": EnvTasks(5)}, seed=3)
    drawn = [source.next(["a"]).task for _ in range(15)]
    for epoch in range(3):
        random.Random(f"3/a/{epoch}").shuffle(order := list(range(5)))
        assert drawn[5 * epoch : 5 * epoch + 5] == order


def test_shares_of_rollouts_hold_at_any_time_whatever_the_group_sizes():
    envs = {"a": EnvTasks(7, 3.0, 8), "b": EnvTasks(4, 1.0, 16), "c": EnvTasks(None, 4.0, 4)}
    source, rollouts = TaskSource(envs, seed=0), Counter()
    for n in range(1, 1000):
        env = source.next(list(envs)).env
        rollouts[env] += envs[env].group_size
        if n > 20:
            for name, share in {"a": 3 / 8, "b": 1 / 8, "c": 4 / 8}.items():
                # never off by more than a group
                assert abs(rollouts[name] - share * rollouts.total()) <= 16


def test_an_environment_that_could_not_be_played_catches_up():
    source = TaskSource({"a": EnvTasks(9), "b": EnvTasks(9)}, seed=0)
    assert {source.next(["a"]).env for _ in range(6)} == {"a"}
    assert [source.next(["a", "b"]).env for _ in range(6)] == ["b"] * 6


def test_tasks_of_an_environment_that_changed_do_not_hang_a_resume():
    source = TaskSource({"a": EnvTasks(3)}, seed=0)
    source.restore(None, done=[TaskRef(0, "a", 77), TaskRef(1, "gone", 0)])
    assert source.next(["a"]).group_id > 0


def test_draws_that_the_log_has_lost_are_not_made_twice():
    """What finished is not played again, what is known to be in flight is, and new groups get new
    numbers."""
    source = TaskSource({"a": EnvTasks(50), "b": EnvTasks(9)}, seed=0)
    known = [source.next(["a"]) for _ in range(4)]
    (record,) = source.newly_drawn()
    lost = [source.next([env]) for env in "aab"]
    restored = TaskSource({"a": EnvTasks(50), "b": EnvTasks(9)}, seed=0)
    restored.restore(None, done=[known[1], lost[1]], begun=[lost[2]], drawn=[record])
    assert [*restored.retry] == [known[0], known[2], known[3], lost[2]]
    assert restored.next_group == 7 and restored.issued == {"a": 5, "b": 1}


def pooled(size, **weights):
    return TaskSource({"a": EnvTasks(size, difficulty=DifficultyConfig(**weights))}, seed=0)


def test_pools_and_running_rates():
    difficulty = DifficultyConfig()
    assert [pool(rate, difficulty) for rate in (-1.0, 0.25, 0.26, 0.75, 0.76, 9.0)] == [
        "hard",
        "hard",
        "normal",
        "normal",
        "easy",
        "easy",
    ]
    source = pooled(5)
    source.note("a", 0, [1.0, 0.0])
    source.note("a", 1, [])
    assert source.update_solve_rates() == {
        "tasks/a/easy": 0,
        "tasks/a/normal": 1,
        "tasks/a/hard": 0,
        "tasks/a/skipped": 0,
    }
    source.note("a", 0, [0.0, 0.0])
    source.note("a", 2, [1.0])
    # as of the last batch
    assert list(unpacked(source.packed_rates()["a"], 5)) == [0.5, *[UNPLAYED] * 4]
    assert source.update_solve_rates() == {
        "tasks/a/easy": 1,
        "tasks/a/normal": 0,
        "tasks/a/hard": 1,
        "tasks/a/skipped": 0,
    }
    assert list(source.rates["a"]) == [0.25, UNPLAYED, 1.0, UNPLAYED, UNPLAYED]


@pytest.mark.parametrize("size", [3, 5, 8])
def test_rates_go_on_with_more_and_with_fewer_tasks(size):
    source, other = pooled(5), pooled(size)
    for task, reward in ((0, 0.0), (2, 0.5), (4, 1.0)):
        source.note("a", task, [reward])
    source.update_solve_rates()
    other.restore(
        TaskState(next_group=3, issued={"a": 3}, in_flight=[], rates=source.packed_rates()), []
    )
    assert list(other.rates["a"]) == ([0.0, UNPLAYED, 0.5, UNPLAYED, 1.0] + [UNPLAYED] * 3)[:size]
    other.note("a", 4, [1.0])
    easy = int(size > 4)
    assert other.update_solve_rates() == {
        "tasks/a/easy": easy,
        "tasks/a/normal": 1,
        "tasks/a/hard": 1,
        "tasks/a/skipped": 0,
    }


def test_easy_and_hard_tasks_come_less_often_and_nothing_of_it_moves_the_others():
    source, plain = (
        pooled(1000, easy_weight=0.2, hard_weight=0.5),
        TaskSource({"a": EnvTasks(1000)}, seed=0),
    )
    for task in range(1000):
        source.note("a", task, [(task % 3) / 2])  # 0: hard, 1: normal, 2: easy
    source.update_solve_rates()
    drawn = Counter()
    while source.issued["a"] + source.skipped["a"] < 2000:
        drawn[source.next(["a"]).task % 3] += 1
    assert drawn[1] == pytest.approx(2 * 333, abs=1) and drawn[2] / 666 == pytest.approx(
        0.2, abs=0.05
    )
    assert drawn[0] / 668 == pytest.approx(0.5, abs=0.06)
    skipped = source.skipped["a"]
    assert (
        source.update_solve_rates()["tasks/a/skipped"] == skipped > 700
        and source.update_solve_rates()["tasks/a/skipped"] == 0
    )
    fresh, order = pooled(1000), [plain.next(["a"]).task for _ in range(1000)]
    assert [fresh.next(["a"]).task for _ in range(1000)] == order  # nothing known: nothing skipped


def test_tasks_that_are_all_easy_are_played_nevertheless():
    source = pooled(4, easy_weight=0.0)
    for task in range(4):
        source.note("a", task, [1.0])
    source.update_solve_rates()
    assert [source.next(["a"]).task in range(4) for _ in range(3)] == [True] * 3 and source.skipped[
        "a"
    ] == 12


def test_endless_tasks_have_no_pools():
    source = pooled(None, easy_weight=0.0)
    source.note("a", 0, [1.0])
    assert (
        source.update_solve_rates() == {}
        and source.packed_rates() == {}
        and [source.next(["a"]).task for _ in range(3)] == [0, 1, 2]
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_run_with_pools_goes_on_exactly_as_if_it_had_not_been_killed(seed):
    """Groups finish in any order between batches; after the kill, the missing and the following
    groups are the same as without it."""
    envs = {
        "a": EnvTasks(7, 2.0, 1, DifficultyConfig()),
        "b": EnvTasks(3),
        "c": EnvTasks(5, 1.0, 1, DifficultyConfig(easy_weight=0.0)),
    }
    dice = random.Random(seed)
    source, later, state, playing, drawn = TaskSource(envs, seed), [], None, [], []
    for _ in range(dice.randrange(20, 60)):
        if playing and dice.random() < 0.5:
            ref, reward = dice.choice(playing), dice.choice([0.0, 0.5, 1.0])
            playing.remove(ref)
            source.note(ref.env, ref.task, [reward])
            later.append((ref, reward))
            drawn += source.newly_drawn()
        elif dice.random() < 0.1:
            source.update_solve_rates()
            written = msgspec.structs.replace(source.state(playing), rates=source.packed_rates())
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(written), type=TaskState)
            later, drawn = [], []
        else:
            playing.append(source.next(list(envs)))
    restored = TaskSource(envs, seed)
    restored.restore(state, done=[ref for ref, _ in later], drawn=drawn)
    for ref, reward in later:
        restored.note(ref.env, ref.task, [reward])
    again = list(restored.retry)
    for env in envs:  # draws after the last finished group are repeated
        while restored.issued[env] < source.issued[env]:
            again.append(restored._draw(env))
    waiting = [
        Counter((ref.env, ref.task) for ref in refs) for refs in ([*source.retry, *playing], again)
    ]
    assert waiting[0] == waiting[1]
    assert (restored.issued, restored.skipped) == (source.issued, source.skipped)
    assert (
        restored.update_solve_rates() == source.update_solve_rates()
        and restored.rates == source.rates
    )
    assert [restored._draw("a").task for _ in range(20)] == [
        source._draw("a").task for _ in range(20)
    ]
