"""Runs of which files are damaged, odd, or not to be read: each says so in its own row, and
hides no other."""

import os

import pytest

from rl.models.tiny import byte_tokenizer
from rl.records.run import Run
from rl.run_dir.spans import Span
from rl.view.library import Library
from rl.view.rollouts import Wanted
from rl.view.server import Handlers
from rl.view.tokens import piece
from tests.records.made import clock, group, make_run, note, write_lines, write_step
from tests.view.made import write_numbers
from tests.view.privileges import denied


def made(root, steps=4):
    """A run of some steps."""
    run_dir = make_run(root)
    write_numbers(run_dir, [0.5] * steps)
    write_step(run_dir, 1, [group(1, [0.0, 1.0])])
    return run_dir


def rows(handlers):
    return {row.key: row for row in handlers.runs().runs}


@pytest.mark.parametrize(
    "line", ['"loss/mean": ' + "9" * 400, '"loss/mean": 0.5, "time": 1e300', '"loss/mean": -1e999']
)
def test_a_number_that_is_none_costs_itself_alone(tmp_path, line):
    files, handlers = made(tmp_path / "x"), Handlers(Library([tmp_path]))
    with files.metrics.open("a") as file:
        file.write(
            f'{{"step": 5, "source": "trainer", {line}}}\n{{"step": {"9" * 20}, "source": '
            f'"trainer", "loss/mean": 2}}\n'
        )
        file.write('{"step": 6, "source": "trainer", "loss/mean": 0.25}\n')
    row = rows(handlers)["x"]
    assert (row.state, row.step) == ("stopped", 6) and row.seconds < 60
    (series,) = handlers.curves(run=["x"], name=["loss/mean"]).series
    assert (series.steps[-1], series.values[-1]) == (6, 0.25)
    assert Run(files.root).metrics(kind="columns")["step"].max() == 6


def test_a_fault_of_the_page_is_no_damage_of_a_run(tmp_path, monkeypatch):
    made(tmp_path / "x")

    def faulty(*_):
        raise TypeError("a fault")

    monkeypatch.setattr("rl.view.runs.run_row", faulty)
    with pytest.raises(TypeError, match="a fault"):
        rows(Handlers(Library([tmp_path])))


def test_times_that_no_clock_shows_are_passed_over(tmp_path):
    files, handlers = made(tmp_path / "x"), Handlers(Library([tmp_path]))
    for time in (1e300, -1e300):
        note(files, time, "death", "trainer")
    spans = [Span(name="a", begin=1.0, end=1e300), Span(name="b", begin=3.0, end=1.0)]
    write_lines(files.spans / "trainer.jsonl", clock("trainer"), *spans)
    files.status("trainer").write_text(
        '{"process": "trainer", "pid": 1, "phase": "training", "since": 1e300, "heartbeat": 1e300}'
    )
    files.evals.mkdir()
    (files.evals / "best.json").write_text("{")
    # nobody has a heartbeat
    assert rows(handlers)["x"].seconds < 60 and rows(handlers)["x"].state == "stopped"
    found = handlers.timeline(run="x")
    assert found.last < 1e11 and not [moment for moment in found.moments if moment.kind == "death"]
    assert len(handlers.curves(run=["x"], name=["loss/mean"]).series) == 1


def test_names_are_harmless_and_no_folder_is_passed_over(tmp_path):
    for name in (b"bad\xff", "turns\u202eround".encode(), b"evals", b"status", b"weights"):
        made(tmp_path / "new").root.rename(tmp_path / os.fsdecode(name))
    made(tmp_path / "batches" / "x")
    found = rows(Handlers(Library([tmp_path])))
    keys = r"bad\udcff turns\u202eround evals status weights batches/x"
    assert found.keys() == {*keys.split(" ")} and found[r"bad\udcff"].name == r"bad\udcff"
    assert {row.key: row.why for row in found.values() if row.step != 4} == {}


def test_what_may_not_be_read_is_said_in_its_own_row(tmp_path):
    made(tmp_path / "good")
    names = ("folder", "config", "status", "metrics", "sources", "events", "rollouts", "evals")
    runs = {name: made(tmp_path / name) for name in names}
    for files in runs.values():
        note(files, 1000.0, "start")
        files.evals.mkdir()
        files.metrics.write_bytes((files.metrics.with_suffix("") / "trainer.jsonl").read_bytes())
    handlers = Handlers(Library([tmp_path]))
    rows(handlers)
    folders = {"folder": "", "config": "config.toml", "metrics": "metrics.jsonl"}
    folders |= {"sources": "metrics", "events": "events.jsonl"}
    shut = {name: tmp_path / name / folders.get(name, name) for name in names}
    with denied(*shut.values()):
        handlers = Handlers(Library([tmp_path]))
        answer = handlers.runs()
        found = {row.key: row for row in answer.runs}
        assert found.keys() == {"good", *names} - {"folder"}
        assert answer.folders == f"{tmp_path} (no permission to read: {shut['folder']})"
        assert found["good"].step == 4
        for name in ("config", "status", "metrics", "sources", "events", "evals"):
            row, health = found[name], handlers.health(name)
            assert row.state == health.state == "unreadable", name
            assert "Permission denied" in row.why and "Permission denied" in health.bottleneck, name
        assert found["rollouts"].state == "stopped"
        assert found["rollouts"].step == found["evals"].step == 4
        assert "Permission denied" in str(handlers.health("rollouts").findings)
        for name in ("rollouts", "evals"):
            assert "Permission denied" in "".join(handlers.rollouts(Wanted(run=name)).damaged)
        assert handlers.rollouts(Wanted(run="evals")).total == 2
    assert handlers.rollouts(Wanted(run="rollouts")).total == 2  # it may be read again
    assert not handlers.health("rollouts").findings[1:]


def test_a_token_that_no_vocabulary_has_is_shown_as_its_number():
    assert [piece(byte_tokenizer(), number) for number in (1 << 62, -1)] == [f"{1 << 62} ", "-1 "]
