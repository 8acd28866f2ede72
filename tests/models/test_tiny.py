"""The tiny model is a model: always the same, and transformers and its tokenizer load it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rl.models.tiny import make_tiny_model
from tests.families import CONFIGS


def test_the_tiny_model_is_always_the_same(tmp_path):
    one, other = (make_tiny_model(tmp_path / name) for name in "ab")
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }


def test_an_architecture_is_initialised_by_its_own_code_from_the_seed(tmp_path):
    """Its weights are large enough to differ visibly, and the random state of the caller stays."""
    state = torch.random.get_rng_state()
    one, other = (make_tiny_model(tmp_path / str(seed), CONFIGS["gpt2"], seed) for seed in (0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [
        load_file(folder / "model.safetensors")["transformer.wte.weight"] for folder in (one, other)
    ]
    assert weights[0].shape == (259, 64) and weights[0].std().item() == pytest.approx(0.2, rel=0.02)
    assert not torch.equal(*weights)
    assert json.loads((one / "config.json").read_text())["eos_token_id"] == 2
