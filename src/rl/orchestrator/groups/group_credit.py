"""Judges a finished group: sets its advantages, or the reason why it is not trained.

Also the user's own credit, filter and rollout metrics (docs/functions.md): their arguments, and the
checks on their results. They are called in a thread beside the event loop, one at a time, and each
call has a deadline.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

from rl.config.base import FunctionConfig
from rl.config.orchestrator import (
    CreditSettings,
    CustomCreditConfig,
    DrGrpoConfig,
    EnvConfig,
    MaxRlConfig,
    OrchestratorConfig,
    ReinforcePlusPlusConfig,
)
from rl.config.outside import own_functions
from rl.config.run import RLConfig
from rl.orchestrator.batches.contents import TAKEN, is_trained
from rl.orchestrator.groups.credit import group_advantages, length_penalties, reinforce_pp
from rl.system.errors import RunError
from rl.system.functions import UserFunction, as_bools, as_number, as_numbers, returned
from rl.wire.rollouts import Group, Rollout, why_left_out

T = TypeVar("T")
Read = Callable[[Any, int], T | None]
CALL_S = 60.0
"""Time limit of one call of a user function."""
THREAD = ThreadPoolExecutor(1, "functions")


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Makes a call that may involve user functions, in the thread reserved for them."""
    return await asyncio.get_running_loop().run_in_executor(THREAD, call, *arguments)


@cache
def user_function(setting: str, name: str, arguments: str = "group, config") -> UserFunction:
    """Returns a user function, loaded once. Raises RunError if it cannot be loaded."""
    return UserFunction(setting, name, arguments)


def load_functions(config: RLConfig) -> None:
    """Loads the functions that the orchestrator calls, so that faults are reported before
    anything is played. Raises RunError."""
    for key, name, arguments in own_functions(config):
        if key.startswith("orchestrator."):
            user_function(key, name, arguments)


def part_of(group: Group, indices: list[int], rewards: list[float]) -> Group:
    """Copies some rollouts of a group, with `rewards` as theirs, for a user function, which may
    modify its argument."""
    rollouts = [group.rollouts[i] for i in indices]
    return msgspec.structs.replace(
        group,
        rollouts=[
            msgspec.structs.replace(rollout, reward=reward, metrics=dict(rollout.metrics))
            for rollout, reward in zip(rollouts, rewards, strict=True)
        ],
        advantages=[group.advantages[i] for i in indices],
        penalties=[group.penalties[i] for i in indices],
    )


def call_for(part: Group, function: UserFunction, config: Any, read: Read[T], wanted: str) -> T:
    """Returns what a user function returns for a part of a group, as `read` reads it. Raises
    RunError for a result that is not `wanted`."""
    count = len(part.rollouts)
    result = function.within(CALL_S, part, config)
    if (values := read(result, count)) is None:
        raise function.wrong(returned(result), f"return {wanted.format(count=count)}")
    return values


def metrics_function(settings: OrchestratorConfig) -> Callable[[list[Rollout]], None] | None:
    """Returns a function that adds the user's metrics to finished rollouts; None if none are
    configured. Raises RunError."""
    if not settings.metrics:
        return None
    function = user_function(
        "orchestrator.metrics.function", settings.metrics.function, "rollout, config"
    )
    return partial(add_metrics, function=function, config=settings.metrics)


def add_metrics(rollouts: list[Rollout], function: UserFunction, config: FunctionConfig) -> None:
    """Adds the user's metrics to the rollouts that did not fail. Raises RunError for non-numbers
    and for names that are taken."""
    for rollout in rollouts:
        if rollout.error:
            continue
        result = function.within(
            CALL_S, msgspec.structs.replace(rollout, metrics=dict(rollout.metrics)), config
        )
        if not isinstance(result, dict) or not all(isinstance(name, str) for name in result):
            raise function.wrong(returned(result), "return a dict of numbers by name")
        for name, value in result.items():
            if fault := name_fault(name, rollout):
                raise function.wrong(f"returned a metric {name!r}", f"give it {fault}")
            if (number := as_number(value)) is None:
                raise function.wrong(
                    f"{returned(value)} as {name!r}",
                    "return finite numbers, and leave out a metric that has none",
                )
            rollout.metrics[name] = number


def name_fault(name: str, rollout: Rollout) -> str:
    """Returns what kind of name a metric needs instead; empty if `name` is valid."""
    if not re.fullmatch(r"[^\s/]+", name):
        return "a name without spaces and slashes"
    if TAKEN.fullmatch(name):
        return "another name: this one is a built-in metric's"
    return (
        "another name: the environment has a metric of that name" if name in rollout.metrics else ""
    )


# Judging ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """The rules by which an environment's groups are judged."""

    credit: CreditSettings = field(default_factory=DrGrpoConfig)
    credit_function: UserFunction | None = None
    """Set for custom credit."""
    filter: FunctionConfig | None = None
    filter_function: UserFunction | None = None
    """Set if there is a filter."""
    has_teacher: bool = False
    """Whether a teacher scores the tokens: then there is something to learn regardless of the
    rewards."""
    replace_no_signal: bool = True
    mask_truncated: bool = False

    @property
    def asks_user(self) -> bool:
        """Whether functions of the user judge groups."""
        return bool(self.credit_function or self.filter_function)


def rules_of(settings: OrchestratorConfig, env: EnvConfig, has_teacher: bool) -> Rules:
    """Returns the rules configured for an environment. Raises RunError for functions that cannot
    be loaded."""
    credit, custom, filtering = env.credit or settings.credit, None, settings.filter
    if isinstance(credit, CustomCreditConfig):
        key = "orchestrator.credit.function"
        if env.credit:
            key = f"orchestrator.environment.{settings.environment.index(env)}.credit.function"
        custom = user_function(key, credit.function)
    key = "orchestrator.filter.function"
    return Rules(
        credit=credit,
        credit_function=custom,
        filter=filtering,
        filter_function=user_function(key, filtering.function) if filtering else None,
        has_teacher=has_teacher,
        replace_no_signal=settings.replace_no_signal,
        mask_truncated=settings.mask_truncated,
    )


def credit_group(group: Group, rules: Rules) -> Group:
    """Sets a finished group's advantages, and the reason if it is not to be trained.

    A group with a failed rollout is not trained at all: the rest is biased, as failing may depend
    on the answer.
    """
    rollouts = group.rollouts
    group.advantages, group.penalties = [0.0] * len(rollouts), [0.0] * len(rollouts)
    group.why, group.signal = None, False
    for rollout in rollouts:
        rollout.filtered = False
    if any(rollout.error for rollout in rollouts):
        group.why = "error"
        return group
    by_agent = compared(group)
    for indices in by_agent.values():
        credit_compared(group, indices, rules)
    only_batch_can_tell = (
        isinstance(rules.credit, ReinforcePlusPlusConfig) and not rules.credit.group_baseline
    )
    group.signal = (
        rules.has_teacher or any(group.advantages) or (None if only_batch_can_tell else False)
    )
    trainable = [rollouts[i] for indices in by_agent.values() for i in indices]
    if not any(rollout.num_sampled for rollout in trainable):
        group.why = "overlong" if any(rollout.overlong for rollout in trainable) else "empty"
    elif not any(is_trained(rollout, rules.mask_truncated) for rollout in trainable):
        reasons = {why_left_out(rollout, rules.mask_truncated) for rollout in trainable}
        group.why = "kept_overflow" if "kept_overflow" in reasons else "truncated"
    elif rules.replace_no_signal and group.signal is False:
        group.why = "no_signal"
    elif rules.filter and rules.filter_function:
        filter_rollouts(group, rules, rules.filter, rules.filter_function)
    return group


def credit_compared(group: Group, indices: list[int], rules: Rules) -> None:
    """Sets the advantages and penalties of the rollouts `indices` of a group, which are compared
    with each other."""
    credit = rules.credit
    rewards = [group.rollouts[i].reward for i in indices]
    if isinstance(credit, MaxRlConfig) and min(rewards) < 0:
        raise RunError(
            f"environment {group.env}: a reward of {min(rewards):g}, but "
            "orchestrator.credit.type = max_rl divides by their mean, and needs rewards that "
            "are never negative; shift them, or choose dr_grpo or grpo"
        )
    lengths = [group.rollouts[i].num_tokens for i in indices]
    penalties = length_penalties(rewards, lengths, credit.length_penalty)
    rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
    for i, penalty in zip(indices, penalties, strict=True):
        group.penalties[i] = penalty
    if isinstance(credit, CustomCreditConfig):
        assert rules.credit_function
        part = part_of(group, indices, rewards)
        wanted = "a list of {count} finite numbers, one for each of group.rollouts"
        advantages = call_for(part, rules.credit_function, credit, as_numbers, wanted)
    else:
        advantages = group_advantages(rewards, credit)
    for i, advantage in zip(indices, advantages, strict=True):
        group.advantages[i] = advantage


def is_judged(group: Group) -> bool:
    """Returns whether `credit_group` has already run, before the teacher was asked, and its result
    still holds: no rollout has failed since."""
    return bool(group.advantages) and (
        group.why is not None or not any(rollout.error for rollout in group.rollouts)
    )


def filter_rollouts(
    group: Group, rules: Rules, config: FunctionConfig, function: UserFunction
) -> None:
    """Marks the rollouts that the filter drops, and the group if nothing is left to learn from."""
    rollouts = group.rollouts
    indices = [i for i, rollout in enumerate(rollouts) if rollout.trainable]
    part = part_of(group, indices, [rollouts[i].reward for i in indices])
    wanted = "a bool for all of group.rollouts, or a list of {count}, one for each"
    for i, passed in zip(indices, call_for(part, function, config, as_bools, wanted), strict=True):
        rollouts[i].filtered = not passed
    left = [i for i in indices if is_trained(rollouts[i], rules.mask_truncated)]
    only_zeros = (
        not rules.has_teacher and group.signal and not any(group.advantages[i] for i in left)
    )
    if not left or (rules.replace_no_signal and only_zeros):
        group.why = "filtered"


def compared(group: Group) -> dict[str, list[int]]:
    """Returns by agent the indices of the rollouts compared with each other, without untrained
    agents."""
    indices: dict[str, list[int]] = defaultdict(list)
    for i, rollout in enumerate(group.rollouts):
        if rollout.trainable:
            indices[rollout.agent].append(i)
    return indices


def normalise(used: list[Group], rules: Mapping[str, Rules]) -> None:
    """Finalises the advantages of a batch's groups with credit over the batch, separately for
    each environment and agent."""
    by_agent: dict[tuple[str, str], list[tuple[Group, list[int]]]] = defaultdict(list)
    for group in used:
        for agent, indices in compared(group).items():
            by_agent[group.env, agent].append((group, indices))
    for (env, _), pairs in by_agent.items():
        credit = rules[env].credit
        if not isinstance(credit, ReinforcePlusPlusConfig):
            continue
        rewards = [
            [group.rollouts[i].reward - group.penalties[i] for i in indices]
            for group, indices in pairs
        ]
        advantages = reinforce_pp(rewards, credit.group_baseline)
        for (group, indices), values in zip(pairs, advantages, strict=True):
            for i, advantage in zip(indices, values, strict=True):
                group.advantages[i] = advantage
