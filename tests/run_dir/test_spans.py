"""Spans of a process: one bounded file, whatever the disk does; and the events of a run."""

import threading
import time
from types import SimpleNamespace

import pytest

from rl.run_dir import spans
from rl.run_dir.spans import (
    DECODER,
    Busy,
    Event,
    EventsReader,
    Gauges,
    Span,
    Start,
    append_event,
    read_events,
)
from rl.run_dir.status import HEARTBEAT_S, Phase, Status
from tests.waiting import until


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "spans"
    spans.recorder = None


def lines(folder, name="p.jsonl"):
    return [DECODER.decode(line) for line in (folder / name).read_bytes().splitlines()]


def test_nothing_is_noted_before_a_process_asks_for_it(folder):
    with spans.span("work"):
        spans.gauges(requests=1)
    spans.flush()
    assert not folder.exists()


def test_spans_and_gauges_follow_the_start_of_their_process(folder):
    spans.start(folder, "p")
    with spans.span("work", "lane", 3, env="sums"):
        time.sleep(0.02)
    with pytest.raises(ValueError), spans.span("fails"):
        raise ValueError
    spans.gauges(requests=2)
    spans.stop()
    spans.start(folder, "p")  # the next attempt
    threading.Thread(target=lambda: spans.note("late", 1.0, 2.0)).run()
    spans.stop()
    start, work, _, gauges, _, late = found = lines(folder)
    assert [type(line) for line in found] == [Start, Span, Span, Gauges, Start, Span]
    assert (work.name, work.lane, work.step, work.about) == ("work", "lane", 3, {"env": "sums"})
    assert work.end - work.begin >= 0.02 and start.monotonic <= work.begin
    assert abs(start.time + time.monotonic() - start.monotonic - time.time()) < 1.0
    assert gauges.values == {"requests": 2} and (late.begin, late.end) == (1.0, 2.0)


def test_a_full_file_makes_room_and_begins_with_its_start(folder, monkeypatch):
    monkeypatch.setattr(spans, "MAX_BYTES", 3000)
    spans.start(folder, "p")
    for number in range(100):
        spans.note("work", float(number), float(number + 1), step=number)
        spans.flush()
    assert {path.name for path in folder.iterdir()} == {"p.jsonl", "p.jsonl.old"}
    assert all(path.stat().st_size <= 3000 for path in folder.iterdir())
    kept = [*lines(folder, "p.jsonl.old"), *lines(folder)]
    steps = [line.step for line in kept if isinstance(line, Span)]
    assert steps == list(range(steps[0], 100)) and len(steps) > 20
    assert all(isinstance(lines(folder, name)[0], Start) for name in ("p.jsonl", "p.jsonl.old"))


def test_a_disk_that_cannot_be_written_costs_the_spans_alone(folder):
    folder.parent.joinpath("spans").touch()  # where the folder would be
    spans.start(folder, "p")
    spans.note("lost", 0.0, 1.0)
    spans.flush()
    folder.unlink()
    spans.note("kept", 1.0, 2.0)
    spans.flush()
    assert [line.name for line in lines(folder)[1:]] == ["kept"]
    assert isinstance(lines(folder)[0], Start)


def test_phases_of_a_status_are_spans(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("rl.run_dir.status.HEARTBEAT_S", 0.01)
    spans.start(folder, "p")
    status = Status(tmp_path / "status" / "p.json", "p")
    status.gauges["requests"] = 4
    status.enter(Phase.TRAINING, 1)
    status.enter(Phase.TRAINING, 1)
    wanted = {"progress": 0, "requests": 4}
    # written by itself, for a killed process loses what is not: within a second
    assert HEARTBEAT_S / spans.FLUSHES <= 1.0
    until((folder / "p.jsonl").exists)
    until(lambda: any(isinstance(line, Gauges) and line.values == wanted for line in lines(folder)))
    status.enter(Phase.PUBLISHING, 1)
    status.close()
    found = lines(folder)
    assert [(line.name, line.step) for line in found if isinstance(line, Span)] == [
        ("starting", None),
        ("training", 1),
        ("publishing", 1),
    ]
    assert spans.recorder is None


def test_several_requests_at_once_are_one_span(folder, monkeypatch):
    clock = iter([10.0, 10.5, 11.0, 12.0, 12.05, 13.0, 20.0, 21.0, 40.0, 55.0, 55.5])
    monkeypatch.setattr(
        spans, "time", SimpleNamespace(monotonic=lambda: next(clock, 60.0), time=time.time)
    )
    busy = Busy("sampling", "requests")
    spans.start(folder, "p")  # consumes the first time
    with busy(), busy():  # from 10.5 and 11 to 12 and 12.05
        pass
    with busy():  # 13 to 20: a separate span
        pass
    spans.flush()

    def noted():
        return [(line.begin, line.end) for line in lines(folder)[1:]]

    # what is over is not kept back until the next begins
    assert noted() == [(10.5, 12.05), (13.0, 20.0)]
    with busy():  # 21 to 55, and recorded so far at 40
        spans.flush()
        assert noted()[2:] == [(21.0, 40.0)]
        spans.stop()
    assert noted()[2:] == [(21.0, 40.0), (40.0, 55.0)]


def test_events_of_several_machines_come_in_the_order_of_their_times(tmp_path):
    own, third = tmp_path / "events.jsonl", tmp_path / "events-node3.jsonl"
    reader = EventsReader(own)
    for file, at, event in (
        (own, 1.0, "start"),
        (own, 4.0, "stop"),
        (third, 2.0, "start"),
        (third, 3.0, "death"),
    ):
        append_event(file, Event(time=at, event=event, process=file.stem))
    for events in (read_events(own), reader.new()):
        assert [event.time for event in events] == [1.0, 2.0, 3.0, 4.0]
    with third.open("a") as file:
        file.write('{"time": 5.0, "event": "restart", "process": "infer')
    assert reader.new() == []
    with third.open("a") as file:
        file.write('ence-node3"}\nnonsense\n')
    append_event(
        tmp_path / "events-node4.jsonl", Event(time=4.5, event="start", process="inference-node4")
    )
    assert [event.process for event in reader.new()] == ["inference-node4", "inference-node3"]
    reader = EventsReader(own)
    reader.skip()
    append_event(third, Event(time=6.0, event="ready", process="inference-node3"))
    assert [event.event for event in reader.new()] == ["ready"]
