"""`rl doctor @ run.toml`: checks that this machine has what a configuration needs."""

import asyncio
import math
import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from rl.commands.doctor.check import GIB, Check, fault_of, needed_gib, output, start_module
from rl.commands.play_session import play_session
from rl.config.check import exposure
from rl.config.command_line import write_config
from rl.config.environment_id import id_faults
from rl.config.run import RLConfig
from rl.diagnosis.disk import REMEDY as DISK_REMEDY
from rl.diagnosis.disk import needs, tensor_shapes
from rl.homes.resolve import homes_of, unmade
from rl.launch import devices
from rl.launch.children import Children
from rl.launch.prepare import REMEDY, is_run_or_free
from rl.orchestrator.workers.setups import task_faults
from rl.run_dir.access_token import given_token
from rl.system.errors import ConfigError, RunError
from rl.system.machine import machine, memory_bytes, visible_gpus
from rl.system.terminal import say
from rl.wire.worker_messages import TEMPLATE_REMEDY, Ready

MODEL_TIMEOUT_S = 300.0
"""Includes the time to convert a packaged model."""
CONNECT_S = 5.0
FIND_MODEL, ASK_HUB, CHECK_ENGINE, ASK_SERVICE = (
    "rl.models.folder",
    "rl.models.hub",
    "rl.inference.engine_args",
    "rl.tinker.client.service",
)
"""Modules that run in separate processes, so that nothing heavy is imported here."""


def config_checks(config: RLConfig, children: Children) -> Iterable[Check]:
    """Yields the checks of a configuration, cheap ones first."""
    config = config.with_absolute_paths()
    yield run_directory(config)
    yield division(config)
    yield from exposed(config)
    yield from servers(config)
    if config.wandb:
        yield wandb()
    with tempfile.TemporaryDirectory(prefix="rl-doctor-") as folder:
        work = Path(folder)
        write_config(work / "config.toml", config)
        found, model = find_model(config, work, children)
        yield found
        if config.is_remote:
            yield service(work, children)
        elif model:
            yield from sizes(config, model)
        if config.inference.vllm and config.starts_inference:
            yield engine_arguments(config, work, children)
        if config.plays:
            yield from environments(config, model, work, children)


def run_directory(config: RLConfig) -> Check:
    """Checks whether a run of that name exists."""
    root = config.run_dir.root
    try:
        exists = is_run_or_free(root)
    except RunError as error:
        return Check("FAIL", "run", str(error))
    if not exists:
        return Check("ok", "run", f"{root} is free")
    if not config.run_dir.anything_made():
        return Check("ok", "run", f"{root} is reused: the run in it has made nothing yet")
    return Check("warn", "run", f"{root} exists: {REMEDY}")


def division(config: RLConfig) -> Check:
    """Checks the assignment of this machine's GPUs and cores to processes."""
    try:
        devices.check_build(config, machine())  # gpus() reports the rest
        split = devices.split(config, machine())
    except ConfigError as error:
        return Check("FAIL", "devices", " ".join(str(error).split()))

    def describe(share: devices.Share) -> str:
        gpus = f"GPUs {','.join(map(str, share.gpus))} and " if share.gpus else ""
        return f"{gpus}{len(share.cores)} cores"

    if config.is_remote:
        return Check("ok", "devices", "none: the service trains and samples")
    text = f"trainer {describe(split.trainer)}, {split.ranks} rank{'s' if split.ranks > 1 else ''}"
    if config.starts_inference:
        text += f"; inference {describe(split.inference)}"
    return Check("ok", "devices", text)


def exposed(config: RLConfig) -> Iterable[Check]:
    """Checks what other machines will be able to reach. Does not create a token; the run does."""
    texts = exposure(config)
    try:
        given_token()
    except RunError as error:
        yield Check("FAIL", "network", str(error))
    for text in texts:
        yield Check("warn", "network", text)
    if not texts and not config.sft:
        yield Check("ok", "network", "everything listens on loopback only")


def servers(config: RLConfig) -> Iterable[Check]:
    """Checks the servers that the run uses but does not start."""
    orchestrator = config.orchestrator
    teachers = [
        one.base_url
        for one in (orchestrator.teacher, *(env.teacher for env in orchestrator.environment))
        if one
    ]
    heads = [
        env.head_server
        for env in (*orchestrator.environment, *orchestrator.eval)
        if env.head_server
    ]
    named = [("orchestrator.inference_urls", url) for url in orchestrator.inference_urls]
    named += [("the teacher's base_url", url) for url in dict.fromkeys(teachers)] + [
        ("head_server", url) for url in dict.fromkeys(heads)
    ]
    for key, url in named:
        parts = urlsplit(url if "//" in url else f"//{url}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()
            yield Check("ok", "servers", f"{url} accepts connections")
        except (OSError, ValueError) as error:
            yield Check(
                "FAIL",
                "servers",
                f"{key} = {url}: {error}; start that server first, or fix the address",
            )


def wandb() -> Check:
    """Checks that there is a key for W&B."""
    if os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun"):
        return Check("ok", "wandb", f"WANDB_MODE={os.environ['WANDB_MODE']}: nothing is sent")
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    if os.environ.get("WANDB_API_KEY") or (
        netrc.is_file() and "wandb" in netrc.read_text(errors="replace")
    ):
        return Check("ok", "wandb", "a key is set")
    return Check("warn", "wandb", "no key: `wandb login`, or WANDB_API_KEY, or WANDB_MODE=offline")


def find_model(config: RLConfig, work: Path, children: Children) -> tuple[Check, Path | None]:
    """Returns a check and the model's folder if it is on this machine; otherwise checks that the
    hub has it. Downloads nothing."""
    name = config.model.name
    child = start_module(
        children, work, "model", FIND_MODEL, str(work / "config.toml"), HF_HUB_OFFLINE="1"
    )
    fault, lines = fault_of(child, MODEL_TIMEOUT_S), output(child)
    if not fault:
        return Check("ok", "model", f"{name}: {lines[-1]}"), Path(lines[-1])
    is_path = name.startswith((".", "/", "~")) or Path(name).is_dir() or name.count("/") > 1
    if child.exit_code == 1 and not is_path:
        hub = start_module(children, work, "hub", ASK_HUB, name)
        if not fault_of(hub, MODEL_TIMEOUT_S):
            download = int(output(hub)[-1]) / GIB
            return Check(
                "ok",
                "model",
                f"{name}: not downloaded yet; the run downloads {download:.1f} GiB from the hub",
            ), None
    return Check(
        "FAIL",
        "model",
        lines[-1] if child.exit_code == 1 and lines else f"looking for {name} {fault}",
    ), None


def sizes(config: RLConfig, model: Path) -> Iterable[Check]:
    """Checks memory and disk for this model. GPU memory is not checked; the trainer tests it at
    its start."""
    count = sum(map(math.prod, tensor_shapes(model)))
    if not count:
        return
    if not visible_gpus(dict(os.environ)):
        free, need = memory_bytes()[1] / GIB, needed_gib(count)
        text = (
            f"{count / 1e6:.0f}M weights need about {need:.0f} GiB on a CPU; {free:.1f} GiB are "
            "free"
        )
        remedy = ": use a smaller model, trainer.lora, or a larger machine"
        yield Check("warn", "memory", text + remedy) if need > free else Check("ok", "memory", text)
    for need in needs(config, model):
        yield (
            Check("ok", "disk", str(need))
            if need.fits
            else Check("warn", "disk", f"{need}: {DISK_REMEDY}")
        )


def service(work: Path, children: Children) -> Check:
    """Checks that the service that trains answers, takes the key and has the model."""
    child = start_module(children, work, "service", ASK_SERVICE, str(work / "config.toml"))
    fault, lines = fault_of(child, MODEL_TIMEOUT_S), output(child)
    if fault and not (child.exit_code == 1 and lines):
        return Check("FAIL", "service", f"asking it {fault}")
    return Check("FAIL" if fault else "ok", "service", lines[-1])


def engine_arguments(config: RLConfig, work: Path, children: Children) -> Check:
    """Checks `[inference.vllm]` with vLLM's own parser."""
    child = start_module(children, work, "vllm-arguments", CHECK_ENGINE, str(work / "config.toml"))
    fault = fault_of(child, MODEL_TIMEOUT_S)
    if not fault:
        return Check(
            "ok",
            "vllm",
            f"inference.vllm: {', '.join(config.inference.vllm)} are valid arguments of vLLM",
        )
    lines = [line for line in output(child) if line.startswith("inference.vllm.")]
    return Check("FAIL", "vllm", "; ".join(lines) or f"reading inference.vllm {fault}")


def environments(
    config: RLConfig, model: Path | None, work: Path, children: Children
) -> Iterable[Check]:
    """Checks that each environment is installed, loads in a worker process, and has the tasks that
    the run needs.

    `model` is the folder of the model whose context the prompts must fit; None: they are not
    measured.
    """
    config = config.model_copy(deep=True)
    for entry in [*config.orchestrator.environment, *config.orchestrator.eval]:
        entry.workers = 1

    async def load() -> dict[str, Ready]:
        homes = homes_of(config, say, recorded=False)  # `unmade` has checked that they exist
        async with play_session(
            config, homes, None, work, children, model=str(model or "")
        ) as ground:
            return ground.ready

    if faults := id_faults(config.orchestrator.env_ids):
        yield from (Check("FAIL", "environment", fault) for fault in faults)
        return
    try:
        if lines := unmade(config):
            yield from (Check("warn", "environment", line) for line in lines)
            return
        loaded = asyncio.run(load())
    except RunError as error:
        yield Check("FAIL", "environment", str(error))
        return
    for name, ready in loaded.items():
        train = (
            "endless tasks" if ready.num_train is None else f"{ready.num_train} training examples"
        )
        yield Check(
            "ok",
            "environment",
            f"{name}: {train}"
            + ("" if ready.num_eval is None else f", {ready.num_eval} for evaluation"),
        )
    faults = {ready.template_fault for ready in loaded.values()} - {""}
    yield from (Check("warn", "template", f"{fault}: {TEMPLATE_REMEDY}") for fault in faults)
    yield from (Check("FAIL", "tasks", fault) for fault in task_faults(config, loaded))
    if not model:
        yield Check(
            "warn",
            "prompts",
            "not measured against model.max_model_len, because the model is not on this machine",
        )
