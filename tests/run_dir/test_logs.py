"""A log keeps its beginning and its end, whatever its process writes; and what is read from it."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest

from rl.run_dir import logs
from rl.run_dir.logs import killed_rank, last_lines, last_words, trim, trim_logs
from tests.waiting import until

WRITER = (
    "import itertools, sys\nfor i in itertools.count():\n    print(f'line {i:09d}', flush=True)"
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 64_000)
    monkeypatch.setattr(logs, "FIRST_BYTES", 8_000)
    monkeypatch.setattr(logs, "NEWEST_BYTES", 24_000)


@pytest.mark.parametrize("prefix", ["(EngineCore pid=7) ", ""])
def test_the_last_words_are_no_routine(tmp_path, prefix):
    """Regression: `saying: INFO 11-29 04:39:28 [core.py:1] Added request` was the reason of a
    death."""
    log = tmp_path / "inference-1.log"
    routine = (
        f'{prefix}INFO 11-29 04:39:28 [core.py:1] Added request\nINFO:     127.0.0.1:5 - "GET '
        '/health HTTP/1.1" 200 OK\n'
    )
    log.write_text(f"ValueError: no room\n{routine}")
    assert last_words(log) == "ValueError: no room"
    log.write_text(routine)
    assert last_words(log) == ""


def test_the_middle_is_cut_out(tmp_path):
    log = tmp_path / "trainer-1.log"
    lines = [f"line {i:09d}" for i in range(10_000)]
    log.write_text("\n".join(lines) + "\n")
    trim_logs([log])
    kept = log.read_text().splitlines()
    first, newest = 8_000 // 15, 24_000 // 15 - 1
    cut = 150_000 - 15 * (first + newest)
    assert kept == [
        *lines[:first],
        f"[rl: {cut} bytes were cut out here; a log keeps its beginning and its end]",
        *lines[-newest:],
    ]
    before = log.read_bytes()
    trim_logs([log])  # it is short enough now
    trim_logs([tmp_path / "nowhere.log"])
    assert log.read_bytes() == before and last_lines(log, 1) == ["line 000009999"]


def test_one_line_without_end(tmp_path):
    log = tmp_path / "trainer-1.log"
    log.write_bytes(b"x" * 100_000)
    trim(log)
    assert log.stat().st_size < 40_000
    assert log.read_bytes().startswith(b"x" * 8_000)
    assert log.read_bytes().endswith(b"x")


def test_its_process_goes_on(tmp_path):
    """A real process that writes as fast as it can."""
    log = tmp_path / "worker-1.log"
    with log.open("ab") as file:
        writer = subprocess.Popen([sys.executable, "-c", WRITER], stdout=file)
    cuts = []

    def cut_twice():
        before = os.stat(log).st_size
        trim_logs([log])
        cuts.extend([before] if os.stat(log).st_size < before else [])
        return len(cuts) >= 2

    try:
        until(cut_twice, 30)
        said = os.stat(log).st_size
        until(lambda: os.stat(log).st_size != said)
    finally:
        writer.kill()
        writer.wait()
    numbers = [
        int(line.split()[1])
        for line in log.read_text().splitlines()
        if line.startswith("line ") and len(line) == 14
    ]
    assert numbers[:500] == list(range(500)) and numbers[-1] > 4_000
    # lines written at the moment of a cut
    assert sum(after < before for before, after in pairwise(numbers)) <= len(cuts)
    assert b"bytes were cut out here" in log.read_bytes() and b"\0" not in log.read_bytes()


REPORT = """
trainer: rank 0 on a has lost rank 1 on a, training step 3
W1125 23:19:10.4 26570 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 26575 closing signal SIGTERM
E1125 23:19:10.5 26570 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 26576)
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : 143 (pid: 26575)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 26576)  (SIGKILL)
"""


def test_torchruns_report_names_the_rank_that_a_signal_has_ended_and_is_not_the_last_word(tmp_path):
    log = tmp_path / "trainer-1.log"
    log.write_text(REPORT)
    assert killed_rank(log) == " because SIGKILL ended rank 1"
    assert last_words(log) == "trainer: rank 0 on a has lost rank 1 on a, training step 3"
    log.write_text(REPORT.replace("-9 (pid: 26576)  (SIGKILL)", "1 (pid: 26576)"))
    assert killed_rank(log) == killed_rank(tmp_path / "none") == ""
