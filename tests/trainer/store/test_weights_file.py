"""Tensors as a safetensors file."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rl.run_dir.safetensors import read_header, tensor_digests
from rl.trainer.store.weights_file import NAMES, write_weights


def test_every_type_and_shape_comes_back(tmp_path):
    bits = torch.arange(24, dtype=torch.uint8) % 2
    named = {f"of.{name}": bits.view(torch.uint8).to(dtype).reshape(2, 3, 4) for dtype, name in NAMES.items()}
    named |= {"turned": torch.arange(6.0).reshape(2, 3).T, "one": torch.tensor(7, dtype=torch.int16), "none": torch.empty(0, 5)}
    write_weights(tmp_path / "w.safetensors", named)
    found = load_file(tmp_path / "w.safetensors")
    assert (
        found.keys() == named.keys() == read_header(tmp_path / "w.safetensors").keys() == tensor_digests(tmp_path / "w.safetensors").keys()
    )
    for name, tensor in named.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].double().equal(tensor.double()), name
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_without_tensors_it_is_a_file_all_the_same(tmp_path):
    write_weights(tmp_path / "w.safetensors", {})
    assert load_file(tmp_path / "w.safetensors") == {}


def test_a_type_that_the_format_has_not_is_an_error(tmp_path):
    with pytest.raises(KeyError, match="complex64"):
        write_weights(tmp_path / "w.safetensors", {"a": torch.zeros(1, dtype=torch.complex64)})
