"""Samples from several small models with vLLM, one after another: `python
scripts/sample_families.py MAX_MODEL_LEN FOLDER...`.

Each folder is DTYPE/NAME. Writes parity.batch into it. An error ends the process: what it leaves
behind may spoil the next model. vLLM's arguments are those of our server (rl/inference/server.py),
and the weights come as a run's new versions do: the engine starts with others.
"""

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

from rl.inference.engine_args import common_environment, cpu_environment
from rl.inference.server import confuses_states, cpu_defaults

LENGTHS = (5, 40, 200)
"""Tokens of the prompts."""
TEMPERATURES = (1.0, 0.7)
TOKENS = 24
SAMPLED = "parity.batch"
LEAST_VOCABULARY = 128
"""Ids of the prompts, which every model has."""


def main() -> None:
    os.environ.update(common_environment() | cpu_environment(1))
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    from rl.inference.worker import count_uncompiled

    # at each architecture, which takes half a minute of imports
    registry._run_in_subprocess = lambda look: look()
    count_uncompiled()
    # a million objects of imports, through which vLLM would look for garbage eight times a model
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    for folder in map(Path, sys.argv[2:]):
        arguments = {
            "model": str(folder),
            "dtype": folder.parent.name,
            "max_model_len": int(sys.argv[1]),
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "kv_cache_memory_bytes": 1 << 27,
            # where attention is latent: the default there is for bfloat16
            "attention_config": {"backend": "CPU_MLA"},
            "seed": 0,
            "load_format": "dummy",
            "worker_extension_cls": "rl.inference.worker.WeightLoader",
            **cpu_defaults({}),
        }
        if confuses_states(EngineArgs(**arguments).create_engine_config()):
            arguments["enable_prefix_caching"] = False
        llm = LLM(**arguments)
        load(llm, folder)
        sample(llm, folder)
        del llm
        # an engine of experts needs process groups that the one before did not make
        cleanup_dist_env_and_memory()


def load(llm: Any, folder: Path) -> None:
    """Puts the folder's weights in the place of those that the engine started with."""
    llm.collective_rpc("stage_weights", args=(str(folder),))
    while not (state := llm.collective_rpc("staging_state")[0])[0]:
        time.sleep(0.01)
    assert not state[1], f"{folder}: {state[1]}"
    llm.collective_rpc("swap_weights")


def sample(llm: Any, folder: Path) -> None:
    """Writes a batch of what the model answers to each prompt at each temperature."""
    from vllm import SamplingParams

    from rl.wire.batch_file import write_batch
    from rl.wire.messages import TrainBatch, TrainedSpan, TrainingSample
    from rl.wire.turns import pack_ids, pack_logprobs

    prompts = [
        [3 + place % (LEAST_VOCABULARY - 3) for place in range(length)] for length in LENGTHS
    ]
    samples = []
    for temperature in TEMPERATURES:
        params = SamplingParams(
            temperature=temperature,
            max_tokens=TOKENS,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        for ids, output in zip(prompts, outputs, strict=True):
            answer = list(output.outputs[0].token_ids)
            logprobs = [
                step[token].logprob
                for step, token in zip(output.outputs[0].logprobs or [], answer, strict=True)
            ]
            samples.append(
                TrainingSample(
                    packed_ids=pack_ids(ids + answer),
                    spans=[TrainedSpan(len(ids), len(ids + answer), 0, advantage=0.0)],
                    packed_logprobs=pack_logprobs(logprobs),
                    env="parity",
                    group_id=len(samples),
                    rollout_id=0,
                    temperature=temperature,
                )
            )
    write_batch(folder / SAMPLED, TrainBatch(step=1, samples=samples), None)


if __name__ == "__main__":
    main()
