"""Rotary embeddings that depend on length: what a sample gets does not depend on its row, and is
what inference has."""

import pytest
import torch

from rl.models.tiny import make_tiny_model
from rl.system.errors import RunError
from rl.trainer.model.head import score
from rl.wire.messages import TrainBatch
from tests.families import CONFIGS
from tests.trainer.policies import learner
from tests.trainer.samples import make_sample, pack_alone


def scored(model, world, *samples):
    batch = TrainBatch(step=1, samples=list(samples))
    (row,) = pack_alone(batch).micro_batches
    return score(model, row, world).logprobs[row.sequences == 0]


def test_a_sample_does_not_depend_on_its_neighbours(world, tmp_path):
    """Up to 64 tokens this model has other frequencies in transformers than beyond; before they
    were frozen, a nat and more."""
    folder = make_tiny_model(tmp_path / "phi3", CONFIGS["phi3"])
    short, long = (
        make_sample(list(range(3, 23)), [30, 31, 32]),
        make_sample(list(range(3, 120)), [40, 41], group=1),
    )
    by_length = {}
    for max_model_len in (64, 512):
        model, _, _ = learner(folder, world, model={"max_model_len": max_model_len})
        alone = by_length[max_model_len] = scored(model, world, short)
        assert torch.allclose(scored(model, world, short, long), alone, atol=2e-5)
    assert (by_length[64] - by_length[512]).abs().max() > 0.1, (
        "the longest sequence that is served decides"
    )


def test_frequencies_are_those_of_inference(world, tmp_path):
    """Literal numbers of vLLM's formulas: 1 / (factor * base^(2i/d)), the scaling, and dynamic
    NTK's base at the length of its table."""
    phi3 = make_tiny_model(tmp_path / "phi3", CONFIGS["phi3"])
    for max_model_len, factors in ((64, (1.0, 1.0625)), (65, (2.0, 3.0))):
        model, _, _ = learner(phi3, world, model={"max_model_len": max_model_len})
        rope = model.model.rotary_emb
        assert rope.inv_freq[:2].tolist() == pytest.approx(
            [1 / factors[0], 1 / (factors[1] * 1e4 ** (2 / 32))]
        )
        assert rope.attention_scaling == pytest.approx(1.2909944)  # sqrt(1 + log 16 / log 64)
    dynamic = make_tiny_model(tmp_path / "dynamic", CONFIGS["llama_dynamic"])
    model, _, _ = learner(dynamic, world, model={"max_model_len": 1024})
    base = 1e4 * (4 * 1024 / 128 - 3) ** (32 / 30)
    assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(base ** (-2 / 32))


def test_lengths_without_frequencies_are_refused(world, tmp_path):
    """vLLM reads beyond the end of its table there: nan."""
    folder = make_tiny_model(tmp_path / "dynamic", CONFIGS["llama_dynamic"])
    with pytest.raises(RunError, match=r"set model\.max_model_len to at most 1024"):
        learner(folder, world, model={"max_model_len": 1025})
