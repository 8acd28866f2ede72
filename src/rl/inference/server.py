"""vLLM's OpenAI server with our engine and our routes, in this process and one engine process."""

import asyncio
import gc
import os
import secrets
import signal
import socket
import sys
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from rl.config.run import RLConfig
from rl.config.trainer import EXPERTS
from rl.inference import engine_process
from rl.inference.engine_args import parse_engine_args
from rl.inference.weight_files import read_tensors
from rl.models.folder import read_json, vocab_size
from rl.run_dir.access_token import is_loopback
from rl.run_dir.checksums import Mirror
from rl.run_dir.status import Status
from rl.system.credentials import resolve
from rl.system.errors import ConfigError, RunError
from rl.system.functions import Blame
from rl.system.linux import pid_scope
from rl.system.machine import memory_bytes
from rl.wire.messages import WeightVersion

CPU_KV_SEQUENCES, CPU_KV_BLOCK = 64, 32
"""Number of sequences that the KV cache on the CPU is sized for (further requests are queued),
and of tokens per block. Only whole blocks are shared: with vLLM's 128, each rollout of a group
would compute a short prompt again, and 64 answers took 4.6 s instead of 3.2."""


SILENT = {"scheduler_cls", "speculative_config"}
"""vLLM's arguments with which our draw and scheduler on CPUs are not used."""


def cpu_defaults(engine_args: dict[str, Any]) -> dict[str, Any]:
    """Default vLLM arguments for the CPU.

    Eager: compiling takes a minute at every start and saves a quarter of the time per token.
    """
    defaults: dict[str, Any] = {
        "enforce_eager": True,
        "block_size": CPU_KV_BLOCK,
        "scheduler_cls": "rl.inference.draw.KeptScheduler",
    }
    parallel = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
    if all(value == 1 for key, value in engine_args.items() if key.replace("-", "_") in parallel):
        defaults["distributed_executor_backend"] = "uni"
    return defaults


def cpu_kv_cache_bytes(config: Any) -> int:
    """Bytes of KV cache on the CPU: for CPU_KV_SEQUENCES half-full sequences, at most a sixth of
    the machine's memory.

    vLLM would take nine tenths of the memory, which the trainer shares, and would touch all of it
    at the start (1.5 s per GiB).
    """
    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_kv_heads(parallel) * model.get_num_layers(parallel)
    token_bytes = 2 * heads * model.get_head_size() * model.dtype.itemsize
    sequence = (model.max_model_len // 2 + CPU_KV_BLOCK) * token_bytes
    return max(4 * sequence, min(CPU_KV_SEQUENCES * sequence, memory_bytes()[0] // 6))


def confuses_states(config: Any) -> bool:
    """Whether vLLM would give requests the states of others: its build for CPUs keeps one
    Mamba-2 state per request but, with prefix caching, looks states up by chunks of prompts (an
    IndexError, or the wrong state)."""
    model = config.model_config.hf_text_config
    return (
        any(getattr(model, name, None) for name in ("mamba_chunk_size", "chunk_size"))
        and config.device_config.device_type == "cpu"
        and config.cache_config.mamba_cache_mode != "none"
    )


def engine_config(args: Namespace, context: Any) -> Any:
    """vLLM's configuration, without prefix caching if `confuses_states`."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=context)
    if confuses_states(config):
        print(
            "inference.vllm.enable_prefix_caching: off, vLLM's build for CPUs confuses the "
            "states of this model's prefixes",
            flush=True,
        )
        args.enable_prefix_caching = False
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=context)
    return config


def check_experts(config: Any) -> None:
    """Warns if a model has experts and a server several engines (`data_parallel_size`). For
    other models engines are independent replicas; here they run in lockstep, and each expert is
    split across all their GPUs. Raises ConfigError if it cannot be split."""
    parallel, model = config.parallel_config, config.model_config
    if not model.is_moe or parallel.data_parallel_size == 1 or parallel.enable_expert_parallel:
        return
    text, gpus = model.hf_text_config, parallel.data_parallel_size * parallel.tensor_parallel_size
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    is_even = not isinstance(width, int) or width % gpus == 0
    problem = "wait for each other in each layer" if is_even else "cannot divide it evenly"
    message = (
        f"inference.vllm.data_parallel_size = {parallel.data_parallel_size} splits each expert "
        f"(width {width}) across {gpus} GPUs, which {problem}: set it to 1 and "
        "tensor_parallel_size to the GPUs, or enable_expert_parallel, or start a server per GPU "
        "(docs/clusters.md)"
    )
    if not is_even:
        raise ConfigError(message)
    print(f"inference: WARNING: {message}", file=sys.stderr, flush=True)


@contextmanager
def running_engine(args: Namespace):
    """Starts the engine's process and yields the engine; ends it on exit. Raises ConfigError if
    vLLM refuses the settings, and RunError if it cannot read the model: another start would fail
    in the same way."""
    from pydantic import ValidationError
    from vllm.usage.usage_lib import UsageContext

    from rl.inference.engine import VersionedEngine

    context, method = UsageContext.OPENAI_API_SERVER, os.environ.get(engine_process.METHOD)
    with Blame(
        "vLLM, reading the model's configuration and the settings,", "give a model that vLLM serves"
    ):
        try:
            config = engine_config(args, context)
        except (ValueError, NotImplementedError) as error:
            text = str(error)
            if isinstance(error, ValidationError):
                text = "; ".join(fault["msg"] for fault in error.errors())
            remedy = "lower model.max_model_len. vLLM's words: " if "max_model_len" in text else ""
            raise ConfigError(f"vLLM refuses the model or its settings: {remedy}{text}") from error
    check_experts(config)
    on_cpu, cache = config.device_config.device_type == "cpu", config.cache_config
    if on_cpu and cache.kv_cache_memory_bytes is None:
        cache.kv_cache_memory_bytes = cpu_kv_cache_bytes(config)
    engine_process.fork_engine(config, method)
    engine = VersionedEngine.from_vllm_config(
        config, usage_context=context, disable_log_stats=args.disable_log_stats
    )
    try:
        yield engine
    finally:
        engine.shutdown(timeout=0)


async def build_app(engine: Any, args: Namespace) -> Any:
    """vLLM's FastAPI app with our routes in front of its own."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app as build_vllm_app

    from rl.inference.chat import serve_tokens
    from rl.inference.routes import make_router

    tasks = await engine.get_supported_tasks()
    app = build_vllm_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    app.include_router(make_router(engine, args.served_model_name[0], serve_tokens(app)))
    return app


@dataclass(frozen=True)
class Served:
    """The weights that are served, and the settings and resources of the server."""

    policy_version: int
    """Version of the weights that the engine starts with."""
    content: str
    """The content_id (rl.run_dir.checksums) of the same weights."""
    changes: WeightVersion | None
    """The adapter or delta to load before the first request, if any."""
    mirror: Mirror
    """What deltas are applied to."""
    token: str
    """The token that every request must have."""
    engine_timeout_s: float
    status: Status
    lock: int
    """File descriptor of the role's lock."""
    sock: socket.socket
    """The server's socket, bound."""


async def run(args: Namespace, served: Served) -> str:
    """Serves until SIGTERM, SIGINT or the engine's death. Returns the error, or "". Raises
    RunError for a bad adapter."""
    with running_engine(args) as engine:
        death = asyncio.create_task(engine_process.engine_death(engine, served.engine_timeout_s))
        ready = asyncio.create_task(make_ready(engine, args, served))
        await asyncio.wait([death, ready], return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            fault = death.result()
        else:
            fault = await answer_requests(ready.result(), served, death)
        if fault:
            print(f"inference: {fault}", file=sys.stderr, flush=True)
        engine_process.end_within(engine_process.END_DEADLINE_S, 1 if fault else 0)
        death.cancel()
        ready.cancel()
        return fault


async def make_ready(engine: Any, args: Namespace, served: Served) -> Any:
    """Does everything between the start of the engine and the first request; returns the app."""
    engine.set_model(
        served.policy_version, served.content, read_tensors(Path(args.model)), served.status.advance
    )
    engine.mirror = served.mirror
    engine.read_timeout_s = engine_process.LOAD_PATIENCE * served.engine_timeout_s
    limit = engine.vllm_config.scheduler_config.max_num_batched_tokens
    served.status.gauges["prefill_tokens"] = limit
    served.status.follow("requests", engine.get_num_unfinished_requests)
    num_engines = engine.vllm_config.parallel_config.data_parallel_size_local
    engine.all_here = all(
        await engine.on_every_worker("begin", os.getpid(), pid_scope(), num_engines)
    )
    engine.head_is_tied = any(await engine.on_every_worker("head_is_tied"))
    if changes := served.changes:
        await engine.load_weights(changes.policy_version, changes.path, content=changes.content)
    return await build_app(engine, args)


async def answer_requests(app: Any, served: Served, death: "asyncio.Task[str]") -> str:
    """Runs the HTTP server until it ends; returns why the engine can no longer be used, or ""."""
    from rl.wire.serving import Gate, serve_app

    async def end_with_engine() -> None:
        raise RunError(await death)

    host = served.sock.getsockname()[0]
    # vLLM's error handlers stop it when they find the engine dead, which ends with it anyway
    app.state.server = SimpleNamespace(should_exit=False)
    gate = Gate(app, served.token, loopback=is_loopback(host))
    gc.freeze()  # else a collection that walked through all modules would block the event loop
    try:
        # Open requests are not waited for: they end with the engine, and their clients repeat them
        # elsewhere.
        work = asyncio.create_task(end_with_engine())
        await serve_app(gate, host, served.sock, served.status, work)
    except RunError as error:
        return str(error)
    return ""


def adapter_arguments(config: RLConfig, model_path: str, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments for adapters beside the model; empty if adapters are merged or the run
    has none. Raises ConfigError."""
    lora, way = config.trainer.lora, config.inference.adapters
    if lora is None:
        return {}
    unfit = "experts" if EXPERTS in lora.targets else ""
    if "text_config" in read_json(Path(model_path) / "config.json"):
        # whose layers vLLM names otherwise: it would serve the model alone, in silence
        unfit = "a model that sees images"
    if way == "merge" or (way == "auto" and (on_cpu or unfit)):
        return {}
    if unfit:
        raise ConfigError(
            f"inference.adapters = hot: vLLM is not known to serve adapters of {unfit}; set "
            "it to merge"
        )
    from vllm.config.lora import MaxLoRARanks  # those that it has buffers for

    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank]
    if not ranks:
        raise ConfigError(
            f"trainer.lora.rank = {lora.rank}: vLLM serves ranks up to "
            f"{get_args(MaxLoRARanks)[-1]}; set inference.adapters = merge"
        )
    # Requests of max_off_policy_steps + 1 versions can be in flight (older ones are cancelled); one
    # more slot is for the next version.
    slots = config.orchestrator.max_off_policy_steps + 2
    return {"enable_lora": True, "max_loras": slots, "max_lora_rank": ranks[0]}


def vllm_arguments(config: RLConfig, model_path: str, on_cpu: bool) -> Namespace:
    """All arguments of vLLM's server for the model at `model_path`. Raises ConfigError for wrong
    ones in `[inference.vllm]`."""
    model, settings = config.model, config.inference
    ours = {
        "model": model_path,
        "served_model_name": [model.name, Path(model.name).name],
        "host": settings.host,
        "max_model_len": model.max_model_len,
        "dtype": model.dtype,
        # servers, and restarts of one, must not sample the same answers
        "seed": secrets.randbits(32),
        "trust_remote_code": model.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rl.inference.worker.WeightLoader",
        "generation_config": "vllm",
        "language_model_only": True,
        "disable_log_stats": True,
    }
    if config.trainer.router_replay == "engine":
        if on_cpu:
            raise ConfigError(
                "trainer.router_replay = engine: vLLM gives no routes on CPUs; set it to "
                "trainer or off"
            )
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the only one that gives routes
        ours["enable_return_routed_experts"] = True
    truncates = config.truncates(vocab_size(Path(model_path)), replayed=True)
    if truncates and not on_cpu:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the only one that gives kept ids
        ours["return_sampling_mask"] = True
    ours |= adapter_arguments(config, model_path, on_cpu)
    settings_of_user = resolve(settings.vllm, "inference.vllm")
    if on_cpu:
        for key in SILENT.intersection(key.replace("-", "_") for key in settings_of_user):
            if truncates:
                raise ConfigError(
                    f"inference.vllm.{key}: with it vLLM does not tell on CPUs which tokens top_p, "
                    "top_k or min_p keep; leave one of them out, or set trainer.max_kept = 0"
                )
        ours |= cpu_defaults(settings_of_user)
    return parse_engine_args(settings_of_user, ours)


def serve(config: RLConfig, model_path: str, served: Served, on_cpu: bool) -> int:
    """Runs the server in this process and returns its exit code. Raises ConfigError before
    anything starts, RunError later."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, engine_process.end_while_starting)
    args = vllm_arguments(config, model_path, on_cpu)
    args.port = served.sock.getsockname()[1]
    engine_process.tie_children([served.sock.fileno(), served.lock])
    import uvloop

    return 1 if uvloop.run(run(args, served)) else 0
