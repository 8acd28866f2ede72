"""How the trainer ends when SIGTERM asks it to: at once, or after a checkpoint if the machine
stays for some more seconds."""

import math
import os
import signal
import threading
from typing import TYPE_CHECKING

from rl.system.errors import WRONG_SETTINGS, RunError

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
