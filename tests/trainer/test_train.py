"""A micro batch on its way through the trainer, and the state that training starts from: which
masters have dither.
"""

import contextlib
import math
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoModelForCausalLM, Gemma3Config

from rl.config.trainer import TrainerConfig
from rl.models.tiny import make_tiny_model
from rl.run_dir.status import Status
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import fill_blocks
from rl.trainer.departure import Departure
from rl.trainer.loss.common import compute_loss
from rl.trainer.loss.losses import loss_function
from rl.trainer.measure.statistics import Statistics, TokenColumns
from rl.trainer.model import head
from rl.trainer.model.attention import attention
from rl.trainer.model.dither import dither
from rl.trainer.model.head import score
from rl.trainer.parallel.loading import load_rows
from rl.trainer.train import loss_inputs, start
from tests.families import CONFIGS, UNTIED
from tests.trainer.device import on_cpu
from tests.trainer.layouts import weights_of
from tests.trainer.model.test_policy import policy, rows_of
from tests.trainer.samples import (
    assert_equal,
    branching_batch,
    in_bfloat16,
    run_config,
    save_checkpoint,
    truncated,
)

ATEN = torch.ops.aten
WAITING = {
    ATEN._local_scalar_dense,
    ATEN.nonzero,
    ATEN.masked_select,
    ATEN.bincount,
    ATEN._unique2,
    ATEN.unique_dim,
    ATEN.unique_consecutive,
    ATEN.lift_fresh,
}
"""Operations for which a GPU's host waits: sizes or numbers that depend on values, and tensors
made of Python numbers."""


class Watch(TorchDispatchMode):
    """Notes the operations of a forward and backward pass for which the host of a GPU would
    wait."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = function.overloadpacket
        lists = [x for x in args[1:2] if isinstance(x, list | tuple)]
        by_mask = packet in (ATEN.index, ATEN.index_put, ATEN.index_put_) and any(
            i is not None and i.dtype == torch.bool for i in lists[0]
        )
        by_counts = packet is ATEN.repeat_interleave and (kwargs or {}).get("output_size") is None
        if packet in WAITING or by_mask or by_counts:
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def dense(query, key, value, tree, window, scale, cap=None, sinks=None):
    """In place of FlexAttention, which has no backward pass here; its mask is made all the same."""
    tree.flex(window)
    heads = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(heads, dim=1) for x in (key, value))
    return (
        scaled_dot_product_attention(query, keys, values, attn_mask=tree.dense(window), scale=scale)
        .transpose(1, 2)
        .contiguous()
    )


@on_cpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("loss", ["policy_gradient", "gspo"])
def test_nothing_in_a_micro_batch_waits_for_the_device(family, loss, world, tmp_path, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 4000)  # several chunks of the logits
    AttentionInterface.register("rl_watched", partial(attention, attend=dense))
    settings = TrainerConfig.model_validate({"loss": {"type": loss, "entropy_coefficient": 0.01}})
    model = policy(make_tiny_model(tmp_path / family, CONFIGS[family]), world)
    model.set_attn_implementation("rl_watched")
    samples = truncated(branching_batch())
    (row,) = rows_of(samples)
    tokens = TokenColumns(samples.num_loss_tokens, world.device, has_reference=False)
    statistics = Statistics(samples, world.device, tokens)
    with Watch() as watch, monkeypatch.context() as patch:
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, lambda tensor, *_, name=name: watch.seen.append(name))
        batch = fill_blocks(row, 1).to(world.device)
        scores = score(model, batch, world, entropy_gradient=True)
        terms = compute_loss(
            loss_inputs(batch, len(samples.samples), scores, world),
            settings.loss,
            loss_function(settings.loss),
        )
        total = (terms.loss * batch.weights).sum()
        total.backward()
        statistics.add(batch, total.detach(), scores, terms)
    assert watch.seen == []
    assert (
        torch.equal(tokens.values[1, batch.token_index], scores.trainer_logprobs.detach())
        and tokens.values[0].eq(1).all()
    )
    assert math.isfinite(statistics.total_loss(world)) and all(
        p.grad is not None for p in model.parameters()
    )


@pytest.fixture(scope="module")
def folder(tied_folder, tmp_path_factory):
    return in_bfloat16(tied_folder, tmp_path_factory.mktemp("model") / "bfloat16")


def started(root, folder, world, dtype="bfloat16", **trainer):
    """A run that is about to train random samples."""
    config = run_config(root, folder, 2, dtype, data={"fake": {}}, **trainer)
    status = Status(config.run_dir.status("trainer"), "trainer")
    found = start(config, world, str(folder), status, Departure())
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


def other_files(folder, target, change):
    """A copy of a model with other tensors in its file."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_tensors_that_no_part_of_the_model_uses_are_told(folder, world, tmp_path, monkeypatch):
    """Regression: only the trainer's log had them."""
    odd = other_files(folder, tmp_path / "odd", lambda t: t.update({"v.weight": torch.ones(2)}))
    told = []
    monkeypatch.setattr(Status, "warn", lambda _, warning: told.append(warning.text))
    started(tmp_path, odd, world)
    assert told == [f"{odd}: its model does not use v.weight, which no version will have"]


def test_a_model_without_its_head_is_refused_before_its_weights_are_read(tmp_path, monkeypatch):
    make_tiny_model(tmp_path / "whole", UNTIED)
    headless = other_files(tmp_path / "whole", tmp_path / "x", lambda t: t.pop("lm_head.weight"))
    monkeypatch.setattr("transformers.modeling_utils.convert_and_load_state_dict_in_model", None)
    with pytest.raises(RunError, match=r"x: its files lack lm_head\.weight, which LlamaFor"):
        load_rows(headless, None)


def test_a_head_that_only_the_whole_models_config_ties_is_not_missed(tmp_path):
    """Regression: it was refused, because the config of the text alone was asked."""
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = layers | {"vocab_size": 32, "hidden_size": 16, "num_key_value_heads": 1, "head_dim": 8}
    vision = layers | {"hidden_size": 16, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=text | {"tie_word_embeddings": False},
        vision_config=vision,
        mm_tokens_per_image=1,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_rows(tmp_path, None)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


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
    trainer.saver.copy(1, trainer.context.model, trainer.context.optimizer)()
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
