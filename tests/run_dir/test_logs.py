"""A log keeps its beginning and its end, whatever its process writes."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest

from rl.run_dir import logs
from rl.run_dir.logs import last_lines, trim, trim_logs
from tests.waiting import until

WRITER = "import itertools, sys\nfor i in itertools.count():\n    print(f'line {i:09d}', flush=True)"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 64_000)
    monkeypatch.setattr(logs, "FIRST_BYTES", 8_000)
    monkeypatch.setattr(logs, "NEWEST_BYTES", 24_000)


def test_the_middle_is_cut_out(tmp_path):
    log = tmp_path / "trainer-1.log"
    lines = [f"line {i:09d}" for i in range(10_000)]
    log.write_text("\n".join(lines) + "\n")
    trim_logs(tmp_path)
    kept = log.read_text().splitlines()
    first, newest = 8_000 // 15, 24_000 // 15 - 1
    cut = 150_000 - 15 * (first + newest)
    assert kept == [*lines[:first], f"[rl: {cut} bytes were cut out here; a log keeps its beginning and its end]", *lines[-newest:]]
    before = log.read_bytes()
    trim_logs(tmp_path)  # it is short enough now
    trim_logs(tmp_path / "nowhere")
    assert log.read_bytes() == before and last_lines(log, 1) == ["line 000009999"]


def test_one_line_without_end(tmp_path):
    log = tmp_path / "trainer-1.log"
    log.write_bytes(b"x" * 100_000)
    trim(log)
    assert log.stat().st_size < 40_000 and log.read_bytes().startswith(b"x" * 8_000) and log.read_bytes().endswith(b"x")


def test_its_process_goes_on(tmp_path):
    """A real process that writes as fast as it can."""
    log = tmp_path / "worker-1.log"
    with log.open("ab") as file:
        writer = subprocess.Popen([sys.executable, "-c", WRITER], stdout=file)
    cuts = []

    def cut_twice() -> bool:
        before = os.stat(log).st_size
        trim_logs(tmp_path)
        cuts.extend([before] if os.stat(log).st_size < before else [])
        return len(cuts) >= 2

    try:
        until(cut_twice, 30)
        said = os.stat(log).st_size
        until(lambda: os.stat(log).st_size != said)
    finally:
        writer.kill()
        writer.wait()
    numbers = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("line ") and len(line) == 14]
    assert numbers[:500] == list(range(500)) and numbers[-1] > 4_000
    assert sum(after < before for before, after in pairwise(numbers)) <= len(cuts)  # lines written at the moment of a cut
    assert b"bytes were cut out here" in log.read_bytes() and b"\0" not in log.read_bytes()
