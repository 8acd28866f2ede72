"""Whether there is still something to learn from: groups whose rewards differ, or have been high."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from rl.orchestrator.rollouts import Group


class Signal(msgspec.Struct, kw_only=True):
    """Rewards since the last group that could be trained, and what each environment's rewards have been. Part of a batch's state."""

    silent: list[tuple[str, float]] = []
    """(environment, reward) of the rollouts since the last group with a signal."""
    ranges: dict[str, tuple[float, float]] = {}
    """Lowest and highest reward seen, by environment."""

    def note(self, group: Group) -> None:
        """Counts a finished group. One that only its batch can judge has a signal if its rewards differ, or from those before it."""
        rewards = group.rewards
        if rewards:
            low, high = self.ranges.get(group.env, (rewards[0], rewards[0]))
            self.ranges[group.env] = (min(low, *rewards), max(high, *rewards))
        signal = group.signal
        if signal is None:
            signal = len({*rewards, *(reward for env, reward in self.silent if env == group.env)}) > 1
        if group.why is None and signal:
            self.silent.clear()
        else:
            self.silent.extend((group.env, reward) for reward in rewards)

    def solved(self) -> bool:
        """All silent rollouts have their environment's highest reward, and it is one: above others, or at least 1."""
        return all(
            reward >= self.ranges[env][1] and (self.ranges[env][1] > self.ranges[env][0] or reward >= 1.0) for env, reward in self.silent
        )

    def histogram(self) -> str:
        """`environment reward: count` of the silent rollouts."""
        return ", ".join(f"{env} {reward:g}: {count}" for (env, reward), count in sorted(Counter(self.silent).items()))

    def complaint(self) -> str:
        """Why a run ends that was silent for too long without being solved."""
        return (
            f"{len(self.silent)} rollouts in a row without any signal: in each group all rewards are equal (reward: count "
            f"{self.histogram()}). Is the task too hard or the reward function wrong? Look at rollouts/, raise group_size "
            "or temperature, or start from easier tasks"
        )


def only_failures(groups: Sequence[Group], limit: int) -> str:
    """What to say when the newest groups, of at least `limit` episodes, all failed or leave nothing to train on; else ""."""
    recent = list(takewhile(lambda group: group.why in ("error", "truncated"), reversed(groups)))
    if not recent or sum(group.num_episodes for group in recent) < limit:
        return ""
    errors = [rollout.error for group in recent for rollout in reversed(group.rollouts) if rollout.error]
    if errors:
        return f"the last {len(recent)} groups all failed; the newest error:\n{errors[0]}"
    remedy = "raise orchestrator.sampling.max_tokens, or set mask_truncated = false"
    return f"every answer in the last {len(recent)} groups was cut off, and mask_truncated leaves none to train on; {remedy}"
