"""The packed model against the plain one, and against itself: values, gradients, and what it does
not depend on. The frozen reference: it scores as the model that it was loaded from, whatever the
policy has become; and the terms beside the loss. Rotary embeddings that depend on length: what a
sample gets does not depend on its row, and is what inference has.
"""

import json
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rl.config.loss import PolicyGradientConfig
from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.models.folder import resolve_model
from rl.models.tiny import make_tiny_model
from rl.system.errors import RESTART, RunError
from rl.trainer.data.batch_sources import prepare
from rl.trainer.data.micro_batch import fill_blocks
from rl.trainer.data.packing import Packed
from rl.trainer.measure.parity import ParityWatch
from rl.trainer.measure.performance import Timer
from rl.trainer.model import head
from rl.trainer.model.head import score
from rl.trainer.model.lora import trainable
from rl.trainer.model.modes import layer_windows
from rl.trainer.model.policy import load_reference, reference_logprobs
from rl.trainer.optim import local, make_optimizer
from rl.trainer.parallel.copies import copies_of
from rl.trainer.train import TrainContext, train_step
from rl.wire.messages import TrainBatch
from rl.wire.parity import LIMITS
from tests.bounds import OPERATIONS, rounding
from tests.families import CONFIGS, SIZES
from tests.raised import run_error
from tests.trainer.device import DEVICE, on_cpu
from tests.trainer.layouts import gradients_of, weights_of
from tests.trainer.policies import learner
from tests.trainer.samples import (
    assert_equal,
    branching_batch,
    make_batch,
    make_sample,
    pack_alone,
    plain_scores,
    truncated,
    with_kept,
)

ENTROPY = 0.1
"""What the entropies count in these tests' objective, beside advantage times log-probability."""


def policy(folder, world, dtype="float32", **settings):
    return learner(folder, world, dtype, **settings)[0]


def rows_of(batch, max_tokens=4096):
    """Rows on the device, on a GPU with whole blocks, as FlexAttention gets them."""
    rows = pack_alone(batch, max_tokens=max_tokens).micro_batches
    return [(row if DEVICE.type == "cpu" else fill_blocks(row, 1)).to(DEVICE) for row in rows]


def backward(model, world, batch, max_tokens=4096):
    """Gradients by name, and {(sample, its n-th loss token): (log-probability, entropy)}."""
    scored = {}
    for row in rows_of(batch, max_tokens):
        scores = score(model, row, world, entropy_gradient=True)
        (row.advantages * scores.trainer_logprobs + ENTROPY * scores.entropies).sum().backward()
        for n, place in enumerate(row.sequences.tolist()):
            depth = int(row.position_ids[row.predictors[row.predictor_of[n]]])
            scored[place, depth + 1] = (
                scores.trainer_logprobs[n].item(),
                scores.entropies[n].item(),
            )
    gradients = gradients_of(model)
    model.zero_grad()
    return gradients, scored


def reference(folder, batch):
    """The same one sample at a time, in plain transformers and torch."""
    return scored_alone(
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval(),
        batch,
    )


def scored_alone(model, batch):
    scored = {}
    for place, sample in enumerate(batch.samples):
        logprobs, entropies = plain_scores(model, sample)
        (torch.tensor(sample.advantages) * logprobs + ENTROPY * entropies).sum().backward()
        for t, *values in zip(
            sample.trained.tolist(), logprobs.tolist(), entropies.tolist(), strict=True
        ):
            scored[place, t] = tuple(values)
    return gradients_of(model), scored


def assert_same(found, expected, operations=OPERATIONS):
    """`operations`: roundings by which two computations may differ, of the largest
    log-probability and of a gradient's norm."""
    gradients, scored = found
    tolerance = rounding(operations)
    largest = max(abs(value) for values in expected[1].values() for value in values)
    assert gradients.keys() == expected[0].keys() and scored.keys() == expected[1].keys()
    for key, values in scored.items():
        assert values == pytest.approx(expected[1][key], abs=tolerance * largest), key
    for name, gradient in gradients.items():
        assert (gradient - expected[0][name]).norm() <= tolerance * expected[0][name].norm().clamp(
            min=1e-3
        ), name


VARIANTS = [
    {"attention": "eager"},
    {"activation_checkpointing": "full"},
    pytest.param({"compile": True}, marks=pytest.mark.proof),
    pytest.param({"compile": True, "activation_checkpointing": "full"}, marks=pytest.mark.proof),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_variants_compute_the_same(tied_folder, world, variant):
    batch = branching_batch()
    # the same operations again, or in another order
    operations = 8 if variant.keys() == {"activation_checkpointing"} else OPERATIONS
    assert_same(
        backward(policy(tied_folder, world, **variant), world, batch),
        backward(policy(tied_folder, world), world, batch),
        operations,
    )


@pytest.mark.proof
def test_experts_stay_out_of_the_graph_of_their_compiled_layer(world, tmp_path, caplog):
    """In float32 torch could not compile the loop that transformers puts in a graph, and went on
    uncompiled with pages of warnings."""
    folder = make_tiny_model(tmp_path / "experts", CONFIGS["qwen3_moe"])
    compiled = backward(policy(folder, world, compile=True), world, branching_batch())
    assert "Backend compiler exception" not in caplog.text
    assert_same(compiled, backward(policy(folder, world), world, branching_batch()))


def test_command_models_have_the_windows_that_inference_has(world, tmp_path):
    """One token more than transformers': 2e-2 nats off vLLM at the tokens behind the first
    window before."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    folder = make_tiny_model(tmp_path / "cohere2", SIZES | {"model_type": "cohere2"} | kinds)
    model = policy(folder, world)
    windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert windows == layer_windows(model) == [5, None]


@on_cpu
@pytest.mark.parametrize("variant", ["whole", "slices", "capped", "lora"])
def test_truncated_tokens_have_the_distribution_that_they_were_drawn_from(
    world, tmp_path, monkeypatch, variant
):
    """Trees whose samples share predictors, some with sets and some without, against logits in
    which all other ids are -inf."""
    if variant == "slices":
        monkeypatch.setattr(head, "SLICE_BYTES", 24 * 300 * 4)
        monkeypatch.setattr(head, "CHUNK_ELEMENTS", 7 * 300)
    capped = {"final_logit_softcapping": 3.0} if variant == "capped" else {}
    folder = make_tiny_model(tmp_path / "model", CONFIGS["gemma3"] | capped)
    batch = truncated(branching_batch())
    if variant != "lora":
        assert_same(backward(policy(folder, world), world, batch), reference(folder, batch))
        return
    models = [policy(folder, world, attention=mode, lora=True) for mode in ("auto", "unpacked")]
    for model in models:
        torch.manual_seed(0)
        for parameter in trainable(model).values():
            torch.nn.init.normal_(local(parameter.detach()), std=0.1)
    assert_same(backward(models[0], world, batch), scored_alone(models[1], batch))


def test_models_that_change_their_logits_are_scored_from_logits(world, tmp_path):
    folder = make_tiny_model(
        tmp_path / "gemma3", CONFIGS["gemma3"] | {"final_logit_softcapping": 3.0}
    )
    model = policy(folder, world)
    assert_same(backward(model, world, branching_batch()), reference(folder, branching_batch()))
    assert not model.get_output_embeddings().forward.fused


def test_the_pass_that_finds_changed_logits_is_forgotten_before_the_next(
    world, tmp_path, monkeypatch
):
    """The activations of both were in memory at once, which a GPU may lack."""
    folder = make_tiny_model(
        tmp_path / "gemma3", CONFIGS["gemma3"] | {"final_logit_softcapping": 3.0}
    )
    outputs, alive, call = [], [], head.call

    def noted(*args):
        alive.append(sum(output() is not None for output in outputs))
        output = call(*args)
        outputs.append(weakref.ref(output))
        return output

    model = policy(folder, world)
    model.get_output_embeddings().forward.fused = True  # the test at the start has found it out
    monkeypatch.setattr(head, "call", noted)
    (row,) = rows_of(make_batch(1))
    score(model, row, world)
    assert alive == [0, 0]


def products_and_attentions(folder, world, kind):
    """How many matrix products and attentions of the layers a forward and backward pass takes."""
    model = policy(folder, world, activation_checkpointing=kind)
    (row,) = rows_of(make_batch(1))
    kept = (torch.ops.aten.mm.default, torch.ops.aten.bmm.out)
    counts = dict.fromkeys(kept, 0)

    class Count(TorchDispatchMode):
        """Counts calls."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in counts:
                counts[function] += 1
            return function(*args, **(kwargs or {}))

    with Count():
        score(model, row, world).trainer_logprobs.sum().backward()
    return list(counts.values())


@on_cpu
def test_only_recomputed_layers_compute_a_product_again(tied_folder, world):
    none, full = (products_and_attentions(tied_folder, world, kind) for kind in ("none", "full"))
    assert none[1] == 2
    # the last product of a layer is needed by nothing in it
    assert full[1] == 4 and full[0] >= none[0] + 2 * 6


def step(model, optimizer, packed, world):
    settings = TrainerConfig(loss=PolicyGradientConfig())
    return train_step(TrainContext(model, optimizer, settings, world), packed, 1e-2, Timer())


def ready(*samples):
    batch = TrainBatch(step=1, samples=list(samples))
    return Packed(batch, [rows_of(batch)], 0.0)


def test_a_loss_that_is_not_finite_changes_nothing(tied_folder, world):
    model = policy(tied_folder, world)
    optimizer = make_optimizer(model, TrainerConfig().optim)
    before = weights_of(model)
    sample = make_sample([5, 6], [7], advantage=float("nan"), logprobs=[0, 0, -5.5])
    with run_error("nan") as caught:
        step(model, optimizer, ready(sample), world)
    assert caught.value.exit_code == RESTART
    assert_equal(weights_of(model), before)


def test_a_head_stays_tied_to_an_embedding_in_a_block(world, tmp_path):
    """BERT's embeddings are a module that transformers would not split; sharded alone, they left
    the head without values."""
    model = policy(make_tiny_model(tmp_path / "bert", CONFIGS["bert"]), world)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@on_cpu
def test_windows_and_implementations_that_the_attention_does_not_see_are_refused(
    tied_folder, world
):
    model = policy(tied_folder, world)
    (row,) = rows_of(make_batch(1))
    model.config.layer_types = ["full_attention", "sliding_attention"]
    model.config.sliding_window = 4
    with run_error(r"window of 4 tokens to its attention function; set trainer.attention = auto"):
        score(model, row, world)
    model.config._attn_implementation = "sdpa"
    with run_error(r"does not call its attention function; set trainer.attention = auto"):
        score(model, row, world)


@on_cpu
def test_flex_attention_needs_a_gpu(tied_folder, world):
    with run_error("use blocks"):
        policy(tied_folder, world, attention="flex")


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
    assert not first.requires_grad and torch.equal(
        first, score(policy, batch, world).trainer_logprobs
    )
    steps = [
        train_step(
            TrainContext(policy, optimizer, config.trainer, world, reference), packed, 1e-2, Timer()
        )
        for _ in range(3)
    ]
    assert torch.equal(reference_logprobs(reference, batch, world), first)
    assert (score(policy, batch, world).trainer_logprobs - first).abs().max() > 0.01
    assert all(step["optim/grad_norm"] > 0 for step in steps)


def sampled(folder, top_p=1.0, top_k=259, min_p=0.0, groups=6):
    """Four samples of eight tokens a group, which plain torch draws from what is left of a model's
    distribution at temperature 0.7, with the sets."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator, samples = torch.Generator().manual_seed(0), []
    for index in range(4 * groups):
        ids, sets, logprobs = [3 + index // 4, 40, 50], [], []
        for _ in range(8):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1] / 0.7
            values, order = logits.softmax(-1).sort(descending=True)
            left = (values.cumsum(0) - values < top_p) & (values >= min_p * values[0])
            left[top_k:] = False
            kept = order[left]
            chosen = int(torch.multinomial(values[left], 1, generator=generator))
            logprobs.append(float(logits[kept].log_softmax(-1)[chosen]))
            sets.append(kept.tolist() if len(kept) < len(order) else [])
            ids = [*ids, int(kept[chosen])]
        sample = make_sample(
            ids[:3],
            ids[3:],
            group=index // 4,
            advantage=float(index % 2),
            logprobs=[0.0] * 3 + logprobs,
            temperature=0.7,
        )
        samples.append(with_kept(sample, sets))
    return TrainBatch(step=1, samples=samples)


@on_cpu
@pytest.mark.parametrize(
    "limits",
    [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.1}, {"top_p": 0.8, "top_k": 20, "min_p": 0.1}],
    ids=str,
)
def test_on_policy_truncated_tokens_have_the_ratio_1(world, tmp_path, limits):
    """Also against the reference and the policy that the batch began with, which are the same
    model. Without the sets the mean ratio is below 1, and in real runs training collapsed."""
    folder = make_tiny_model(tmp_path / "peaked", CONFIGS["llama"] | {"initializer_range": 0.15})
    batch = sampled(folder, **limits)
    several = {"minibatches": 3, "loss": {"type": "clip", "kl_coefficient": 0.1}}
    policy, optimizer, config = learner(folder, world, **several)
    reference = load_reference(config, str(folder), policy, world)
    parity = ParityWatch(LIMITS["float32"], True, None)
    context = TrainContext(policy, optimizer, config.trainer, world, reference, parity)
    packed = prepare(batch, config, world, 64, minibatches=3)
    metrics = train_step(context, packed, 0.0, Timer())
    assert metrics["optim/steps"] == 3 and metrics["optim/grad_norm"] > 0.01
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    for name in ("mismatch_kl/max", "parity/kl", "update_kl/mean", "reference_kl/mean"):
        assert 0 <= metrics[name] < 1e-9, name
    sizes = np.concatenate([sample.kept.counts for sample in batch.samples])
    assert 0 < metrics["entropy/mean"] < np.log(sizes.clip(1)).mean()
    for sample in batch.samples:
        sample.kept = None
    untruncated = prepare(batch, config, world, 64, minibatches=3)
    context.parity = None
    assert train_step(context, untruncated, 0.0, Timer())["ratio/mean"] < 0.95


def test_it_holds_the_weights_once_in_the_dtype_that_is_computed_in(tied_folder, world):
    policy, _, config = learner_of(tied_folder, world, "bfloat16", kl_coefficient=0.1)
    reference = load_reference(config, str(tied_folder), policy, world)
    reference_logprobs(reference, packed_batch().micro_batches[0], world)
    parameters = list(reference.parameters())
    assert {p.dtype for p in parameters} == {torch.bfloat16} and not any(
        p.requires_grad for p in parameters
    )
    held = copies_of(reference)
    assert len(held) == 3 and not any(copies.by_master for copies in held)


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
        reference_logprobs(reference, batch, world), score(alone, batch, world).trainer_logprobs
    )
    assert not torch.equal(
        reference_logprobs(reference, batch, world), score(policy, batch, world).trainer_logprobs
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


def scored(model, world, *samples):
    batch = TrainBatch(step=1, samples=list(samples))
    (row,) = pack_alone(batch).micro_batches
    return score(model, row, world).trainer_logprobs[row.sequences == 0]


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
