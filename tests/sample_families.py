"""Samples from several small models with vLLM, one after another in this process, whose arguments are their folders: DTYPE/FAMILY.

Writes parity.batch into each. vLLM's arguments are those of our server (rl/inference/server.py).
"""

import os
import sys
from pathlib import Path

from rl.inference.server import common_environment, cpu_defaults, cpu_environment

PROMPTS = [list(range(3, 3 + n)) for n in (5, 40, 200)]
TEMPERATURES = (1.0, 0.7)
TOKENS = 24


def main() -> None:
    os.environ.update(common_environment() | cpu_environment(1))
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from rl.wire.batch_file import write_batch
    from rl.wire.messages import TrainBatch, TrainingSample, VersionSpan

    for folder in sys.argv[1:]:
        llm = LLM(
            folder,
            dtype=Path(folder).parent.name,
            max_model_len=512,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            kv_cache_memory_bytes=1 << 27,
            seed=0,
            **cpu_defaults({}),
        )
        samples = []
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
            for ids, output in zip(PROMPTS, outputs, strict=True):
                answer = list(output.outputs[0].token_ids)
                logprobs = [step[token].logprob for step, token in zip(output.outputs[0].logprobs or [], answer, strict=True)]
                samples.append(
                    TrainingSample(
                        token_ids=ids + answer,
                        loss_mask=[False] * len(ids) + [True] * len(answer),
                        logprobs=[0.0] * len(ids) + logprobs,
                        advantages=[0.0] * (len(ids) + len(answer)),
                        policy_versions=[VersionSpan(0, len(answer))],
                        env="parity",
                        group_id=len(samples),
                        rollout_id=0,
                        temperature=temperature,
                    )
                )
        write_batch(Path(folder) / "parity.batch", TrainBatch(step=1, samples=samples), None)
        del llm
        cleanup_dist_env_and_memory()  # an engine of experts needs process groups that the one before did not make
