"""How a rank ends before the run does: when SIGTERM asks it to, at once or after a checkpoint if
the machine stays for some more seconds; and when a collective fails, as another rank is lost.

gloo does not say which rank a failed collective has lost. After NCCL's timeout its watchdog ends
the process before Python can say anything; a rank that has died or stands still is then named by
its launcher.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rl.run_dir.paths import RunDir
from rl.run_dir.status import HEARTBEAT_S, RoleStatus, Staleness, describe, read_status
from rl.system.errors import RESTART, WRONG_SETTINGS, RunError

if TYPE_CHECKING:  # it imports torch, which main.py does later
    from rl.trainer.parallel.world import World

GRACE = "RL_GRACE_S"
"""Environment variable with the seconds between SIGTERM and the end of this process, in which it
writes a checkpoint."""
LEFT = 128 + signal.SIGTERM
"""Exit code of a rank that SIGTERM has ended, with or without a checkpoint."""


def grace_s() -> float:
    """Returns the seconds that the environment grants; 0 if it says nothing. Raises RunError if
    it is no number."""
    text = os.environ.get(GRACE) or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise RunError(
            f"{GRACE} = {text}: give the seconds from SIGTERM to the end of the process, or "
            "leave it out",
            WRONG_SETTINGS,
        )
    return seconds


class Departure:
    """SIGTERM to this rank, and the decision of all ranks to leave.

    Rank 0's SIGTERM counts for all: every rank calls `agreed` at the same points of the training.
    A SIGTERM to another rank only starts that rank's own deadline. A rank that is still
    there `grace_s` seconds after its own SIGTERM, or after all have agreed, ends.
    """

    def __init__(self, grace_s: float = 0.0):
        self.grace_s = grace_s
        self.can_save = False
        """Whether there is a training whose state can be saved: otherwise SIGTERM ends the
        process at once."""
        self.asked = threading.Event()
        """Set by SIGTERM. On rank 0 it also ends the waits for the orchestrator."""
        self.decided = False
        """Whether all ranks have agreed to leave."""

    def watch(self) -> None:
        """Starts to wait for SIGTERM in a thread: Python's own handlers run only between two
        bytecodes of the main thread, and not during a long operator. To end at any moment is
        safe because every write is atomic."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._wait, name="sigterm", daemon=True).start()

    def _wait(self) -> None:
        signal.sigwait({signal.SIGTERM})
        if not (self.can_save and self.grace_s):
            os._exit(LEFT)
        self._start_deadline()
        self.asked.set()

    def _start_deadline(self) -> None:
        timer = threading.Timer(self.grace_s, os._exit, [LEFT])
        timer.daemon = True
        timer.start()

    def agreed(self, world: "World") -> bool:
        """Whether to leave, the same on every rank; once True it stays so."""
        if not self.decided and world.broadcast_int(self.asked.is_set()):
            self.decided = True
            if self.grace_s and not self.asked.is_set():
                self._start_deadline()
            if world.is_main:
                print(
                    f"SIGTERM: saving what has been trained and leaving, within {self.grace_s:g} s",
                    flush=True,
                )
        return self.decided


LOOK_S = 2.5 * HEARTBEAT_S
"""Seconds in which every living rank shows a new heartbeat."""


def status_name(rank: int) -> str:
    """Returns the name of a rank's status file."""
    return f"trainer-{rank}" if rank else "trainer"


@contextmanager
def naming_lost_ranks(run_dir: RunDir, rank: int, size: int) -> Iterator[None]:
    """Context in which the error of a collective becomes a RunError that names the lost ranks;
    if all live, it gets a note of what each does."""
    try:
        yield
    except RuntimeError as error:
        if size == 1:
            raise
        lost, living = lost_ranks(run_dir, [other for other in range(size) if other != rank])
        if not lost:
            error.add_note(f"All other ranks live: {living}")
            raise
        text = (
            f"rank {rank} on {socket.gethostname()} has lost {lost} ({error}). Its own error, if "
            "it had one, is above or in another log"
        )
        raise RunError(text, RESTART) from None


def lost_ranks(run_dir: RunDir, ranks: Iterable[int]) -> tuple[str, str]:
    """Describes those of the ranks that are lost, and the others. Lost is one that has ended on
    this machine or, if there is none, one whose heartbeat does not change for LOOK_S."""
    signs = Staleness()
    for pause_s in (LOOK_S, 0.0):
        statuses = {
            rank: read_status(run_dir.status(status_name(rank))) or RoleStatus() for rank in ranks
        }
        silent = {
            rank for rank, status in statuses.items() if signs.look(str(rank), status.heartbeat)
        }
        lost = {rank for rank, status in statuses.items() if status.lives() is False} or silent
        if lost:
            break
        time.sleep(pause_s)
    texts = {
        rank: f"rank {rank} on {status.host or 'an unknown host'}, {describe(status)}"
        for rank, status in statuses.items()
    }
    return "; ".join(texts.pop(rank) for rank in sorted(lost)), "; ".join(texts.values())
