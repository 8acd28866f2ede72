"""`trainer`: one rank of the trainer. `torchrun ... -m rl.trainer.main @ outputs/x/config.toml`, or without torchrun a single rank."""

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import NoReturn

from rl.config.command_line import load_config, to_toml
from rl.config.help import PROCESS_USAGE
from rl.config.run import RLConfig
from rl.models.folder import resolve_model
from rl.run_dir import spans
from rl.run_dir.checksums import newest_sound_checkpoint
from rl.run_dir.files import clean_leftovers
from rl.run_dir.lease import ROLE_WAIT_S, check_fence, hold_role
from rl.run_dir.metrics import merging, read_metrics
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, Status
from rl.system.errors import CANNOT_WRITE, GIVE_UP, RunError
from rl.system.linux import LAUNCHER, end_with_parent
from rl.system.warm_start import leave
from rl.trainer.store.background import Background

SLOW_IMPORTS = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "rl.trainer.sft.source", "rl.trainer.start")

ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Variables with which the user configures torch's allocator on GPUs, which is read when it first allocates."""


def main() -> None:
    """The console script."""
    if not ALLOCATOR & os.environ.keys():
        # Every micro batch has another length: blocks that grow leave no holes, for which a later step would run out of memory.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    leave(lambda: preload(load_config(sys.argv[1:], "trainer")[0]))
    config, _ = load_config(sys.argv[1:], "trainer", usage=PROCESS_USAGE)
    exit_on_sigterm()
    run_dir, rank = config.run_dir, int(os.environ.get("RANK", 0))
    try:
        run(config, rank)
    except RunError as error:
        fail(run_dir, str(error), error.exit_code)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        remedy = "free space, mend that disk or change output_dir or trainer.weights.dir"
        remedy += ", then start again: the run goes on from its last checkpoint"
        fail(run_dir, f"{error}; {remedy}", GIVE_UP)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is written; libraries that take their threads down with the interpreter have been seen to abort


def preload(config: RLConfig) -> None:
    """Imports what `run` will need, and does nothing else."""
    for module in SLOW_IMPORTS:
        importlib.import_module(module)
    with contextlib.suppress(RunError, OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError):
        # Whatever is wrong there, `run` will say it.
        folder = resolve_model(config.model, needs_template=config.sft is None)
        kind = json.loads((Path(folder) / "config.json").read_bytes())["model_type"]
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def run(config: RLConfig, rank: int) -> None:
    """Holds the role, brings the ranks up, trains, and takes everything down again."""
    name = f"trainer-{rank}" if rank else "trainer"
    checkpoints = Background()
    lease = None
    if rank == 0:
        lease = hold_role(config.run_dir.lock("trainer"), ROLE_WAIT_S)
        own = (config.run_dir.weights_dir, config.run_dir.checkpoints, config.run_dir.digests_dir, config.run_dir.tokens_dir)
        clean_leftovers(*own, ours="")
        # Reading them takes about as long as the imports below, where `leave` has not made them, or as loading the model: both at once.
        checkpoints.start(newest_sound_checkpoint, config.run_dir.checkpoints)
    if not config.trainer.data.fake:  # a benchmark writes only what is asked for
        spans.start(config.run_dir.spans, name)
    status = Status(config.run_dir.status(name), name)
    status.enter(Phase.LOADING_MODEL)
    base = resolve_model(config.model, needs_template=config.sft is None)
    import torch.distributed as dist
    from transformers.utils.logging import disable_progress_bar

    from rl.trainer.fake import summary
    from rl.trainer.measure.memory import keep_to_share
    from rl.trainer.parallel.world import check_nodes, start_world
    from rl.trainer.replay import open_log
    from rl.trainer.sft.source import FromExamples, open_source
    from rl.trainer.start import start
    from rl.trainer.train import train

    disable_progress_bar()
    status.enter(Phase.WAITING_FOR_RANKS)
    settings = config.trainer
    world = start_world(uses_gpus(config), settings.rank_timeout_s, settings.dp_replicate, settings.context_parallel)
    keep_to_share(config, world.device)
    check_nodes(world, config.run_dir.root, to_toml(config).encode())
    source = None
    if settings.data.replay:
        source = open_log(config, settings.data.replay)
    elif config.sft:
        source = open_source(config, base, world, status)
    if isinstance(source, FromExamples):
        config = config.model_copy(update={"max_steps": source.num_steps})
    status.enter(Phase.LOADING_MODEL, max_steps=config.max_steps)
    what = f"{config.run_dir.checkpoints} to be read: does that disk answer?"
    found = checkpoints.result(what, settings.rank_timeout_s)
    alone = settings.data.replay or settings.data.fake or (config.sft and LAUNCHER not in os.environ)  # neither `rl` nor an orchestrator
    merges = merging(config.run_dir.metrics, partial(check_fence, config.run_dir.lock("trainer")))
    with merges if alone and rank == 0 else contextlib.nullcontext():
        train(start(config, world, base, status, source, found))
    dist.destroy_process_group()
    status.close()
    if lease:
        lease.close()
    if rank == 0 and settings.data.fake:
        print(summary(read_metrics(config.run_dir.metrics).values()))


def uses_gpus(config: RLConfig) -> bool:
    """GPUs when there are any, unless trainer.gpus = 0. Ends the process when there are none of those that are asked for."""
    import torch

    found = torch.cuda.is_available()
    if config.trainer.gpus and not found:
        remedy = "see nvidia-smi, and whether torch is the build for GPUs (uv run --no-group cpu --group gpu)"
        fail(config.run_dir, f"trainer.gpus = {config.trainer.gpus}, but torch finds no GPU: {remedy}", 1)
    return config.trainer.gpus != 0 and found


def fail(run_dir: RunDir, message: str, code: int) -> NoReturn:
    """Ends this rank with one line; os._exit, because other ranks may hold the process group in a collective.

    torchrun ends with 1 whatever the ranks' codes are: the first one's is left in a file, for others fail because of it.
    """
    print(f"trainer: {message}", file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        with contextlib.suppress(OSError), run_dir.exit_code("trainer").open("x") as file:
            file.write(str(code))
    os._exit(code)


def exit_on_sigterm() -> None:
    """SIGTERM ends the process at once with code 143, also in the middle of a long operator: every write is atomic, so a run can go on.

    A thread waits for the signal; Python's own handlers run only between two bytecodes of the main thread. Under torchrun the same
    signal comes when torchrun dies, so that no rank outlives it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


if __name__ == "__main__":
    main()
