"""The part of vLLM's workers that is ours."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed import utils

from rl.inference import draw
from rl.inference.worker import WeightLoader


def test_workers_leave_the_processor_to_others_while_they_wait(monkeypatch):
    """Two that waited around sched_yield, one on each core, kept trainers whose memory they read
    from answering."""
    monkeypatch.setattr(utils, "USE_SCHED_YIELD", True)
    monkeypatch.setattr(draw, "speed_up", lambda runner: None)
    WeightLoader.prepare_cpu(SimpleNamespace(model_runner=None))
    monkeypatch.setattr(time, "sleep", (slept := []).append)
    utils.sched_yield()
    assert slept == [0]
