"""What several processes did, on one clock."""

import msgspec
import pytest

from rl.records.run import Run
from rl.records.timeline import Done, Timeline, spread
from rl.run_dir.events import Event, append_event
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.spans import Gauges, Span, Start
from tests.records.made import make_run


def write(path, *lines, tail=b""):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + tail)


def start(process, time, monotonic):
    return Start(process=process, pid=1, host="h", place="", time=time, monotonic=monotonic)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The trainer's clock stands at 100 when it is 1000, that of inference at 5, and after its second start at 1."""
    run_dir = make_run(tmp_path / "x")
    one, two = Span(name="forward_backward", begin=100.0, end=102.0, lane="step", step=1), Span(name="optimizer", begin=102.0, end=103.0)
    write(run_dir.spans / "trainer.jsonl.old", start("trainer", 1000.0, 100.0), one)
    write(run_dir.spans / "trainer.jsonl", start("trainer", 1000.0, 100.0), two, tail=b'{"kind": "span", "na')
    again = start("inference", 1010.0, 1.0), Span(name="pause", begin=2.0, end=2.5, lane="weights", step=1)
    name = "inference-host.domain-8000"
    write(run_dir.spans / f"{name}.jsonl", start(name, 1000.0, 5.0), Gauges(at=6.0, values={"requests": 3}), *again)
    MetricsLog(run_dir.metrics, "orchestrator").write(1, {"reward/mean": 0.5})
    append_event(run_dir.events, Event(time=1004.0, event="death", process="trainer", step=1, reason="killed"))
    return Run(run_dir.root)


def test_a_start_behind_a_torn_line_counts(tmp_path):
    """The process before was killed within a line, and the next one begins in it."""
    run_dir = make_run(tmp_path / "x")
    one, two = Span(name="a", begin=1.0, end=2.0), Span(name="b", begin=1.0, end=2.0)
    lines = [start("trainer", 1000.0, 0.0), one, b'{"kind":"span","na', start("trainer", 91000.0, 0.0), two]
    torn = b"".join(line if isinstance(line, bytes) else msgspec.json.encode(line) + b"\n" for line in lines)
    run_dir.spans.mkdir()
    (run_dir.spans / "trainer.jsonl").write_bytes(torn)
    assert [(done.name, done.begin) for done in Run(run_dir.root).timeline().spans] == [("a", 1001.0), ("b", 91001.0)]


def test_all_processes_are_on_one_clock(run):
    found = run.timeline()
    assert [(done.process[:9], done.name, done.begin, done.end, done.step) for done in found.spans] == [
        ("trainer", "forward_backward", 1000.0, 1002.0, 1),
        ("trainer", "optimizer", 1002.0, 1003.0, None),
        ("inference", "pause", 1011.0, 1011.5, 1),
    ]
    assert [(counted.process, counted.time, counted.values) for counted in found.gauges] == [
        ("inference-host.domain-8000", 1001.0, {"requests": 3})
    ]
    assert [(mark.process, mark.name, mark.step, mark.text) for mark in found.marks] == [
        ("trainer", "death", 1, "killed"),
        ("orchestrator", "batch", 1, ""),
    ]
    part = run.timeline(1001.5, 1004.0)
    assert [done.name for done in part.spans] == ["forward_backward", "optimizer"] and not part.gauges and len(part.marks) == 1


def test_spans_that_overlap_have_lanes_of_their_own_in_a_trace(run):
    times = ((0.0, 4.0), (1.0, 2.0), (1.5, 3.0), (2.0, 5.0), (4.0, 6.0))
    done = [Done("w", "rollouts", "play", begin, end, None, {}) for begin, end in times]
    assert [lane for _, lane in spread(done)] == ["rollouts", "rollouts 2", "rollouts 3", "rollouts 2", "rollouts 3"]
    events = run.timeline().trace()["traceEvents"]
    (pause,) = [event for event in events if event["name"] == "pause"]
    assert (pause["ph"], pause["ts"], pause["dur"], pause["args"]) == ("X", 1011e6, 0.5e6, {"step": 1})
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "trainer", "orchestrator", "inference-host.domain-8000", "step", "", "weights"
    }  # fmt: skip
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"requests": 3}]
    assert {event["name"] for event in events if event["ph"] == "i"} == {"batch 1", "death 1"}
    assert Timeline().trace() == {"traceEvents": [], "displayTimeUnit": "ms"}
