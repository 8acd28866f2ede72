"""Rollouts out of files: also of a run that is being written, killed or damaged."""

import gzip
import os

import pytest

from rl.diagnosis.rollouts import (
    heading,
    messages_text,
    read_all,
    read_rollouts,
    rollout_files,
)
from rl.run_dir.files import CorruptFileError, append_file, write_file
from rl.run_dir.paths import RunDir
from rl.wire.batch_file import sound_rollouts, sum_path, write_rollouts
from rl.wire.rollouts import Group, Rollout, encoded
from tests import jsonl
from tests.orchestrator.made import turn


def row(group, reward=0.0, why=None, **more):
    fields = {
        "env": "e",
        "task": 7,
        "group_id": group,
        "rollout_id": 0,
        "trained": why is None,
        "why": why,
    }
    return (
        fields
        | {"messages": [{"role": "user", "content": "?"}], "reward": reward, "metrics": {}}
        | more
    )


def waiting(group):
    """A finished group that no batch has settled."""
    rollout = Rollout(turns=[turn()], text=[{"role": "user", "content": "?"}])
    return Group(group_id=group, env="e", task=7, rollouts=[rollout])


def lines(*rows):
    return jsonl.text(*rows).encode()


@pytest.fixture
def run(tmp_path):
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    write_rollouts(run_dir.rollouts(1), lines(row(1), row(2, why="no_signal")))
    write_rollouts(run_dir.rollouts(2), lines(row(3), row(4, 1.0)))
    write_file(run_dir.pending, encoded([waiting(5), waiting(6)]))
    return run_dir


def groups(run_dir, step=None, selection=None, damaged=None):
    rows = read_all(rollout_files(run_dir, step), [] if damaged is None else damaged)
    return [one["group_id"] for one in filter(selection.takes if selection else None, rows)]


def test_the_newest_come_first_and_before_them_what_no_batch_has_settled(run):
    assert groups(run) == [5, 6, 3, 4, 1, 2] and groups(run, 1) == [1, 2] and groups(run, 9) == []
    run.pending.unlink()
    assert groups(run) == [3, 4, 1, 2]


def test_a_line_that_is_being_written_is_not_read_and_a_settled_group_not_twice(run):
    append_file(run.pending, encoded([waiting(7)]) + b"torn")
    assert groups(run) == [5, 6, 7, 3, 4, 1, 2]
    # the batch is committed, and pending.log is still as it was
    write_rollouts(run.rollouts(3), lines(row(6), row(5)))
    os.utime(run.rollouts(3))
    assert groups(run) == [7, 6, 5, 3, 4, 1, 2]


def test_a_damaged_file_costs_itself_alone(run):
    run.rollouts(2).write_bytes(lines(row(9)))
    sum_path(run.rollouts(1)).unlink()
    run.rollouts(1).write_bytes(lines(row(1)) + b"[]\n")
    damaged: list[str] = []
    assert groups(run, damaged=damaged) == [5, 6, 1]
    assert damaged == [
        f"{run.rollouts(2)}: damaged, its checksum does not match; move it and "
        "000002.sha256 away to continue without it",
        f"{run.rollouts(1)}:2: not a rollout: it needs messages and a reward",
    ]
    run.rollouts(1).write_bytes(b"{\n")
    with pytest.raises(CorruptFileError, match=r"000001.jsonl:1: not JSON"):
        list(read_rollouts(run.rollouts(1)))


def test_a_rollout_in_words():
    assert heading(
        row(
            3,
            0.5,
            step=4,
            agent="judge",
            advantage=-0.25,
            metrics={"exact": 1.0},
            outcome="finished",
            stop="max_turns",
            num_tokens=1234,
            num_turns=3,
            versions=[2, 3],
        )
    ) == (
        "step 4, e, task 7, group 3, rollout 0, agent judge\n"
        "  reward 0.500 (exact 1), advantage -0.250, trained\n"
        "  finished (max_turns), 1,234 tokens, 3 turns, sampled by version 2, 3"
    )
    assert heading(row(3, outcome="truncated", stop="max_turns_reached", num_turns=1)).endswith(
        "\n  truncated"
    )
    evaluated = {
        "policy_version": 10,
        "env": "e\x1b",
        "task": 1,
        "rollout": 2,
        "reward": None,
        "messages": [],
        "outcome": "failed",
    }
    assert heading(evaluated) == "version 10, e\\x1b, task 1, rollout 2\n  no reward\n  failed"
    told = [
        {
            "role": "assistant",
            "content": "so\nbe it\r",
            "reasoning_content": "hm",
            "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}, {"name": "old"}],
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "url": "x"}],
        },
    ]
    assert messages_text(told) == (
        'assistant: (thinks) hm\n    so\n    be it\\r\n    calls add({"a": 1})\n    calls old()\n'
        'user: see\n    {"type": "image_url", "url": "x"}'
    )


def test_a_conversation_in_short_is_about_a_screen():
    turns = [{"role": "tool", "content": f"{i} " + "long\n" * 5000} for i in range(40)]
    said = messages_text(turns, is_short=True).splitlines()
    assert said[0] == "tool: 0 long"
    assert "[... 30 messages ...]" in said
    assert any(line.startswith("tool: 39 ") for line in said)
    assert len(said) <= 80 and sum(map(len, said)) < 5000
    assert messages_text(turns[:1], is_short=True).count("\n") == 60


def test_a_file_that_unpacks_to_more_than_memory_holds_is_refused(tmp_path, monkeypatch):
    """gzip packs a thousand times as much as the file has."""
    monkeypatch.setattr("rl.diagnosis.rollouts.MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr("rl.wire.batch_file.MAX_ROLLOUTS_BYTES", 1 << 20)
    path = tmp_path / "000001.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"reward": 1, "messages": []}\n' + b" " * (1 << 21) + b"\n"))
    rows = read_rollouts(path)
    assert next(rows)["reward"] == 1
    with pytest.raises(
        CorruptFileError,
        match=r"000001.jsonl.gz:2: a line of more than 1,048,576 bytes is no rollout",
    ):
        next(rows)
    with pytest.raises(
        CorruptFileError, match=r"longer than 1,048,576 bytes; `rl show .*` reads it line by line"
    ):
        sound_rollouts(path)
