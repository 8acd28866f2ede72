"""The state that training starts from: which masters have dither."""

import contextlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl.run_dir.status import Status
from rl.system.errors import RunError
from rl.trainer.model.dither import dither
from rl.trainer.start import start
from tests.trainer.layouts import weights_of
from tests.trainer.samples import assert_equal, in_bfloat16, run_config, save_checkpoint


@pytest.fixture(scope="module")
def folder(tied_folder, tmp_path_factory):
    return in_bfloat16(tied_folder, tmp_path_factory.mktemp("model") / "bfloat16")


def started(root, folder, world, dtype="bfloat16", **trainer):
    """A run that is about to train random samples."""
    config = run_config(root, folder, 2, dtype, data={"fake": {}}, **trainer)
    status = Status(config.run_dir.status("trainer"), "trainer")
    found = start(config, world, str(folder), status)
    status.close()
    return found


def test_masters_of_a_run_in_bfloat16_begin_with_dither_and_those_of_a_checkpoint_remain(
    folder, world, tmp_path
):
    trainer = started(tmp_path, folder, world)
    run_dir, context = trainer.config.run_dir, trainer.context
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    dither(plain, 0)
    expected, file = dict(plain.named_parameters()), load_file(folder / "model.safetensors")
    weights = weights_of(context.model)
    assert weights.keys() == expected.keys() and len(weights) > 10
    for name, weight in weights.items():
        assert weight.equal(expected[name]) and weight.bfloat16().equal(file[name]), name
        assert (weight != file[name].float()).float().mean() > 0.99, name
    for parameter in context.model.parameters():
        parameter.data.copy_(parameter.data.bfloat16() * 2)
    save_checkpoint(run_dir.checkpoints / "000001", 1, context.model, context.optimizer, world)
    for name, weight in weights_of(started(tmp_path, folder, world).context.model).items():
        assert weight.equal(file[name].float() * 2), name


@pytest.mark.parametrize(
    ("settings", "needed"),
    [({"lora": {"rank": 2}}, True), ({"loss": {"kl_coefficient": 0.1}}, True), ({}, False)],
)
def test_a_run_that_needs_its_base_does_not_go_on_with_another(
    folder, world, tmp_path, settings, needed
):
    """Checkpoints lack the base of adapters and of the KL term; files of the same shapes took
    its place in silence."""
    base = shutil.copytree(folder, tmp_path / "base")
    trainer = started(tmp_path, base, world, **settings)
    trainer.saver.save(1, trainer.context.model, trainer.context.optimizer)
    trainer.saver.finish()
    assert started(tmp_path, base, world, **settings).step == 1
    file = base / "model.safetensors"
    save_file(
        {name: tensor * 2 for name, tensor in load_file(file).items()}, file, {"format": "pt"}
    )
    with (
        pytest.raises(RunError, match=r"beside other files of model\.name's weights")
        if needed
        else contextlib.nullcontext()
    ):
        started(tmp_path, base, world, **settings)


def test_masters_of_a_run_in_float32_and_the_base_of_adapters_have_none(folder, world, tmp_path):
    file = load_file(folder / "model.safetensors")
    whole = weights_of(started(tmp_path / "whole", folder, world, "float32").context.model)
    assert_equal(whole, {name: tensor.float() for name, tensor in file.items()})
    base = weights_of(started(tmp_path / "adapters", folder, world, lora={"rank": 2}).context.model)
    frozen = {
        name.replace(".base_layer", ""): weight
        for name, weight in base.items()
        if ".lora_" not in name
    }
    assert_equal(frozen, file)
