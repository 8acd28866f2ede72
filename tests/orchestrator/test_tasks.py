from collections import Counter

from rl.orchestrator.tasks import EnvTasks, TaskSource


def test_every_task_once_an_epoch_in_a_new_order():
    source = TaskSource({"a": EnvTasks(5, 1.0)}, seed=3)
    drawn = [source.next().task for _ in range(15)]
    epochs = [drawn[:5], drawn[5:10], drawn[10:]]
    assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_weights_hold_within_sampling_error():
    source = TaskSource({"a": EnvTasks(7, 3.0), "b": EnvTasks(4, 1.0)}, seed=0)
    counts = Counter(source.next().env for _ in range(4000))
    assert abs(counts["a"] / 4000 - 0.75) < 3 * (0.75 * 0.25 / 4000) ** 0.5


def test_restored_source_plays_what_is_missing_and_then_what_would_have_come():
    envs = {"a": EnvTasks(6, 1.0), "b": EnvTasks(3, 1.0)}
    source = TaskSource(envs, seed=1)
    first = [source.next() for _ in range(4)]
    source.finished(first[0].group_id)
    source.finished(first[2].group_id)
    state = source.state()
    later = [source.next() for _ in range(3)]  # issued after the state was written; the middle one finished
    restored = TaskSource(envs, seed=1)
    restored.restore(state, done={first[3].group_id, later[1].group_id})
    assert [restored.next() for _ in range(2)] == [first[1], later[0]]
    rest = TaskSource(envs, seed=1)
    expected = [rest.next() for _ in range(12)][7:]
    assert [restored.next() for _ in range(6)] == [later[2], *expected]


def test_reissued_task_comes_again():
    source = TaskSource({"a": EnvTasks(3, 1.0)}, seed=0)
    ref = source.next()
    source.reissue(ref.group_id)
    assert source.next() == ref and source.next() != ref
