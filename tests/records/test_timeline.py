"""What several processes did, on one clock."""

import types

import pytest

from rl.records.run import Run
from rl.records.timeline import Done, Timeline, spread
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.spans import DECODER, Gauges, Span
from rl.run_dir.status import Phase, RoleStatus, archive_status, write_status
from tests.records.made import clock, make_run, note, write_lines


@pytest.fixture
def run(tmp_path):
    """The trainer's clock stands at 100 when it is 1000, that of inference at 5, and after its
    second start at 1."""
    run_dir = make_run(tmp_path / "x")
    forward = Span(name="forward_backward", begin=100.0, end=102.0, lane="step", step=1)
    optimizer = Span(name="optimizer", begin=102.0, end=103.0)
    write_lines(run_dir.spans / "trainer.jsonl.old", clock("trainer", 1000.0, 100.0), forward)
    write_lines(
        run_dir.spans / "trainer.jsonl",
        clock("trainer", 1000.0, 100.0),
        optimizer,
        tail=b'{"kind": "span", "na',
    )
    again = (
        clock("inference", 1010.0, 1.0),
        Span(name="pause", begin=2.0, end=2.5, lane="weights", step=1),
    )
    name = "inference-host.domain-8000"
    write_lines(
        run_dir.spans / f"{name}.jsonl",
        clock(name, 1000.0, 5.0),
        Gauges(at=6.0, values={"requests": 3}),
        *again,
    )
    MetricsLog(run_dir.metrics, "orchestrator").write(1, {"reward/mean": 0.5})
    note(run_dir, 1004.0, "death", "trainer", step=1, reason="killed")
    return Run(run_dir.root)


def test_a_start_behind_a_torn_line_counts(tmp_path):
    """The process before was killed within a line, and the next one begins in it."""
    run_dir = make_run(tmp_path / "x")
    file = run_dir.spans / "trainer.jsonl"
    torn = b'{"kind":"span","na'
    write_lines(file, clock("trainer"), Span(name="a", begin=1.0, end=2.0), tail=torn)
    write_lines(file, clock("trainer", 91000.0), Span(name="b", begin=1.0, end=2.0))
    assert [(done.name, done.begin) for done in Run(run_dir.root).timeline().spans] == [
        ("a", 1001.0),
        ("b", 91001.0),
    ]


def test_all_processes_are_on_one_clock(run):
    found = run.timeline()
    spans = [(done.process[:9], done.name, done.begin, done.end, done.step) for done in found.spans]
    assert spans == [
        ("trainer", "forward_backward", 1000.0, 1002.0, 1),
        ("trainer", "optimizer", 1002.0, 1003.0, None),
        ("inference", "pause", 1011.0, 1011.5, 1),
    ]
    (gauges,) = found.gauges
    assert gauges.process == "inference-host.domain-8000"
    assert (gauges.time, gauges.values) == (1001.0, {"requests": 3})
    marks = [(mark.process, mark.name, mark.step, mark.text) for mark in found.marks]
    assert marks == [("trainer", "death", 1, "killed"), ("orchestrator", "batch", 1, "")]
    some = run.timeline(1001.5, 1004.0)
    assert [done.name for done in some.spans] == ["forward_backward", "optimizer"]
    assert not some.gauges and len(some.marks) == 1


def test_spans_that_overlap_have_lanes_of_their_own_in_a_trace(run):
    times = ((0.0, 4.0), (1.0, 2.0), (1.5, 3.0), (2.0, 5.0), (4.0, 6.0))
    done = [Done("w", "rollouts", "play", begin, end, None, {}) for begin, end in times]
    lanes = ["rollouts", "rollouts 2", "rollouts 3", "rollouts 2", "rollouts 3"]
    assert [lane for _, lane in spread(done)] == lanes
    events = run.timeline().trace()["traceEvents"]
    (pause,) = [event for event in events if event["name"] == "pause"]
    assert (pause["ph"], pause["ts"], pause["dur"]) == ("X", 1011e6, 0.5e6)
    assert pause["args"] == {"step": 1}
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    processes = {"trainer", "orchestrator", "inference-host.domain-8000"}
    assert names == processes | {"step", "", "weights"}
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"requests": 3}]
    assert {event["name"] for event in events if event["ph"] == "i"} == {"batch 1", "death 1"}
    assert Timeline().trace() == {"traceEvents": [], "displayTimeUnit": "ms"}


def doing(process, phase, since, heartbeat, step=None):
    times = {"since": since, "heartbeat": heartbeat}
    return RoleStatus(process=process, pid=1, host="elsewhere", phase=phase, step=step, **times)


def phases(run, process):
    return [
        (done.name, done.begin, done.end)
        for done in run.timeline().spans
        if done.process == process and done.lane == "phase"
    ]


def test_what_a_process_is_in_is_an_open_span_until_the_newest_heartbeat_or_its_own_last(tmp_path):
    run_dir = make_run(tmp_path / "x")
    before = Span(name="waiting_for_batch", begin=1.0, end=5.001, lane="phase", step=3)
    write_lines(run_dir.spans / "trainer.jsonl", clock("trainer"), before)
    statuses = {
        "trainer": doing("trainer", Phase.TRAINING, 1005.0, 1060.0, 3),
        "orchestrator": doing("orchestrator", Phase.FILLING_BATCH, 1004.0, 1061.5),
        "inference": doing("inference", Phase.SERVING, 1003.0, 1020.0),
    }
    for name, status in statuses.items():
        write_status(run_dir.status(name), status)
    run = Run(run_dir.root)
    # one behind the other
    waited = ("waiting_for_batch", 1001.0, 1005.001)
    assert phases(run, "trainer") == [waited, ("training", 1005.001, 1061.5)]
    assert phases(run, "orchestrator") == [("filling_batch", 1004.0, 1061.5)]
    assert phases(run, "inference") == [("serving", 1003.0, 1020.0)]  # it is silent for long
    archive_status(run_dir.status("trainer"), run_dir.spans)
    assert not run_dir.status("trainer").exists()
    # it stays so
    assert phases(run, "trainer") == [waited, ("training", 1005.001, 1060.0)]
    # of one without a status there is nothing to say
    archive_status(run_dir.status("trainer"), run_dir.spans)


def test_until_its_first_span_a_process_starts(tmp_path):
    run_dir = make_run(tmp_path / "x")
    spans = [
        Span(name="starting", begin=9.0, end=10.0, lane="phase"),
        Span(name="serving", begin=40.0, end=41.0, lane="phase"),
    ]
    write_lines(run_dir.spans / "inference.jsonl", clock("inference"), *spans)
    note(run_dir, 1000.0, "start")
    for time, event, process in (
        (1004.0, "start", "inference"),
        (1020.0, "death", "inference"),
        (1021.0, "restart", "inference"),
        (1030.0, "start", "trainer"),
        (1036.0, "death", "trainer"),
        (1037.0, "restart", "trainer"),
    ):
        note(run_dir, time, event, process)
    write_status(run_dir.status("inference"), doing("inference", Phase.SERVING, 1041.0, 1050.0))
    run = Run(run_dir.root)
    assert phases(run, "rl") == [("starting", 1000.0, 1004.0)]
    assert phases(run, "inference")[:3] == [
        ("starting", 1004.0, 1009.0),
        ("starting", 1009.0, 1010.0),
        ("starting", 1021.0, 1040.0),
    ]
    assert phases(run, "trainer") == [("starting", 1030.0, 1036.0), ("starting", 1037.0, 1050.0)]
    assert [mark.process for mark in run.timeline().marks if mark.name == "start"] == ["rl"]


def test_span_files_are_read_once_and_followed_when_a_full_one_becomes_the_old_one(
    tmp_path, monkeypatch
):
    run_dir, decoded = make_run(tmp_path / "x"), []
    monkeypatch.setattr(
        "rl.records.timeline.DECODER",
        types.SimpleNamespace(decode=lambda text: decoded.append(text) or DECODER.decode(text)),
    )
    file = run_dir.spans / "trainer.jsonl"
    write_lines(file, clock("trainer"), Span(name="a", begin=1.0, end=2.0))
    run = Run(run_dir.root)

    def names():
        return [done.name for done in run.timeline().spans]

    assert names() == names() == ["a"] and len(decoded) == 2
    write_lines(file, Span(name="b", begin=3.0, end=4.0))
    file.rename(file.with_name("trainer.jsonl.old"))
    write_lines(file, clock("trainer"), Span(name="c", begin=5.0, end=6.0))
    assert names() == ["a", "b", "c"] and len(decoded) == 5
    file.rename(file.with_name("trainer.jsonl.old"))
    write_lines(file, clock("trainer"))
    assert names() == ["c"] and run.recording.ends == (1005.0, 1006.0) and len(decoded) == 6
