"""A batch as the Tinker API's data, and the metrics of its answer.

A datum has the tokens of a sample up to the one before its last trained one, and at each the token
after it. The API sums the loss over all tokens; the weight of each token in our loss
(trainer.loss.aggregation) is therefore a factor of its advantage.
"""

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import tinker

from rl.config.run import RLConfig
from rl.config.tinker import service_loss
from rl.wire.messages import TrainBatch, TrainingSample

MAX_LOG_RATIO = 10.0
"""As of our own losses, see rl.trainer.loss.common."""
LOWEST = -1e4
"""Stands for a log-probability of -inf, which the API does not take; the ratio is clamped far
above."""
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@dataclass
class ServiceBatch:
    """A batch for the API, and what its N trained tokens have in common with the answer."""

    loss_fn: tinker.types.LossFnType
    loss_fn_config: dict[str, float]
    data: list[tinker.Datum]
    masks: list[np.ndarray]
    """The trained targets of each datum."""
    logprobs: np.ndarray
    """[N] the sampler's."""
    advantages: np.ndarray
    """[N]"""
    lag_zero: np.ndarray
    """[N] whether the version that is trained sampled the token."""
    envs: np.ndarray
    """[N] names."""
    num_tokens: int


def prepare(batch: TrainBatch, config: RLConfig) -> ServiceBatch:
    """Returns a batch as data. Samples without a trained token are left out."""
    loss = config.trainer.loss
    name, settings = service_loss(loss) or ("", {})  # the configuration was checked
    constant_length = loss.constant_length or config.orchestrator.sampling.max_tokens
    weights = loss.sample_weights([sample.num_trained for sample in batch.samples], constant_length)
    pairs = list(zip(batch.samples, weights, strict=True))
    data = [datum(sample, weight, name) for sample, weight in pairs if sample.spans]
    samples = [sample for sample in batch.samples if sample.spans]
    return ServiceBatch(
        cast(tinker.types.LossFnType, name),
        settings,
        data,
        [mask_of(sample) for sample in samples],
        np.concatenate([sample.logprobs for sample in samples]),
        np.concatenate([sample.advantages for sample in samples]),
        np.concatenate([sample.versions for sample in samples]) == batch.step - 1,
        np.concatenate([np.full(sample.num_trained, sample.env) for sample in samples]),
        sum(sample.num_tokens for sample in samples),
    )


def mask_of(sample: TrainingSample) -> np.ndarray:
    """Returns which of the tokens from the second to the last trained one are trained."""
    mask = np.zeros(sample.spans[-1].end - 1, bool)
    mask[sample.trained - 1] = True
    return mask


def datum(sample: TrainingSample, weight: float, loss_fn: str) -> tinker.Datum:
    """Returns a sample for a loss of the API."""
    mask = mask_of(sample)
    ids = sample.token_ids[: len(mask) + 1].astype(np.int64)
    advantages, logprobs = np.zeros(len(mask), np.float32), np.zeros(len(mask), np.float32)
    advantages[mask] = sample.by_span("advantage", "float64") * weight
    logprobs[mask] = np.maximum(sample.logprobs, LOWEST)
    inputs: dict[str, np.ndarray] = {"target_tokens": ids[1:]}
    if loss_fn == "cross_entropy":
        inputs["weights"] = advantages
    else:
        inputs |= {"advantages": advantages, "logprobs": logprobs}
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = mask.astype(np.float32)
    tensors = {key: tinker.TensorData.from_numpy(value) for key, value in inputs.items()}
    prompt = tinker.ModelInput.from_ints(ids[:-1].tolist())
    return tinker.Datum(model_input=prompt, loss_fn_inputs=tensors)


def metrics_of(batch: ServiceBatch, output: tinker.ForwardBackwardOutput) -> dict[str, float]:
    """Returns the metrics of an answer: the loss, and the agreement of trainer and sampler, of
    all tokens and of each environment's."""
    trained = [
        record["logprobs"].to_numpy().reshape(-1)[mask]
        for record, mask in zip(output.loss_fn_outputs, batch.masks, strict=True)
    ]
    difference = np.concatenate(trained).astype(np.float64) - batch.logprobs
    log_ratio = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics = {"loss/mean": output.metrics["loss:sum"]} if "loss:sum" in output.metrics else {}
    clipped = None
    if batch.loss_fn == "ppo":
        low, high = (math.log(x) if x else -math.inf for x in batch.loss_fn_config.values())
        too_low = (batch.advantages < 0) & (log_ratio < low)
        clipped = np.where(batch.advantages > 0, log_ratio > high, too_low)
    for env in ("", *sorted({*batch.envs.tolist()})):
        of = batch.envs == env if env else np.full(len(log_ratio), True)
        metrics |= agreement(f"{env}/" if env else "", log_ratio[of], batch.lag_zero[of])
        if clipped is not None:
            metrics[f"masked_fraction/{env}".rstrip("/")] = float(clipped[of].mean())
    current = log_ratio[batch.lag_zero]
    metrics["parity/tokens"] = len(current)
    if len(current):
        metrics |= {
            "mismatch_kl/max": float(k3(current).max()),
            "parity/mean": float(np.abs(current).mean()),
            "parity/max": float(np.abs(current).max()),
            "parity/kl": float(k3(current).mean()),
        }
    return metrics


def agreement(inner: str, log_ratio: np.ndarray, lag_zero: np.ndarray) -> dict[str, float]:
    """Returns the metrics of log r [N]; `inner` is part of their names."""
    metrics = {f"ratio/{inner}mean": float(np.exp(log_ratio).mean())}
    for name, q in QUANTILES.items():
        metrics[f"ratio/{inner}{name}"] = float(np.exp(np.quantile(log_ratio, q)))
    for name, of in (("mismatch_kl", lag_zero), ("lag_kl", ~lag_zero)):
        if of.any():
            metrics[f"{name}/{inner}mean"] = float(k3(log_ratio[of]).mean())
    return metrics


def k3(log_ratio: np.ndarray) -> np.ndarray:
    """Returns the estimates k3 of the KL divergence of the trainer from the sampler, see
    rl.trainer.loss.common."""
    return np.expm1(log_ratio) - log_ratio
