"""Compares our losses with those of TRL's GRPOTrainer: the same random log-probabilities, the loss and its gradient, in float64.

uv run scripts/trl_losses.py [--python /path/to/an/environment/with/trl/bin/python]

TRL runs in an environment of its own (by default one that `uv` makes for this: trl==1.16.0), as this same file with --trl; tensors go
there and back as safetensors. TRL's code is called, not copied: `_compute_loss` on a stand-in for the trainer, and, of the method that
makes its batches, the statement that computes the ratios of trainer to vLLM. Prints the greatest relative differences, one line a case.
"""

import argparse
import ast
import inspect
import math
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TRL_PYTHON = ["uv", "run", "--no-project", "--with", "trl==1.16.0", "python"]
LENGTHS = [1, 7, 64, 30, 12, 2]
CONSTANT_LENGTH = 80


@dataclass(frozen=True)
class Case:
    """The same loss in our settings and in TRL's."""

    name: str
    ours: dict[str, Any]
    trl: dict[str, Any] = field(default_factory=dict)
    mismatch: dict[str, Any] = field(default_factory=dict)
    """TRL's correction for vLLM, in place of a ratio in the loss. The gradients are to agree; the values are defined differently: ours has
    w A log p, TRL's w A."""
    decoupled: bool = False
    """Several optimizer steps a batch: the policy that the batch began with is a third one, between trainer and sampler."""

    @property
    def old(self) -> str:
        """The log-probabilities that TRL's ratio compares with."""
        return "old" if self.decoupled else "trainer" if self.mismatch else "sampler"


WIDE = [0.0, math.inf]
CASES = [
    Case("clip, token (DAPO)", {"type": "clip"}, {"loss_type": "dapo"}),
    Case("clip, sequence (GRPO)", {"type": "clip", "aggregation": "sequence"}, {"loss_type": "grpo"}),
    Case("clip, constant (Dr. GRPO)", {"type": "clip", "aggregation": "constant"}, {"loss_type": "dr_grpo"}),
    Case("clip + k3 to the reference", {"type": "clip", "kl_coefficient": 0.04}, {"loss_type": "dapo", "beta": 0.04}),
    Case("clip + entropy", {"type": "clip", "entropy_coefficient": 0.01}, {"loss_type": "dapo", "entropy_coef": 0.01}),
    Case("cispo", {"type": "cispo", "clip_high": 1.0}, {"loss_type": "cispo", "epsilon_high": 2.0}),  # TRL's is the bound itself
    Case(
        "gspo",
        {"type": "gspo", "clip_low": 0.05, "clip_high": 0.08},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
    ),
    Case("clip, decoupled", {"type": "clip"}, {"loss_type": "dapo"}, {"mode": "token_truncate", "clip_max": 2.0}, decoupled=True),
    Case(
        "cispo, decoupled",
        {"type": "cispo", "clip_high": 1.0},
        {"loss_type": "cispo", "epsilon_high": 2.0},
        {"mode": "token_truncate", "clip_max": 2.0},
        decoupled=True,
    ),
    Case("policy_gradient, truncated (TIS)", {"token_mask": WIDE}, mismatch={"mode": "token_truncate", "clip_max": 2.0}),
    Case(
        "policy_gradient, token_mask (IcePop)",
        {"truncate": math.inf, "token_mask": [0.5, 5.0]},
        mismatch={"mode": "token_mask", "clip_min": 0.5, "clip_max": 5.0},
    ),
    Case(
        "policy_gradient, sequence, truncated",
        {"importance": "sequence", "token_mask": WIDE},
        mismatch={"mode": "sequence_truncate", "clip_max": 2.0},
    ),
    Case(
        "policy_gradient, sequence_mask (MIS)",
        {"importance": "sequence", "truncate": math.inf, "token_mask": WIDE, "sequence_mask": [0.0, 3.0]},
        mismatch={"mode": "sequence_mask", "clip_max": 3.0},
    ),
]


def make_tensors() -> dict[str, Tensor]:
    """[B, T], padded: log-probabilities whose ratios lie between e^-4 and e^4; one advantage a sequence [B]."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    trainer = -(normal(*shape).square() + 0.01)
    spread = torch.tensor([1.0, 0.5, 0.1, 0.3, 0.0, 1.5], dtype=torch.float64)[:, None]
    return {
        "mask": (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).long(),
        "trainer": trainer,
        "sampler": trainer - (normal(*shape) * spread).clamp(-4, 4),
        "old": trainer + 0.3 * normal(*shape),
        "reference": trainer + normal(*shape),
        "entropies": normal(*shape).square(),
        "advantages": normal(shape[0]),
    }


# TRL's side --------------------------------------------------------------------------------------------------------------


def trl_losses(given: Path, results: Path) -> None:
    """Runs every case in TRL and writes `loss.<case>` and `gradient.<case>`."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    tensors, found = load_file(given), {}
    for i, case in enumerate(CASES):
        trainer = tensors["trainer"].clone().requires_grad_()
        loss = GRPOTrainer._compute_loss(stand_in(case, trainer, tensors), None, trl_inputs(case, tensors))
        loss.backward()
        found |= {f"loss.{i}": loss.detach(), f"gradient.{i}": trainer.grad}
    save_file(found, results)


def stand_in(case: Case, trainer: Tensor, tensors: dict[str, Tensor]) -> SimpleNamespace:
    """What `_compute_loss` reads of a GRPOTrainer: one process, one micro batch, a model that gives `trainer`."""
    itself = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=False)
    settings = {
        "args": SimpleNamespace(delta=3.0, use_bias_correction_kl=False, steps_per_generation=1),
        "accelerator": itself,
        "model": SimpleNamespace(training=True),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *a, **k: (trainer, tensors["entropies"], None),
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": CONSTANT_LENGTH,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "entropy_coef": 0.0,
        "loss_type": "dapo",
    } | case.trl
    off = dict.fromkeys(("aux_loss_enabled", "use_adaptive_entropy", "off_policy_mask_threshold", "use_vllm"))
    switches = off | {"top_entropy_quantile": 1.0, "_entropy_bonus_enabled": bool(settings["entropy_coef"])}
    correction = {"vllm_importance_sampling_correction": bool(case.mismatch), "use_vllm": bool(case.mismatch)}
    bounds = {f"vllm_importance_sampling_{key}": case.mismatch.get(key) for key in ("mode", "clip_min", "clip_max")}
    return SimpleNamespace(**settings, **(switches | correction | bounds))


def trl_inputs(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch of TRL's. With a correction for vLLM the ratio in the loss is 1 and the correction holds the sampler's."""
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "completion_ids": torch.ones_like(tensors["mask"]),
        "completion_mask": tensors["mask"],
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors[case.old],
        "ref_per_token_logps": tensors["reference"],
        "num_items_in_batch": tensors["mask"].sum(),
    }
    if case.mismatch:
        inputs["importance_sampling_ratio"] = trl_ratios(case, tensors)
    return inputs


def trl_ratios(case: Case, tensors: dict[str, Tensor]) -> Tensor:
    """Runs the one statement of TRL's rollout code that computes `vllm_importance_sampling_ratio`."""
    from trl.trainer import grpo_trainer

    method = inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions)
    branches = [node for node in ast.walk(ast.parse(textwrap.dedent(method))) if isinstance(node, ast.If)]
    (branch,) = (
        node
        for node in branches
        if ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "per_token_logps_diff =" in ast.unparse(node)
    )
    names = {
        **vars(grpo_trainer),
        "self": stand_in(case, tensors["trainer"], tensors),
        "completion_mask": tensors["mask"],
        "tool_mask": None,
        "old_per_token_logps": tensors[case.old],
        "sampling_per_token_logps": tensors["sampler"],
    }
    exec(compile(ast.Module([branch], []), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"]


# Our side ----------------------------------------------------------------------------------------------------------------


def our_loss(case: Case, tensors: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The loss of the batch and its gradient [B, T], 0 at the padding."""
    from pydantic import TypeAdapter

    from rl.config.loss import LossConfig
    from rl.trainer.loss.common import LossInputs, compute_loss
    from rl.trainer.loss.losses import loss_function

    config = TypeAdapter(LossConfig).validate_python(case.ours)
    mask, lengths = tensors["mask"].bool(), torch.tensor(LENGTHS)
    sequences = torch.arange(len(LENGTHS)).repeat_interleave(lengths)
    flat = {key: tensors[key][mask].to(dtype) for key in ("trainer", "sampler", "old", "reference", "entropies")}
    trainer, entropies = flat["trainer"].requires_grad_(), flat["entropies"].requires_grad_()
    count = torch.full((len(LENGTHS),), float(len(LENGTHS)), dtype=torch.float64)
    per_token = {"token": 1.0 / lengths.double().sum().expand(len(LENGTHS)), "sequence": 1.0 / (count * lengths)}
    weights = per_token.get(config.aggregation, 1.0 / (count * CONSTANT_LENGTH)).to(dtype)[sequences]
    inputs = LossInputs(
        trainer_logprobs=trainer,
        logprobs=flat["sampler"],
        advantages=tensors["advantages"].to(dtype)[sequences],
        entropies=entropies,
        weights=weights,
        sequences=sequences,
        sequence_sum=lambda values: values.new_zeros(len(LENGTHS)).index_add(0, sequences, values),
        reference_logprobs=flat["reference"],
        old_logprobs=flat["old"] if case.decoupled else None,
    )
    loss = (compute_loss(inputs, config, loss_function(config)).loss * inputs.weights).sum()
    loss.backward()
    gradient = torch.zeros_like(tensors["trainer"])
    gradient[mask] = trainer.grad.double()
    return loss.detach().double(), gradient


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Greatest difference, relative to the greatest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", help="a Python with TRL; default: uv makes one")
    parser.add_argument("--trl", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl:
        return trl_losses(*args.trl)
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder) / "given.safetensors", Path(folder) / "results.safetensors"
        tensors = make_tensors()
        save_file(tensors, given)
        python = [args.python] if args.python else TRL_PYTHON
        subprocess.run([*python, __file__, "--trl", str(given), str(results)], check=True)
        theirs = load_file(results)
    print(f"{'case':40} {'loss':>10} {'gradient':>10} {'gradient, float32':>18}")
    worst = 0.0
    for i, case in enumerate(CASES):
        loss, gradient = our_loss(case, tensors, torch.float64)
        single = our_loss(case, tensors, torch.float32)[1]
        found = [] if case.mismatch else [difference(loss, theirs[f"loss.{i}"])]
        found.append(difference(gradient, theirs[f"gradient.{i}"]))
        worst = max(worst, *found)
        columns = f"{'-' if case.mismatch else format(found[0], '.1e'):>10} {found[-1]:10.1e}"
        print(f"{case.name:40} {columns} {difference(single, theirs[f'gradient.{i}']):18.1e}")
    sys.exit(f"a difference of {worst:.1e}" if worst > 1e-6 else 0)


if __name__ == "__main__":
    main()
