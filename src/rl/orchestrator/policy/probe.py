"""Probes: completions without a reward, on which the trainer compares its log-probabilities with inference's."""

import asyncio
import math
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from rl.wire.batch_file import samples_of
from rl.wire.inference_client import InferenceServers
from rl.wire.messages import TrainingSample

PROMPTS, TOKENS = 4, 32


class Prompt(NamedTuple):
    """The ids before a sample's first sampled token, and its sampling temperature."""

    token_ids: list[int]
    temperature: float


def prompts_of(batch: Path) -> list[Prompt]:
    """Returns the prompt of the first sample of each of the first PROMPTS groups in a batch file."""
    prompts: dict[int, Prompt] = {}
    for sample in samples_of(batch):
        if sample.group_id not in prompts:
            prompts[sample.group_id] = Prompt(sample.token_ids[: sample.loss_mask.index(True)], sample.temperature)
        if len(prompts) == PROMPTS:
            break
    return [*prompts.values()]


async def probe(servers: InferenceServers, prompts: Collection[Prompt], max_model_len: int) -> list[TrainingSample]:
    """Returns a completion of each prompt by the loaded version. Prompts that fill the context are cut from the left."""
    room = max(1, max_model_len - TOKENS)
    asked = [complete(servers, prompt.token_ids[-room:], prompt.temperature, TOKENS, i) for i, prompt in enumerate(prompts)]
    return await asyncio.gather(*asked)


async def complete(servers: InferenceServers, prompt: list[int], temperature: float, num_tokens: int, group_id: int) -> TrainingSample:
    """Returns one completion of a prompt as a sample, with all sampled tokens in the loss mask."""
    answer = await servers.generate(0, prompt, {"max_tokens": num_tokens, "temperature": temperature})
    n, m = len(prompt), len(answer.token_ids)
    return TrainingSample(
        token_ids=prompt + answer.token_ids,
        loss_mask=[False] * n + [True] * m,
        logprobs=[0.0] * n + [math.nan if one is None else one for one in answer.logprobs],
        advantages=[0.0] * (n + m),
        policy_versions=answer.policy_versions,
        env="probe",
        group_id=group_id,
        rollout_id=0,
        temperature=temperature,
    )
