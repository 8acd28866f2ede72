"""Progress of the run: the state that the orchestrator's loops share and wait for, and the times
between two batches."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl.run_dir.status import EndKind


class Progress:
    """The newest and the final batch, and a condition that is notified of every change. Only
    `final` may decrease."""

    def __init__(self, max_steps: int):
        self.newest = 0
        """Number of the newest committed batch."""
        self.final = max_steps
        """Number of the last batch of the run."""
        self.end_reason = ""
        """Why the run ends before max_steps; empty if it does not."""
        self.end_kind: EndKind = "done"
        self.changed = asyncio.Condition()

    def end(self, reason: str, kind: EndKind = "early") -> None:
        """Makes the newest batch the last one."""
        self.final, self.end_reason, self.end_kind = min(self.newest, self.final), reason, kind

    async def notify(self) -> None:
        """Makes every `wait_until` check its condition again."""
        async with self.changed:
            self.changed.notify_all()

    async def wait_until(self, holds: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Waits until `holds()` is true; it is checked after every `notify`. Returns False after
        `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s), self.changed:
                await self.changed.wait_for(holds)
        except TimeoutError:
            return False
        return True


class StepClock:
    """Wall time between batches, and how long inference was idle in it."""

    def start(self) -> None:
        self._reset(time.monotonic())
        self.num_busy = 0

    def _reset(self, now: float) -> None:
        self.since = self.idle_since = now
        self.idle_s = self.pause_s = 0.0
        self.stale = Counter[str]()
        """Number of groups cancelled or dropped as too old, by environment."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Marks a block in which inference is busy."""
        if self.num_busy == 0:
            self.idle_s += time.monotonic() - self.idle_since
        self.num_busy += 1
        try:
            yield
        finally:
            self.num_busy -= 1
            if self.num_busy == 0:
                self.idle_since = time.monotonic()

    def lap(self, num_tokens: float) -> dict[str, float]:
        """Returns metrics of the time since the last lap, in which `num_tokens` tokens were
        generated, and starts the next lap."""
        now = time.monotonic()
        idle_s = self.idle_s + (now - self.idle_since if self.num_busy == 0 else 0.0)
        elapsed = max(now - self.since, 1e-9)
        metrics = {
            "time/batch": elapsed,
            "time/pause_inference": self.pause_s,
            "perf/generated_tokens_per_s": num_tokens / elapsed,
            "perf/inference_idle_fraction": min(1.0, idle_s / elapsed),
            "rollouts/stale_groups": self.stale.total(),
            **{f"rollouts/{env}/stale_groups": count for env, count in self.stale.items()},
        }
        self._reset(now)
        return metrics
