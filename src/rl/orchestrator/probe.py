"""Probes: completions without reward, on which the trainer compares its log-probabilities with inference's."""

import asyncio

from rl.wire.inference_client import InferenceServers
from rl.wire.messages import TrainBatch, TrainingSample

PROMPTS, TOKENS = 4, 32


async def probe(servers: InferenceServers, batch: TrainBatch, max_model_len: int) -> list[TrainingSample]:
    """A completion by the loaded version of one prompt of each of the batch's first groups, cut from the left if it fills the context."""
    firsts = list({sample.group_id: sample for sample in reversed(batch.samples)}.values())[-PROMPTS:]
    room = max(1, max_model_len - TOKENS)
    prompts = [sample.token_ids[: sample.loss_mask.index(True)][-room:] for sample in firsts]
    asked = zip(prompts, firsts, strict=True)
    return await asyncio.gather(*(complete(servers, ids, sample.temperature, TOKENS, i) for i, (ids, sample) in enumerate(asked)))


async def complete(servers: InferenceServers, prompt: list[int], temperature: float, num_tokens: int, group_id: int) -> TrainingSample:
    """One completion of a prompt as a sample with all its tokens marked."""
    answer = await servers.generate(0, prompt, {"max_tokens": num_tokens, "temperature": temperature})
    n, m = len(prompt), len(answer.token_ids)
    return TrainingSample(
        token_ids=prompt + answer.token_ids,
        loss_mask=[False] * n + [True] * m,
        logprobs=[0.0] * n + answer.logprobs,
        advantages=[0.0] * (n + m),
        policy_versions=answer.policy_versions,
        env="probe",
        group_id=group_id,
        rollout_id=0,
        temperature=temperature,
    )
