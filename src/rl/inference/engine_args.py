"""The environment and the arguments of vLLM's server. `[inference.vllm]` is checked against vLLM's
own argument parser, so that every vLLM argument works and no list of them lives here.

`python -m rl.inference.engine_args CONFIG` only checks; exit code 1 with a line per fault.
"""

import argparse
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from rl.config.command_line import from_toml
from rl.config.run import RLConfig
from rl.system.errors import ConfigError
from rl.system.linux import socket_base
from rl.system.machine import is_cpu_vllm, visible_gpus
from rl.system.terminal import did_you_mean

OWNED = {
    "model": "model.name",
    "tokenizer": "model.name",
    "served_model_name": "model.name",
    "max_model_len": "model.max_model_len",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "chat_template": "model.chat_template",
    "host": "inference.host",
    "port": "inference.port",
    "enable_lora": "trainer.lora",
    "enable_return_routed_experts": "trainer.router_replay",
    "return_sampling_mask": "trainer.max_kept",
    "max_lora_rank": "trainer.lora.rank",
    "max_loras": "orchestrator.max_off_policy_steps",
}
"""vLLM arguments that duplicate a setting of ours -> that setting."""

PLAIN_HTTP = (
    "the server of a run speaks plain HTTP: put a tunnel or a TLS proxy in front (docs/security.md)"
)
FIXED = {
    "logprobs_mode": "training needs the logprobs of the distribution that was sampled from "
    "(processed_logprobs)",
    "worker_extension_cls": "the worker extension loads the weights",
    "seed": "each start of a server has its own seed: with the same one, servers would sample the "
    "same answers",
    "api_server_count": "one API process stamps the policy versions",
    "uds": "the server binds inference.host and inference.port",
    "config": "put its keys into [inference.vllm]",
    "api_key": "the run's token guards every path, while vLLM's key leaves some open: set RL_TOKEN",
    "headless": "engines on a further machine would begin with another version than the server: "
    "start a server on each (docs/clusters.md)",
    "language_model_only": "policies are trained on text alone, so images are not taken",
    "grpc": "the server of a run answers HTTP",
    "enable_ssl_refresh": PLAIN_HTTP,
} | {
    f"ssl_{name}": PLAIN_HTTP
    for name in ("keyfile", "certfile", "ca_certs", "cert_reqs", "ciphers")
}
"""vLLM arguments that cannot be changed -> why."""


def make_parser() -> argparse.ArgumentParser:
    """vLLM's server parser, which raises ConfigError instead of ending the process."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class RaisingParser(FlexibleArgumentParser):
        def error(self, message: str) -> None:
            raise ConfigError(message)

    return make_arg_parser(RaisingParser())


def to_flags(action: argparse.Action, value: Any) -> list[str]:
    """The flags that set one argument to `value` (from TOML). Raises ConfigError if there are
    none."""
    flag = action.option_strings[0]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError("takes true or false")
        if value:
            return [flag]
        negative = [option for option in action.option_strings if option.startswith("--no-")]
        return negative[:1]
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [flag, *map(str, value)]
    if isinstance(value, list | dict):
        return [f"{flag}={json.dumps(value)}"]
    return [f"{flag}={value}"]


def parse_one(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    """`value` as vLLM's own parser reads it. Raises ConfigError if it refuses it."""
    try:
        return getattr(parser.parse_args(to_flags(action, value)), action.dest)
    except ConfigError as error:
        flag, _, reason = str(error).partition(": ")
        raise ConfigError(reason if flag.startswith("argument ") else str(error)) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None


def parse_engine_args(values: dict[str, Any], defaults: dict[str, Any] | None = None) -> Namespace:
    """All arguments of vLLM's server: vLLM's defaults, then `defaults` (ours, trusted), then
    `values` (the user's, `_` or `-` in keys).

    Raises ConfigError listing every fault of `values` with key, value and remedy.
    """
    parser, faults = make_parser(), []
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    actions.pop("help")
    args = parser.parse_args([])
    for name, value in (defaults or {}).items():
        setattr(args, name, value)
    for key, value in values.items():
        name = key.replace("-", "_")
        fault = ""
        if name in OWNED:
            fault = f"set {OWNED[name]} instead"
        elif name in FIXED:
            fault = f"cannot be set, {FIXED[name]}"
        elif name not in actions:
            fault = f"vLLM has no such argument; {did_you_mean(name, actions)}"
        else:
            try:
                setattr(args, name, parse_one(parser, actions[name], value))
            except ConfigError as error:
                fault = str(error)
        if fault:
            # a secret is not printed
            shown = "..." if name.endswith(("key", "token")) else repr(value)
            faults.append(f"inference.vllm.{key} = {shown}: {fault}")
    if faults:
        raise ConfigError("\n".join(faults))
    return args


def runs_on_cpu(config: RLConfig) -> bool:
    """Whether the server runs on the CPU, also if there are GPUs that vLLM's build or the
    configuration does not use."""
    return config.inference.gpus == 0 or is_cpu_vllm() or not visible_gpus(dict(os.environ))


SOCKET_NAME = 37
"""Bytes of vLLM's name for a socket, with the slash before it."""


def prepare(on_cpu: bool, cpus: int | list[int] | None) -> None:
    """Sets up this process and its children before anything imports torch or vllm. Existing
    environment variables take precedence."""
    # Imports take half as long with .pyc files (25 s without them on a cold machine, at every start
    # of a server).
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    environment = common_environment()
    if on_cpu:
        if isinstance(cpus, list):
            os.sched_setaffinity(0, cpus)
        threads = cpus if isinstance(cpus, int) else len(os.sched_getaffinity(0))
        environment |= cpu_environment(threads)
    os.environ.update(environment | dict(os.environ))
    os.environ["VLLM_SERVER_DEV_MODE"] = "0"
    # the run's token guards all paths, and a request can show only one
    os.environ.pop("VLLM_API_KEY", None)


def cpu_environment(num_threads: int) -> dict[str, str]:
    """Environment variables of a server without GPU; must be set before vllm or torch is imported.

    Without OMP_NUM_THREADS vLLM reduces torch to one thread. Its in-process executor, 50% faster
    than the multi-process one on few cores, is only used with VLLM_ENABLE_V1_MULTIPROCESSING=0 (the
    engine core is still a separate process). GOMP_SPINCOUNT: by default threads that wait for each
    other spin for milliseconds; with other work on the same two cores, 64 answers of 16 tokens took
    35-64 s that way, 10-22 s with this (load 3 to 9, not a controlled comparison).
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "GOMP_SPINCOUNT": "10000",
    }


def common_environment() -> dict[str, str]:
    """Environment variables of every server: no usage statistics are sent, forked processes do
    not warn about tokenizer threads, sockets are where their paths are short enough, and calls of
    tools are the policy's own. By default vLLM lets a grammar choose their tokens; the trainer
    would compute other probabilities."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    sockets = {"VLLM_RPC_BASE_PATH": socket_base(SOCKET_NAME)}
    return quiet | sockets | {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}


def main() -> None:
    """Runs the check, without a model or a server."""
    config = from_toml(Path(sys.argv[1]))
    prepare(runs_on_cpu(config), None)  # before anything imports vLLM
    try:
        parse_engine_args(config.inference.vllm)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
