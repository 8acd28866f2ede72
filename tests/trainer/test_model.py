"""The packed model against the plain one, and against itself: values, gradients, and what it does not depend on."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.config import ModelConfig
from rl.models import ModelError
from rl.trainer import weights
from rl.trainer.config import LossConfig, TrainerConfig
from rl.trainer.loss import policy_gradient_loss
from rl.trainer.model import check_attention, load_policy, score
from rl.trainer.optim import gradient_norm, make_optimizer
from rl.trainer.packing import pack
from rl.trainer.train import NotFiniteError, Timer, train_step
from tests.trainer.samples import make_batch, make_sample

HIDDEN = 64


def policy(folder, world, dtype="float32", attention="sdpa", checkpointing=False):
    return load_policy(str(folder), ModelConfig(dtype=dtype), attention, checkpointing, world)


def backward(model, samples, max_tokens):
    """Gradient norm, gradients by name and {(group, token, advantage): logprob} of the policy loss of `samples`."""
    scored = {}
    for batch in pack(samples, 0, 1, max_tokens, HIDDEN).micro_batches:
        logprobs, _ = score(model, batch)
        policy_gradient_loss(logprobs, batch.logprobs, batch.advantages, LossConfig())[0].backward()
        scored |= dict(zip(zip(batch.targets.tolist(), batch.advantages.tolist(), strict=True), logprobs.tolist(), strict=True))
    gradients = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return gradients, scored


def reference(folder, samples):
    """The same one sample at a time, in plain transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scored = {}
    for sample in samples:
        logits = model(torch.tensor([sample.token_ids])).logits[0, :-1] / sample.temperature
        logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(sample.token_ids[1:])[:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask[1:])
        sampler, advantages = torch.tensor(sample.logprobs[1:]), torch.tensor(sample.advantages[1:])
        ratio = (logprobs.detach() - sampler).exp()
        weights = torch.where(mask & (ratio >= 0.125) & (ratio <= 8), ratio.clamp(max=2.0), 0.0)
        (-(weights * advantages * logprobs).sum()).backward()
        for t, a, p in zip(sample.token_ids[1:], advantages.tolist(), logprobs.tolist(), strict=True):
            scored[t, a] = p
    return {name: p.grad for name, p in model.named_parameters()}, scored


def assert_close(gradients, expected, tolerance):
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= tolerance * expected[name].norm().clamp(min=1e-3), name


def samples_with_everything():
    """Groups, two turns, another temperature, a sample that repeats another, one of a prompt alone."""
    samples = make_batch(5, groups=3).samples
    samples += [make_sample([5, 6, 7, 8], [9, 10, 11], group=9, rollout=i, advantage=0.25 + i, logprobs=[-6.0] * 7) for i in range(2)]
    samples += [make_sample([5, 6, 7, 8], [9, 20, 21], group=9, rollout=3, advantage=-0.5, logprobs=[-6.0] * 7, temperature=0.7)]
    two_turns = make_sample(list(range(30, 50)), [3, 4], group=10, advantage=0.125, logprobs=[-6.0] * 22)
    two_turns.loss_mask[10:12] = [True, True]
    two_turns.advantages[10:12] = [0.0625, 0.0625]
    return [*samples, two_turns]


def test_packed_trees_equal_single_samples(model_folder, world):
    samples = samples_with_everything()
    model = policy(model_folder, world)
    gradients, scored = backward(model, samples, 4096)
    expected_gradients, expected = reference(model_folder, samples)
    assert len(scored) > 50
    assert all(abs(scored[key] - expected[key]) < 1e-5 for key in scored)
    assert_close(gradients, expected_gradients, 1e-5)


@pytest.mark.parametrize("variant", [{"attention": "eager"}, {"checkpointing": True}])
def test_variants_compute_the_same(tied_folder, world, variant):
    samples = samples_with_everything()
    expected, _ = backward(policy(tied_folder, world), samples, 4096)
    assert_close(backward(policy(tied_folder, world, **variant), samples, 4096)[0], expected, 1e-5)


def test_one_large_equals_many_micro_batches(tied_folder, world):
    samples = make_batch(2, groups=6).samples
    model = policy(tied_folder, world)
    assert len(pack(samples, 0, 1, 30, HIDDEN).micro_batches) > 4
    assert_close(backward(model, samples, 30)[0], backward(model, samples, 4096)[0], 1e-5)


def test_own_logprobs_give_ratio_one(model_folder, world):
    model = policy(model_folder, world)
    samples = [s for s in make_batch(3).samples if s.group_id == 0]
    (batch,) = pack(samples, 0, 1, 4096, HIDDEN).micro_batches
    batch.logprobs = score(model, batch)[0].detach()
    _, stats = policy_gradient_loss(score(model, batch)[0], batch.logprobs, batch.advantages, LossConfig())
    assert stats.mismatch_kl.item() == 0.0 and stats.ratio.item() == len(batch.targets) and stats.masked.item() == 0


def test_bfloat16_computes_as_bfloat16_weights_do(tied_folder, world):
    """FSDP's mixed precision is the computation of inference: bfloat16 weights, not autocast."""
    samples = [make_sample([5, 6, 7, 8], [9, 10, 11])]
    (batch,) = pack(samples, 0, 1, 4096, HIDDEN).micro_batches
    plain = AutoModelForCausalLM.from_pretrained(tied_folder, dtype=torch.bfloat16)
    logits = plain(batch.input_ids).logits[0, 3:].float()
    expected = torch.log_softmax(logits, -1).gather(-1, batch.targets[:, None])[:, 0]
    assert torch.allclose(score(policy(tied_folder, world, "bfloat16"), batch)[0], expected, atol=1e-6)


def test_published_weights_load_in_transformers(model_folder, world, tmp_path):
    model = policy(model_folder, world)
    weights.publish(model, tmp_path / "000001", model_folder, torch.float32, world)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    published, base = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (tmp_path / "000001", model_folder))
    assert torch.equal(published(ids).logits, base(ids).logits)
    assert published.config.tie_word_embeddings == base.config.tie_word_embeddings


def step(model, optimizer, samples, world):
    packed = pack(samples, 0, 1, 4096, HIDDEN)
    tokens = sum(sum(s.loss_mask) for s in samples)
    return train_step(model, optimizer, packed.micro_batches, tokens, 1e-2, TrainerConfig(), world, Timer())


def test_a_step_raises_what_was_good(tied_folder, world):
    model = policy(tied_folder, world)
    optimizer = make_optimizer(model, TrainerConfig().optim)
    samples = [
        make_sample([5, 6], [7], advantage=1.0, logprobs=[0, 0, -5.5]),
        make_sample([5, 6], [8], advantage=-1.0, logprobs=[0, 0, -5.5]),
    ]
    (batch,) = pack(samples, 0, 1, 4096, HIDDEN).micro_batches
    before = score(model, batch)[0].detach()
    metrics = step(model, optimizer, samples, world)
    after = score(model, batch)[0].detach()
    assert after[0] > before[0] and after[1] < before[1]
    assert metrics["optim/grad_norm"] > 0 and metrics["optim/lr"] == 1e-2 and 0 < metrics["entropy/mean"] < 5.6
    assert gradient_norm(model.parameters()) == 0 or all(p.grad is None for p in model.parameters())


def test_a_loss_that_is_not_finite_changes_nothing(tied_folder, world):
    model = policy(tied_folder, world)
    optimizer = make_optimizer(model, TrainerConfig().optim)
    before = [p.full_tensor().clone() for p in model.parameters()]
    with pytest.raises(NotFiniteError, match="nan"):
        step(model, optimizer, [make_sample([5, 6], [7], advantage=float("nan"), logprobs=[0, 0, -5.5])], world)
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))


def test_attention_that_trees_do_not_describe_is_refused(tied_folder):
    model = AutoModelForCausalLM.from_pretrained(tied_folder)
    check_attention(model, 512)
    model.config.sliding_window = 256
    check_attention(model, 256)
    with pytest.raises(ModelError, match=r"slides over 256 tokens; set model.max_model_len to 256"):
        check_attention(model, 512)
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match="linear_attention"):
        check_attention(model, 512)
