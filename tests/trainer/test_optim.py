import pytest
import torch
from torch import nn

from rl.config.trainer import OptimConfig
from rl.trainer.optim import clip_gradients, gradient_norm, lr_at, make_optimizer


def rates(max_steps=4, **settings):
    config = OptimConfig(lr=1.0, **settings)
    return [round(lr_at(step, config, max_steps), 6) for step in range(1, max_steps + 1)]


def test_schedules():
    assert rates() == [1.0, 1.0, 1.0, 1.0]
    assert rates(warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(schedule="cosine") == [1.0, 0.853553, 0.5, 0.146447]
    assert rates(schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.5]
    assert rates(schedule="linear", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]


def test_gradient_norm_and_clipping():
    parameters = [torch.zeros(2), torch.zeros(1)]
    parameters[0].grad, parameters[1].grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    assert gradient_norm(parameters) == pytest.approx(7.0)
    clip_gradients(parameters, 7.0, 14.0)
    assert parameters[1].grad.tolist() == [6.0]
    clip_gradients(parameters, 7.0, 3.5)
    assert [p.grad.tolist() for p in parameters] == [[1.0, 1.5], [3.0]]


def test_steps_are_those_of_torch_and_vectors_are_not_decayed():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    ours = make_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    theirs = torch.optim.AdamW(
        [{"params": [twin.weight], "weight_decay": 0.5}, {"params": [twin.bias], "weight_decay": 0.0}], lr=0.1, betas=(0.9, 0.95)
    )
    for _ in range(3):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    assert torch.allclose(model.weight, twin.weight, atol=1e-6) and torch.allclose(model.bias, twin.bias, atol=1e-6)
