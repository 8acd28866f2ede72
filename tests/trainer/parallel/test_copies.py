"""A single rank's weights beside those that FSDP would hold: the same bits."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from rl.models.tiny import make_tiny_model
from rl.trainer.parallel.copies import copies_of
from rl.trainer.parallel.sharding import compute_in, reshard, shard_model, untied_blocks
from tests.families import CONFIGS


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def by_fsdp(folder, world, dtype):
    model = load(folder)
    precision = MixedPrecisionPolicy(param_dtype=dtype)
    for block in [*untied_blocks(model), model]:
        fully_shard(block, mesh=world.mesh, mp_policy=precision, reshard_after_forward=False)
    return model


def by_copies(folder, world, dtype, recomputed=False):
    model = load(folder)
    shard_model(model, dtype, world)
    for layer in model.model.layers if recomputed else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def step(model, optimizer):
    """One optimizer step on two micro batches; the loss of each."""
    losses = []
    for number in range(2):
        torch.manual_seed(number)
        ids = torch.randint(250, (2, 17))
        logprobs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        loss = -logprobs[:, :-1].gather(-1, ids[:, 1:, None]).mean()
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def weights(model):
    """Whole, by name."""
    return {
        name: getattr(parameter, "full_tensor", lambda x=parameter: x)().detach()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recomputed", [False, True])
def test_steps_have_the_bits_of_fsdp(world, tmp_path, family, dtype, recomputed):
    folder = make_tiny_model(tmp_path / family, CONFIGS[family])
    models = [by_fsdp(folder, world, dtype), by_copies(folder, world, dtype, recomputed)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in models]
    before = weights(load(folder))
    for _ in range(3):
        expected, found = (step(*each) for each in zip(models, optimizers, strict=True))
        assert found == expected
    expected, found = map(weights, models)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert not any(torch.equal(found[name], before[name]) for name in before)


def test_masters_are_back_after_each_pass(world, tmp_path):
    """Also after one that failed, and copies of a test do not stay."""
    model = by_copies(make_tiny_model(tmp_path / "llama", None), world, torch.bfloat16)
    masters, ids = list(model.parameters()), torch.arange(9)[None]
    with torch.no_grad():
        assert model(input_ids=ids).logits.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    reshard(model)
    assert all(a is b for a, b in zip(model.parameters(), masters, strict=True))
    model(input_ids=ids).logits.sum().backward()
    assert all(a is b for a, b in zip(model.parameters(), masters, strict=True))
    assert all(master.grad.dtype == torch.float32 for master in masters)
    with pytest.raises(IndexError), torch.no_grad():
        model(input_ids=ids + 10**6)
    compute_in(model, torch.float64, is_test=True)
    assert all(a is b for a, b in zip(model.parameters(), masters, strict=True))
    with torch.no_grad():
        assert model(input_ids=ids).logits.dtype == torch.float64
    assert not any(copies.by_master for copies in copies_of(model))


def test_a_pass_after_a_failed_one_has_the_weights_of_now(world, tmp_path):
    model = by_copies(make_tiny_model(tmp_path / "llama", None), world, torch.bfloat16)
    masters, ids = list(model.parameters()), torch.arange(9)[None]
    model.model.layers[1].mlp.register_forward_hook(fail := Fail())
    with pytest.raises(ArithmeticError):
        model(input_ids=ids)
    fail.fails = False
    with torch.no_grad():
        for master in masters:
            master.mul_(0.5)
    found = model(input_ids=ids).logits
    compute_in(model, torch.bfloat16)  # forgets all copies
    assert torch.equal(model(input_ids=ids).logits, found)


def test_blocks_that_no_gradient_reaches_leave_too(world, tmp_path):
    model = by_copies(make_tiny_model(tmp_path / "llama", None), world, torch.bfloat16)
    masters = list(model.parameters())
    model.model.layers[1].register_forward_hook(lambda layer, inputs, _: inputs[0])
    model(input_ids=torch.arange(9)[None]).logits.sum().backward()
    assert all(a is b for a, b in zip(model.parameters(), masters, strict=True))
    reached = [name for name, weight in model.named_parameters() if weight.grad is not None]
    assert 0 < len(reached) < len(masters) and not any("layers.1." in name for name in reached)


class Fail:
    fails = True

    def __call__(self, *_):
        if self.fails:
            raise ArithmeticError
