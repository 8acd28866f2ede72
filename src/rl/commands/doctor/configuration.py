"""`rl doctor @ run.toml`: checks that this machine has what a configuration needs."""

import asyncio
import math
import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from rl.commands.doctor.machine import GIB, Check, ask, needed_gib
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
from rl.orchestrator.groups.teacher import make_teachers
from rl.orchestrator.workers.setups import task_faults
from rl.run_dir.access_token import given_token
from rl.system.errors import ConfigError, RunError
from rl.system.machine import machine, memory_bytes, visible_gpus
from rl.system.terminal import say, size
from rl.wire.worker_messages import TEMPLATE_REMEDY, Ready

CONNECT_S, TEACHER_S = 5.0, 30.0
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
        check, model = find_model(config, work, children)
        yield check
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
        return Check("run", "FAIL", str(error))
    if not exists:
        return Check("run", "ok", f"{root} is free")
    if not config.run_dir.anything_made():
        return Check("run", "ok", f"{root} is reused: the run in it has made nothing yet")
    return Check("run", "warn", f"{root} exists: {REMEDY}")


def division(config: RLConfig) -> Check:
    """Checks the assignment of this machine's GPUs and cores to processes."""
    try:
        devices.check_build(config, machine())  # gpus() reports the rest
        split = devices.split(config, machine())
    except ConfigError as error:
        return Check("devices", "FAIL", " ".join(str(error).split()))
    if config.is_remote:
        return Check("devices", "ok", "none: the service trains and samples")

    def describe(share: devices.Share) -> str:
        gpus = f"GPUs {','.join(map(str, share.gpus))} and " if share.gpus else ""
        return f"{gpus}{len(share.cores)} cores"

    text = f"trainer {describe(split.trainer)}, {split.ranks} rank{'s' if split.ranks > 1 else ''}"
    if config.starts_inference:
        text += f"; inference {describe(split.inference)}"
    return Check("devices", "ok", text)


def exposed(config: RLConfig) -> Iterable[Check]:
    """Checks what other machines will be able to reach. Does not create a token; the run does."""
    texts = exposure(config)
    try:
        given_token()
    except RunError as error:
        yield Check("network", "FAIL", str(error))
    for text in texts:
        yield Check("network", "warn", text)
    if not texts and config.kind != "sft":
        yield Check("network", "ok", "everything listens on loopback only")


def servers(config: RLConfig) -> Iterable[Check]:
    """Checks the servers that the run uses but does not start."""
    orchestrator = config.orchestrator
    keys = dict.fromkeys(orchestrator.inference_urls, "orchestrator.inference_urls")
    keys |= {
        teacher.url: "the teacher's base_url" for teacher in make_teachers(orchestrator).values()
    }
    keys |= {
        env.head_server: "head_server" for env in orchestrator.entries.values() if env.head_server
    }
    yield from map(connection, keys, keys.values())


def connection(url: str, key: str = "") -> Check:
    """Checks that the server that setting `key` names accepts connections."""
    address = urlsplit(url if "//" in url else f"//{url}")
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=CONNECT_S).close()
        return Check("servers", "ok", f"{url} accepts connections")
    except (OSError, ValueError) as error:
        text = f"{key} = {url}: {error}; start that server first, or fix the address"
        return Check("servers", "FAIL", text)


def wandb() -> Check:
    """Checks that there is a key for W&B."""
    mode = os.environ.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled", "dryrun"):
        return Check("wandb", "ok", f"WANDB_MODE={mode}: nothing is sent")
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    in_netrc = netrc.is_file() and "wandb" in netrc.read_text(errors="replace")
    if os.environ.get("WANDB_API_KEY") or in_netrc:
        return Check("wandb", "ok", "a key is set")
    return Check("wandb", "warn", "no key: `wandb login`, or WANDB_API_KEY, or WANDB_MODE=offline")


def find_model(config: RLConfig, work: Path, children: Children) -> tuple[Check, Path | None]:
    """Returns a check and the model's folder if it is on this machine; otherwise checks that the
    hub has it. Downloads nothing."""
    name, file = config.model.name, str(work / "config.toml")
    answer = ask(children, work, "model", FIND_MODEL, file, HF_HUB_OFFLINE="1")
    if not answer.fault:
        return Check("model", "ok", f"{name}: {answer.lines[-1]}"), Path(answer.lines[-1])
    is_path = name.startswith((".", "/", "~")) or Path(name).is_dir() or name.count("/") > 1
    if answer.explains and not is_path:
        hub = ask(children, work, "hub", ASK_HUB, name)
        if not hub.fault:
            download = size(int(hub.lines[-1]))
            text = f"{name}: not downloaded yet; the run downloads {download} from the hub"
            return Check("model", "ok", text), None
    text = answer.lines[-1] if answer.explains else f"looking for {name} {answer.fault}"
    return Check("model", "FAIL", text), None


def sizes(config: RLConfig, model: Path) -> Iterable[Check]:
    """Checks memory and disk for this model. GPU memory is not checked; the trainer tests it at
    its start."""
    count = sum(map(math.prod, tensor_shapes(model)))
    if not count:
        return
    if not visible_gpus(dict(os.environ)):
        free, need = memory_bytes()[1], needed_gib(count)
        text = (
            f"{count / 1e6:.0f}M weights need about {need:.0f} GiB on a CPU; {size(free)} are free"
        )
        if lacks := need * GIB > free:
            text += ": use a smaller model, trainer.lora, or a larger machine"
        yield Check("memory", "warn" if lacks else "ok", text)
    for need in needs(config, model):
        text = str(need) if need.fits else f"{need}: {DISK_REMEDY}"
        yield Check("disk", "ok" if need.fits else "warn", text)


def service(work: Path, children: Children) -> Check:
    """Checks that the service that trains answers, takes the key and has the model."""
    answer = ask(children, work, "service", ASK_SERVICE, str(work / "config.toml"))
    if answer.fault and not answer.explains:
        return Check("service", "FAIL", f"asking it {answer.fault}")
    return Check("service", "FAIL" if answer.fault else "ok", answer.lines[-1])


def engine_arguments(config: RLConfig, work: Path, children: Children) -> Check:
    """Checks `[inference.vllm]` with vLLM's own parser."""
    answer = ask(children, work, "vllm-arguments", CHECK_ENGINE, str(work / "config.toml"))
    if not answer.fault:
        names = ", ".join(config.inference.vllm)
        return Check("vllm", "ok", f"inference.vllm: {names} are valid arguments of vLLM")
    lines = [line for line in answer.lines if line.startswith("inference.vllm.")]
    return Check("vllm", "FAIL", "; ".join(lines) or f"reading inference.vllm {answer.fault}")


def environments(
    config: RLConfig, model: Path | None, work: Path, children: Children
) -> Iterable[Check]:
    """Checks that each environment is installed, loads in a worker process, and has the tasks that
    the run needs; and the teachers that are up, as the start of a run does.

    `model` is the folder of the model whose context the prompts must fit; None: they are not
    measured, and teachers not checked.
    """
    config = config.model_copy(deep=True)
    for entry in config.orchestrator.entries.values():
        entry.workers = 1

    async def load() -> dict[str, Ready]:
        homes = homes_of(config, say, recorded=False)  # `unmade` has checked that they exist
        folder = str(model or "")
        async with play_session(config, homes, None, work, children, model=folder) as session:
            return session.ready

    try:
        if faults := id_faults(config.orchestrator.env_ids):
            yield from (Check("environment", "FAIL", fault) for fault in faults)
            return
        if lines := unmade(config):
            yield from (Check("environment", "warn", line) for line in lines)
            return
        loaded = asyncio.run(load())
    except RunError as error:
        yield Check("environment", "FAIL", str(error))
        return
    for name, ready in loaded.items():
        train = (
            "endless tasks" if ready.num_train is None else f"{ready.num_train} training examples"
        )
        held_out = "" if ready.num_eval is None else f", {ready.num_eval} for evaluation"
        yield Check("environment", "ok", f"{name}: {train}{held_out}")
    for fault in {ready.template_fault for ready in loaded.values()} - {""}:
        yield Check("template", "warn", f"{fault}: {TEMPLATE_REMEDY}")
    for fault in task_faults(config, loaded):
        yield Check("tasks", "FAIL", fault)
    for teacher in dict.fromkeys(make_teachers(config.orchestrator).values()):
        if not model or connection(teacher.url).level == "FAIL":
            continue  # `servers` says so
        try:
            teacher.config.timeout_s = min(teacher.config.timeout_s, TEACHER_S)
            text = "; ".join(asyncio.run(teacher.check_alone(config, model, loaded)))
            yield Check("teacher", "warn" if text else "ok", text or f"{teacher.url} scores text")
        except RunError as error:
            yield Check("teacher", "FAIL", str(error))
    if not model:
        text = "not measured against model.max_model_len: the model is not on this machine"
        yield Check("prompts", "warn", text)
