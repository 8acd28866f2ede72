"""Samples for the trainer's tests."""

import random

from rl.messages import TrainBatch, TrainingSample, VersionSpan


def make_sample(
    prompt: list[int], answer: list[int], *, group: int = 0, rollout: int = 0, advantage: float = 1.0, **more
) -> TrainingSample:
    """A prompt and one sampled answer; every sampled token has logprob -2 unless `logprobs` is given."""
    n, m = len(prompt), len(answer)
    fields = {"logprobs": [0.0] * n + [-2.0] * m, "advantages": [0.0] * n + [advantage] * m} | more
    return TrainingSample(
        token_ids=prompt + answer,
        loss_mask=[False] * n + [True] * m,
        policy_versions=[VersionSpan(0, m)],
        env="test",
        group_id=group,
        rollout_id=rollout,
        **fields,
    )


def make_batch(step: int, *, groups: int = 3, group_size: int = 4, vocab: int = 259, prompt: int = 12, answer: int = 8) -> TrainBatch:
    """Random prompts and answers of differing lengths, the same for the same step; logprobs near those of a uniform distribution."""
    rng = random.Random(step)
    samples = []
    for group in range(groups):
        head = [rng.randrange(3, vocab) for _ in range(rng.randint(prompt // 2, prompt))]
        for rollout in range(group_size):
            tail = [rng.randrange(3, vocab) for _ in range(rng.randint(1, answer))]
            logprobs = [0.0] * len(head) + [-5.5 + rng.uniform(-0.5, 0.5) for _ in tail]
            samples.append(make_sample(head, tail, group=group, rollout=rollout, advantage=rng.uniform(-1, 1), logprobs=logprobs))
    return TrainBatch(step=step, samples=samples)
