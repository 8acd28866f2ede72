"""Router replay with the routes of a real vLLM: the part of scripts/gpu_check.py that needs it
beside the trainer's packages."""

import json
import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch
from benchmarks.gpu_bench import Bench, in_process, say

from rl.config.run import RLConfig
from rl.models.tiny import make_tiny_model
from rl.trainer.data.prefetch import prepare
from rl.trainer.measure.parity import differences
from rl.trainer.model.head import mode_of
from rl.trainer.model.policy import load_policy
from rl.wire.messages import TrainBatch, TrainingSample, VersionSpan
from rl.wire.parity import parity_of

SHAPE = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "initializer_range": 0.05,
    "max_position_embeddings": 1024,
}
PROMPTS, PROMPT, ANSWER = 64, 64, 256


def routes(bench: Bench) -> None:
    """The KL of what vLLM has sampled to what the trainer computes, both in bfloat16, with
    routes of its own and with vLLM's."""
    if not bench.on_gpu or find_spec("vllm") is None:
        return say("routes", note="needs a GPU and vLLM")
    folder = make_tiny_model(bench.folder / "experts", SHAPE)
    sampled = Path(in_process(bench, partial(sample, folder), "vllm")["file"])
    batch = TrainBatch(
        step=1, samples=msgspec.msgpack.decode(sampled.read_bytes(), type=list[TrainingSample])
    )
    model = {"name": str(folder), "dtype": "bfloat16", "max_model_len": PROMPT + ANSWER}
    config, world = (
        RLConfig.model_validate({"model": model, "trainer": {"router_replay": "engine"}}),
        bench.world(),
    )
    policy = load_policy(str(folder), config.model, config.trainer, world)
    routers = policy.get_output_embeddings().forward.routers
    rows = prepare(
        batch, config, world, SHAPE["hidden_size"], mode=mode_of(policy), routers=routers
    ).micro_batches
    found = {"own routes": list[float](), "vllm's routes": list[float]()}
    for row in (row.to(world.device) for row in rows):
        found["own routes"] += differences(policy, replace(row, routes=None), world).tolist()
        found["vllm's routes"] += differences(policy, row, world).tolist()
    for name, each in found.items():
        say(
            name,
            kl=parity_of(each).kl,
            mean=parity_of(each).mean,
            bytes_a_token=routers.width,
            aim="replay lowers the KL",
        )


def sample(folder: Path) -> None:
    """Writes completions of random prompts with vLLM's routes as samples."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from vllm import LLM, SamplingParams

    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 259, (PROMPTS, PROMPT), generator=generator).tolist()
    settings = {
        "enable_return_routed_experts": True,
        "logprobs_mode": "processed_logprobs",
        "gpu_memory_utilization": 0.4,
    }
    engine = LLM(
        str(folder),
        dtype="bfloat16",
        max_model_len=PROMPT + ANSWER,
        skip_tokenizer_init=True,
        **settings,
    )
    params = SamplingParams(max_tokens=ANSWER, logprobs=0, detokenize=False, ignore_eos=True)
    samples = []
    for number, output in enumerate(
        engine.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    ):
        answer, prompt = output.outputs[0], prompts[number]
        ids = list(answer.token_ids)
        assert len(answer.routed_experts) == len(prompt) + len(ids) - 1
        samples.append(
            TrainingSample.of(
                token_ids=prompt + ids,
                loss_mask=[False] * len(prompt) + [True] * len(ids),
                logprobs=[0.0] * len(prompt)
                + [at[token].logprob for at, token in zip(answer.logprobs, ids, strict=True)],
                advantages=[0.0] * (len(prompt) + len(ids)),
                policy_versions=[VersionSpan(0, len(ids))],
                env="vllm",
                group_id=number,
                rollout_id=0,
                routes=answer.routed_experts.tobytes(),
            )
        )
    path = folder / "samples"
    path.write_bytes(msgspec.msgpack.encode(samples))
    print(json.dumps({"file": str(path)}), flush=True)
