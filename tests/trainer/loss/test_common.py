"""Each loss against the papers' formulas in float64 NumPy (loss_formulas.py), gradients
included, and some against literal numbers."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rl.config.check import check_loss
from rl.config.loss import LossConfig
from rl.system.errors import GIVE_UP, RunError
from rl.trainer.loss.common import (
    LossInputs,
    compute_loss,
    log_ratio,
    masked_tokens,
    teacher_advantages,
)
from rl.trainer.loss.losses import loss_function
from tests.trainer import loss_formulas as formulas
from tests.trainer.samples import make_sample, sample_weights

E = math.e
OFF = {"token_mask": [0.0, math.inf]}


def loss_config(kind="policy_gradient", **settings):
    return TypeAdapter(LossConfig).validate_python({"type": kind, **settings})


def replace_config(config, **settings):
    return config.model_copy(update=settings)


def inputs_of(trainer, sampler, advantages, lengths=None, dtype=torch.float32, **more):
    """LossInputs of sequences of the given lengths, one behind the other (default: one
    sequence)."""
    lengths = lengths or [len(trainer)]
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def tensor(values):
        return torch.tensor(np.array(values), dtype=dtype)

    def sequence_sum(values):
        return values.new_zeros(len(lengths)).index_add(0, sequences, values)

    more = {"entropies": np.zeros(len(trainer))} | more
    return LossInputs(
        trainer_logprobs=tensor(trainer).requires_grad_(),
        logprobs=tensor(sampler),
        advantages=tensor(advantages),
        weights=torch.ones(len(trainer), dtype=dtype),
        sequences=sequences,
        sequence_sum=sequence_sum,
        **{key: tensor(value).requires_grad_(key == "entropies") for key, value in more.items()},
    )


def run(inputs, config):
    """The terms, and the gradient of the sum of the losses by the trainer's log-probabilities."""
    terms = compute_loss(inputs, config, loss_function(config))
    (terms.loss * inputs.weights).sum().backward()
    return terms, inputs.trainer_logprobs.grad


def literals(config, trainer, sampler, advantages):
    terms, gradient = run(inputs_of(trainer, sampler, advantages), config)
    return terms.loss.tolist(), gradient.tolist(), terms.without_gradient.tolist()


# Literal numbers. The sampler's log-probability is -2 throughout, so that -2 + x is a ratio of e^x.


def test_gspo_has_no_gradient_beyond_the_clamp():
    """log r = 299, A = -1: the value of e^10, and no gradient; of two tokens only the one within
    the clamp has one."""
    loss, gradient, _ = literals(loss_config("gspo", delta=math.inf), [-1.0], [-300.0], [-1])
    assert loss == pytest.approx([E**10], rel=1e-5) and gradient == [0.0]
    loss, gradient, _ = literals(
        loss_config("gspo", delta=math.inf), [-1.0, -1.0], [-300.0, -1.0], [-1, -1]
    )
    assert loss == pytest.approx([E**5] * 2, rel=1e-5) and gradient == pytest.approx(
        [0.0, E**5], rel=1e-5
    )


def test_masks_act_on_the_first_policy_and_the_sampler():
    """o / q = e^0.5, e^-1, e: the second token alone is masked, whose r is 1."""
    inputs = inputs_of([-1.4, -2, 0], [-2] * 3, [1, 1, -1], old_logprobs=[-1.5, -3, -1])
    terms, _ = run(inputs, loss_config("clip", token_mask=[0.5, 5]))
    assert terms.masked.tolist() == [False, True, False] and terms.loss[1] == 0


def test_a_teacher_adds_to_the_advantage_where_it_has_scored():
    """log teacher - log p = 0.5, no score, and 14, which is cut to 10."""
    trainer, teacher = torch.tensor([-2.0, -2.0, -15.0]), torch.tensor([-1.5, math.nan, -1.0])
    assert teacher_advantages(trainer, teacher, 2.0).tolist() == [1.0, 0.0, 20.0]


def test_clipped_tokens_keep_kl_and_entropy():
    more = {"reference_logprobs": [-1.0], "entropies": [0.5]}
    extra = {"kl_coefficient": 1.0, "entropy_coefficient": 1.0}
    terms, gradient = run(inputs_of([-1.5], [-2.0], [1.0], **more), loss_config("clip", **extra))
    assert terms.loss.tolist() == pytest.approx(
        [-1.28 + E**0.5 - 1.5 - 0.5]
    ) and gradient.tolist() == pytest.approx([1 - E**0.5])
    assert terms.without_gradient.all()


# The papers' formulas -----------------------------------------------------------------------------

LENGTHS = [1, 7, 30, 3, 12, 2]


def random_sequences(seed, spread):
    """Sequences with one advantage each, ratios about e^(+-spread), one exactly on-policy, one
    with zero advantage."""
    rng = np.random.default_rng(seed)
    sequences = []
    for i, n in enumerate(LENGTHS):
        trainer = -rng.exponential(1.5, n) - 0.01
        sampler = (
            trainer.copy()
            if i == 1
            else np.minimum(trainer - rng.normal(0, spread, n).clip(-8, 8), -1e-3)
        )
        advantage = 0.0 if i == 5 else rng.normal()
        values = {
            "reference": trainer + rng.normal(0, 1, n),
            "teacher": trainer + rng.normal(0, 1, n),
        }
        values["old"] = trainer + np.random.default_rng([seed, i]).normal(0, spread, n).clip(-4, 4)
        sequences.append(
            formulas.Sequence(
                trainer, sampler, np.full(n, advantage), rng.uniform(0, 3, n), **values
            )
        )
    return sequences


def joined(sequences, name):
    return np.concatenate([getattr(sequence, name) for sequence in sequences])


OWN = {
    "token": (
        loss_config(truncate=2.0, **OFF),
        lambda s: formulas.policy_gradient(s, "token", 2.0),
    ),
    "untruncated": (
        loss_config(truncate=math.inf, **OFF),
        lambda s: formulas.policy_gradient(s, "token", math.inf),
    ),
    "sequence": (
        loss_config(importance="sequence", **OFF),
        lambda s: formulas.policy_gradient(s, "sequence", 2.0),
    ),
    "none": (
        loss_config(importance="none", **OFF),
        lambda s: formulas.policy_gradient(s, "none", 0.0),
    ),
    "clip": (loss_config("clip"), lambda s: formulas.clip(s, 0.2, 0.28, 3.0)),
    "cispo": (
        loss_config("cispo", clip_low=0.9, clip_high=1.5),
        lambda s: formulas.cispo(s, 0.9, 1.5),
    ),
    "gspo": (
        loss_config("gspo", clip_low=0.1, clip_high=0.2),
        lambda s: formulas.gspo(s, 0.1, 0.2, 3.0),
    ),
    "dppo": (
        loss_config("dppo", mask_high=0.1, kl_tau=1e-3),
        lambda s: formulas.dppo(s, 0.2, 0.1, 20.0, 1e-3),
    ),
    "dppo, tau 0": (
        loss_config("dppo", mask_high=0.1, kl_tau=0.0),
        lambda s: formulas.dppo(s, 0.2, 0.1, 20.0, 0.0),
    ),
    "dro": (loss_config("dro", beta=0.3), lambda s: formulas.dro(s, 0.3)),
    "cross_entropy": (loss_config("cross_entropy"), lambda s: formulas.cross_entropy(s)),
}


DECOUPLED = {
    "decoupled clip": (
        loss_config("clip", truncate=1.5),
        lambda s: formulas.decoupled(s, lambda s: formulas.clip(s, 0.2, 0.28, 3.0), 1.5),
    ),
    "decoupled cispo": (
        loss_config("cispo", clip_low=0.9, clip_high=1.5),
        lambda s: formulas.decoupled(s, lambda s: formulas.cispo(s, 0.9, 1.5), 2.0),
    ),
    "decoupled gspo": (
        loss_config("gspo", clip_low=0.1, clip_high=0.2, truncate=1.1),
        lambda s: formulas.decoupled(s, lambda s: formulas.gspo(s, 0.1, 0.2, 3.0), 1.1, True),
    ),
}


def inputs_like(sequences, names=(), dtype=torch.float64):
    """LossInputs of these sequences, with some of their other columns."""
    more = {f"{name}_logprobs": joined(sequences, name) for name in names}
    given = [joined(sequences, name) for name in ("trainer", "sampler", "advantages")]
    return inputs_of(*given, LENGTHS, dtype, entropies=joined(sequences, "entropies"), **more)


@pytest.mark.parametrize("spread", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("name", OWN | DECOUPLED)
def test_losses_equal_the_papers(name, spread):
    config, formula = (OWN | DECOUPLED)[name]
    columns = ["old"] if name in DECOUPLED else []
    # of other seeds a token's old / sampler is beyond e^10, where ours is clamped
    for seed in (2,) if columns else range(5):
        sequences = random_sequences(seed, spread)
        advantages = joined(sequences, "advantages")
        terms, gradient = run(inputs_like(sequences, columns), config)
        values, slopes = zip(*map(formula, sequences), strict=True)
        np.testing.assert_allclose(
            terms.loss.detach().numpy(), np.concatenate(values), rtol=1e-9, atol=1e-12
        )
        np.testing.assert_allclose(gradient.numpy(), np.concatenate(slopes), rtol=1e-9, atol=1e-12)
        # whose squared log ratio has a gradient where the rest has none
        if name not in ("dppo", "dro", *DECOUPLED):
            assert np.array_equal(
                terms.without_gradient.numpy(), (np.concatenate(slopes) == 0) & (advantages != 0)
            )
        trainer, sampler, old = (joined(sequences, name) for name in ("trainer", "sampler", "old"))
        first = (old if columns else trainer) - sampler
        measured = {"ratio": np.exp(trainer - sampler), "kl": np.expm1(first) - first}
        if columns:
            measured["update_kl"] = np.expm1(trainer - old) - (trainer - old)
        for key, expected in measured.items():
            np.testing.assert_allclose(getattr(terms, key), expected, rtol=1e-9, atol=1e-12)
        single = inputs_like(sequences, columns, torch.float32)
        assert torch.allclose(
            compute_loss(single, config, loss_function(config)).loss.double(),
            terms.loss,
            rtol=3e-5,
            atol=1e-5,
        )


MASKS = {
    "token": ((0.5, 5.0), (0.0, math.inf), (0.0, math.inf)),
    "sequence": ((0.0, math.inf), (0.2, 3.0), (0.0, math.inf)),
    "geometric": ((0.0, math.inf), (0.0, math.inf), (0.9, 1.1)),
    "all": ((0.5, 5.0), (0.1, 8.0), (0.7, 1.4)),
}


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("masks", MASKS)
def test_the_whole_loss_equals_the_papers(masks, aggregation, estimator):
    """Masks, KL, entropy, teacher and aggregation together: the number that is minimised, and
    its gradient."""
    names = ("token_mask", "sequence_mask", "geometric_mask")
    extra = {
        "kl_coefficient": 0.05,
        "entropy_coefficient": 0.02,
        "teacher_coefficient": 0.5,
        "kl_estimator": estimator,
    }
    config = loss_config(
        aggregation=aggregation, **dict(zip(names, MASKS[masks], strict=True)), **extra
    )
    for seed in range(3):
        sequences = random_sequences(seed, 0.4)
        inputs = inputs_like(sequences, ["reference", "teacher"])
        samples = [make_sample([1, 2], list(range(3, 3 + n))) for n in LENGTHS]
        counts = np.repeat(sample_weights(samples, config, 100), LENGTHS)
        terms, gradient = run(replace(inputs, weights=torch.tensor(counts)), config)
        total, slopes, entropy_slopes = 0.0, [], []
        for s, weight in zip(sequences, formulas.weights(LENGTHS, aggregation, 100), strict=True):
            taught = replace(s, advantages=s.advantages + 0.5 * (s.teacher - s.trainer))
            (value, slope), (kl, kl_slope) = (
                formulas.policy_gradient(taught, "token", 2.0),
                getattr(formulas, estimator)(s),
            )
            keep = formulas.kept(s, *MASKS[masks])
            total += weight * np.sum(keep * (value + 0.05 * kl - 0.02 * s.entropies))
            slopes.append(weight * keep * (slope + 0.05 * kl_slope))
            entropy_slopes.append(-0.02 * weight * keep)
        assert float((terms.loss.detach() * torch.tensor(counts)).sum()) == pytest.approx(
            total, rel=1e-9
        )
        np.testing.assert_allclose(gradient.numpy(), np.concatenate(slopes), rtol=1e-9, atol=1e-14)
        np.testing.assert_allclose(
            inputs.entropies.grad.numpy(), np.concatenate(entropy_slopes), rtol=1e-9, atol=1e-14
        )


# What every loss keeps ----------------------------------------------------------------------------

EVERY = {name: config for name, (config, _) in OWN.items()} | {
    "masks": loss_config(token_mask=[0.5, 2], sequence_mask=[0.2, 5], geometric_mask=[0.9, 1.1]),
    "gspo-masks": loss_config("gspo", sequence_mask=[0.2, 5], geometric_mask=[0.9, 1.1]),
}


@pytest.mark.parametrize("name", EVERY)
def test_extreme_values_stay_finite(name):
    """Log ratios of +-1000, an impossible token for the sampler, long sequences whose products
    overflow; gradients, too."""
    config = replace_config(EVERY[name], kl_coefficient=0.1, entropy_coefficient=0.1)
    trainer, sampler = (
        [-1.0, -1000.0, -1.0, 0.0] + [-1.0] * 500,
        [-1000.0, -1.0, -math.inf, -1000.0] + [-20.0] * 500,
    )
    reference, teacher = (
        [-1000.0, -1.0, 0.0, -1000.0] + [-1.0] * 500,
        [-1000.0, 0, -math.inf, -1] + [-1.0] * 500,
    )
    more = {"reference_logprobs": reference, "teacher_logprobs": teacher}
    for sign in (1.0, -1.0, 0.0):
        inputs = inputs_of(trainer, sampler, [sign] * 504, [1, 1, 2, 500], **more)
        terms, gradient = run(inputs, config)
        assert terms.loss.isfinite().all()
        assert gradient.isfinite().all()
        assert terms.kl.isfinite().all()
        assert terms.reference_kl.isfinite().all()
        assert not gradient[masked_tokens(inputs, config, log_ratio(inputs).detach())].any()


@pytest.mark.parametrize("name", EVERY)
def test_no_tokens_give_zero(name):
    terms, gradient = run(inputs_of([], [], [], [0]), EVERY[name])
    assert terms.loss.sum().item() == 0 and gradient.shape == (0,)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name, exact):
    """Also under masks that keep a ratio of 1 alone: bounds belong to what is kept."""
    masks = ("token_mask", "sequence_mask", "geometric_mask") if exact else ()
    config = replace_config(EVERY[name], kl_tau=0.0, **dict.fromkeys(masks, (1.0, 1.0)))
    logprobs, advantages = [-1.0, -2.0, -0.5], [0.5, 0.5, -2.0]
    terms, gradient = run(inputs_of(logprobs, logprobs, advantages, [2, 1]), config)
    assert gradient.tolist() == pytest.approx([-a for a in advantages])
    assert terms.ratio.tolist() == [1.0] * 3
    assert not terms.without_gradient.any() and terms.kl.tolist() == [0.0] * 3


@pytest.mark.parametrize("kind", ["clip", "gspo"])
def test_a_ratio_on_the_bound_of_a_clip_has_its_gradient(kind):
    half = math.log(0.5)
    for trainer, sampler, advantage, ratio in ((half, 0.0, -1.0, 0.5), (0.0, half, 1.0, 2.0)):
        inputs = inputs_of([trainer], [sampler], [advantage], dtype=torch.float64)
        terms, gradient = run(inputs, loss_config(kind, clip_low=0.5, clip_high=1.0))
        assert terms.ratio.item() == ratio
        assert gradient.item() == -advantage * ratio
        assert not terms.without_gradient.any()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", ["sequence", "gspo", "masks", "gspo-masks"])
def test_tokens_of_a_sequence_on_two_ranks(name, several):
    """Each rank has every other token, and sums over sequences come from both: values and
    gradients are those of one rank with all."""
    sequences = random_sequences(4, 0.3)
    whole = inputs_like(sequences, ["old"] if several else [])
    terms, gradient = run(whole, EVERY[name])
    parts = []
    for rank in range(2):
        tokens = slice(rank, None, 2)
        own = {
            key: value[tokens].detach()
            for key, value in vars(whole).items()
            if isinstance(value, torch.Tensor)
        }
        own["trainer_logprobs"].requires_grad_()
        parts.append(LossInputs(**own, sequence_sum=whole.sequence_sum))
    sent = [sums_of(part, EVERY[name]) for part in parts]
    assert sent[0] and len(sent[0]) == len(sent[1])
    for rank, part in enumerate(parts):
        totals = iter([a + b for a, b in zip(*sent, strict=True)])
        mine, slope = run(
            replace(part, sequence_sum=lambda _, totals=totals: next(totals)), EVERY[name]
        )
        assert torch.allclose(mine.loss, terms.loss[rank::2], rtol=1e-12) and torch.allclose(
            slope, gradient[rank::2], rtol=1e-12
        )
        assert torch.equal(mine.without_gradient, terms.without_gradient[rank::2])


def sums_of(part, config):
    """What a rank contributes to each sum over sequences, in order."""
    sent = []

    def send(values):
        assert not values.requires_grad, "a gradient would have to cross the ranks"
        sent.append(values.new_zeros(len(LENGTHS)).index_add(0, part.sequences, values))
        return sent[-1]

    compute_loss(replace(part, sequence_sum=send), config, loss_function(config))
    return sent


# Custom losses ------------------------------------------------------------------------------------


def test_the_custom_loss_of_the_documentation(tmp_path, monkeypatch):
    """docs/functions.md: TOPR. Positive advantages as they are, negative ones weighted by a
    ratio cut at `args.high`."""
    blocks = re.findall(r"```python\n(.*?)```", Path("docs/functions.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "def topr" in block]
    (tmp_path / "my_loss.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    config = loss_config("custom", function="my_loss.py:topr", args={"high": 1.0})
    assert not list(check_loss(config))
    loss, gradient, clipped = literals(config, [-1, -1, -3], [-2.0] * 3, [2.0, -2.0, -2.0])
    assert gradient == pytest.approx([-2, 2, 2 / E])
    assert loss == pytest.approx([2, -2, -6 / E])
    assert clipped == [False] * 3


NONE = "torch.zeros(2, dtype=torch.bool)"
BROKEN_LOSSES = [
    ("-inputs.trainer_logprobs.sum()", "returned one tensor of shape []"),
    ("(1.0, 2)", "returned (1.0, 2)"),
    (
        f"(-inputs.trainer_logprobs.sum(), {NONE})",
        "returned a loss of shape [] on cpu, not [2] on cpu",
    ),
    (
        "(-inputs.trainer_logprobs, inputs.advantages)",
        "returned a loss of torch.float32 and a clipped of torch.float32",
    ),
    (
        f"(inputs.trainer_logprobs.long(), {NONE})",
        "returned a loss of torch.int64 and a clipped of torch.bool",
    ),
    ("inputs.advantage", "raised AttributeError: 'LossInputs' object has no attribute 'advantage'"),
    ("exit()", "raised SystemExit: None"),
    (
        f"((inputs.trainer_logprobs + 2).log(), {NONE})",
        "returned a loss that is nan at 1 of 2 tokens, the first with trainer_logprobs -3, "
        "logprobs -1, advantages 2",
    ),
    (
        f"(-inputs.trainer_logprobs.detach(), {NONE})",
        "returned a loss with no gradient for inputs.trainer_logprobs: was it detached?",
    ),
    (
        # the gradient of both branches
        f"(torch.where(inputs.advantages > 1, 0.0, (inputs.trainer_logprobs + 2).sqrt()), {NONE})",
        "returned a loss whose gradient is nan at 1 of 2 tokens, the first with "
        "trainer_logprobs -3, logprobs -1, advantages 2",
    ),
]


@pytest.mark.parametrize(("result", "said"), BROKEN_LOSSES)
def test_a_broken_custom_loss_is_named_with_file_and_line_and_not_tried_again(
    tmp_path, result, said
):
    path = tmp_path / "broken.py"
    path.write_text(f"import torch\n\n\ndef f(inputs, config):\n    return {result}\n")
    with pytest.raises(RunError) as error:
        run(
            inputs_of([-1.0, -3.0], [-1.0, -1.0], [1.0, 2.0]),
            loss_config("custom", function=f"{path}:f"),
        )
    assert str(error.value).startswith(f"trainer.loss.function {path}:f {said}")
    assert error.value.exit_code == GIVE_UP
    assert f"(at {path}:{5 if 'raised' in said else 4}); " in str(error.value)


def test_what_only_passes_through_a_custom_loss_is_not_its_fault(tmp_path):
    """Memory that ran out, another rank that died, a model that gave nan: a restart may help, or
    a batch may be to blame."""
    path = tmp_path / "sound.py"
    path.write_text(
        "def f(inputs, config):\n    return "
        "inputs.sequence_sum(inputs.trainer_logprobs)[inputs.sequences], inputs.advantages > "
        "9\n"
    )
    config, inputs = (
        loss_config("custom", function=f"{path}:f"),
        inputs_of([-1.0, -3.0], [-1.0, -1.0], [1.0, 1.0]),
    )
    for place, fails in (
        ("x.py", torch.OutOfMemoryError("no memory")),
        ("/x/torch/distributed/c10d.py", RuntimeError("closed")),
    ):
        exec(
            compile("def sequence_sum(values): raise fails", place, "exec"),
            names := {"fails": fails},
        )
        with pytest.raises(RuntimeError, match=str(fails)):
            run(replace(inputs, sequence_sum=names["sequence_sum"]), config)
    terms, gradient = run(inputs_of([-1.0, math.nan], [-1.0, -1.0], [1.0, 1.0]), config)
    assert terms.loss.isnan().all() and gradient.tolist() == [2.0, 2.0]


# Combinations that make no sense ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "key", "message"),
    [
        (
            "clip",
            {"clip_low": 0, "clip_high": 0},
            "clip_high",
            "leave no ratio unclipped; raise one, or use type",
        ),
        ("clip", {"token_mask": [0.8, 1.28]}, "token_mask", "would be clipped to [0.8, 1.28]"),
        ("cispo", {"token_mask": [0.5, 5]}, "token_mask", "would be clipped to [0, 5]"),
        (
            "gspo",
            {"geometric_mask": [0.9999, 1.0001]},
            "geometric_mask",
            "masks every ratio that would be clipped to [0.9997, 1.0004]",
        ),
    ],
)
def test_combinations_that_make_no_sense(kind, settings, key, message):
    ((found, remedy),) = check_loss(loss_config(kind, **settings))
    assert found == f"trainer.loss.{key}" and message in remedy


def test_masks_that_leave_something_to_clip_make_sense():
    assert not list(check_loss(loss_config("clip", token_mask=[0.5, 5.0])))
    assert not list(check_loss(loss_config("gspo", sequence_mask=[0.5, 3.0], token_mask=[0.01, 9])))
    assert not list(check_loss(loss_config("cispo", clip_high=math.inf)))


def test_with_several_steps_masks_are_on_another_ratio():
    assert not list(check_loss(loss_config("clip", token_mask=[0.8, 1.28], truncate=3), True))
