"""`rl serve`: the Tinker API over a model, with our trainer and our inference.

`python -m rl.commands.serve @ config.toml` is its process that answers clients and trains their
adapters.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from rl.cluster.submit import dry_run
from rl.config.command_line import load_config_or_exit
from rl.config.help import PROCESS_USAGE, SETTINGS
from rl.config.run import RLConfig
from rl.config.stored import as_written
from rl.launch import roles
from rl.launch.children import Children
from rl.launch.keeper import Keeper
from rl.launch.prepare import keep_choices, prepare, refusals
from rl.launch.roles import Role
from rl.launch.run import check_ports, on_this_machine
from rl.models.folder import resolve_model
from rl.run_dir import spans
from rl.run_dir.access_token import run_token
from rl.run_dir.lease import LEASE_S, ROLE_WAIT_S, hold_role
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, Status, read_status
from rl.system.errors import LASTING, RunError, exit_code_of
from rl.system.linux import bind, die_with_parent, raise_open_files
from rl.system.terminal import say
from rl.tinker.requests import KEY_PREFIX
from rl.trainer.main import set_up_allocator, uses_gpus

NAME = "tinker"


def process() -> None:
    """Exit code 0 after SIGTERM, otherwise that of the error."""
    set_up_allocator()
    config, _ = load_config_or_exit(sys.argv[1:], "rl serve", usage=PROCESS_USAGE)
    code = 0
    try:
        run_process(config)
    except (RunError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        code = exit_code_of(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # everything is written; threads of libraries may abort at the end of the interpreter
    os._exit(code)


def run_process(config: RLConfig) -> None:
    """Loads the model, and serves it or replays what a client has done with it."""
    die_with_parent()
    raise_open_files()
    assert config.serve
    run_dir, replayed = config.run_dir, config.trainer.data.replay
    lease = hold_role(run_dir.lock(NAME), ROLE_WAIT_S)
    spans.start(run_dir.spans, NAME)
    status = Status(run_dir.status(NAME), NAME)
    status.enter(Phase.LOADING_MODEL)
    sock = None if replayed else bind(config.serve.host, config.serve.port, "serve.port")
    base = resolve_model(config.model, needs_template=False)
    from transformers.utils.logging import disable_progress_bar

    from rl.tinker.main import replay, serve
    from rl.trainer.determinism import conditions, differing_conditions
    from rl.trainer.learner import AdapterLearner
    from rl.trainer.measure.performance import keep_to_share
    from rl.trainer.model.head import mode_of
    from rl.trainer.parallel.world import start_world

    disable_progress_bar()
    world = start_world(uses_gpus(config), config.trainer.patience_s)
    keep_to_share(config, world.device)
    learner = AdapterLearner(config, Path(base), world)
    if sock:
        asyncio.run(serve(config, learner, status, sock))
    elif replayed:
        here = conditions(config.trainer, world, mode_of(learner.model))
        replay(config, learner, replayed, lambda other: differing_conditions(other, here))
    status.close()
    lease.close()


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
    stored = as_written(run_dir.root)
    keep_choices(config, stored)
    if refused := refusals(stored, config):
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


if __name__ == "__main__":
    process()
