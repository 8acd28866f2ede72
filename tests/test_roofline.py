import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from scripts.benchmarks import pause, roofline
from scripts.benchmarks.roofline import Laps, Load, Phase, by_kind, covered


def test_time_in_which_anybody_computes_is_counted_once():
    spans = [SimpleNamespace(begin=begin, end=end) for begin, end in ((5.0, 7.0), (1.0, 3.0), (2.0, 2.5), (6.5, 9.0), (11.0, 12.0))]
    assert covered(spans, 0.0, 20.0) == pytest.approx(2.0 + 4.0 + 1.0)
    assert covered(spans, 2.0, 8.0) == pytest.approx(1.0 + 3.0)
    assert covered(spans, 3.0, 5.0) == 0.0


def test_steps_are_told_apart_by_their_tokens():
    """Two steps for the prompts, then one token for each of four rollouts, three times."""
    steps = [{"all": 5.0, "model": 4.0}, {"all": 2.0, "model": 1.0}, *({"all": x, "model": 0.5, "sampler": 0.2} for x in (0.9, 1.0, 3.0))]
    found = by_kind(steps, [30, 10, 4, 4, 4], Load(rollouts=4, group=2, prompt=20, new=4))
    assert found["prefill"] == {"all": 7.0, "model": 5.0, "sampler": 0.0}
    assert found["decode step"] == {"all": 1.0, "model": 0.5, "sampler": 0.2}


def test_a_line_names_the_largest_owner_first():
    line = Phase("decode step", 0.02, 0.08, {"sampler": 0.01, "model": 0.05}).line()
    assert line.split() == ["decode", "step", "20.0", "ms", "80.0", "ms", "0.25", "model", "50.0", "ms,", "sampler", "10.0", "ms"]
    assert Load(rollouts=64, group=8, prompt=44, new=16).trained == 8 * 44 + 64 * 16


def test_a_call_inside_another_one_counts_once(monkeypatch):
    """vLLM's runner for GPUs computes the logits while it samples."""
    clock, laps = [0.0], Laps(gpu=False)
    monkeypatch.setattr(laps, "now", lambda: clock[0])

    def takes(seconds, inner=None):
        def call():
            clock[0] += seconds
            return inner and inner.logits()

        return call

    model = SimpleNamespace(logits=takes(2.0))
    runner = SimpleNamespace(execute=takes(5.0), sample=takes(1.0, model))
    for owner, method, name in ((runner, "execute", "model"), (model, "logits", "model"), (runner, "sample", "sampler")):
        laps.watch(owner, method, name)
    laps.steps.append({})
    runner.execute()
    runner.sample()
    assert laps.steps == [{"model": 7.0, "sampler": 1.0}]


def test_the_server_alone_is_started_as_the_benchmark_of_pauses_starts_it(monkeypatch):
    """It left out an argument that was added there, and ended with a TypeError after two minutes."""
    process = SimpleNamespace(pid=1, wait=lambda: None)
    start = mock.create_autospec(pause.start_server, return_value=(process, "http://127.0.0.1:1"))
    monkeypatch.setattr(pause, "start_server", start)
    monkeypatch.setattr(os, "killpg", lambda pid, signum: None)

    async def ask(url, headers, load, rounds):
        return [3.0]

    monkeypatch.setattr(roofline, "ask", ask)
    found = roofline.server_alone("model", Load(8, 4, 44, 4), "bfloat16", 2, {"this": Path("."), "against": Path("x")})
    assert found == {"this": 3.0, "against": 3.0} and start.call_count == 2
