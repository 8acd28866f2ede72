"""The events of a run and of its machines."""

from rl.run_dir.events import Event, EventsReader, append_event, read_events


def test_events_of_several_machines_come_in_the_order_of_their_times(tmp_path):
    own, third = tmp_path / "events.jsonl", tmp_path / "events-node3.jsonl"
    reader = EventsReader(own)
    for file, time, event in (
        (own, 1.0, "start"),
        (own, 4.0, "stop"),
        (third, 2.0, "start"),
        (third, 3.0, "death"),
    ):
        append_event(file, Event(time=time, event=event, process=file.stem))
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
