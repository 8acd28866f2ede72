"""Whether there is still something to learn from: groups whose rewards differ, or have been high."""

from collections import Counter

import msgspec

from rl.orchestrator.rollouts import Group


class Signal(msgspec.Struct, kw_only=True):
    """Rewards since the last group that could be trained, and what each environment's rewards have been. Part of a batch's state."""

    silent: list[tuple[str, float]] = []
    """(environment, reward) of the rollouts since the last group with a signal."""
    ranges: dict[str, tuple[float, float]] = {}
    """Lowest and highest reward seen, by environment."""

    def note(self, group: Group) -> None:
        rewards = [rollout.reward for rollout in group.rollouts if rollout.error is None and rollout.trainable]
        if rewards:
            low, high = self.ranges.get(group.env, (rewards[0], rewards[0]))
            self.ranges[group.env] = (min(low, *rewards), max(high, *rewards))
        if group.why is None and any(group.advantages):
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
