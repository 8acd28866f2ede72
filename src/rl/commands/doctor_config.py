"""`rl doctor @ run.toml`: what a configuration needs that only a look at the machine can tell."""

import asyncio
import json
import math
import os
import socket
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from rl import devices
from rl.access import AccessError, exposure, run_token
from rl.cli import to_toml
from rl.commands.doctor_machine import GIB, Check, memory_bytes, needed_gib
from rl.commands.doctor_smoke import wait_for
from rl.config import RLConfig
from rl.disk import SPARE, needs, size, tensor_shapes
from rl.files import write_file
from rl.orchestrator.env_ids import EnvLoadError, check_installed
from rl.prepare import with_absolute_paths
from rl.processes import LAUNCHER, Children

MODEL_TIMEOUT_S = 300.0
"""A model that comes out of a package is converted first."""
REACH_S = 5.0
FIND_MODEL = """
import pathlib, sys
from rl.cli import from_toml
from rl.models import ModelError, resolve_model
config = from_toml(pathlib.Path(sys.argv[1]))
try:
    print(resolve_model(config.model, needs_template=config.sft is None))
except ModelError as error:
    print(error)
    raise SystemExit(1)
"""
ASK_HUB = """
import sys
from huggingface_hub import model_info
from huggingface_hub.errors import HfHubHTTPError
try:
    files = model_info(sys.argv[1], files_metadata=True, timeout=10).siblings
    print(sum(file.size or 0 for file in files if file.rfilename.endswith((".safetensors", ".json"))))
except (HfHubHTTPError, OSError) as error:
    print(str(error).splitlines()[0])
    raise SystemExit(1)
"""
CHECK_ENGINE = """
import json, sys
from rl.inference.main import prepare
prepare(sys.argv[2] == "cpu", None)
from rl.inference.engine_args import EngineArgsError, parse_engine_args
try:
    parse_engine_args(json.loads(sys.argv[1]))
except EngineArgsError as error:
    print(error)
    raise SystemExit(1)
"""


def config_checks(config: RLConfig, children: Children) -> Iterable[Check]:
    """One check after the other, the cheap ones first."""
    config = with_absolute_paths(config)
    yield run_directory(config)
    division = divided(config)
    yield division[0]
    yield from exposed(config)
    yield from others(config)
    if config.wandb:
        yield wandb()
    with tempfile.TemporaryDirectory(prefix="rl-doctor-") as folder:
        work = Path(folder)
        write_file(work / "config.toml", to_toml(config).encode())
        found, model = find_model(config, work, children)
        yield found
        if model:
            yield from sizes(config, model)
        if config.inference.vllm and not config.sft and not config.orchestrator.inference_urls:
            yield engine_arguments(config, division[1], work, children)
        if not config.sft:
            yield from environments(config, work, children)


def run_directory(config: RLConfig) -> Check:
    root = config.run_dir.root
    if config.run_dir.config.exists():
        return Check("warn", "run", f"{root} exists: continue that run with --resume, delete it with --clean, or choose another --name")
    return Check("ok", "run", f"{root} is free")


def divided(config: RLConfig) -> tuple[Check, bool]:
    """Who gets what of this box, and whether inference gets a GPU."""
    try:
        division = devices.split(config, devices.machine())
    except devices.DeviceError as error:
        return Check("FAIL", "devices", " ".join(str(error).split())), False

    def words(share: devices.Share) -> str:
        gpus = f"GPUs {','.join(map(str, share.gpus))} and " if share.gpus else ""
        return f"{gpus}{len(share.cores)} cores"

    said = f"trainer {words(division.trainer)}, {division.ranks} rank{'s' if division.ranks > 1 else ''}"
    if not config.sft and not config.orchestrator.inference_urls:
        said += f"; inference {words(division.inference)}"
    return Check("ok", "devices", said), bool(division.inference.gpus)


def exposed(config: RLConfig) -> Iterable[Check]:
    """What other machines will be able to reach. The token is made by the run, not by a question."""
    said = exposure(config)
    try:
        if os.environ.get("RL_TOKEN"):
            run_token(config)
    except AccessError as error:
        yield Check("FAIL", "network", str(error))
    for text in said:
        yield Check("warn", "network", text)
    if not said and not config.sft:
        yield Check("ok", "network", "everything listens on loopback alone")


def others(config: RLConfig) -> Iterable[Check]:
    """Servers that the run uses and does not start."""
    orchestrator = config.orchestrator
    teachers = [one.base_url for one in (orchestrator.teacher, *(env.teacher for env in orchestrator.environment)) if one]
    heads = [env.head_server for env in (*orchestrator.environment, *orchestrator.eval) if env.head_server]
    named = [("orchestrator.inference_urls", url) for url in orchestrator.inference_urls]
    named += [("the teacher's base_url", url) for url in dict.fromkeys(teachers)] + [("head_server", url) for url in dict.fromkeys(heads)]
    for key, url in named:
        parts = urlsplit(url if "//" in url else f"//{url}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=REACH_S).close()
            yield Check("ok", "servers", f"{url} accepts connections")
        except (OSError, ValueError) as error:
            yield Check("FAIL", "servers", f"{key} = {url}: {error}; start that server first, or mend the address")


def wandb() -> Check:
    """Whether W&B will know who we are."""
    if os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun"):
        return Check("ok", "wandb", f"WANDB_MODE={os.environ['WANDB_MODE']}: nothing is sent")
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    if os.environ.get("WANDB_API_KEY") or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace")):
        return Check("ok", "wandb", "a key is there")
    return Check("warn", "wandb", "no key: `wandb login`, or WANDB_API_KEY, or WANDB_MODE=offline")


def find_model(config: RLConfig, work: Path, children: Children) -> tuple[Check, Path | None]:
    """The model's folder if it is on this machine; else whether the hub has it. Nothing is downloaded."""
    name, command = config.model.name, [sys.executable, "-c", FIND_MODEL, str(work / "config.toml")]
    child = children.start("model", command, {**os.environ, "HF_HUB_OFFLINE": "1"}, work / "logs")
    fault = wait_for(child, MODEL_TIMEOUT_S)
    said = child.log.read_text(errors="replace").strip().splitlines()
    if not fault:
        return Check("ok", "model", f"{name}: {said[-1]}"), Path(said[-1])
    is_path = name.startswith((".", "/", "~")) or Path(name).is_dir() or name.count("/") > 1
    if child.exit_code == 1 and not is_path:
        asked = children.start("hub", [sys.executable, "-c", ASK_HUB, name], dict(os.environ), work / "logs")
        if not wait_for(asked, MODEL_TIMEOUT_S):
            size = int(asked.log.read_text().strip().splitlines()[-1])
            return Check("ok", "model", f"{name}: not here yet; the start of the run downloads {size / GIB:.1f} GiB from the hub"), None
    return Check("FAIL", "model", said[-1] if child.exit_code == 1 and said else f"looking for {name} {fault}"), None


def sizes(config: RLConfig, model: Path) -> Iterable[Check]:
    """Memory and disk for this model. GPUs have their own memory, and the trainer tries that at its start."""
    count = sum(map(math.prod, tensor_shapes(model)))
    if count and not devices.visible_gpus(dict(os.environ)):
        free, need = memory_bytes()[1] / GIB, needed_gib(count)
        said = f"{count / 1e6:.0f}M weights take about {need:.0f} GiB on a CPU, {free:.1f} GiB are free"
        remedy = ": a smaller model, trainer.lora, or a larger machine"
        yield Check("warn", "memory", said + remedy) if need > free else Check("ok", "memory", said)
    if not count:
        return
    for need in needs(config, model):
        parts = ", ".join(f"{what} {size(amount)}" for what, amount in need.parts.items())
        said = f"up to {size(need.total)} in {need.place} ({parts}), {size(need.free)} are free"
        remedy = (
            ": free some, choose another --output_dir, or keep less (trainer.weights, trainer.checkpoint, orchestrator.batches: keep_last)"
        )
        yield Check("warn", "disk", said + remedy) if need.total * SPARE > need.free else Check("ok", "disk", said)


def engine_arguments(config: RLConfig, on_gpus: bool, work: Path, children: Children) -> Check:
    """`[inference.vllm]` as vLLM's own parser reads it."""
    given = json.dumps(config.inference.vllm)
    command = [sys.executable, "-c", CHECK_ENGINE, given, "gpu" if on_gpus else "cpu"]
    child = children.start("vllm-arguments", command, dict(os.environ), work / "logs")
    fault = wait_for(child, MODEL_TIMEOUT_S)
    if not fault:
        return Check("ok", "vllm", f"inference.vllm: {', '.join(config.inference.vllm)} are arguments of vLLM")
    lines = [line for line in child.log.read_text(errors="replace").splitlines() if line.startswith("inference.vllm.")]
    return Check("FAIL", "vllm", "; ".join(lines) or f"reading inference.vllm {fault}")


def environments(config: RLConfig, work: Path, children: Children) -> Iterable[Check]:
    """Each is installed; and each loads, in the processes that a run would have."""
    from rl.commands.playing import arena
    from rl.orchestrator.rollouts import Endpoint, PolicySpec, Ready
    from rl.orchestrator.workers import WorkerError

    entries = {entry.label: entry for entry in [*config.orchestrator.environment, *config.orchestrator.eval]}
    try:
        for entry in entries.values():
            if entry.id and not entry.python:
                check_installed(entry.id)
    except EnvLoadError as error:
        yield Check("FAIL", "environment", str(error))
        return
    config = config.model_copy(deep=True)
    for entry in [*config.orchestrator.environment, *config.orchestrator.eval]:
        entry.workers = 1

    async def load() -> dict[str, Ready]:
        nobody = PolicySpec(endpoint=Endpoint(base_url="http://127.0.0.1:9/v1", model="none"))  # never asked
        async with arena(config, nobody, work, children) as ground:
            return ground.ready

    os.environ[LAUNCHER] = str(os.getpid())  # workers end with us, however we end
    try:
        for name, ready in asyncio.run(load()).items():
            train = "ever new tasks" if ready.num_train is None else f"{ready.num_train} training examples"
            said = f"{name}: {train}" + ("" if ready.num_eval is None else f", {ready.num_eval} for evaluation")
            if ready.num_train == 0 and name in [env.label for env in config.orchestrator.environment]:
                yield Check("FAIL", "environment", f"{said}; check its arguments (args)")
            else:
                yield Check("ok", "environment", said)
    except (WorkerError, EnvLoadError) as error:
        yield Check("FAIL", "environment", str(error))
