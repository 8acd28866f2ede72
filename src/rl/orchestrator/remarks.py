"""What the log says about environments that give trouble: the first time, and then now and then."""

import logging
import time
from collections import Counter

from rl.orchestrator.rollouts import Group

log = logging.getLogger(__name__)

EVERY_S = 60.0


class Remarks:
    """Warnings, at most one of a kind for an environment every EVERY_S seconds."""

    def __init__(self) -> None:
        self.said: dict[tuple[str, str], float] = {}

    def _due(self, kind: str, env: str) -> bool:
        now = time.monotonic()
        due = now - self.said.get((kind, env), -EVERY_S) >= EVERY_S
        if due:
            self.said[kind, env] = now
        return due

    def failed(self, group: Group) -> None:
        """A group has failed members."""
        errors = [rollout for rollout in group.rollouts if rollout.error]
        if errors and self._due("failed", group.env):
            first = (errors[0].error or "").splitlines()[0]
            count, cause = len(errors), errors[0].cause
            log.warning("environment %s: %d rollouts of a group failed for good (%s): %s", group.env, count, cause, first)

    def stale(self, stale: Counter[str], used: Counter[str], limit: int) -> None:
        """Groups that were too old for a batch, and those that were used in it, by environment."""
        for env, count in stale.items():
            if count >= max(1, used[env]) and self._due("stale", env):
                log.warning(
                    "environment %s: %d of its groups were stale for this batch, %d were used. Its rollouts take longer than "
                    "orchestrator.max_off_policy_steps = %d steps: raise that, lower its weight, or make it faster (workers, max_tokens)",
                    *(env, count, used[env], limit),
                )
