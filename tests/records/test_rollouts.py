"""Rollouts of a run directory: chosen, followed while they are written, and what is damaged,
deleted or taken back."""

import math
import os

import numpy as np
import pytest

from rl.orchestrator.batches.batch_files import PendingLog
from rl.orchestrator.groups.group_credit import credit_group
from rl.records import index
from rl.records.run import Run
from rl.run_dir.files import write_file
from rl.system.errors import RunError
from rl.wire.batch_file import compress_rollouts, sum_path
from rl.wire.rollouts import Group
from tests.records.made import RULES, group, make_run, rollout, write_eval_of, write_step


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """Two steps of two groups each; of each step one group has no signal."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir = make_run(tmp_path / "x")
    write_step(run_dir, 1, [group(0, [0.0, 1.0], task=3), group(1, [1.0, 1.0], task=4)])
    second = group(2, [0.0, 0.5], task=3, version=1), group(3, [0.0, 0.0], "words", version=1)
    write_step(run_dir, 2, [*second])
    return run_dir


def noted_reads(monkeypatch):
    """The names of the files of rollouts that are read from now on."""
    read, sound = [], index.sound_rollouts
    monkeypatch.setattr(index, "sound_rollouts", lambda path: read.append(path.name) or sound(path))
    return read


def ids(rollouts):
    return [(rollout.group_id, rollout.rollout_id) for rollout in rollouts]


def test_rollouts_are_chosen_by_what_they_are_and_sorted_and_paged(run_dir):
    run = Run(run_dir.root)
    found = run.rollouts()
    assert ids(found) == [(group, i) for group in range(4) for i in range(2)] and len(found) == 8
    assert ids(run.rollouts(why="trained")) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert ids(run.rollouts(why=["no_signal"], env="sums")) == [(1, 0), (1, 1)]
    with pytest.raises(RunError, match="env = nobody: has no rollouts; there are: sums, words"):
        run.rollouts(env=["sums", "nobody"])
    second = [(2, 0), (2, 1)]
    assert ids(run.rollouts(step=2, task={3})) == ids(run.rollouts(version=1, task=3)) == second
    assert ids(run.rollouts(step=range(1, 2), reward=(0.5, None))) == [(0, 1), (1, 0), (1, 1)]
    assert ids(run.rollouts(exact=(None, 0.5), step=[1, 2], env=["sums"])) == [(0, 0), *second]
    best = found.sorted("reward", descending=True)
    assert ids(best[:6]) == [(0, 1), (1, 0), (1, 1), (2, 1), (0, 0), (2, 0)]
    assert ids(found.sorted("env", descending=True)[:2]) == [(3, 0), (3, 1)]
    assert found.counts("why") == {"trained": 4, "no_signal": 4}
    assert found.counts("kind") == {"train": 8} and ids(run.group(2)) == second
    by_version = {version: ids(rollouts) for version, rollouts in run.task("sums", 3).items()}
    assert by_version == {0: [(0, 0), (0, 1)], 1: second}
    sixth = found[5]
    fields = {"kind": "train", "step": 2, "version": 1, "why": "trained", "advantage": 0.25}
    assert {name: getattr(sixth, name) for name in fields} == fields
    assert (sixth["num_tokens"], sixth["outcome"], sixth.metrics) == (3, "finished", {"exact": 0.5})
    assert sixth.messages[1]["content"] == "four"
    assert "assistant: four" in sixth.text
    assert ids(found.containing("fou")) == ids(found)
    # of which no one wrote the last two
    for text in ("five", "role", "assistant"):
        assert not [*found.containing(text)]
    assert len(found.where(exact=[0.5, 0.1])) == 1
    assert len(run.rollouts(why="error")) == 0  # which is a word of the reader's own
    trained = ids(run.rollouts(why="trained"))
    assert trained and trained == ids(run.rollouts(why=("trained", "error")))
    for wanted, words in (
        ({"length_mean": 1}, "length_mean: rollouts have no such field; there are: kind, .*exact"),
        (
            {"why": "no-signal"},
            "no-signal: no rollout of the run has it; there are: trained, no_signal",
        ),
        (
            {"reward": (1, 0)},
            "reward = \\(1, 0\\): give the minimum and the maximum, in this order",
        ),
    ):
        with pytest.raises(RunError, match=words):
            run.rollouts(**wanted)
    for method, args, words in (
        (run.group, [9], "group 9: has no rollouts"),
        (run.task, ["sums", 99], "task 99 of sums: has no rollouts"),
        (run.timeline, [5, 1], "begin = 5, end = 1: give them in this order"),
    ):
        with pytest.raises(RunError, match=words):
            method(*args)


def test_a_metric_is_found_by_values_that_float32_has_not(run_dir):
    write_step(run_dir, 3, [group(4, [0.1, 0.2]), group(5, [1 / 3, 0.0])])
    run = Run(run_dir.root)
    assert ids(run.rollouts(step=3, exact=[0.1, 1 / 3])) == [(4, 0), (5, 0)]
    assert ids(run.rollouts(step=3, exact=0.2)) == [(4, 1)]


def test_a_metric_that_is_called_as_a_field_is_told_from_it(run_dir):
    rollouts = [rollout(0.0), rollout(1.0, metrics={"num_turns": 7.0})]
    write_step(
        run_dir,
        3,
        [credit_group(Group(group_id=4, env="sums", task=1, rollouts=rollouts), RULES["sums"])],
    )
    found = Run(run_dir.root).rollouts(step=3).sorted("metrics/num_turns")
    assert [one["num_turns"] for one in found] == [1, 1] and found[0].metrics == {"num_turns": 7.0}
    assert len(set(found.fields)) == len(found.fields)


def test_the_first_32_metrics_count_and_stay(run_dir):
    run = Run(run_dir.root)
    assert len(run.rollouts()) == 8
    write_step(
        run_dir,
        3,
        [group(4, [0.0, 1.0], metrics={f"m{i:02d}": 1.0 for i in range(40)} | {"exact": 0.25})],
    )
    assert run.rollouts(step=3).column("exact").tolist() == [0.25, 0.25]
    assert run.rollouts().column("m30").tolist()[-2:] == [1.0, 1.0]
    assert run.rollouts().metrics == ["exact", *(f"m{i:02d}" for i in range(31))]
    with pytest.raises(RunError, match=r"m31: .* \(of metrics the first 32 count\); .*m30"):
        run.rollouts(m31=1.0)


def test_an_interrupt_while_files_are_read_loses_no_rollout(run_dir, monkeypatch):
    run, sound = Run(run_dir.root), index.sound_rollouts
    os.utime(run_dir.rollouts_dir, (1.0, 1.0))  # an old run, which is listed once

    def interrupted(path):
        if path.name == "000002.jsonl":
            raise KeyboardInterrupt
        return sound(path)

    monkeypatch.setattr(index, "sound_rollouts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.rollouts()
    monkeypatch.setattr(index, "sound_rollouts", sound)
    assert len(run.rollouts()) == 8


def test_a_table_has_all_fields(run_dir):
    frame = Run(run_dir.root).rollouts(step=1).frame("pandas")
    assert frame.reward.tolist() == frame.exact.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert frame.why.tolist() == ["trained"] * 2 + ["no_signal"] * 2
    assert {*frame.kind} == {"train"} and not frame.failed.any() and not frame.truncated.any()


def test_a_live_run_is_followed_and_only_new_files_are_read(run_dir, monkeypatch):
    run, pending = Run(run_dir.root), PendingLog(run_dir.pending)
    assert len(run.rollouts()) == 8 and len(run.rollouts("pending")) == 0
    pending.append([group(4, [0.0, 1.0])])
    assert ids(run.rollouts("pending", why="pending")) == [(4, 0), (4, 1)]
    # those without a step are in no stretch of steps
    assert ids(run.rollouts(step=(None, 1))) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with run_dir.pending.open("ab") as file:
        file.write(b"torn")
    assert len(run.rollouts("pending")) == 2 and run.rollouts("pending")[1].text
    waiting = run.rollouts("pending")
    read = noted_reads(monkeypatch)
    write_step(run_dir, 3, [group(4, [0.0, 1.0])])
    # before it is made anew
    assert len(run.rollouts("pending")) == 0 and len(run.rollouts()) == 10
    pending.groups = [group(5, [1.0])]
    pending.rewrite()
    assert ids(run.rollouts())[-3:] == [(4, 0), (4, 1), (5, 0)]
    assert len(run.rollouts("train")) == 10 and read == ["000003.jsonl"]
    with pytest.raises(RunError, match="has moved: its file was rewritten"):
        _ = waiting[1].row
    # the orchestrator was killed before its commit
    write_step(run_dir, 3, [group(6, [0.0, 1.0, 0.0])])
    assert ids(run.rollouts(step=3)) == [(6, 0), (6, 1), (6, 2)]
    assert run.rollouts(step=3)[2].row["group_id"] == 6


def test_old_steps_are_compressed_deleted_damaged_or_taken_back(run_dir):
    for step in range(3, 8):
        write_step(run_dir, step, [group(step + 1, [0.0, 1.0])])
    run = Run(run_dir.root)
    first = run.rollouts(step=1)[1]
    assert len(run.rollouts()) == 18
    for step in (1, 2):
        compress_rollouts(run_dir.rollouts(step))
    assert first.messages and run.rollouts(step=2)[3].row["env"] == "words"
    assert len(run.rollouts()) == 18
    run_dir.rollouts_dir.joinpath("000001.jsonl.gz").unlink()
    sum_path(run_dir.rollouts(1)).unlink()
    with pytest.raises(RunError, match=r"000001.jsonl: no longer exists"):
        _ = first.messages
    assert len(run.rollouts()) == 14 and not run.damaged
    run_dir.discard_after(4)
    assert sorted(run.rollouts().counts("step")) == [2, 3, 4]
    write_step(run_dir, 5, [group(40, [0.0, 1.0])])
    assert ids(run.rollouts(step=5)) == [(40, 0), (40, 1)]
    assert ids(run.rollouts())[-3:] == [(5, 1), (40, 0), (40, 1)]
    write_file(run_dir.rollouts(5), b"x")
    assert not run.rollouts(step=5)
    assert "its checksum does not match" in run.damaged[run_dir.rollouts(5)]
    write_file(run_dir.rollouts(6), b'{"reward": "high"}\n')
    fault = run.damaged[run_dir.rollouts(6)]
    assert "000006.jsonl:1: not a rollout of this version of rl" in fault
    assert len(run.rollouts()) == 8


def test_evaluations_by_version_and_example(run_dir):
    for version, rewards in {0: [0.0, 0.0], 2: [0.0, 1.0]}.items():
        write_eval_of(run_dir, version, rewards)
    run = Run(run_dir.root)
    rewards = {
        version: rollouts.column("reward").tolist()
        for version, rollouts in run.task("held-out", 1, "eval").items()
    }
    assert rewards == {0: [0.0], 2: [1.0]}
    last = run.rollouts("eval", version=2)[1]
    assert (last.kind, last.step, last.group_id, last.task) == ("eval", None, None, 1)
    assert math.isnan(last.advantage) and last.text
    assert last["rollout_id"] == -1 and last.rollout_id is None and last["episode"] == 0
    write_eval_of(run_dir, 4, [1.0, 1.0])
    assert [version.evals["held-out"] for version in run.versions] == [0.0, 0.5, 1.0]
    assert [version.best_of for version in run.versions] == [(), (), ("held-out",)]
    assert len(run.rollouts("eval")) == 6


def test_rollouts_that_failed_have_their_cause(run_dir):
    failed = group(7, [1.0])
    failed.rollouts.append(rollout(0.0, error="late", cause="timeout", episode=1))
    failed.advantages, failed.why = [0.0, 0.0], "error"
    write_step(run_dir, 3, [failed])
    run = Run(run_dir.root)
    assert [(one.why, one.outcome, one["failed"]) for one in run.rollouts(step=3)] == [
        ("error", "finished", 0),
        ("timeout", "timeout", 1),
    ]


def test_the_index_of_a_long_run_is_kept_in_the_users_cache(run_dir, monkeypatch):
    write_eval_of(run_dir, 2, [1.0])
    monkeypatch.setattr(index, "CACHE_S", 0.0)
    before = Run(run_dir.root).rollouts().columns()
    kept = index.cache_file(run_dir.root)
    assert kept.is_file()
    monkeypatch.setattr(index, "CACHE_S", math.inf)
    read = noted_reads(monkeypatch)
    write_step(run_dir, 3, [group(4, [0.0, 1.0])])
    again = Run(run_dir.root)
    assert len(again.rollouts()) == 10 and len(again.rollouts("eval")) == 1
    assert read == ["000003.jsonl"]
    for name, values in again.rollouts(step=[1, 2]).columns().items():
        assert np.array_equal(values, before[name], equal_nan=values.dtype.kind == "f"), name
    write_step(run_dir, 1, [group(9, [0.0, 1.0])])
    assert ids(Run(run_dir.root).rollouts(step=1)) == [(9, 0), (9, 1)]
    monkeypatch.setattr(index, "CACHE_S", 0.0)
    write_file(run_dir.rollouts(2), b"x")
    for _ in range(2):  # what is damaged is said by whoever has the index from the cache, too
        assert len(Run(run_dir.root).rollouts()) == 4
        assert [*Run(run_dir.root).damaged] == [run_dir.rollouts(2)]
    kept.write_bytes(b"damaged")
    monkeypatch.setattr(index, "CACHE_S", math.inf)
    assert len(Run(run_dir.root).rollouts()) == 4


def test_a_million_rollouts_take_a_hundred_megabytes_and_filters_are_fast():
    words = index.Words()
    line = index.RolloutLine(reward=0.5, messages=b"", env="e", metrics={"m": 1.0})
    vars(line).update(kind="train", file="rollouts/000001.jsonl", offset=0, length=1)
    joined = index.joined([index.columns_of([line] * 1000, words)] * 20)
    assert len(joined["kind"]) == 20_000
    assert sum(array.nbytes for array in joined.values()) / 20_000 < 160
