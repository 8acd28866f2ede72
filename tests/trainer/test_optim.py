import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rl.config.trainer import OptimConfig
from rl.models.tiny import make_tiny_model
from rl.system.errors import RunError
from rl.trainer.model.head import score
from rl.trainer.optim import (
    MOMENTS,
    OffloadedAdamW,
    clip_gradients,
    gradient_norm,
    local,
    make_optimizer,
)
from rl.trainer.store import checkpoint
from tests.families import CONFIGS
from tests.trainer.model.test_policy import policy, rows_of
from tests.trainer.samples import branching_batch


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0] * 4),
        ({"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine"}, [1.0, 0.853553, 0.5, 0.146447]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1.0, 1.0, 0.5]),
        ({"schedule": "linear", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_schedules(settings, expected):
    config = OptimConfig(lr=1.0, **settings)
    assert [round(config.lr_at(step, 4), 6) for step in range(1, 5)] == expected


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
        [
            {"params": [twin.weight], "weight_decay": 0.5},
            {"params": [twin.bias], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.9, 0.95),
    )
    for _ in range(3):
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    assert torch.allclose(model.weight, twin.weight, atol=1e-6) and torch.allclose(
        model.bias, twin.bias, atol=1e-6
    )


def test_offload_needs_a_gpu():
    with pytest.raises(
        RunError, match=r"trainer.optim.offload moves .* without a GPU leave it false"
    ):
        make_optimizer(nn.Linear(2, 2), OptimConfig(offload=True))


class Copies(TorchDispatchMode):
    """The storages that are copied from and to."""

    def __init__(self):
        super().__init__()
        self.sources, self.targets = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.targets.append(args[0].untyped_storage().data_ptr())
            self.sources.append(args[1].untyped_storage().data_ptr())
        return function(*args, **(kwargs or {}))


def test_offloaded_moments_travel_once_an_optimizer_step_and_the_bits_are_the_same(
    tied_folder, world
):
    """Here the host is the device as well, so the copies are counted."""
    (row,), results = rows_of(branching_batch()), []
    for kind in (torch.optim.AdamW, OffloadedAdamW):
        model = policy(tied_folder, world)
        optimizer = make_optimizer(model, OptimConfig(weight_decay=0.1))
        optimizer.__class__ = kind
        host = sorted(
            local(state[name]).untyped_storage().data_ptr()
            for state in optimizer.state.values()
            for name in MOMENTS
        )
        for _ in range(2):
            with Copies() as passes:
                for _ in range(2):
                    score(model, row, world).trainer_logprobs.sum().backward()
            with Copies() as step:
                optimizer.step()
            optimizer.zero_grad()
            assert not set(host) & {*passes.sources, *passes.targets}
            moved = host if kind is OffloadedAdamW else []
            assert (
                sorted(set(host).intersection(step.sources))
                == sorted(set(host).intersection(step.targets))
                == moved
            )
            assert len(step.sources) == len(step.targets) == 2 * len(moved)
        results.append(checkpoint.snapshot(model, optimizer, world))
    assert results[0].keys() == results[1].keys()
    assert all(
        torch.equal(local(value), local(results[1][name])) for name, value in results[0].items()
    )


def decayed(model):
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.5))
    chosen = {
        id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


@pytest.mark.parametrize("family", CONFIGS)
def test_of_each_family_what_multiplies_whole_vectors_is_decayed(family, tmp_path):
    folder = make_tiny_model(tmp_path / "m", config=CONFIGS[family])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    left = {name for name, parameter in model.named_parameters() if parameter.ndim > 1} - decayed(
        model
    )
    assert all(
        name.endswith(("bias", "A_log", "conv1d.weight", "conv.conv.weight")) or "norm" in name
        for name in left
    ), left
    assert not any(
        "norm" in name or name.endswith(("bias", "A_log", "conv1d.weight"))
        for name in decayed(model)
    )
