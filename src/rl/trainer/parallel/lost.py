"""Which rank a failed collective has lost, which gloo does not say. After NCCL's timeout its
watchdog ends the process before Python can say anything; a rank that has died or stands still is
then named by its launcher."""

import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rl.run_dir.paths import RunDir
from rl.run_dir.status import HEARTBEAT_S, RoleStatus, Staleness, describe, read_status
from rl.system.errors import RESTART, RunError

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
