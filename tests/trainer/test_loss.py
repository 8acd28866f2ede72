import math

import pytest
import torch

from rl.trainer.config import LossConfig
from rl.trainer.loss import policy_gradient_loss

DEFAULT = LossConfig()


def loss_and_gradient(trainer, sampler, advantages, config=DEFAULT):
    p = torch.tensor(trainer, requires_grad=True)
    loss, stats = policy_gradient_loss(p, torch.tensor(sampler), torch.tensor(advantages), config)
    loss.backward()
    return loss.item(), p.grad.tolist(), stats


def test_on_policy_is_plain_reinforce():
    # r = 1: loss = -(0.5 * -1 + -0.25 * -2) = 0, gradient = -A.
    loss, gradient, stats = loss_and_gradient([-1.0, -2.0], [-1.0, -2.0], [0.5, -0.25])
    assert loss == pytest.approx(0.0)
    assert gradient == pytest.approx([-0.5, 0.25])
    assert stats.mismatch_kl.item() == 0.0 and stats.masked.item() == 0 and stats.ratio.item() == 2.0


def test_literals_of_cap_and_mask():
    # r = e^0.5 = 1.6487 (as it is), e^1.5 = 4.4817 (capped at 2), e^3 = 20.09 (above 8: masked), e^-3 = 0.0498 (below 1/8: masked)
    loss, gradient, stats = loss_and_gradient([-1.0, -1.0, -1.0, -4.0], [-1.5, -2.5, -4.0, -1.0], [1.0, 1.0, 1.0, 1.0])
    assert gradient == pytest.approx([-1.6487213, -2.0, 0.0, 0.0])
    assert loss == pytest.approx(1.6487213 + 2.0)
    assert stats.masked.item() == 2
    # k3 = r - 1 - log r
    assert stats.mismatch_kl_max.item() == pytest.approx(math.exp(3) - 1 - 3)
    assert stats.mismatch_kl.item() == pytest.approx(0.1487213 + 1.9816891 + 16.0855369 + 2.0497871)
    assert stats.ratio.item() == pytest.approx(1.6487213 + 4.4816891 + 20.0855369 + 0.0497871)


def test_bounds_belong_to_what_is_kept():
    config = LossConfig(ratio_low=1.0, ratio_high=1.0)
    assert loss_and_gradient([-1.0], [-1.0], [1.0], config)[1] == [-1.0]


def test_extreme_ratios_stay_finite():
    config = LossConfig(ratio_cap=math.inf, ratio_low=0.0, ratio_high=math.inf)
    loss, gradient, stats = loss_and_gradient([-1.0, -1000.0], [-1000.0, -1.0], [1.0, 1.0], config)
    assert gradient == pytest.approx([-math.exp(10), -math.exp(-10)])
    assert math.isfinite(loss) and math.isfinite(stats.mismatch_kl.item())


def test_no_tokens_give_zero():
    loss, _, stats = loss_and_gradient([], [], [])
    assert loss == 0.0 and stats.mismatch_kl_max.item() == 0.0


def test_equals_the_formula_written_as_a_loop():
    torch.manual_seed(0)
    p, q, advantages = -torch.rand(50) * 6, -torch.rand(50) * 6, torch.randn(50)
    expected_loss, expected_gradient = 0.0, []
    for log_p, log_q, a in zip(p.tolist(), q.tolist(), advantages.tolist(), strict=True):
        r = math.exp(log_p - log_q)
        weight = min(r, 2.0) if 0.125 <= r <= 8.0 else 0.0
        expected_loss -= weight * a * log_p
        expected_gradient.append(-weight * a)
    loss, gradient, _ = loss_and_gradient(p.tolist(), q.tolist(), advantages.tolist())
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradient == pytest.approx(expected_gradient, rel=1e-5)
