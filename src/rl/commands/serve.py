"""`rl serve`: the Tinker API over a model, with our trainer and our inference."""

import os
import time
from pathlib import Path

from rl.cluster.submit import dry_run
from rl.commands.serve_process import NAME
from rl.config.command_line import load_config_or_exit
from rl.config.help import SETTINGS
from rl.config.run import RLConfig
from rl.config.stored import as_written
from rl.launch import roles
from rl.launch.children import Children
from rl.launch.keeper import Keeper
from rl.launch.prepare import prepare, refusals
from rl.launch.roles import Role
from rl.launch.run import check_ports, on_this_machine
from rl.run_dir.access_token import run_token
from rl.run_dir.lease import LEASE_S
from rl.run_dir.paths import RunDir
from rl.run_dir.status import read_status
from rl.system.errors import LASTING, RunError
from rl.system.linux import bind
from rl.system.terminal import say
from rl.tinker.requests import KEY_PREFIX

HELP = f"""Serves the Tinker API over a model: programs that use the tinker SDK train LoRA adapters
on this machine and sample from them. Prints the address and the key to give them. What clients make
is kept in the run directory, and the next start with the same name goes on with it. See
docs/tinker.md.

usage: rl serve [@ FILE] [--serve.alias NAME] [--KEY VALUE] ...

{SETTINGS}  --clean                     delete what clients have made, and start over
"""
POLL_S = 0.2


def main(args: list[str], children: Children) -> int:
    preset = {"serve": (True, "rl serve")}
    config, line = load_config_or_exit(
        args, "rl serve", variables=os.environ, usage=HELP, given=preset, dry_run=dry_run
    )
    is_clean = "clean" in line.switches
    config = config.with_absolute_paths()
    placement = on_this_machine(config)
    check_same(config, clean=is_clean)
    check_ports(config)
    assert config.serve
    sock = bind(config.serve.host, config.serve.port, "serve.port")
    # a process that is started again must be found where it was
    config.serve.port = sock.getsockname()[1]
    sock.close()
    prepared = prepare(config, resume=None, clean=is_clean)
    run_dir = prepared.run_dir
    for note in [*placement.notes, *(prepared.notes if is_clean else ())]:
        say(note)
    keeper = Keeper(config, run_dir, children, say)
    keeper.event("start", "rl", pid=os.getpid())
    try:
        keeper.begin([Role("model", roles.command("model", run_dir, 1), {})])
        while not keeper.finished:
            poll(keeper)
        say(f"starting {Path(config.model.name).name} (logs: {run_dir.logs})")
        keeper.begin(placement.roles(run_dir))
        watch(keeper, run_dir)
    finally:
        children.stop()
        keeper.archive_statuses()
        prepared.lease.close()
    return 0


def check_same(config: RLConfig, clean: bool) -> None:
    """Raises RunError if clients have made something here with settings that what they make
    depends on."""
    run_dir = config.run_dir
    if clean or not (run_dir.root / "models").is_dir():
        return
    if refused := refusals(as_written(run_dir.root), config):
        remedy = "  choose another --name, or delete what clients have made with --clean"
        raise RunError(
            "\n".join([f"{run_dir.root} was made with other settings:", *refused, remedy])
        )


def poll(keeper: Keeper) -> None:
    """Checks the processes, and says which have died. A start that the system refuses is tried
    again for LEASE_S. Raises RunError if a process cannot go on, OSError if it cannot start."""
    deadline, deaths = time.monotonic() + LEASE_S, None
    while deaths is None:
        try:
            deaths = keeper.poll()
        except OSError as error:
            if error.errno in LASTING or time.monotonic() >= deadline:
                raise
            time.sleep(POLL_S)
    for death in deaths:
        if death.verdict:
            raise death.verdict
        say(f"  {death.role} {death.reason}, {death.again}")
    time.sleep(POLL_S)


def watch(keeper: Keeper, run_dir: RunDir) -> None:
    """Keeps the processes alive until `rl stop`; prints address and key when both are ready."""
    told = False
    while not run_dir.stop_request.exists():
        poll(keeper)
        statuses = [read_status(run_dir.status(name)) for name in ("inference", NAME)]
        addresses = [status.address for status in statuses if status and status.address]
        if not told and len(addresses) == len(statuses):
            told = True
            print(
                f"export TINKER_BASE_URL={addresses[1]}\nexport "
                f"TINKER_API_KEY={KEY_PREFIX}{run_token(run_dir.status_dir)}"
            )
    run_dir.stop_request.unlink(missing_ok=True)
