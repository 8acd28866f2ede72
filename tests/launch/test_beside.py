"""Processes beside a run: curves.png is kept up to date. The page is tested in test_run.py,
because it needs a run."""

import sys

from rl.launch import run
from rl.run_dir.lease import lease_path
from rl.run_dir.metrics import Merger, MetricsLog
from tests.launch.test_curves import synthetic
from tests.waiting import until


def start(run_dir, children, monkeypatch):
    """Pictures at any interval, for any share of the time."""
    said: list[str] = []
    started = children.start
    quick = "from rl.launch import curves; curves.EVERY_S, curves.SHARE = 0.0, 1.0; curves.main()"

    def given(name, command, *more):
        return started(name, [sys.executable, "-c", quick, *command[4:]], *more)

    monkeypatch.setattr(children, "start", given)
    return run.start_curves(run_dir, "r", children, said.append), said


def test_a_picture_comes_with_news_and_its_process_goes_with_the_others(
    tmp_path, children, monkeypatch
):
    run_dir = synthetic(tmp_path)
    pictures, said = start(run_dir, children, monkeypatch)
    first = until(lambda: run_dir.curves.exists() and run_dir.curves.stat().st_mtime_ns, 60)
    assert run_dir.curves.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    MetricsLog(run_dir.metrics, "trainer").write(9, {"time/step": 1.0})
    Merger(run_dir.metrics).merge()
    until(lambda: run_dir.curves.stat().st_mtime_ns > first, 60)
    pictures.poll()
    assert children.stop() == []
    pictures.close()
    pictures.poll()
    assert said == [] and not list((tmp_path / "logs").iterdir())


def test_no_picture_is_drawn_for_an_rl_that_has_lost_its_run(tmp_path, children, monkeypatch):
    run_dir = synthetic(tmp_path)
    lease = lease_path(run_dir.lock("rl"), 4)
    lease.parent.mkdir(exist_ok=True)
    lease.write_bytes(b"held")
    pictures, said = start(run_dir, children, monkeypatch)
    until(run_dir.curves.exists, 60)
    lease.write_bytes(b"")
    until(lambda: pictures.poll() or said, 60)
    assert "has lost or given back its run" in pictures.loss or "exit code 1" in said[0]
    before = run_dir.curves.stat().st_mtime_ns
    MetricsLog(run_dir.metrics, "trainer").write(9, {"time/step": 1.0})
    Merger(run_dir.metrics).merge()
    assert run_dir.curves.stat().st_mtime_ns == before


def test_one_that_fails_is_a_warning(tmp_path, children, monkeypatch):
    run_dir = synthetic(tmp_path)
    run_dir.metrics.unlink()
    run_dir.metrics.mkdir()
    pictures, said = start(run_dir, children, monkeypatch)
    until(lambda: pictures.poll() or said, 60)
    (log,) = (tmp_path / "logs").iterdir()
    why = (
        "is out of date: drawing it failed; it is drawn again when the run ends (exit code 1, "
        f"log: {log})"
    )
    assert said == [f"warning: {run_dir.curves} {why}"] and "IsADirectoryError" in log.read_text()
    pictures.close()
    assert log.exists()
