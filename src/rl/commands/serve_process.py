"""The process of `rl serve` that answers clients and trains their adapters: `python -m
rl.commands.serve_process @ config.toml`."""

import asyncio
import os
import sys
from pathlib import Path

from rl.config.command_line import load_config_or_exit
from rl.config.help import PROCESS_USAGE
from rl.config.run import RLConfig
from rl.models.folder import resolve_model
from rl.run_dir import spans
from rl.run_dir.lease import ROLE_WAIT_S, hold_role
from rl.run_dir.status import Phase, Status
from rl.system.errors import RunError, exit_code_of
from rl.system.linux import bind, die_with_parent, raise_open_files
from rl.trainer.main import set_up_allocator, uses_gpus

NAME = "tinker"


def main() -> None:
    """Exit code 0 after SIGTERM, otherwise that of the error."""
    set_up_allocator()
    config, _ = load_config_or_exit(sys.argv[1:], "rl serve", usage=PROCESS_USAGE)
    code = 0
    try:
        run(config)
    except (RunError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        code = exit_code_of(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # everything is written; threads of libraries may abort at the end of the interpreter
    os._exit(code)


def run(config: RLConfig) -> None:
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


if __name__ == "__main__":
    main()
