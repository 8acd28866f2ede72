"""Proves that a run trained on exactly what was sampled: scores every trained token again, with transformers, under the version that
sampled it, and compares with the logprob in the batch. A token that had been tokenised anew, or moved, would show at once.

uv run scripts/rescore.py outputs/NAME [--steps 1-5]

Needs the weights of the versions (trainer.weights.keep_last). Prints JSON: for each environment the number of samples, of sampled tokens
and of stretches of them (the turns of a multi-turn sample), mean and largest difference of the logprobs in nats, and the KL estimate
mean(exp(d) - 1 - d), http://joschu.net/blog/kl-approx.html.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl.config.command_line import from_toml
from rl.models.folder import resolve_model
from rl.run_dir.paths import RunDir, numbered
from rl.wire.batch_file import decode_batch
from rl.wire.messages import TrainingSample


def versions_of(sample: TrainingSample) -> list[int | None]:
    """The policy version behind each token; None where none sampled it."""
    versions = iter([span.policy_version for span in sample.policy_versions for _ in range(span.num_tokens)])
    return [next(versions) if sampled else None for sampled in sample.loss_mask]


@torch.no_grad()
def logprobs(model: PreTrainedModel, sample: TrainingSample) -> list[float]:
    """Of each token but the first given those before it, at the sample's temperature; nats."""
    logits = model(torch.tensor([sample.token_ids])).logits[0, :-1].float() / sample.temperature
    return [0.0, *logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids[1:])[:, None])[:, 0].tolist()]


def rescore(run: Path, steps: Iterable[int]) -> dict[str, dict[str, float]]:
    """The differences of a run's batches by environment; see above."""
    config = from_toml(run / "config.toml")
    directory = RunDir(run, run / "weights")
    samples = [sample for step in steps for sample in decode_batch(directory.batch(step).read_bytes(), str(step)).batch.samples]
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    found: dict[str, list[float]] = defaultdict(list)
    for version in sorted({span.policy_version for sample in samples for span in sample.policy_versions}):
        path = str(directory.weights(version)) if version else resolve_model(config.model)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        for sample in samples:
            stamps = versions_of(sample)
            if version in stamps:
                scored = logprobs(model, sample)
                found[sample.env] += [scored[i] - sample.logprobs[i] for i, stamp in enumerate(stamps) if stamp == version]
    return {env: summary(differences, [sample for sample in samples if sample.env == env]) for env, differences in sorted(found.items())}


def summary(differences: list[float], samples: list[TrainingSample]) -> dict[str, Any]:
    stretches = [sum(sampled for sampled, _ in groupby(sample.loss_mask)) for sample in samples]
    assert len(differences) == sum(sum(sample.loss_mask) for sample in samples), "every sampled token is scored once"
    return {
        "samples": len(samples),
        "of several turns": sum(count > 1 for count in stretches),
        "sampled stretches": sum(stretches),
        "tokens": len(differences),
        "mean |d|": sum(map(abs, differences)) / len(differences),
        "max |d|": max(map(abs, differences)),
        "kl": sum(math.exp(d) - 1 - d for d in differences) / len(differences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", default="", help="first-last; default: all")
    args = parser.parse_args()
    there = sorted(numbered(args.run / "batches", ".batch"))
    first, _, last = args.steps.partition("-")
    steps = [step for step in there if not first or int(first) <= step <= int(last or first)]
    print(json.dumps(rescore(args.run, steps), indent=2))


if __name__ == "__main__":
    main()
