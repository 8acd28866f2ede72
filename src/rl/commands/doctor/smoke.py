"""`rl doctor`: runs a real training step and a real vLLM server on a tiny random model, in
separate processes."""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl.commands.doctor.machine import TIMEOUT_S, Check, ask, fault_of
from rl.commands.play_session import policy_server
from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.launch import devices, roles
from rl.launch.children import Children
from rl.models.tiny import MAX_LEN, make_tiny_model
from rl.run_dir.metrics import read_metrics
from rl.system.errors import ConfigError, RunError
from rl.system.machine import is_cpu_vllm, machine, visible_gpus

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
    answer = ask(children, work, "torch", "rl.trainer.parallel.world")
    if answer.fault:
        return Check("torch", "FAIL", f"counting GPUs {answer.fault}")
    count, build = answer.lines[-1].split(" ", 1)
    if int(count) >= wanted:
        return Check("torch", "ok", f"sees {count} GPUs, CUDA {build}")
    text = (
        f"sees {count} of {wanted} GPUs (CUDA {build}): the driver is older than that CUDA, or "
        "this torch is for CPUs: update it, or `uv sync --no-group cpu --group gpu`"
    )
    return Check("torch", "FAIL", text)


def smoke_config(model: Path, **sections: Any) -> RLConfig:
    """Returns a configuration with a tiny model and these sections. Raises ConfigError."""
    sections["model"] = {"name": str(model), "dtype": "float32", "max_model_len": MAX_LEN}
    return RLConfig.model_validate({"orchestrator": {"environment": [{"id": "none"}]}} | sections)


def trainer_smoke(config: RLConfig, model: Path, work: Path, children: Children) -> Check:
    """Runs a few steps of the real trainer, on as many ranks as the configuration would use."""
    samples = {"samples": 8, "group_size": 4, "prompt_tokens": 16, "completion_tokens": 16}
    shares = config.trainer.model_dump(include={"gpus", "cpus", "ranks"}, exclude_none=True)
    trainer = {"data": {"fake": samples}, **shares}
    try:
        smoke = smoke_config(
            model, name="trainer", output_dir=str(work), max_steps=STEPS, trainer=trainer
        )
        division = devices.split(smoke, machine())
    except ConfigError as error:
        return Check("training", "FAIL", " ".join(str(error).split()))
    run_dir, ranks, start = smoke.run_dir, division.ranks, time.monotonic()
    write_config(run_dir.config, smoke)
    child = roles.start(children, "trainer", run_dir, division, work / "logs")
    if fault := fault_of(child, TIMEOUT_S):
        return Check("training", "FAIL", f"a training step on a tiny model {fault}")
    step_s = read_metrics(run_dir.metrics)[STEPS, "trainer"]["time/step"]
    device = "GPU" if division.trainer.gpus else "CPU"
    text = (
        f"{STEPS} steps on {ranks} {device} rank{'s' if ranks > 1 else ''}, {1000 * step_s:.0f} ms "
        f"per step; {time.monotonic() - start:.1f} s including startup"
    )
    return Check("training", "ok", text)


def vllm_smoke(model: Path, work: Path, children: Children) -> Check:
    """Runs a real server and samples a few answers."""
    start = time.monotonic()
    try:
        sampled_s, tokens = asyncio.run(answers(model, work, children))
    except TimeoutError:
        why = "is the machine overloaded, or its disk slow?"
        return Check("vLLM", "FAIL", f"no answer within {TIMEOUT_S:.0f} s; {why}")
    except (RunError, ValueError) as error:
        return Check("vLLM", "FAIL", str(error))
    rate = f"{REQUESTS} answers, {tokens / sampled_s:.0f} tokens per second"
    return Check("vLLM", "ok", f"{rate}; {time.monotonic() - start:.1f} s including startup")


async def answers(model: Path, work: Path, children: Children) -> tuple[float, int]:
    """Returns (seconds, number of tokens sampled in that time)."""
    gpus = 1 if visible_gpus(dict(os.environ)) and not is_cpu_vllm() else 0
    config = smoke_config(model, inference={"gpus": gpus, "startup_timeout_s": TIMEOUT_S})
    sampling = {"max_tokens": TOKENS, "temperature": 1.0}
    prompts = [[3 + (7 * i + j) % 250 for j in range(16)] for i in range(REQUESTS)]
    starting = policy_server(config, str(model), work, children)
    async with asyncio.timeout(TIMEOUT_S), starting as server, server.client() as client:
        await client.generate(0, prompts[0], sampling)  # the first request warms up the server
        start = time.monotonic()
        sampled = await asyncio.gather(*(client.generate(0, p, sampling) for p in prompts))
        return time.monotonic() - start, sum(len(answer.completion_ids) for answer in sampled)
