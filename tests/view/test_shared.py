"""Many who look at many runs: a slow run keeps no other waiting, and what was read is not read
again."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl.records.run import Run
from rl.run_dir import metrics
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.spans import Gauges, Span
from rl.system.errors import RunError
from rl.view.library import Library
from rl.view.rollouts import Wanted
from rl.view.server import Handlers
from tests.records.made import clock, group, make_run, write_lines, write_step
from tests.view.made import write_numbers

SPANS = 3000


def made(root, steps=4, answer="four"):
    """A run with spans of two processes."""
    run_dir = make_run(root)
    write_numbers(run_dir, [0.5] * steps)
    write_step(run_dir, 1, [group(1, [0.0, 1.0], text=answer)])
    for process in ("trainer", "inference"):
        spans = [
            Span(name="sampling", begin=float(i), end=i + 0.5, lane="step", step=i)
            for i in range(SPANS)
        ]
        gauges = Gauges(at=float(SPANS), values={"requests": 1.0})
        write_lines(run_dir.spans / f"{process}.jsonl", clock(process, 10_000.0), *spans, gauges)
    return run_dir


def test_a_run_that_is_being_read_keeps_no_other_waiting(tmp_path):
    for name in ("slow", "quick"):
        made(tmp_path / name)
    handlers = Handlers(Library([tmp_path]))
    before = handlers.runs()
    held, done = threading.Event(), threading.Event()

    def hold():
        with handlers._reading(["slow"]):
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    try:
        for name in ("slow", "quick"):
            (tmp_path / name / "evals").mkdir()  # their rows are to be made anew
        began = time.monotonic()
        assert {row.key: row.step for row in handlers.runs().runs} == {
            row.key: row.step for row in before.runs
        }
        assert len(handlers.timeline(run="quick", begin=10_000.0, end=10_010.0).lanes) == 2
        assert time.monotonic() - began < 15
    finally:
        done.set()
        thread.join()


def test_the_index_of_rollouts_keeps_no_numbers_waiting(tmp_path):
    run = Run(made(tmp_path / "x").root)
    with ThreadPoolExecutor(1) as pool, run._lock:  # as a refresh of the index holds it
        assert pool.submit(lambda: run.step).result(timeout=10) == 4


def test_metrics_are_parsed_once_for_rows_and_health(tmp_path, monkeypatch):
    files, handlers = made(tmp_path / "x", steps=50), Handlers(Library([tmp_path]))
    before = handlers.runs().runs[0].step
    parsed, real = [], metrics.parse_line

    def parse(line, *more):
        parsed.append(line)
        return real(line, *more)

    for module in ("rl.run_dir.metrics", "rl.run_dir.numbers"):
        monkeypatch.setattr(f"{module}.parse_line", parse)
    for _ in range(3):
        health = handlers.health(run="x")
    assert handlers.timeline(run="x").note.startswith("no spans of this time are here")
    assert parsed == []
    assert health.lines[0].startswith("step 50 of 9")
    assert "2.0 s per step" in health.lines[0]
    MetricsLog(files.metrics, "trainer").write(51, {"loss/mean": 0.5})
    assert handlers.health(run="x").lines[0].startswith("step 51 of 9") and len(parsed) == 1
    assert (before, handlers.runs().runs[0].step, len(parsed)) == (50, 51, 1)


def test_a_run_that_was_replaced_is_another_one(tmp_path):
    """Its metrics, rollouts and settings are those of the new one, whose files may have the same
    numbers and sizes."""
    files, handlers = made(tmp_path / "x"), Handlers(Library([tmp_path]))
    assert handlers.runs().runs[0].step == 4
    assert handlers.rollouts(Wanted(run="x", q="four")).total == 2
    files.root.rename(tmp_path / ".away")
    made(tmp_path / "x", steps=2, answer="five")
    assert handlers.runs().runs[0].step == 2
    assert [handlers.rollouts(Wanted(run="x", q=text)).total for text in ("four", "five")] == [0, 2]
    (tmp_path / "x").rename(tmp_path / ".also")
    handlers._library.looked = -10.0
    assert handlers.runs().runs == []
    with pytest.raises(RunError):
        handlers.rollouts(Wanted(run="x"))
