"""`inference`: one vLLM server at the newest policy version of the run. Also `python -m rl.inference.main`."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from rl.access import AccessError, run_token
from rl.cli import load_config
from rl.config import RLConfig
from rl.credentials import CredentialError, redact, resolve
from rl.messages import WeightVersion
from rl.models import ModelError, resolve_model
from rl.processes import GIVE_UP, LASTING, die_with_parent
from rl.run_dir import RunDir, numbered
from rl.standby import leave
from rl.status import ROLE_WAIT_S, AlreadyRunningError, Status, hold_role

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM lays its buffers out for; a smaller one fits into the next."""

SLOW_IMPORTS = (
    "uvloop",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.launcher",
    "vllm.v1.engine.core",
    "rl.inference.routes",
    "rl.inference.server",
    "rl.inference.worker",
)


def main() -> None:
    """Entry point: exit code 0 after SIGTERM or SIGINT, 1 when the engine died, 2 for a wrong setting, 3 where another start is no use."""
    leave(lambda: preload(load_config(sys.argv[1:], "inference")[0]))
    config, _ = load_config(sys.argv[1:], "inference")
    try:
        code = run(config)
    except AccessError as error:
        code = tell(error, 2)
    except ModelError as error:
        code = tell(error, GIVE_UP)
    except AlreadyRunningError as error:
        code = tell(error, 1)
    except OSError as error:
        code = tell(error, GIVE_UP if error.errno in LASTING else 1)
    sys.exit(code)


def preload(config: RLConfig) -> None:
    """Imports what server and engine will need, and does nothing else."""
    prepare(runs_on_cpu(config), config.inference.cpus)
    for module in SLOW_IMPORTS:
        importlib.import_module(module)


def tell(error: Exception, code: int) -> int:
    print(f"inference: {error}", file=sys.stderr, flush=True)
    return code


def runs_on_cpu(config: RLConfig) -> bool:
    """Also where there are GPUs, if vLLM or the configuration does without them."""
    from rl.devices import is_cpu_vllm, visible_gpus

    return config.inference.gpus == 0 or is_cpu_vllm() or not visible_gpus(dict(os.environ))


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
    os.environ.pop("VLLM_API_KEY", None)  # the run's token guards all paths, and a request can show only one


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


def newest_sound_version(run_dir: RunDir) -> WeightVersion | None:
    """The newest policy version above 0 that is whole; damaged ones are passed over, loudly. None while there is only the base model."""
    from rl.inference.weight_files import WeightsError, read_tensors, verify

    for version, path in reversed(numbered(run_dir.weights_dir).items()):
        try:
            read_tensors(path)
            verify(path)
            return WeightVersion(version, str(path))
        except WeightsError as error:
            print(f"inference: WARNING: policy version {version} is passed over: {error}", file=sys.stderr, flush=True)
    return None


def run(config: RLConfig) -> int:
    """Serves the newest sound policy version of the run directory, or the base model as version 0."""
    from rl.inference.adapter import is_adapter
    from rl.inference.engine_args import EngineArgsError
    from rl.inference.server import Served, serve
    from rl.inference.weight_files import WeightsError, WeightsGoneError

    die_with_parent()
    on_cpu = runs_on_cpu(config)
    prepare(on_cpu, config.inference.cpus)
    run_dir, model = config.run_dir, config.model
    token = run_token(config)
    lock = hold_role(run_dir.lock("inference"), "inference", ROLE_WAIT_S)
    status = Status(run_dir.status("inference"), "inference")
    try:
        newest = newest_sound_version(run_dir)
        adapter = newest if newest and is_adapter(Path(newest.path)) else None
        whole = newest if newest and not adapter else None
        return serve(
            model_path=whole.path if whole else resolve_model(model),
            served=Served(whole.policy_version if whole else 0, adapter, token, config.inference.engine_timeout_s, status, lock),
            served_model_name=model.name,
            host=config.inference.host,
            port=config.inference.port,
            max_model_len=model.max_model_len,
            dtype=model.dtype,
            engine_args=resolve(config.inference.vllm, "inference.vllm"),
            adapter_args=adapter_arguments(config, on_cpu),
            on_cpu=on_cpu,
            seed=config.seed,
            trust_remote_code=model.trust_remote_code,
            chat_template=model.chat_template,
        )
    except (CredentialError, EngineArgsError) as error:
        print(f"inference: wrong settings\n{redact(str(error))}", file=sys.stderr)
        return 2
    except WeightsGoneError as error:  # the trainer has just replaced or deleted it
        return tell(error, 1)
    except WeightsError as error:
        return tell(error, GIVE_UP)
    finally:
        status.close()
        os.close(lock)


if __name__ == "__main__":
    main()
