"""`rl doctor`: a training step and a vLLM server for real, on a tiny random model, in processes of their own."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from rl import devices
from rl.cli import to_toml
from rl.commands.doctor_machine import Check
from rl.commands.tiny_model import MAX_LEN, make_tiny_model
from rl.config import RLConfig
from rl.files import write_file
from rl.metrics import read_metrics
from rl.processes import Child, Children, last_lines

SMOKE_TIMEOUT_S = 300.0
"""A cold start of vLLM from a slow disk takes a minute."""
STEPS, REQUESTS, TOKENS = 3, 8, 64
POLL_S = 0.1
TORCH_GPUS = "import torch; print(torch.cuda.device_count(), torch.version.cuda or 'no CUDA in this build of torch')"


def smoke_checks(config: RLConfig, children: Children) -> Iterable[Check]:
    """Each with its seconds."""
    with tempfile.TemporaryDirectory(prefix="rl-doctor-") as folder:
        work = Path(folder)
        model = make_tiny_model(work / "tiny")
        if devices.visible_gpus(dict(os.environ)):
            yield torch_gpus(work, children)
        yield trainer_smoke(config, model, work, children)
        yield vllm_smoke(model, work, children)


def wait_for(child: Child, timeout_s: float) -> str:
    """Waits for a child's end; what went wrong, with the end of its log, or empty."""
    deadline = time.monotonic() + timeout_s
    while child.exit_code is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if child.exit_code == 0:
        return ""
    why = child.ending() if child.exit_code is not None else f"did not end within {timeout_s:.0f} s"
    child.signal_group(signal.SIGKILL)
    return f"{why}; its last words:" + "".join(f"\n        | {line}" for line in last_lines(child.log)[-6:])


def torch_gpus(work: Path, children: Children) -> Check:
    """Whether torch sees what the driver shows."""
    wanted = len(devices.visible_gpus(dict(os.environ)))
    child = children.start("torch", [sys.executable, "-c", TORCH_GPUS], dict(os.environ), work / "logs")
    if fault := wait_for(child, SMOKE_TIMEOUT_S):
        return Check("FAIL", "torch", f"counting GPUs {fault}")
    count, build = child.log.read_text().strip().splitlines()[-1].split(" ", 1)
    if int(count) < wanted:
        remedy = "the driver is older than that CUDA, or this torch is for CPUs: update it, or `uv sync --no-group cpu --group gpu`"
        return Check("FAIL", "torch", f"sees {count} of {wanted} GPUs (CUDA {build}): {remedy}")
    return Check("ok", "torch", f"sees {count} GPUs, CUDA {build}")


def trainer_smoke(config: RLConfig, model: Path, work: Path, children: Children) -> Check:
    """A few steps of the real trainer, on as many ranks as the configuration would take."""
    from rl.main import command

    ours = {
        "name": "trainer",
        "output_dir": str(work),
        "max_steps": STEPS,
        "model": {"name": str(model), "dtype": "float32", "max_model_len": MAX_LEN},
        "trainer": {
            "data": {"fake": {"samples": 8, "group_size": 4, "prompt_tokens": 16, "completion_tokens": 16}},
            **config.trainer.model_dump(include={"gpus", "cpus", "ranks"}, exclude_none=True),
        },
        "orchestrator": {"environment": [{"id": "none"}]},
    }
    try:
        smoke = RLConfig.model_validate(ours)
        division = devices.split(smoke, devices.machine())
    except devices.DeviceError as error:
        return Check("FAIL", "FSDP", " ".join(str(error).split()))
    smoke = devices.write_into(smoke, division)
    write_file(smoke.run_dir.config, to_toml(smoke).encode())
    start, environment = time.monotonic(), {**os.environ, **division.trainer.env}
    child = children.start("trainer", command("trainer", smoke.run_dir, division.ranks), environment, work / "logs", division.trainer.cores)
    if fault := wait_for(child, SMOKE_TIMEOUT_S):
        return Check("FAIL", "FSDP", f"a training step on a tiny model {fault}")
    step = read_metrics(smoke.run_dir.metrics)[STEPS, "trainer"]["time/step"]
    place = "GPU" if division.trainer.gpus else "CPU"
    said = f"{STEPS} steps on {division.ranks} {place} rank{'s' if division.ranks > 1 else ''}, {1000 * step:.0f} ms a step"
    return Check("ok", "FSDP", f"{said}; {time.monotonic() - start:.1f} s with the start")


def vllm_smoke(model: Path, work: Path, children: Children) -> Check:
    """A real server and a few answers."""
    from rl.commands.playing import PlayError
    from rl.orchestrator.inference_client import InferenceLostError
    from rl.prepare import RunError

    start = time.monotonic()
    try:
        sampled_s, tokens = asyncio.run(answers(model, work, children))
    except TimeoutError:
        return Check("FAIL", "vLLM", f"no answer within {SMOKE_TIMEOUT_S:.0f} s; is the machine overloaded, or its disk slow?")
    except (devices.DeviceError, InferenceLostError, PlayError, RunError, ValueError) as error:
        return Check("FAIL", "vLLM", str(error))
    rate = f"{REQUESTS} answers, {tokens / sampled_s:.0f} tokens a second"
    return Check("ok", "vLLM", f"{rate}; {time.monotonic() - start:.1f} s with the start")


async def answers(model: Path, work: Path, children: Children) -> tuple[float, int]:
    """Seconds, and how many tokens were sampled in them."""
    from rl.commands.playing import start_server
    from rl.orchestrator.inference_client import InferenceServers

    gpus = 1 if devices.visible_gpus(dict(os.environ)) and not devices.is_cpu_vllm() else 0
    ours = {
        "model": {"name": str(model), "dtype": "float32", "max_model_len": MAX_LEN},
        "inference": {"gpus": gpus, "startup_timeout_s": SMOKE_TIMEOUT_S},
        "orchestrator": {"environment": [{"id": "none"}]},
    }
    async with asyncio.timeout(SMOKE_TIMEOUT_S):
        server, _ = await start_server(RLConfig.model_validate(ours), str(model), work, children)
        servers = InferenceServers([], server.config.run_dir.status("inference"), SMOKE_TIMEOUT_S)
        try:
            await server.ready()
            sampling = {"max_tokens": TOKENS, "temperature": 1.0}
            prompts = [[3 + (7 * i + j) % 250 for j in range(16)] for i in range(REQUESTS)]
            await servers.generate(0, prompts[0], sampling)  # the first one warms it up
            start = time.monotonic()
            found = await asyncio.gather(*(servers.generate(0, prompt, sampling) for prompt in prompts))
            return time.monotonic() - start, sum(len(answer.token_ids) for answer in found)
        finally:
            await servers.close()
            await server.end()
