from collections import Counter

from rl.orchestrator.tasks import EnvTasks, TaskRef, TaskSource


def test_every_task_once_an_epoch_in_a_new_order():
    source = TaskSource({"a": EnvTasks(5)}, seed=3)
    drawn = [source.next(["a"]).task for _ in range(15)]
    epochs = [drawn[:5], drawn[5:10], drawn[10:]]
    assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_endless_tasks_come_in_their_own_order():
    source = TaskSource({"a": EnvTasks(None)}, seed=3)
    assert [source.next(["a"]).task for _ in range(5)] == [0, 1, 2, 3, 4]


def test_shares_of_rollouts_hold_at_any_time_whatever_the_group_sizes():
    envs = {"a": EnvTasks(7, 3.0, 8), "b": EnvTasks(4, 1.0, 16), "c": EnvTasks(None, 4.0, 4)}
    source, rollouts = TaskSource(envs, seed=0), Counter()
    for n in range(1, 1000):
        env = source.next(list(envs)).env
        rollouts[env] += envs[env].group_size
        if n > 20:
            for name, share in {"a": 3 / 8, "b": 1 / 8, "c": 4 / 8}.items():
                assert abs(rollouts[name] - share * rollouts.total()) <= 16  # never off by more than a group


def test_an_environment_that_could_not_be_played_catches_up():
    source = TaskSource({"a": EnvTasks(9), "b": EnvTasks(9)}, seed=0)
    assert {source.next(["a"]).env for _ in range(6)} == {"a"}
    assert [source.next(["a", "b"]).env for _ in range(6)] == ["b"] * 6


def test_restored_source_plays_what_is_missing_and_then_what_would_have_come():
    envs = {"a": EnvTasks(6), "b": EnvTasks(3)}
    source = TaskSource(envs, seed=1)
    first = [source.next(list(envs)) for _ in range(4)]
    source.finished(first[0].group_id)
    source.finished(first[2].group_id)
    state = source.state()
    later = [source.next(list(envs)) for _ in range(4)]  # issued after the state was written; two of them finished
    restored = TaskSource(envs, seed=1)
    restored.restore(state, done=[first[3], later[1], later[2]])
    missing = [restored.next(list(envs)) for _ in range(2)]
    assert missing[0] == first[1]
    assert [(ref.env, ref.task) for ref in missing[1:]] == [(later[0].env, later[0].task)]
    assert missing[1].group_id > later[2].group_id  # never a number that is taken
    rest = TaskSource(envs, seed=1)
    expected = Counter((ref.env, ref.task) for ref in [rest.next(list(envs)) for _ in range(18)][7:])
    assert Counter((ref.env, ref.task) for ref in [restored.next(list(envs)) for _ in range(11)]) == expected


def test_tasks_of_an_environment_that_changed_do_not_hang_a_resume():
    source = TaskSource({"a": EnvTasks(3)}, seed=0)
    source.restore(None, done=[TaskRef(0, "a", 77), TaskRef(1, "gone", 0)])
    assert source.next(["a"]).group_id > 0


def test_reissued_task_comes_again():
    source = TaskSource({"a": EnvTasks(3)}, seed=0)
    ref = source.next(["a"])
    source.reissue(ref.group_id)
    assert source.next(["a"]) == ref and source.next(["a"]) != ref
