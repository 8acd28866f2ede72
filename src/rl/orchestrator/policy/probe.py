"""Probes: completions without a reward, on which the trainer compares its log-probabilities with
inference's."""

import asyncio
from pathlib import Path

from rl.orchestrator.batches.samples import rollout_samples
from rl.wire.batch_file import decode_batch, sound_batch
from rl.wire.inference_client import InferenceServers
from rl.wire.messages import TrainingSample
from rl.wire.rollouts import Group, Rollout
from rl.wire.turns import Turns

PROMPTS, TOKENS = 4, 32


def first_of_groups(batch: Path) -> list[TrainingSample]:
    """Returns the first sample of each of the first PROMPTS groups in a batch file."""
    first: dict[int, TrainingSample] = {}
    for sample in decode_batch(sound_batch(batch), str(batch)).batch.samples:
        first.setdefault(sample.group_id, sample)
        if len(first) == PROMPTS:
            break
    return [*first.values()]


async def probe(
    servers: InferenceServers, samples: list[TrainingSample], max_model_len: int
) -> list[TrainingSample]:
    """Returns completions by the loaded version of the samples' prompts. Prompts that fill the
    context are cut from the left. Raises what InferenceServers.generate raises."""
    room = max(1, max_model_len - TOKENS)

    async def one(sample: TrainingSample) -> TrainingSample:
        prompt = sample.token_ids[: sample.spans[0].start][-room:].tolist()
        return await complete(
            servers, prompt, sample.temperature, TOKENS, sample.group_id, sample.routes is not None
        )

    return await asyncio.gather(*map(one, samples))


async def complete(
    servers: InferenceServers,
    prompt: list[int],
    temperature: float,
    num_tokens: int,
    group_id: int,
    routes: bool = False,
) -> TrainingSample:
    """Returns one completion of a prompt as a sample, with all sampled tokens in the loss mask,
    and with its routes if so wanted."""
    sampling = {"max_tokens": num_tokens, "temperature": temperature, "routes": routes}
    turn = await servers.generate(0, prompt, sampling)
    group = Group(
        group_id=group_id,
        env="probe",
        task=0,
        rollouts=[Rollout(turns=Turns.of([turn]))],
        advantages=[0.0],
        temperature=temperature,
    )
    return next(rollout_samples(group, 0))
