"""Descriptions of all metrics in `metrics.jsonl`, W&B and the console, from which `uv run
scripts/reference.py` makes docs/metrics.md.

`<env>` stands for an environment's name; the description explains other words in angle brackets.
"""

import re
from functools import cache

PASS = "pass@k: the chance that one of k samples has the highest reward, 1"
"""What a pass is, where one is shown beside a mean reward, which also counts partial answers."""
REWARD = {
    "reward/mean": "Mean reward of rollouts finished since the last batch, trained or not; with "
    "several agents, only of trainable ones.",
    "reward/<env>/mean": "The same for one environment.",
    "reward/<env>/<metric>": "Mean of an environment's own metric over the rollouts that have it; "
    "a metric named mean becomes `own_mean`.",
    "reward/<env>/agent_<agent>": "Mean reward of one agent, if episodes have several.",
    "reward/<env>/length_penalty": "Mean amount that orchestrator.credit.length_penalty subtracted "
    "from the reward before credit.",
}
ROLLOUTS = {
    "rollouts/finished": "Number of rollouts that were settled with this batch: trained, replaced "
    "or failed.",
    "rollouts/<env>/finished": "The same for one environment.",
    "rollouts/trained": "Number of rollouts in this batch.",
    "rollouts/<env>/trained": "The same for one environment.",
    "rollouts/missing": "Number of episodes missing from the batch (orchestrator.batch_size), if "
    "too many groups had no signal.",
    "rollouts/length_mean": "Mean number of sampled tokens of a rollout that did not fail.",
    "rollouts/turns_mean": "Mean number of turns of a rollout that did not fail.",
    "rollouts/truncated": "Share of the rollouts that did not fail in which an answer was cut off "
    "by a token limit.",
    "rollouts/overlong": "Share of all rollouts whose prompt left no room for an answer.",
    "rollouts/empty": "Share of all rollouts in which no token was sampled.",
    "rollouts/timeout": "Share of all rollouts that took too long.",
    "rollouts/errored": "Share of all rollouts that failed for good.",
    "rollouts/filtered": "Share of all rollouts that `orchestrator.filter` dropped.",
    "rollouts/<env>/filtered": "The same for one environment, if there are any.",
    "rollouts/retried": "Share of all rollouts that were retried after a failure.",
    "rollouts/unmerged_turns": "Share of the turns after the first that began a new sample, "
    "because their prompt rewrites earlier turns.",
    "rollouts/zero_advantage": "Share of all rollouts in groups without signal: all advantages are "
    "zero.",
    "rollouts/replaced_groups": "Number of groups without signal that were replaced.",
    "rollouts/<env>/replaced_groups": "The same for one environment, if there are any.",
    "rollouts/surplus_groups": "Number of groups begun in excess of the batch (`max_lag = 0`) that "
    "finished; no mean includes them.",
    "rollouts/cancelled_groups": "Number of groups begun in excess of the batch and cancelled "
    "while running. A few may still finish, and count in the next step's "
    "`rollouts/surplus_groups`.",
    "rollouts/stale_groups": "Number of groups cancelled or dropped because they exceeded "
    "orchestrator.max_off_policy_steps, or with `max_lag = 0` because an older version had sampled "
    "some of them.",
    "rollouts/<env>/stale_groups": "The same for one environment, if there are any.",
    "rollouts/<env>/share": "Share of the rollouts that belong to an environment, if there are "
    "several.",
    "rollouts/<env>/failed_<cause>": "Number of rollouts that failed for good: environment, "
    "reward, inference, worker, timeout, ...",
    "tasks/<env>/easy": "Number of tasks in the pool of easy ones "
    "(orchestrator.environment.difficulty).",
    "tasks/<env>/normal": "Number of tasks that are neither easy nor hard.",
    "tasks/<env>/hard": "Number of tasks in the pool of hard ones.",
    "tasks/<env>/skipped": "Number of times that an easy or hard task was skipped since the last "
    "batch.",
    "env/<env>/quarantined": "1 if the environment is lost: left out because its workers kept "
    "dying.",
    "rollouts/route_bytes": "Bytes of routes per token of the trained rollouts, with "
    "trainer.router_replay = engine.",
    "lag/mean": "Mean lag of the trained tokens in versions: N - 1 minus the version that sampled "
    "them.",
    "lag/max": "Greatest lag of a trained token.",
}
EVALS = {
    "eval/<env>/reward_mean": "Mean reward over the examples of an evaluation; a failed rollout "
    "counts as 0.",
    "eval/<env>/reward_mean_stderr": "Its standard error over the examples.",
    "eval/<env>/avg@<k>": "reward_mean under a name with the number k of samples per example.",
    "eval/<env>/pass@<k>": "Probability that one of k samples solves an example (reward 1 or "
    "more), unbiased.",
    "eval/<env>/pass@<k>_stderr": "Its standard error over the examples.",
    "eval/<env>/agent_<agent>": "Mean reward of one agent, if there are several; a failed rollout "
    "counts as 0.",
    "eval/<env>/agent_<agent>_stderr": "Its standard error over the examples in which the agent "
    "plays.",
    "eval/<env>/length_mean": "Mean number of sampled tokens of a rollout. Missing if an endpoint "
    "does not count them.",
    "eval/<env>/errored": "Share of the episodes that failed for good.",
    "eval/<env>/truncated": "Share of the rollouts in which an answer was cut off by a token "
    "limit.",
    "eval/<env>/<metric>": "Mean of one of the environment's own reward functions or metrics.",
}
LOSS = {
    "loss/mean": "The loss that was minimised, as trainer.loss.aggregation averages it.",
    "entropy/mean": "Mean entropy of the policy at the trained tokens, nats.",
    "entropy/<env>/mean": "The same for one environment.",
    "mismatch_kl/mean": "Mean estimate (k3) of the KL divergence between sampler and trainer at "
    "tokens of the trained version, nats.",
    "mismatch_kl/<env>/mean": "The same for one environment.",
    "mismatch_kl/max": "Greatest estimate at one token.",
    "lag_kl/mean": "The same estimate at tokens of older versions: how far the policy has moved "
    "since they were sampled.",
    "lag_kl/<env>/mean": "The same for one environment.",
    "ratio/mean": "Mean of r, the ratio of the trainer's to the sampler's probability of a token.",
    "ratio/<env>/mean": "The same for one environment.",
    "ratio/<quantile>": "Quantile of r: p01, p50 (the median), p99.",
    "ratio/<env>/<quantile>": "The same for one environment.",
    "masked_fraction": "Share of the tokens without gradient: masked, or clipped by the loss.",
    "masked_fraction/<env>": "The same for one environment.",
    "reference_kl/mean": "Mean estimate of the KL divergence to the reference model, with "
    "trainer.loss.kl_coefficient, nats.",
    "reference_kl/<env>/mean": "The same for one environment.",
    "teacher_kl/mean": "Mean of log p(sampler) - log p(teacher) over the sampled tokens, with a "
    "teacher, nats.",
    "teacher_kl/<env>/mean": "The same for one environment.",
    "update_kl/mean": "Mean estimate of the KL divergence from the policy before the batch, with "
    "several optimizer steps.",
    "update_kl/<env>/mean": "The same for one environment.",
    "optim/grad_norm": "Norm of the gradient before it is clipped to trainer.optim.max_grad_norm.",
    "optim/lr": "Learning rate of the step.",
    "optim/steps": "Number of optimizer steps for the batch: trainer.minibatches x trainer.epochs.",
    "experts/load_mean": "Tokens of a layer's busiest expert divided by the mean of the layer's "
    "experts, mean over the layers.",
    "experts/load_max": "The same in the layer where it is greatest.",
    "experts/unused": "Share of the experts of all layers to which no token was sent.",
    "parity/tokens": "Number of tokens sampled by exactly the trained version, on which trainer "
    "and inference are compared.",
    "parity/mean": "Mean absolute difference of their log-probabilities, nats.",
    "parity/max": "Largest absolute difference, nats.",
    "parity/kl": "Mean estimate of the KL divergence on these tokens, nats.",
    "parity/agrees": "1 if the two agree within the limit for model.dtype, else 0.",
    "parity/unjudged": "Number of consecutive checkpoints without a comparison: no fresh token, no "
    "timely answer to the probe.",
    "quarantined": "1 for a step whose batch was quarantined because it repeatedly killed the "
    "trainer.",
}
SFT = {
    "epoch": "Passes over the examples so far (`rl sft`).",
    "validation/loss": "Mean cross entropy of the trained tokens of held-out examples, nats.",
    "validation/perplexity": "exp(validation/loss).",
    "validation/tokens": "Number of these tokens.",
}
TIME = {
    "time/step": "Seconds of the trainer's whole step, from requesting the batch to the end of the "
    "step.",
    "time/wait_for_batch": "Seconds that the trainer waited for the batch.",
    "time/forward_backward": "Seconds of the forward and backward passes, with the sums of metrics "
    "over ranks and the collection of the token log.",
    "time/old_logprobs": "Seconds for computing log-probabilities before the first of several "
    "optimizer steps.",
    "time/optimizer": "Seconds of clipping and of the optimizer step.",
    "time/publish_weights": "Seconds for which publishing a version held up the step.",
    "time/publish_latency": "Seconds from an optimizer step until the orchestrator knew its "
    "version; usually of the previous version.",
    "time/checkpoint": "Seconds for which a checkpoint held up the step.",
    "time/checkpoint_cost": "Seconds from the beginning of the newest complete checkpoint's copy "
    "until it was written.",
    "time/checkpoint_fraction": "time/checkpoint_cost divided by the time since the previous "
    "checkpoint, or training, began.",
    "time/parity": "Seconds of comparing trainer and inference on a probe, at a checkpoint.",
    "time/validation": "Seconds of a validation.",
    "time/batch": "Seconds between two batches of the orchestrator.",
    "time/pause_inference": "Seconds that generation paused for new weights since the last batch.",
    "time/eval": "Seconds of an evaluation.",
    "perf/tokens_per_s": "Tokens of the batch, including prompts but not padding, per second of "
    "the whole step.",
    "perf/generated_tokens_per_s": "Sampled tokens of settled rollouts per second between two "
    "batches.",
    "perf/inference_idle_fraction": "Share of the time between two batches in which inference had "
    "nothing to do.",
    "perf/shared_token_fraction": "Share of the batch's tokens that were not computed because "
    "another sample has the same prefix.",
    "perf/peak_memory_gib": "Peak memory of a rank so far, GiB: of the GPU, or of the process "
    "without a GPU.",
    "perf/mfu": "Model FLOP/s utilisation, on known GPUs in bfloat16 only.",
}
SECTIONS = {
    "Rewards": REWARD,
    "Rollouts, tasks and lag": ROLLOUTS,
    "Evaluations": EVALS,
    "Loss and agreement": LOSS,
    "Supervised fine-tuning": SFT,
    "Seconds and throughput": TIME,
}
METRICS = {name: what for section in SECTIONS.values() for name, what in section.items()}
OWN = "Other"
"""The section of the user's own metrics."""


@cache
def meaning(name: str) -> tuple[str, str]:
    """Returns (section, description) of a metric; the description of a user's own metric is
    empty."""
    for section, metrics in SECTIONS.items():
        if name in metrics:
            return section, metrics[name]
    for section, metrics in SECTIONS.items():
        for pattern, what in metrics.items():
            if "<" in pattern and re.fullmatch(
                re.sub(r"<\w+>", ".+", re.sub(r"[.+*?()]", r"\\\g<0>", pattern)), name
            ):
                return section, what
    return OWN, ""
