"""`inference`: one vLLM server at the newest policy version of the run. Also `python -m rl.inference.main`."""

import os
import sys
from pathlib import Path
from typing import Any

from rl.cli import load_config
from rl.config import RLConfig
from rl.models import ModelError, resolve_model
from rl.processes import die_with_parent
from rl.status import AlreadyRunningError, Status, hold_role

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM lays its buffers out for; a smaller one fits into the next."""


def main() -> None:
    """Entry point: exit code 0 after SIGTERM or SIGINT, 1 when the engine died, 2 for a wrong setting."""
    config, _ = load_config(sys.argv[1:], "inference")
    try:
        sys.exit(run(config))
    except (AlreadyRunningError, ModelError, OSError) as error:
        sys.exit(f"inference: {error}")


def prepare(on_cpu: bool, cpus: int | list[int] | None) -> None:
    """Sets up this process and its children; comes before anything imports torch or vllm. What the environment says already stays."""
    from rl.inference.server import common_environment, cpu_environment

    # Imports take half as long with .pyc files; without them every start of a server pays (25 s on a cold machine).
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    environment = common_environment()
    if on_cpu:
        if isinstance(cpus, list):
            os.sched_setaffinity(0, cpus)
        environment |= cpu_environment(cpus if isinstance(cpus, int) else len(os.sched_getaffinity(0)))
    os.environ.update(environment | dict(os.environ))
    os.environ["VLLM_SERVER_DEV_MODE"] = "0"


def adapter_arguments(config: RLConfig, on_cpu: bool) -> dict[str, Any]:
    """vLLM's arguments for adapters beside the model; none where they are merged or the run has none."""
    lora, way = config.trainer.lora, config.inference.adapters
    if lora is None or way == "merge" or (way == "auto" and on_cpu):
        return {}
    from rl.inference.engine_args import EngineArgsError

    rank = next((rank for rank in LORA_RANKS if rank >= lora.rank), None)
    if rank is None:
        raise EngineArgsError(f"trainer.lora.rank = {lora.rank}: vLLM serves ranks up to {LORA_RANKS[-1]}; set inference.adapters = merge")
    # Requests of that many versions can be in flight: older ones are cancelled. One more is the next.
    return {"enable_lora": True, "max_loras": config.orchestrator.max_off_policy_steps + 2, "max_lora_rank": rank}


def run(config: RLConfig) -> int:
    """Serves the newest policy version of the run directory, or the base model as version 0."""
    from rl.devices import is_cpu_vllm, visible_gpus
    from rl.inference.adapter import is_adapter
    from rl.inference.engine_args import EngineArgsError
    from rl.inference.server import serve

    die_with_parent()
    on_cpu = config.inference.gpus == 0 or is_cpu_vllm() or not visible_gpus(dict(os.environ))
    prepare(on_cpu, config.inference.cpus)
    run_dir, model = config.run_dir, config.model
    lock = hold_role(run_dir.lock("inference"), "inference")
    status = Status(run_dir.status("inference"), "inference")
    newest = run_dir.newest_weights()
    adapter = newest if newest and is_adapter(Path(newest.path)) else None
    whole = newest if newest and not adapter else None
    try:
        return serve(
            model_path=whole.path if whole else resolve_model(model),
            policy_version=whole.policy_version if whole else 0,
            adapter=adapter,
            served_model_name=model.name,
            host=config.inference.host,
            port=config.inference.port,
            max_model_len=model.max_model_len,
            dtype=model.dtype,
            engine_args=config.inference.vllm,
            adapter_args=adapter_arguments(config, on_cpu),
            on_ready=lambda address: status.doing("serving", address=address),
            on_cpu=on_cpu,
            seed=config.seed,
            trust_remote_code=model.trust_remote_code,
            chat_template=model.chat_template,
        )
    except EngineArgsError as error:
        print(f"inference: wrong settings\n{error}", file=sys.stderr)
        return 2
    finally:
        status.close()
        os.close(lock)


if __name__ == "__main__":
    main()
