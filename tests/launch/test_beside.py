"""The page beside a run that ends early, and curves.png, which a thread keeps up to date. The rest is in test_run.py: it needs a run."""

import contextlib
import os
import signal
import threading
from functools import partial

import pytest

from rl.launch import curves
from rl.launch.beside import Page
from rl.run_dir.metrics import Merger, MetricsLog
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError
from tests.launch.test_curves import synthetic
from tests.waiting import until


@pytest.fixture
def drawing(monkeypatch):
    """Returns a function that draws pictures of a run, at any interval and for any share of the time, until the test ends."""
    monkeypatch.setattr(curves, "EVERY_S", 0.05)
    monkeypatch.setattr(curves, "SHARE", 1.0)
    over = threading.Event()

    def draw(run_dir: RunDir, fence=lambda: None) -> threading.Thread:
        thread = threading.Thread(target=partial(curves.keep_drawn, run_dir, "r", fence, over), daemon=True)
        thread.start()
        return thread

    yield draw
    over.set()


def news(run_dir: RunDir) -> None:
    MetricsLog(run_dir.metrics, "trainer").write(9, {"time/step": 1.0})
    Merger(run_dir.metrics).merge()


def drawn_at(run_dir: RunDir) -> int:
    with contextlib.suppress(FileNotFoundError):
        return run_dir.curves.stat().st_mtime_ns
    return 0


def test_a_picture_comes_with_news(tmp_path, drawing):
    run_dir = synthetic(tmp_path)
    drawing(run_dir)
    first = until(lambda: drawn_at(run_dir), 60)
    assert run_dir.curves.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    news(run_dir)
    until(lambda: drawn_at(run_dir) > first, 60)


def test_no_picture_is_drawn_for_an_rl_that_has_lost_its_run(tmp_path, drawing):
    run_dir, lost = synthetic(tmp_path), threading.Event()

    def fence() -> None:
        if lost.is_set():
            raise RunError("another process has taken over")

    thread = drawing(run_dir, fence)
    before = until(lambda: drawn_at(run_dir), 60)
    lost.set()
    news(run_dir)
    thread.join(60)
    assert not thread.is_alive() and drawn_at(run_dir) == before


def test_a_picture_that_cannot_be_drawn_is_drawn_later(tmp_path, drawing):
    run_dir = synthetic(tmp_path)
    run_dir.curves.mkdir()
    (run_dir.curves / "in the way").touch()
    thread = drawing(run_dir)
    thread.join(0.5)
    (run_dir.curves / "in the way").unlink()
    run_dir.curves.rmdir()
    until(lambda: run_dir.curves.is_file(), 60)
    assert thread.is_alive()


def test_a_page_that_ends_early_is_a_warning(tmp_path, children):
    said: list[str] = []
    page = Page(RunDir(tmp_path, tmp_path / "weights"), children, said.append)
    os.kill(page.child.pid, signal.SIGKILL)
    until(lambda: page.poll() or said, 60)
    log = tmp_path / "logs" / "view-1.log"
    assert said == [f"warning: the page of --view has ended, the run continues (exit code -9, log: {log})"]
    page.close()
    assert log.exists()
