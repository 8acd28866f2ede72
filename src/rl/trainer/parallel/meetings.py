"""Where ranks wait for each other outside of collectives: in the store of their rendezvous.

A collective has a short deadline (`trainer.rank_timeout_s`), by which a rank that hangs is noticed.
A rank that waits for something else, such as the orchestrator, an evaluation or a disk, comes much
later and is not lost. So ranks meet here before each collective that such a wait may precede. A
rank that dies or stands still meanwhile is noticed by `rl`: see launch/keeper.py, and
cluster/reach.py for its machine.
"""

import socket
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from rl.system.errors import RESTART, RunError

MAIN = "main"
"""The meetings of the main threads."""
LONGEST_S = 20 * 86400.0
"""The longest wait that the store can count in 32 bits of milliseconds."""
END_S = 60.0
"""Seconds that the process with the store waits at its end for the other ranks to end."""


def absent(store: dist.Store, keys: list[str], timeout_s: float) -> list[int]:
    """Waits until all keys are in the store, for `timeout_s` seconds at most. Returns the indices
    of those that are not.

    Raises RunError if the store's process has ended.
    """
    try:
        store.wait(keys, timedelta(seconds=min(timeout_s, LONGEST_S)))
    except dist.DistStoreError:
        return [index for index, key in enumerate(keys) if not store.check([key])]
    except dist.DistNetworkError as error:
        raise RunError(
            f"the process with the ranks' store, rank 0 or its torchrun, has ended ({error})",
            RESTART,
        ) from None
    return []


class Meetings:
    """All meetings of one rank. Every rank comes to the same ones, in the same order for each
    name."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience_s: float):
        """`patience_s`: the deadline of the main threads' meetings."""
        self.store, self.rank, self.size, self.patience_s = store, rank, size, patience_s
        self.connections: dict[str, dist.Store] = {}
        """One for each name: a wait blocks all others on its connection."""
        self.count = Counter[str]()
        """Number of meetings by name."""

    def meet(self, word: bytes = b"", name: str = MAIN) -> bytes:
        """Waits until every rank has come, and returns rank 0's word. Raises RunError naming the
        ranks that have not come by the deadline.

        A background thread meets those of other ranks under its own name, and without a deadline:
        who waits for the thread has one.
        """
        if name not in self.connections:
            self.connections[name] = self.store.clone()
        store = self.connections[name]
        self.count[name] += 1
        keys = [f"{name}/{self.count[name]}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], word)
        if late := absent(store, keys, self.patience_s if name == MAIN else LONGEST_S):
            waited = (
                f"rank {self.rank} on {socket.gethostname()} waited {self.patience_s:.0f} s for "
                f"ranks {late}, which did not come"
            )
            raise RunError(f"{waited}: see their logs, and `rl doctor` for what they do", RESTART)
        word = word if self.rank == 0 else store.get(keys[0])
        # all have read it: they came here afterwards
        store.delete_key(f"{name}/{self.count[name] - 1}/{self.rank}")
        return word

    def close(self) -> None:
        """Ends this rank's part. Waits on rank 0, which may have the store, until all others
        have ended theirs."""
        self.store.set(f"end-{self.rank}", "")
        if self.rank == 0:
            absent(self.store, [f"end-{rank}" for rank in range(self.size)], END_S)
