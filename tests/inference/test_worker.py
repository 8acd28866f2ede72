"""The part of vLLM's workers that is ours."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed import utils
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

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


def test_a_gpus_runner_gives_no_ids_where_truncation_left_all(monkeypatch):
    """Regression: for a request that truncates nothing it gave the whole vocabulary at each token.
    Sets beyond its 2,048 columns come as bits; a step has up to two tokens of a request here."""
    monkeypatch.setattr(SamplingMaskTensors, "tolists", SamplingMaskTensors.tolists)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    WeightLoader.begin(SimpleNamespace(), 0, "another host", 1)
    vocabulary, width = 4001, 2048
    bits = np.arange(vocabulary) % 4 != 0  # 3,000 ids
    with torch.inference_mode():
        masks = SamplingMaskTensors(
            torch.arange(width, dtype=torch.int32).repeat(6, 1),
            torch.from_numpy(np.packbits(bits, bitorder="little")).repeat(6, 1),
            torch.tensor([vocabulary, 3, 3000, 0, vocabulary, 1], dtype=torch.int32),
            vocabulary,
            rows_per_request=2,
        )
    step = masks.tolists(np.array([2, 1, 2]))
    sets = [step.slice_request(i, n).to_nested_list() for i, n in enumerate((2, 1, 2))]
    assert sets == [[[], [0, 1, 2]], [np.flatnonzero(bits).tolist()], [[], [0]]]
