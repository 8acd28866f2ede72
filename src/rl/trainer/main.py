"""`trainer`: one rank of the trainer. `torchrun ... -m rl.trainer.main @ outputs/x/config.toml`, or without torchrun a single rank."""

import ctypes
import errno
import os
import signal
import sys
import threading

from rl.cli import load_config, to_toml
from rl.config import RLConfig
from rl.files import CorruptFileError
from rl.functions import FunctionError
from rl.metrics import read_metrics
from rl.models import ModelError, resolve_model
from rl.sft.rows import DataError
from rl.status import AlreadyRunningError, Status, hold_role
from rl.transport import OrchestratorLostError

PR_SET_PDEATHSIG = 1


def main() -> None:
    """The console script."""
    config, _ = load_config(sys.argv[1:], "trainer")
    exit_on_sigterm()
    try:
        run(config)
    except (AlreadyRunningError, CorruptFileError, DataError, FunctionError, ModelError, OrchestratorLostError) as error:
        fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        fail(f"{error}; free space or change output_dir or trainer.weights.dir, then start again: the run goes on from its last checkpoint")


def run(config: RLConfig) -> None:
    """Holds the role, brings the ranks up, trains, and takes everything down again."""
    is_main = int(os.environ.get("RANK", 0)) == 0
    status = None
    if is_main:
        hold_role(config.run_dir.lock("trainer"), "trainer")
        status = Status(config.run_dir.status("trainer"), "trainer")
        status.doing("loading the model")
    base = resolve_model(config.model, needs_template=config.sft is None)  # before torch is imported: a missing model is said at once
    from transformers.utils.logging import disable_progress_bar

    from rl.trainer.checkpoint import CheckpointMismatchError
    from rl.trainer.distributed import check_nodes, start_world, stop_world
    from rl.trainer.fake import summary
    from rl.trainer.memory import OutOfMemoryError
    from rl.trainer.nodes import WorldError
    from rl.trainer.sft import open_source
    from rl.trainer.train import NotFiniteError, start, train

    disable_progress_bar()

    if status:
        status.doing("waiting for the other ranks of the trainer")
    settings = config.trainer
    try:
        world = start_world(uses_gpus(config), settings.rank_timeout_s, settings.dp_replicate, settings.context_parallel)
        check_nodes(world, config.run_dir.root, to_toml(config).encode())
        source = None
        if config.sft:
            source = open_source(config, base, world, status)
            config = config.model_copy(update={"max_steps": source.num_steps})
        if status:
            status.doing("loading the model", max_steps=config.max_steps)
        train(start(config, world, base, status, source))
    except (CheckpointMismatchError, NotFiniteError, OutOfMemoryError, WorldError) as error:
        fail(str(error))
    stop_world()
    if status:
        status.close()
        if settings.data.fake:
            print(summary(read_metrics(config.run_dir.metrics).values()))


def uses_gpus(config: RLConfig) -> bool:
    """GPUs when there are any, unless trainer.gpus = 0."""
    import torch

    return config.trainer.gpus != 0 and torch.cuda.is_available()


def fail(message: str) -> None:
    """Ends this rank with one line; os._exit, because other ranks may hold the process group in a collective."""
    print(f"trainer: {message}", file=sys.stderr, flush=True)
    os._exit(1)


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
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main()
