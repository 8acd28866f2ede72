"""The frozen reference: it scores as the model that it was loaded from, whatever the policy has
become; and the terms beside the loss."""

import json

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from rl.config.run import ModelConfig
from rl.models.folder import resolve_model
from rl.models.tiny import make_tiny_model
from rl.trainer.measure.performance import Timer
from rl.trainer.model.head import score
from rl.trainer.model.reference import load_reference, reference_logprobs
from rl.trainer.train import TrainContext, train_step
from tests.raised import run_error
from tests.trainer.policies import learner
from tests.trainer.samples import make_batch, pack_alone


def learner_of(folder, world, dtype="float32", lora=False, **loss):
    return learner(folder, world, dtype, {"max_model_len": 512}, lora=lora, loss=loss)


def packed_batch():
    batch = make_batch(1, groups=2)
    return pack_alone(batch, [1 / batch.num_loss_tokens] * len(batch.samples))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
def test_it_stays_what_the_policy_was(tied_folder, world, dtype, lora):
    policy, optimizer, config = learner_of(tied_folder, world, dtype, lora, kl_coefficient=1.0)
    reference = load_reference(config, str(tied_folder), policy, world)
    assert (reference is policy) == lora
    packed = packed_batch()
    (batch,) = packed.micro_batches
    first = reference_logprobs(reference, batch, world)
    assert not first.requires_grad and torch.equal(first, score(policy, batch, world).logprobs)
    steps = [
        train_step(
            TrainContext(policy, optimizer, config.trainer, world, reference), packed, 1e-2, Timer()
        )
        for _ in range(3)
    ]
    assert torch.equal(reference_logprobs(reference, batch, world), first)
    assert (score(policy, batch, world).logprobs - first).abs().max() > 0.01
    assert all(step["optim/grad_norm"] > 0 for step in steps)


def test_it_holds_the_weights_once_in_the_dtype_that_is_computed_in(tied_folder, world):
    policy, _, config = learner_of(tied_folder, world, "bfloat16", kl_coefficient=0.1)
    reference = load_reference(config, str(tied_folder), policy, world)
    reference_logprobs(reference, packed_batch().micro_batches[0], world)
    parameters = list(reference.parameters())
    assert {p.dtype for p in parameters} == {torch.bfloat16} and not any(
        p.requires_grad for p in parameters
    )
    groups = [
        module._get_fsdp_state()._fsdp_param_group
        for module in reference.modules()
        if isinstance(module, FSDPModule)
    ]
    assert len(groups) == 3 and all(group.is_sharded for group in groups if group)


def test_another_model_as_reference_needs_no_chat_template(tied_folder, world, tmp_path):
    """It scores tokens. The remedy that was given, model.chat_template, would have replaced the
    policy's."""
    other = make_tiny_model(tmp_path / "other", seed=1)
    (other / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    with run_error("has no chat template"):
        resolve_model(ModelConfig(name=str(other)))
    policy, _, config = learner_of(
        tied_folder, world, lora=True, kl_coefficient=0.1, kl_reference=str(other)
    )
    reference = load_reference(config, str(tied_folder), policy, world)
    (batch,) = packed_batch().micro_batches
    alone, _, _ = learner_of(other, world)
    assert torch.equal(
        reference_logprobs(reference, batch, world), score(alone, batch, world).logprobs
    )
    assert not torch.equal(
        reference_logprobs(reference, batch, world), score(policy, batch, world).logprobs
    )


def test_what_cannot_be_a_reference(tied_folder, world):
    policy, _, config = learner_of(tied_folder, world, kl_coefficient=0.1)
    config.trainer.loss.kl_reference = "/nowhere"
    with run_error(r"trainer\.loss\.kl_reference: .*no such folder; give an existing one"):
        load_reference(config, str(tied_folder), policy, world)
    config.trainer.loss.kl_reference = None
    policy.config.vocab_size += 1
    with run_error(r"trainer\.loss\.kl_reference: .* has another vocabulary than .*same token ids"):
        load_reference(config, str(tied_folder), policy, world)
