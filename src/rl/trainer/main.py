"""`trainer`: one rank of the trainer. `torchrun ... -m rl.trainer.main @ outputs/x/config.toml`;
without torchrun, the only rank."""

import contextlib
import importlib
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from rl.config.command_line import load_config_or_exit, to_toml
from rl.config.help import PROCESS_USAGE
from rl.config.run import RLConfig
from rl.models.folder import read_json, resolve_model
from rl.run_dir import spans
from rl.run_dir.files import clean_leftovers
from rl.run_dir.lease import ROLE_WAIT_S, check_fence, hold_role
from rl.run_dir.metrics import merging, read_metrics
from rl.run_dir.paths import RunDir
from rl.run_dir.status import MACHINE_LEASE, Phase, Status, is_over
from rl.system.errors import CANNOT_WRITE, GIVE_UP, WRONG_SETTINGS, RunError
from rl.system.linux import LAUNCHER, end_with_parent
from rl.system.prefork import leave
from rl.trainer.departure import LEFT, Departure, grace_s, naming_lost_ranks, status_name

SLOW_IMPORTS = "torch.distributed.checkpoint", "torch.distributed.fsdp", "rl.trainer.train"

ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Environment variables with which users configure torch's GPU allocator; torch reads them at
its first allocation."""


def main() -> None:
    """The console script."""
    set_up_allocator()
    leave(lambda: preload(load_config_or_exit(sys.argv[1:], "trainer")[0]))
    config, _ = load_config_or_exit(sys.argv[1:], "trainer", usage=PROCESS_USAGE)
    run_dir, rank = config.run_dir, int(os.environ.get("RANK", 0))
    try:
        code = run(config, rank, start_to_watch())
    except RunError as error:
        fail(run_dir, str(error), error.exit_code)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        remedy = "free space, fix the disk, or change output_dir or trainer.weights.dir"
        remedy += "; then start again: the run resumes from its last checkpoint"
        fail(run_dir, f"{error}; {remedy}", GIVE_UP)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # everything is written; some libraries have been seen to abort when the interpreter shuts their
    # threads down
    os._exit(code)


def set_up_allocator() -> None:
    """Has torch's GPU allocator grow its blocks, unless the user has configured it. Micro
    batches differ in length: blocks of fixed sizes would become fragmented, and a later step run
    out of memory."""
    if not ALLOCATOR & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def preload(config: RLConfig) -> None:
    """Imports the modules that `run` will need, and does nothing else."""
    for module in SLOW_IMPORTS:
        importlib.import_module(module)
    with contextlib.suppress(RunError, OSError, ImportError):  # `run` will report them
        folder = Path(resolve_model(config.model, needs_template=config.plays))
        kind = read_json(folder / "config.json").get("model_type")
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def run(config: RLConfig, rank: int, departure: Departure) -> int:
    """Takes the trainer's role, connects the ranks, trains, and shuts everything down. Returns
    the exit code: LEFT if SIGTERM ended it."""
    run_dir, settings, name = config.run_dir, config.trainer, status_name(rank)
    lease = None
    if rank == 0:
        lease = hold_role(run_dir.lock("trainer"), ROLE_WAIT_S)
        folders = run_dir.weights_dir, run_dir.checkpoints, run_dir.digests_dir, run_dir.tokens_dir
        clean_leftovers(*folders, ours="")
    if not settings.data.fake:  # a benchmark writes only what the user asks for
        spans.start(run_dir.spans, name)
    status = Status(run_dir.status(name), name)
    status.enter(Phase.LOADING_MODEL)
    base = resolve_model(config.model, needs_template=config.plays)
    from torch.distributed import destroy_process_group
    from transformers.utils.logging import disable_progress_bar

    from rl.trainer.data.batch_sources import summary
    from rl.trainer.measure.performance import keep_to_share
    from rl.trainer.parallel.world import START_TIMEOUT_S, check_nodes, start_world
    from rl.trainer.train import WRITING, start, train

    disable_progress_bar()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        status.enter(Phase.WAITING_FOR_RANKS)
    world = start_world(
        uses_gpus(config),
        settings.patience_s,
        settings.dp_replicate,
        settings.context_parallel,
        settings.expert_parallel,
        max(START_TIMEOUT_S, settings.rank_timeout_s),
    )
    keep_to_share(config, world.device)
    check_nodes(world, run_dir.root, to_toml(config).encode())
    with contextlib.ExitStack() as stack:
        # with neither `rl` nor an orchestrator nobody else merges metrics
        alone = config.batches_from not in WRITING or (config.sft and LAUNCHER not in os.environ)
        if alone and rank == 0:
            fence = partial(check_fence, run_dir.lock("trainer"))
            stack.enter_context(merging(run_dir.metrics, fence))
        stack.enter_context(naming_lost_ranks(run_dir, rank, world.size))
        has_left = train(start(config, world, base, status, departure))
    destroy_process_group()
    status.close()
    if lease:
        lease.close()
    if rank == 0 and settings.data.fake:
        print(summary(read_metrics(run_dir.metrics).values()))
    return LEFT if has_left else 0


def uses_gpus(config: RLConfig) -> bool:
    """Returns whether to use GPUs: yes if torch finds any, unless trainer.gpus = 0. Ends the
    process if GPUs are asked for but missing."""
    import torch

    has_gpus = torch.cuda.is_available()
    if config.trainer.gpus and not has_gpus:
        remedy = (
            "check nvidia-smi, and that torch is the GPU build (uv run --no-group cpu --group gpu)"
        )
        fail(
            config.run_dir,
            f"trainer.gpus = {config.trainer.gpus}, but torch finds no GPU: {remedy}",
            WRONG_SETTINGS,
        )
    return config.trainer.gpus != 0 and has_gpus


def fail(run_dir: RunDir, message: str, code: int) -> NoReturn:
    """Prints one line and ends this rank, with os._exit because other ranks may hold the process
    group in a collective.

    torchrun exits with 1 whatever the ranks' codes are, so the first rank to fail leaves its code
    in a file; the others fail as a result. A machine that was declared lost leaves none: the file
    belongs to its successor.
    """
    print(f"trainer: {message}", file=sys.stderr, flush=True)
    lease = os.environ.get(MACHINE_LEASE)
    if "RANK" in os.environ and not (lease and is_over(run_dir.status_dir / lease)):
        with contextlib.suppress(OSError), run_dir.exit_code("trainer").open("x") as file:
            file.write(str(code))
    os._exit(code)


def start_to_watch() -> Departure:
    """Starts to wait for SIGTERM. Raises RunError. Under torchrun the process is also killed
    when torchrun dies, so that no rank outlives it."""
    departure = Departure(grace_s())
    departure.watch()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGKILL)
    return departure


if __name__ == "__main__":
    main()
