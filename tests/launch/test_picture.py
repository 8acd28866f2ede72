"""curves.png is drawn from time to time during a run, in a separate process."""

import time

from rl.launch import picture
from rl.launch.picture import Picture
from tests.launch.test_curves import synthetic
from tests.waiting import until


def make(run_dir, children, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(picture, "EVERY_S", 0.0)
    return Picture(run_dir, "r", children, said.append), said


def finish(pictures: Picture) -> None:
    def ended() -> bool:
        pictures.poll(0)
        return pictures.child is None

    until(ended, 60)


def test_a_picture_comes_with_news_and_the_next_one_much_later(tmp_path, children, monkeypatch):
    pictures, said = make(synthetic(tmp_path), children, monkeypatch)
    pictures.poll(0)
    assert pictures.child is None  # nothing is new
    began = time.monotonic()
    pictures.poll(3)
    asked_s = time.monotonic() - began
    assert pictures.child is not None
    pictures.poll(1)  # does not wait, and starts no second one
    finish(pictures)
    took = time.monotonic() - began
    assert asked_s < took / 2  # it did not wait for the picture
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and said == []
    assert not list((tmp_path / "logs").iterdir()) and not list(tmp_path.glob(".*"))
    assert pictures.news and 10 < pictures.next_at - time.monotonic() <= took / picture.SHARE
    pictures.poll(1)
    assert pictures.child is None


def test_one_that_fails_is_a_warning_and_the_last(tmp_path, children, monkeypatch):
    run_dir = synthetic(tmp_path)
    run_dir.metrics.unlink()
    run_dir.metrics.mkdir()
    pictures, said = make(run_dir, children, monkeypatch)
    pictures.poll(1)
    finish(pictures)
    (log,) = (tmp_path / "logs").iterdir()
    how = f"is out of date: drawing it ended with exit code 1 (log: {log}); it is drawn again when the run ends"
    assert said == [f"warning: {run_dir.curves} {how}"] and "IsADirectoryError" in log.read_text()
    pictures.poll(1)
    assert pictures.child is None


def test_when_the_run_ends_the_process_goes_with_the_others_and_none_follows(tmp_path, children, monkeypatch):
    pictures, said = make(synthetic(tmp_path), children, monkeypatch)
    pictures.poll(1)
    assert children.stop() == []
    pictures.close()
    pictures.poll(1)
    assert pictures.child is None and said == [] and not list((tmp_path / "logs").iterdir())
