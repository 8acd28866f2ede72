"""A micro batch on its way through the trainer."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from rl.config.trainer import TrainerConfig
from rl.models.tiny import make_tiny_model
from rl.trainer.data.micro_batch import fill_blocks
from rl.trainer.loss.common import compute_loss
from rl.trainer.loss.losses import loss_function
from rl.trainer.measure.statistics import Statistics
from rl.trainer.measure.tokens import TokenColumns
from rl.trainer.model import logprobs
from rl.trainer.model.attention import attention
from rl.trainer.model.head import score
from rl.trainer.train import loss_inputs
from tests.families import CONFIGS
from tests.trainer.device import on_cpu
from tests.trainer.model.test_policy import policy, rows_of
from tests.trainer.samples import branching_batch

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
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 4000)  # several chunks of the logits
    AttentionInterface.register("rl_watched", partial(attention, attend=dense))
    settings = TrainerConfig.model_validate({"loss": {"type": loss, "entropy_coefficient": 0.01}})
    model = policy(make_tiny_model(tmp_path / family, CONFIGS[family]), world)
    model.set_attn_implementation("rl_watched")
    samples = branching_batch()
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
        torch.equal(tokens.values[1, batch.token_index], scores.logprobs.detach())
        and tokens.values[0].eq(1).all()
    )
    assert math.isfinite(statistics.total_loss(world)) and all(
        p.grad is not None for p in model.parameters()
    )
