"""How far the run is: what the orchestrator's loops share, and wait for."""

import asyncio
from collections.abc import Callable

from rl.orchestrator.probe import Prompt
from rl.run_dir.status import EndKind


class Progress:
    """Numbers of the run that only grow, but for `final`, and the condition that tells of every change."""

    def __init__(self, max_steps: int):
        self.newest = 0
        """The last batch."""
        self.prompts: dict[int, Prompt] = {}
        """Of the last batch's first groups, for probes: to decode it again would hold the event loop."""
        self.final = max_steps
        """The last batch that there will be."""
        self.end_reason = ""
        """Why the run ends before max_steps."""
        self.end_kind: EndKind = "done"
        self.changed = asyncio.Condition()

    def end(self, reason: str, kind: EndKind = "early") -> None:
        """Makes the newest batch the last one."""
        self.final, self.end_reason, self.end_kind = min(self.newest, self.final), reason, kind

    async def notify(self) -> None:
        """Has every `wait_until` check its condition again."""
        async with self.changed:
            self.changed.notify_all()

    async def wait_until(self, holds: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Waits until `holds()` is true, which is checked after every `notify`. Returns False if `timeout_s` seconds passed before."""
        try:
            async with asyncio.timeout(timeout_s), self.changed:
                await self.changed.wait_for(holds)
        except TimeoutError:
            return False
        return True
