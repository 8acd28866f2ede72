"""Every metric of `metrics.jsonl`, W&B and the console, in words. docs/metrics.md is made from it (`uv run scripts/reference.py`).

`<env>` stands for an environment's name, other words in angle brackets for what the text says.
"""

import re
from functools import cache

REWARD = {
    "reward/mean": "Mean reward of all rollouts that finished since the last batch, trained or not; of several agents the trainable ones.",
    "reward/<env>/mean": "The same of one environment.",
    "reward/<env>/<metric>": "Mean of a metric of the environment's own over the rollouts that have it; `own_mean` of one called mean.",
    "reward/<env>/agent_<agent>": "Mean reward of one agent, where episodes have several.",
    "reward/<env>/length_penalty": "Mean of what orchestrator.credit.length_penalty took off the reward before credit.",
}
ROLLOUTS = {
    "rollouts/finished": "Number of rollouts that were settled with this batch: trained, replaced or failed.",
    "rollouts/<env>/finished": "The same of one environment.",
    "rollouts/trained": "Number of rollouts that this batch trains.",
    "rollouts/<env>/trained": "The same of one environment.",
    "rollouts/missing": "Number of rollouts that the batch lacks of orchestrator.batch_size, where too many groups had no signal.",
    "rollouts/length_mean": "Mean number of sampled tokens of a rollout that did not fail.",
    "rollouts/turns_mean": "Mean number of turns of a rollout that did not fail.",
    "rollouts/truncated": "Share of the rollouts that did not fail in which an answer was cut off by a limit of tokens.",
    "rollouts/overlong": "Share of all rollouts whose prompt left no room for an answer.",
    "rollouts/empty": "Share of all rollouts in which no token was sampled.",
    "rollouts/timeout": "Share of all rollouts that took too long.",
    "rollouts/errored": "Share of all rollouts that failed for good.",
    "rollouts/filtered": "Share of all rollouts that `orchestrator.filter` dropped.",
    "rollouts/<env>/filtered": "The same of one environment, if there are any.",
    "rollouts/retried": "Share of all rollouts that were played more than once because they failed.",
    "rollouts/unmerged_turns": "Share of the turns after a first one that began a new sample, because their prompt rewrites earlier ones.",
    "rollouts/zero_advantage": "Share of all rollouts whose group has nothing to learn from: all advantages are zero.",
    "rollouts/replaced_groups": "Number of groups without signal that were replaced.",
    "rollouts/<env>/replaced_groups": "The same of one environment, if there are any.",
    "rollouts/surplus_groups": "Number of groups that were begun beyond the batch (`max_lag = 0`) and finished; they are in no mean.",
    "rollouts/cancelled_groups": "Number of groups that were begun beyond the batch and were still played. A few of them may finish all "
    "the same, as the next step's `rollouts/surplus_groups`.",
    "rollouts/stale_groups": "Number of groups that were cancelled or dropped as older than orchestrator.max_off_policy_steps.",
    "rollouts/<env>/stale_groups": "The same of one environment, if there are any.",
    "rollouts/<env>/share": "Share of an environment in the rollouts, where there are several.",
    "rollouts/<env>/failed_<cause>": "Number of rollouts that failed for good: environment, reward, inference, worker, timeout, ...",
    "tasks/<env>/easy": "Number of tasks in the pool of easy ones (orchestrator.environment.difficulty).",
    "tasks/<env>/normal": "Number of tasks that are neither easy nor hard.",
    "tasks/<env>/hard": "Number of tasks in the pool of hard ones.",
    "tasks/<env>/skipped": "Number of turns of easy and hard tasks that passed unplayed since the last batch.",
    "env/<env>/quarantined": "1 if the environment is left out because its workers kept dying.",
    "lag/mean": "Mean over the trained tokens of how many versions their policy was behind: N - 1 minus the version that sampled them.",
    "lag/max": "Greatest lag of a trained token.",
}
EVALS = {
    "eval/<env>/reward_mean": "Mean reward over the examples of an evaluation; a failed rollout counts as 0.",
    "eval/<env>/reward_mean_stderr": "Its standard error over the examples.",
    "eval/<env>/avg@<k>": "reward_mean under a name that gives the number k of samples of each example.",
    "eval/<env>/pass@<k>": "Probability that one of k samples solves an example (reward 1 or more), unbiased.",
    "eval/<env>/pass@<k>_stderr": "Its standard error over the examples.",
    "eval/<env>/agent_<agent>": "Mean reward of one agent, where there are several; a failed rollout counts as 0.",
    "eval/<env>/agent_<agent>_stderr": "Its standard error over the examples in which it plays.",
    "eval/<env>/length_mean": "Mean number of sampled tokens of a rollout.",
    "eval/<env>/errored": "Share of the episodes that failed for good.",
    "eval/<env>/truncated": "Share of the rollouts in which an answer was cut off by a limit of tokens.",
    "eval/<env>/<metric>": "Mean of a reward function or metric of the environment's own.",
}
LOSS = {
    "loss/mean": "The loss that was minimised, as trainer.loss.aggregation averages it.",
    "entropy/mean": "Mean entropy of the policy at the trained tokens, nats.",
    "entropy/<env>/mean": "The same of one environment.",
    "mismatch_kl/mean": "Mean estimate (k3) of the KL divergence between sampler and trainer at tokens of the trained version, nats.",
    "mismatch_kl/<env>/mean": "The same of one environment.",
    "mismatch_kl/max": "Greatest estimate at one token.",
    "lag_kl/mean": "The same at tokens of older versions: how far the policy has moved since they were sampled.",
    "lag_kl/<env>/mean": "The same of one environment.",
    "ratio/mean": "Mean ratio r of the trainer's to the sampler's probability of a token.",
    "ratio/<env>/mean": "The same of one environment.",
    "ratio/<quantile>": "Quantile of r: p01, p50 (the median), p99.",
    "ratio/<env>/<quantile>": "The same of one environment.",
    "masked_fraction": "Share of the tokens without gradient: masked, or left out by the loss's clip.",
    "masked_fraction/<env>": "The same of one environment.",
    "reference_kl/mean": "Mean estimate of the KL divergence to the reference model, with trainer.loss.kl_coefficient, nats.",
    "reference_kl/<env>/mean": "The same of one environment.",
    "teacher_kl/mean": "Mean of log sampler - log teacher over the sampled tokens, with a teacher, nats.",
    "teacher_kl/<env>/mean": "The same of one environment.",
    "update_kl/mean": "Mean estimate of the KL divergence of the policy from that before the batch, with several optimizer steps.",
    "update_kl/<env>/mean": "The same of one environment.",
    "optim/grad_norm": "Norm of the gradient before it is clipped to trainer.optim.max_grad_norm.",
    "optim/lr": "Learning rate of the step.",
    "optim/steps": "Number of optimizer steps of the batch: trainer.minibatches x trainer.epochs.",
    "parity/tokens": "Number of tokens that were sampled by exactly the trained version, on which trainer and inference are compared.",
    "parity/mean": "Mean distance of their log-probabilities there, nats.",
    "parity/max": "Greatest distance there, nats.",
    "parity/kl": "Mean estimate of the KL divergence there, nats.",
    "parity/agrees": "1 if the two agree within the limit for model.dtype, else 0.",
    "quarantined": "1 for a step whose batch was put aside because it killed the trainer again and again.",
}
SFT = {
    "epoch": "Passes over the examples so far (`rl sft`).",
    "validation/loss": "Mean cross entropy of the held-out examples' trained tokens, nats.",
    "validation/perplexity": "Its exponential.",
    "validation/tokens": "Number of these tokens.",
}
TIME = {
    "time/step": "Seconds of the trainer's whole step, from asking for the batch to the end of all that follows.",
    "time/wait_for_batch": "Seconds that the trainer waited for the batch.",
    "time/forward_backward": "Seconds of the forward and backward passes.",
    "time/old_logprobs": "Seconds of the log-probabilities before the first of several optimizer steps.",
    "time/optimizer": "Seconds of clipping and of the optimizer step.",
    "time/publish_weights": "Seconds that publishing a version held the step up.",
    "time/publish_latency": "Seconds from an optimizer step until the orchestrator knew of its version; mostly of the version before.",
    "time/checkpoint": "Seconds that a checkpoint held the step up.",
    "time/checkpoint_cost": "Seconds from the begin of the newest complete checkpoint's copy to the end of its writing.",
    "time/checkpoint_fraction": "These seconds over those from the begin of the checkpoint before it, or of training, to its own.",
    "time/parity": "Seconds of comparing trainer and inference on a probe, at a checkpoint.",
    "time/validation": "Seconds of a validation.",
    "time/batch": "Seconds between two batches of the orchestrator.",
    "time/pause_inference": "Seconds that generation paused for new weights since the last batch.",
    "time/eval": "Seconds of an evaluation.",
    "perf/tokens_per_s": "Real tokens of the batch, prompts included and padding not, over the seconds of the whole step.",
    "perf/generated_tokens_per_s": "Sampled tokens of settled rollouts over the seconds between two batches.",
    "perf/inference_idle_fraction": "Share of the time between two batches in which inference had nothing to do.",
    "perf/shared_token_fraction": "Share of the batch's tokens that were not computed because another sample begins alike.",
    "perf/peak_memory_gib": "Most memory that a rank has held so far, GiB: of the GPU, or of the process without one.",
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
"""The section of metrics of the user's own."""


@cache
def meaning(name: str) -> tuple[str, str]:
    """(section, what it is in words) of a metric; of one of the user's own the section alone."""
    for section, metrics in SECTIONS.items():
        if name in metrics:
            return section, metrics[name]
    for section, metrics in SECTIONS.items():
        for pattern, what in metrics.items():
            if "<" in pattern and re.fullmatch(re.sub(r"<\w+>", ".+", re.sub(r"[.+*?()]", r"\\\g<0>", pattern)), name):
                return section, what
    return OWN, ""
