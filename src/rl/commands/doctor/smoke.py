"""`rl doctor`: runs a real training step and a real vLLM server on a tiny random model, in
separate processes."""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from rl.commands.doctor.check import Check, fault_of, output, start_module
from rl.commands.play_session import start_server
from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.launch import devices, roles
from rl.launch.children import Children
from rl.models.tiny import MAX_LEN, make_tiny_model
from rl.run_dir.metrics import read_metrics
from rl.system.errors import ConfigError, RunError
from rl.system.machine import is_cpu_vllm, machine, visible_gpus
from rl.wire.inference_client import InferenceServers

SMOKE_TIMEOUT_S = 300.0
"""A cold start of vLLM from a slow disk takes a minute."""
STEPS, REQUESTS, TOKENS = 3, 8, 64


def smoke_checks(config: RLConfig, children: Children) -> Iterable[Check]:
    """Yields checks of real processes on a tiny model, with their times."""
    with tempfile.TemporaryDirectory(prefix="rl-doctor-") as folder:
        work = Path(folder)
        model = make_tiny_model(work / "tiny")
        if visible_gpus(dict(os.environ)):
            yield torch_gpus(work, children)
        yield trainer_smoke(config, model, work, children)
        yield vllm_smoke(model, work, children)


def torch_gpus(work: Path, children: Children) -> Check:
    """Checks that torch sees all GPUs of the driver."""
    wanted = len(visible_gpus(dict(os.environ)))
    child = start_module(children, work, "torch", "rl.trainer.gpus")
    if fault := fault_of(child, SMOKE_TIMEOUT_S):
        return Check("FAIL", "torch", f"counting GPUs {fault}")
    count, build = output(child)[-1].split(" ", 1)
    if int(count) < wanted:
        remedy = (
            "the driver is older than that CUDA, or this torch is for CPUs: update it, or `uv "
            "sync --no-group cpu --group gpu`"
        )
        return Check("FAIL", "torch", f"sees {count} of {wanted} GPUs (CUDA {build}): {remedy}")
    return Check("ok", "torch", f"sees {count} GPUs, CUDA {build}")


def trainer_smoke(config: RLConfig, model: Path, work: Path, children: Children) -> Check:
    """Runs a few steps of the real trainer, on as many ranks as the configuration would use."""
    settings = {
        "name": "trainer",
        "output_dir": str(work),
        "max_steps": STEPS,
        "model": {"name": str(model), "dtype": "float32", "max_model_len": MAX_LEN},
        "trainer": {
            "data": {
                "fake": {
                    "samples": 8,
                    "group_size": 4,
                    "prompt_tokens": 16,
                    "completion_tokens": 16,
                }
            },
            **config.trainer.model_dump(include={"gpus", "cpus", "ranks"}, exclude_none=True),
        },
        "orchestrator": {"environment": [{"id": "none"}]},
    }
    try:
        smoke = RLConfig.model_validate(settings)
        division = devices.split(smoke, machine())
    except ConfigError as error:
        return Check("FAIL", "FSDP", " ".join(str(error).split()))
    smoke = devices.write_into(smoke, division)
    write_config(smoke.run_dir.config, smoke)
    start = time.monotonic()
    child = roles.start(
        children, "trainer", smoke.run_dir, division.trainer, division.ranks, work / "logs"
    )
    if fault := fault_of(child, SMOKE_TIMEOUT_S):
        return Check("FAIL", "FSDP", f"a training step on a tiny model {fault}")
    step = read_metrics(smoke.run_dir.metrics)[STEPS, "trainer"]["time/step"]
    place = "GPU" if division.trainer.gpus else "CPU"
    text = (
        f"{STEPS} steps on {division.ranks} {place} rank{'s' if division.ranks > 1 else ''}, "
        f"{1000 * step:.0f} ms per step"
    )
    return Check("ok", "FSDP", f"{text}; {time.monotonic() - start:.1f} s including startup")


def vllm_smoke(model: Path, work: Path, children: Children) -> Check:
    """Runs a real server and samples a few answers."""
    start = time.monotonic()
    try:
        sampled_s, tokens = asyncio.run(answers(model, work, children))
    except TimeoutError:
        return Check(
            "FAIL",
            "vLLM",
            f"no answer within {SMOKE_TIMEOUT_S:.0f} s; is the machine overloaded, or its "
            "disk slow?",
        )
    except (RunError, ValueError) as error:
        return Check("FAIL", "vLLM", str(error))
    rate = f"{REQUESTS} answers, {tokens / sampled_s:.0f} tokens per second"
    return Check("ok", "vLLM", f"{rate}; {time.monotonic() - start:.1f} s including startup")


async def answers(model: Path, work: Path, children: Children) -> tuple[float, int]:
    """Returns (seconds, number of tokens sampled in that time)."""
    gpus = 1 if visible_gpus(dict(os.environ)) and not is_cpu_vllm() else 0
    settings = {
        "model": {"name": str(model), "dtype": "float32", "max_model_len": MAX_LEN},
        "inference": {"gpus": gpus, "startup_timeout_s": SMOKE_TIMEOUT_S},
        "orchestrator": {"environment": [{"id": "none"}]},
    }
    async with asyncio.timeout(SMOKE_TIMEOUT_S):
        server = await start_server(RLConfig.model_validate(settings), str(model), work, children)
        servers = InferenceServers([], server.config.run_dir.status("inference"), SMOKE_TIMEOUT_S)
        try:
            await server.ready()
            sampling = {"max_tokens": TOKENS, "temperature": 1.0}
            prompts = [[3 + (7 * i + j) % 250 for j in range(16)] for i in range(REQUESTS)]
            await servers.generate(0, prompts[0], sampling)  # the first request warms up the server
            start = time.monotonic()
            found = await asyncio.gather(
                *(servers.generate(0, prompt, sampling) for prompt in prompts)
            )
            return time.monotonic() - start, sum(len(answer.completion_ids) for answer in found)
        finally:
            await servers.close()
            await server.end()
