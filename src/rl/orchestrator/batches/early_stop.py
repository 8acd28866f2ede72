"""Decides when a run ends early: nothing is left to learn from, or everything fails."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from rl.config.run import RLConfig
from rl.diagnosis.environments import MANY_LONG, MOSTLY, cut_off_remedy, equal_remedy
from rl.run_dir.status import EndKind
from rl.wire.rollouts import Group, all_equal, at_least

FALL = 0.05
"""Part of the range of rewards by which their mean must have fallen to count as a collapse."""
LEFT = 0.4
"""Part of the mean above the lowest reward that may be left then: a smaller fall may be chance,
or harder tasks."""


class RewardHistory(msgspec.Struct, kw_only=True):
    """Rewards since the last trainable group, and the range of each environment's rewards. Part
    of a batch's state."""

    without_signal: list[tuple[str, float]] = []
    """(environment, reward) of the rollouts since the last group with a signal."""
    episodes: int = 0
    """Number of episodes that these rollouts are of: each trained agent of an episode has a
    rollout of its own."""
    cut_off: int = 0
    """Number of these rollouts with an answer that was cut off."""
    num: int = 0
    total: float = 0.0
    """Number and sum of all rewards so far."""
    ranges: dict[str, tuple[float, float]] = {}
    """Lowest and highest reward so far, by environment."""

    def add(self, group: Group) -> None:
        """Counts a finished group. If its signal is None, it has one if its rewards, and those
        since the last signal, are not all equal."""
        env, rewards, signal = group.env, group.rewards, group.signal
        self.num += len(rewards)
        self.total += sum(rewards)
        if rewards:
            self.ranges[env] = extent([*self.ranges.get(env, ()), *rewards])
        if signal is None:
            before = [reward for other, reward in self.without_signal if other == env]
            signal = not all_equal([*rewards, *before])
        if group.why is None and signal:
            self.without_signal.clear()
            self.episodes = self.cut_off = 0
        else:
            self.cut_off += sum(rollout.truncated for rollout in group.rewarded)
            self.without_signal.extend((env, reward) for reward in rewards)
            self.episodes += len({rollout.episode for rollout in group.rewarded})

    def is_solved(self) -> bool:
        """Whether all rollouts without signal have their environment's highest reward, which is
        above its lowest or at least 1."""
        return all(
            at_least(reward, self.ranges[env][1])
            and (not all_equal(self.ranges[env]) or at_least(reward, 1.0))
            for env, reward in self.without_signal
        )

    def success(self) -> tuple[str, EndKind]:
        """Returns why a solved run ends; "doubtful" if an environment has only ever given one
        reward, so its highest is unknown."""
        constant = sorted({env for env, _ in self.without_signal if all_equal(self.ranges[env])})
        if constant:
            only_rewards = ", ".join(
                f"{env} has given no reward other than {self.ranges[env][0]:g}" for env in constant
            )
            return (
                f"nothing to learn: since the first rollout, {only_rewards}. Either the task is "
                "that easy, or the reward is wrong",
                "doubtful",
            )
        return (
            f"solved: the last {len(self.without_signal)} rollouts all have the highest reward "
            f"({self.histogram()})",
            "early",
        )

    def histogram(self) -> str:
        """Lists the rewards of the rollouts without signal, by environment: `rewards of sums: 12
        times 0, 3 times 0.5`."""
        counts = Counter((env, float(f"{reward:g}")) for env, reward in self.without_signal)
        texts: dict[str, list[str]] = {}
        for (env, reward), count in sorted(counts.items()):
            texts.setdefault(env, []).append(f"{count} times {reward:g}")
        return "; ".join(f"rewards of {env}: {', '.join(of_env)}" for env, of_env in texts.items())

    def diagnosis(self, config: RLConfig) -> str:
        """Returns why a run ends that had no signal for too long and is not solved, and the
        remedy."""
        count = len(self.without_signal)
        rewards = {reward for _, reward in self.without_signal}
        cut_off, now = self.cut_off / count, sum(reward for _, reward in self.without_signal)
        before = (self.total - now) / (self.num - count) if self.num > count else 0.0
        now /= count
        low, high = extent([bound for env, _ in self.without_signal for bound in self.ranges[env]])
        if before - now > FALL * (high - low) and now - low <= LEFT * (before - low):
            why = (
                f"The mean reward was {before:.3f} before, and is {now:.3f} now: the policy has "
                "collapsed; start over with a tenth of trainer.optim.lr = "
                f"{config.trainer.optim.lr:g}"
            )
        elif cut_off > MOSTLY and min(rewards) <= 0:
            why = cut_off_remedy(cut_off, config)
        elif all_equal(rewards):
            why = equal_remedy(rewards.pop())
            if cut_off > MANY_LONG:
                why += f"; {cut_off:.0%} of the answers were cut off"
        else:
            why = "raise group_size or temperature, or take tasks of which the model solves some"
        filtered = ", or orchestrator.filter dropped it" if config.orchestrator.filter else ""
        return (
            f"{count} rollouts in a row without any signal: in each group all rewards are "
            f"equal{filtered} ({self.histogram()}). {why[0].upper()}{why[1:]}"
        )


def extent(values: Sequence[float]) -> tuple[float, float]:
    """Returns the lowest and the highest value."""
    return min(values), max(values)


def only_failures(groups: Sequence[Group], limit: int) -> str:
    """Returns an error message if the newest groups, at least `limit` episodes, all failed or
    leave nothing to train on; else ""."""
    failures = ("error", "truncated", "filtered", "kept_overflow")
    recent = list(takewhile(lambda group: group.why in failures, reversed(groups)))
    if not recent or sum(group.num_episodes for group in recent) < limit:
        return ""
    (why, count), total = Counter(group.why for group in recent).most_common(1)[0], len(recent)
    which = f"the last {total} groups" if count == total else f"{count} of the last {total} groups"
    if why == "filtered":
        return f"orchestrator.filter left nothing to train on in {which}: make it less strict"
    if why == "kept_overflow":
        return (
            f"at every token in {which} sampling kept more ids than trainer.max_kept, so none "
            "can be trained; begin a new run with orchestrator.sampling.top_k of at most that, "
            "or with a higher trainer.max_kept"
        )
    if why == "truncated":
        return (
            f"every answer in {which} was truncated, and mask_truncated leaves none to train on; "
            "raise orchestrator.sampling.max_tokens, or set mask_truncated = false"
        )
    errors = (rollout.error for group in recent for rollout in reversed(group.rollouts))
    newest = next(filter(None, errors))
    return f"{which}{' all' if count == total else ''} failed; the newest error:\n{newest}"
