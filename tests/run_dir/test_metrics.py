"""One source per writer, merged into metrics.jsonl: complete lines, each once; the last value
wins."""

import errno
import json
import os
import signal
from itertools import chain

import pytest

from rl.run_dir import metrics
from rl.run_dir.metrics import Merger, MetricsLog, MetricsReader, cut_metrics, merging, read_metrics
from rl.system import faults
from rl.system.errors import RunError
from tests.waiting import until


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def steps_of(path):
    return [line["step"] for line in MetricsReader(path).new()]


@pytest.mark.parametrize("merged", [False, True])
def test_the_last_value_of_a_step_and_source_wins(path, merged):
    logs = {name: MetricsLog(path, name) for name in ("trainer", "orchestrator", "eval")}
    logs["trainer"].write(1, {"loss/mean": 1.0})
    if merged:
        Merger(path).merge()
    logs["orchestrator"].write(1, {"reward/mean": 0.1})
    logs["trainer"].write(1, {"loss/mean": 2.0})
    for name in "ab":
        logs["eval"].write(0, {f"eval/{name}/reward_mean": 0.1})
    lines = read_metrics(path)
    assert set(lines) == {(1, "trainer"), (1, "orchestrator"), (0, "eval")}
    assert lines[1, "trainer"]["loss/mean"] == 2.0
    assert {"eval/a/reward_mean", "eval/b/reward_mean"} < lines[0, "eval"].keys()
    Merger(path).merge()
    assert read_metrics(path) == lines


def test_the_reader_gives_each_line_once_and_only_when_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert reader.new() == []
    path.write_text('{"step": 1, "source": "a"}\n{"step": 2, ')
    assert [line["step"] for line in reader.new()] == [1]
    assert reader.new() == []
    with path.open("a") as file:
        file.write('"source": "a"}\n')
    assert [line["step"] for line in reader.new()] == [2]


def test_the_reader_goes_on_behind_lines_that_a_repair_took_back(path):
    log, reader, merger = MetricsLog(path, "a"), MetricsReader(path), Merger(path)
    for step in (1, 2, 3):
        log.write(step, {})
    merger.merge()
    assert len(reader.new()) == 3
    cut_metrics(path, 1)
    merger.merge()
    assert reader.new() == []
    MetricsLog(path, "a").write(2, {})
    merger.merge()
    assert [line["step"] for line in reader.new()] == [2]


def test_a_run_from_before_there_were_sources_goes_on(path):
    """Its lines stay where they are; half a line of a killed writer, which the next one
    completed, is skipped."""
    path.parent.mkdir()
    old = (
        b'{"step": 1, "source": "a"}\n{"step": 2, "sou\n{"step": 2, "source": "a"}\n{"step": 3, "so'
    )
    path.write_bytes(old)
    MetricsLog(path, "a").write(3, {})
    assert list(read_metrics(path)) == [(1, "a"), (2, "a"), (3, "a")]
    Merger(path).merge()
    assert path.read_bytes().startswith(old[: old.rfind(b"\n") + 1]) and steps_of(path) == [1, 2, 3]
    assert cut_metrics(path, 1)[0] == b'{"step": 2, "sou\n'
    Merger(path).merge()
    assert steps_of(path) == [1]


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def merge_and_cut(path):
    """A run in which everything happens; each line has a unique number."""
    count = len(path.read_bytes()) if path.exists() else 0
    merger, logs = Merger(path), [MetricsLog(path, source) for source in "ab"]
    for step in (1, 2):
        for log in logs:
            count += 1
            log.write(step, {"count": count + 1e-6 * os.getpid()})
        merger.merge()
    cut_metrics(path, 1)
    merger.merge()
    logs = [MetricsLog(path, source) for source in "ab"]
    logs[0].write(2, {"count": count + 1})
    merger.merge()


def test_a_death_at_any_point_loses_and_doubles_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr(
        faults, "plan", faults.FaultPlan(trace=str(tmp_path / "trace"), process="p")
    )
    merge_and_cut(tmp_path / "traced" / "metrics.jsonl")
    monkeypatch.setattr(faults, "plan", None)
    points = [tuple(line.split()[1:]) for line in (tmp_path / "trace").read_text().splitlines()]
    # not those of another test's thread: a heartbeat
    points = [point for point in points if point[0].startswith(("metrics.", "merged."))]
    assert {name for name, _ in points} >= {
        "metrics.torn",
        "metrics.done",
        "metrics.rename",
        "merged.write",
        "merged.torn",
        "merged.done",
        "merged.rename",
    }
    for number, (name, count) in enumerate(points):
        path = tmp_path / f"life-{number}" / "metrics.jsonl"
        if (child := os.fork()) == 0:
            faults.plan = faults.FaultPlan(f"p:{name}:{count}", process="p")
            merge_and_cut(path)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, name
        # the next writers, which cut off incomplete lines
        sources = [MetricsLog(path, source).path for source in "ab"]
        Merger(path).merge()
        merged = lines_of(path)
        assert len(set(merged)) == len(merged), name
        assert {line for source in sources for line in lines_of(source)} <= set(merged), name
        assert all(json.loads(line)["step"] for line in merged)
        cut_metrics(path, 1)  # as the next resume does
        left = [line for source in sources for line in lines_of(source)]
        assert sorted(lines_of(path)) == sorted(left), name


def test_a_merger_goes_by_what_is_there(path):
    """Another merger writes in turn with it, and one line of a source is damaged."""
    log = MetricsLog(path, "a")
    merger, other = Merger(path), Merger(path)
    for step in range(1, 7):
        log.write(step, {})
        (merger if step % 2 else other).merge()
    os.write(log.file, b"\0\0\0\n")
    log.write(7, {})
    merger.merge()
    merger.merge()
    assert steps_of(path) == [1, 2, 3, 4, 5, 6, 7] and b"\0" not in path.read_bytes()


def test_a_metrics_file_that_was_deleted_is_made_again_piece_by_piece(path, monkeypatch):
    monkeypatch.setattr("rl.run_dir.files.PIECE_BYTES", 1000)
    monkeypatch.setattr(metrics, "PIECE_BYTES", 1000)
    logs = [MetricsLog(path, source) for source in "ab"]
    for step in range(100):
        monkeypatch.setattr(metrics.time, "time", lambda step=step: float(step))
        for log in logs:
            log.write(step, {"x": 1.0})
    appended, append = [], Merger._append
    monkeypatch.setattr(
        Merger, "_append", lambda self, data: appended.append(len(data)) or append(self, data)
    )
    merger = Merger(path)
    merger.merge()
    whole = path.read_bytes()
    steps = [json.loads(line)["step"] for line in whole.splitlines()]
    assert max(appended) < 1100 and len(appended) >= 10 and steps == sorted([*range(100)] * 2)
    path.unlink()
    merger.merge()
    assert path.read_bytes() == whole


def test_who_lost_its_role_writes_no_line_and_merges_none(path):
    def fence():
        raise RunError("lost")

    with pytest.raises(RunError, match="lost"):
        MetricsLog(path, "a", fence).write(1, {})
    assert read_metrics(path) == {}
    MetricsLog(path, "a").write(1, {})
    with pytest.raises(RunError, match="lost"):
        Merger(path, fence).merge()
    assert steps_of(path) == []


def test_a_full_disk_leaves_the_lines_to_the_next_merge(path, monkeypatch):
    merger = Merger(path)
    MetricsLog(path, "a").write(1, {})
    merger.merge()
    MetricsLog(path, "a").write(2, {})

    def full(fd, data):
        write(fd, data[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            merger.merge()
    merger.merge()
    assert steps_of(path) == [1, 2] and len(path.read_bytes().splitlines()) == 2


def test_a_process_without_rl_merges_as_long_as_it_runs(path, monkeypatch):
    monkeypatch.setattr(metrics, "MERGE_S", 0.01)
    with merging(path, lambda: None):
        log = MetricsLog(path, "a")
        log.write(1, {})
        until(lambda: steps_of(path) == [1])
        monkeypatch.setattr(metrics, "MERGE_S", 60)
        log.write(2, {})
    assert steps_of(path) == [1, 2]


def test_what_is_not_wanted_is_not_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for source in ("trainer", "eval"):
        for step in (1, 2):
            MetricsLog(path, source).write(step, {"loss/mean": step, "a": 1, "b": 2})
    some = min(file.stat().st_size for file in (path.parent / "metrics").iterdir()) * 3 // 4
    # nothing is merged yet
    assert sorted(read_metrics(path, last_bytes=2 * some)) == [(2, "eval"), (2, "trainer")]
    Merger(path).merge()
    assert list(read_metrics(path, "eval")) == [(1, "eval"), (2, "eval")]
    assert read_metrics(path, "x") == read_metrics(tmp_path / "no") == {}
    sizes = (some, path.stat().st_size)
    assert [len(read_metrics(path, last_bytes=size)) for size in sizes] == [1, 4]


def test_a_long_file_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.run_dir.files.PIECE_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    log, reader = MetricsLog(path, "a"), MetricsReader(path)
    for step in range(1, 8):
        log.write(step, {"x": 1.0} if step != 4 else {f"long/{i}": 1.0 for i in range(50)})
    Merger(path).merge()
    pieces = []
    while lines := reader.new():
        pieces.append([line["step"] for line in lines])
    assert list(chain(*pieces)) == [1, 2, 3, 4, 5, 6, 7] and len(pieces) > 4
    with path.open("a") as file:
        file.write('{"step": 8, ' + "x" * 500)
    later = MetricsReader(path)
    later.skip()
    assert later.offset == reader.offset and later.new() == []
    MetricsReader(tmp_path / "no").skip()


@pytest.mark.parametrize(
    "damage",
    [
        b'{"step": 2, "sou\n',
        b"\n",
        b'{"step": -1, "source": "a"}\n',
        b'{"source": "a", "step": 9}\n',
        b"\xff}\n",
    ],
)
def test_a_quick_look_finds_what_must_be_cut(tmp_path, damage):
    """`cut_metrics` does not parse the lines of a file if all of them begin and end correctly
    and their steps are kept."""
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, "a").write(3, {"x": 1})
    assert cut_metrics(path, 3) == []
    with path.open("ab") as file:
        file.write(damage)
    MetricsLog(path, "a").write(1, {"x": 1})
    Merger(path).merge()
    steps = [step for step in steps_of(path) if step <= 3]
    assert cut_metrics(path, 3) == ([damage] if b"-1" not in damage else [])
    assert steps_of(path) == steps
