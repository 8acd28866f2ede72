"""metrics.jsonl: whole lines, the last value wins."""

import json
import multiprocessing
import threading
from itertools import chain

import pytest

from rl.run_dir.metrics import MetricsLog, MetricsReader, cut_metrics, read_metrics


def test_a_line(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    MetricsLog(path, "trainer").write(3, {"loss/mean": 0.5, "bad": float("inf")})
    (line,) = path.read_text().splitlines()
    content = json.loads(line)
    assert content.pop("time") > 1.7e9
    assert content == {"step": 3, "source": "trainer", "loss/mean": 0.5, "bad": None}


def test_the_last_value_of_a_step_and_source_wins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    trainer, orchestrator, evals = (MetricsLog(path, source) for source in ("trainer", "orchestrator", "eval"))
    trainer.write(1, {"loss/mean": 1.0})
    orchestrator.write(1, {"reward/mean": 0.1})
    trainer.write(1, {"loss/mean": 2.0})
    evals.write(0, {"eval/a/reward_mean": 0.1})
    evals.write(0, {"eval/b/reward_mean": 0.2})
    lines = read_metrics(path)
    assert set(lines) == {(1, "trainer"), (1, "orchestrator"), (0, "eval")}
    assert lines[1, "trainer"]["loss/mean"] == 2.0
    assert (lines[0, "eval"]["eval/a/reward_mean"], lines[0, "eval"]["eval/b/reward_mean"]) == (0.1, 0.2)


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


def test_the_reader_goes_on_behind_lines_that_a_repair_took_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log, reader = MetricsLog(path, "a"), MetricsReader(path)
    for step in (1, 2, 3):
        log.write(step, {})
    assert len(reader.new()) == 3
    cut_metrics(path, 1)
    assert reader.new() == []
    MetricsLog(path, "a").write(2, {})
    assert [line["step"] for line in reader.new()] == [2]


def test_a_line_that_its_writer_did_not_finish_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "source": "a"}\n{"step": 2, "sou')
    MetricsLog(path, "a").write(3, {})
    assert [line["step"] for line in MetricsReader(path).new()] == [1, 3]
    assert cut_metrics(path, 1)[0] == b'{"step": 2, "sou\n'
    assert [line["step"] for line in MetricsReader(path).new()] == [1]


def test_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut_metrics(path, 1) == []
    log = MetricsLog(path, "a")
    for step in (1, 2, 3, 2):
        log.write(step, {})
    gone = cut_metrics(path, 1)
    assert [json.loads(line)["step"] for line in gone] == [2, 3, 2]
    assert [line["step"] for line in MetricsReader(path).new()] == [1]
    assert cut_metrics(path, 1) == []


def write_many(path, source):
    log = MetricsLog(path, source)
    for step in range(200):
        log.write(step, {"x" * 50: step})


def test_lines_of_several_writers_never_mix(tmp_path):
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=write_many, args=(path, f"p{i}")) for i in range(2)]
    workers += [threading.Thread(target=write_many, args=(path, f"t{i}")) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(read_metrics(path)) == 800


def test_what_is_not_wanted_is_not_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for source in ("trainer", "eval"):
        for step in (1, 2):
            MetricsLog(path, source).write(step, {"loss/mean": step, "a": 1, "b": 2})
    assert list(read_metrics(path, "eval")) == [(1, "eval"), (2, "eval")] and read_metrics(path, "x") == read_metrics(tmp_path / "no") == {}
    line = read_metrics(path, "trainer", "a".__eq__)[2, "trainer"]
    assert {name for name in line if name != "time"} == {"step", "source", "a"} and line["a"] == 1
    size = path.stat().st_size
    assert list(read_metrics(path, last_bytes=size // 2 - 9)) == [(2, "eval")] and len(read_metrics(path, last_bytes=size)) == 4


def test_a_long_file_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.run_dir.files.PIECE_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    log, reader = MetricsLog(path, "a"), MetricsReader(path)
    for step in range(1, 8):
        log.write(step, {"x": 1.0} if step != 4 else {f"long/{i}": 1.0 for i in range(50)})
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
    "damage", [b'{"step": 2, "sou\n', b"\n", b'{"step": -1, "source": "a"}\n', b'{"source": "a", "step": 9}\n', b"\xff}\n"]
)
def test_a_quick_look_finds_what_must_be_cut(tmp_path, damage):
    """`cut_metrics` parses no line of a file in which all lines begin and end as they should, and with steps that are wanted."""
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, "a").write(3, {"x": 1})
    assert cut_metrics(path, 3) == []
    with path.open("ab") as file:
        file.write(damage)
    MetricsLog(path, "a").write(1, {"x": 1})
    steps = [line["step"] for line in MetricsReader(path).new() if line["step"] <= 3]
    expected = [damage] if b"-1" not in damage else []
    assert cut_metrics(path, 3) == expected and [line["step"] for line in MetricsReader(path).new()] == steps
