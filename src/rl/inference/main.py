"""`inference`: one vLLM server with the newest policy version of the run. Also `python -m
rl.inference.main`.

The server that `rl` starts and keeps alive is the run's process `inference`; there may be any
number of others, each named `inference-<host>-<port>`.
"""

import importlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from rl.config.command_line import load_config_or_exit
from rl.config.help import PROCESS_USAGE
from rl.config.run import RLConfig
from rl.inference.engine_args import prepare, runs_on_cpu
from rl.inference.server import Served, serve
from rl.inference.weight_files import is_adapter, read_tensors
from rl.models.folder import resolve_model
from rl.run_dir import spans
from rl.run_dir.access_token import run_token
from rl.run_dir.checksums import Mirror, chain, check_version, content_of, is_delta
from rl.run_dir.lease import ROLE_WAIT_S, Lease, forget_dead_servers, hold_role
from rl.run_dir.paths import RunDir, numbered
from rl.run_dir.status import SERVER_NAME, Phase, Status, further_server
from rl.system.credentials import redact
from rl.system.errors import WRONG_SETTINGS, ConfigError, RunError, exit_code_of
from rl.system.linux import bind, die_with_parent
from rl.system.prefork import leave
from rl.system.process_table import MARKER
from rl.wire.messages import WeightVersion

SLOW_IMPORTS = (
    "uvloop",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.launcher",
    "vllm.v1.engine.core",
    "rl.inference.routes",
    "rl.inference.worker",
)


def main() -> None:
    """Entry point. Exit code 0 after SIGTERM or SIGINT, 1 if the engine died, 2 for a wrong
    setting, 3 if another start is pointless."""
    leave(lambda: preload(load_config_or_exit(sys.argv[1:], "inference")[0]))
    config, _ = load_config_or_exit(
        sys.argv[1:], "inference", usage=PROCESS_USAGE, optional=("orchestrator.environment",)
    )
    try:
        code = run(config)
    except (RunError, OSError) as error:
        code = report(error, exit_code_of(error))
    sys.exit(code)


def preload(config: RLConfig) -> None:
    """Imports what server and engine will need, nothing more."""
    prepare(runs_on_cpu(config), config.inference.cpus)
    for module in SLOW_IMPORTS:
        importlib.import_module(module)


def report(error: Exception | str, code: int) -> int:
    print(f"inference: {error}", file=sys.stderr, flush=True)
    return code


def newest_sound_version(
    run_dir: RunDir, mirror: Mirror, claim: Callable[[int], None]
) -> WeightVersion | None:
    """The newest policy version above 0 that is whole; damaged ones are skipped with a warning.
    None if there is only the base model.

    `claim` is called with each before it is read, because a run that continues with its other
    servers may delete versions. A delta is then in `mirror`.
    """
    for version, path in reversed(numbered(run_dir.weights_dir).items()):
        claim(version)
        try:
            if is_delta(path):
                mirror.become(path)
                content = content_of(mirror.tensors or {})
            else:
                read_tensors(path)
                content = check_version(path, run_dir.digests(version))
            # Of what was read: the record may be of another version already, which the trainer is
            # writing in the place of this one.
            return WeightVersion(version, str(path), content=content)
        except RunError as error:
            text = f"inference: WARNING: skipping policy version {version}: {error}"
            print(text, file=sys.stderr, flush=True)
    return None


def take_role(config: RLConfig) -> tuple[str, Lease, socket.socket]:
    """Takes a name among the processes of the run. Returns the name, its lease and the bound
    socket. Raises RunError, OSError."""
    run_dir, settings = config.run_dir, config.inference
    if MARKER in os.environ:  # `rl` has started it
        name = os.environ.get(SERVER_NAME, "inference")
        lease = hold_role(run_dir.lock(name), ROLE_WAIT_S)
        return name, lease, bind(settings.host, settings.port, "inference.port")
    sock = bind(settings.host, settings.port, "inference.port")
    name = further_server(sock.getsockname()[1])
    forget_dead_servers(run_dir.status_dir)
    return name, hold_role(run_dir.lock(name), ROLE_WAIT_S), sock


def run(config: RLConfig) -> int:
    """Serves the newest sound policy version of the run directory, or the base model as version
    0."""
    die_with_parent()
    on_cpu = runs_on_cpu(config)
    prepare(on_cpu, config.inference.cpus)
    run_dir = config.run_dir
    try:
        token = run_token(run_dir.status_dir)
    # an unusable token file is a wrong setting, just like an unusable RL_TOKEN
    except RunError as error:
        return report(error, WRONG_SETTINGS)
    name, lease, sock = take_role(config)
    spans.start(run_dir.spans, name)
    status = Status(run_dir.status(name), name)
    try:
        mirror, base = Mirror(), ""
        newest = newest_sound_version(
            run_dir,
            mirror,
            lambda version: status.enter(Phase.LOADING_MODEL, policy_version=version),
        )
        path = Path(newest.path) if newest else Path()
        changes = newest if newest and (is_adapter(path) or is_delta(path)) else None
        if newest and not is_adapter(path):
            base = str([*chain(path)][-1])
        served = Served(
            newest.policy_version if newest and not changes else 0,
            newest.content if newest and not changes else "",
            changes,
            mirror,
            token,
            config.inference.engine_timeout_s,
            status,
            lease.fd,
            sock,
        )
        return serve(config, base or resolve_model(config.model), served, on_cpu)
    except ConfigError as error:
        return report(f"wrong settings\n{redact(str(error))}", WRONG_SETTINGS)
    finally:
        status.close()
        lease.close()


if __name__ == "__main__":
    main()
