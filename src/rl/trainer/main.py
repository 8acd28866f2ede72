"""`trainer`: one rank of the trainer. `torchrun ... -m rl.trainer.main @ outputs/x/config.toml`, or without torchrun a single rank."""

import ctypes
import errno
import os
import signal
import sys
import threading

from rl.cli import load_config
from rl.config import RLConfig
from rl.files import CorruptFileError
from rl.models import ModelError, resolve_model
from rl.status import AlreadyRunningError, Status, hold_role
from rl.transport import OrchestratorLostError

GROUP_SLACK_S = 600.0
"""Ranks wait this much longer for rank 0 than rank 0 waits for a batch: it must be the one that reports."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    """The console script."""
    config, _ = load_config(sys.argv[1:], "trainer")
    exit_on_sigterm()
    try:
        run(config)
    except (AlreadyRunningError, CorruptFileError, ModelError, OrchestratorLostError) as error:
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
    base = resolve_model(config.model)  # before torch is imported: a missing model is said at once
    from transformers.utils.logging import disable_progress_bar

    from rl.trainer.checkpoint import CheckpointMismatchError
    from rl.trainer.distributed import start_world, stop_world
    from rl.trainer.train import NotFiniteError, start, train

    disable_progress_bar()

    world = start_world(use_gpus=uses_gpus(config), timeout_s=config.trainer.batch_timeout_s + GROUP_SLACK_S)
    try:
        train(start(config, world, base, status))
    except (CheckpointMismatchError, NotFiniteError) as error:
        fail(str(error))
    stop_world()
    if status:
        status.close()


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
