"""How far the run is: what the orchestrator's loops share, and wait for."""

import asyncio


class Progress:
    """Numbers that only grow, but for `final`, and the condition that tells of every change."""

    def __init__(self, max_steps: int):
        self.newest = 0
        """The last batch."""
        self.final = max_steps
        """The last batch that there will be."""
        self.end_reason = ""
        """Why the run ends before max_steps."""
        self.changed = asyncio.Condition()

    def end(self, reason: str) -> None:
        """No further batch is made."""
        self.final, self.end_reason = min(self.newest, self.final), reason

    async def wake(self) -> None:
        """Lets every loop look again whether what it waits for has come."""
        async with self.changed:
            self.changed.notify_all()
