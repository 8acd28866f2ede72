"""Progress of the run: the state that the orchestrator's loops share and wait for."""

import asyncio
from collections.abc import Callable

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
