"""Judges a finished group: sets its advantages, or the reason why it is not trained. Pure."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

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
from rl.orchestrator.batches.samples import is_trained
from rl.orchestrator.groups.credit import group_advantages, length_penalties, reinforce_pp
from rl.orchestrator.groups.functions import (
    custom_advantages,
    may_be_trained,
    part_of,
    user_function,
)
from rl.system.errors import RunError
from rl.system.functions import UserFunction
from rl.wire.rollouts import Group


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


def rules_of(settings: OrchestratorConfig, env: EnvConfig, has_teacher: bool) -> Rules:
    """Returns the rules configured for an environment. Raises RunError for functions that cannot
    be loaded."""
    credit, custom = env.credit or settings.credit, None
    if isinstance(credit, CustomCreditConfig):
        place = settings.environment.index(env) if env.credit else None
        key = "orchestrator.credit" if place is None else f"orchestrator.environment.{place}.credit"
        custom = user_function(f"{key}.function", credit.function)
    return Rules(
        credit=credit,
        credit_function=custom,
        filter=settings.filter,
        filter_function=user_function("orchestrator.filter.function", settings.filter.function)
        if settings.filter
        else None,
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
    for own in compared(group).values():
        rewards, lengths = [rollouts[i].reward for i in own], [rollouts[i].num_tokens for i in own]
        if isinstance(rules.credit, MaxRlConfig) and min(rewards, default=0.0) < 0:
            raise RunError(
                f"environment {group.env}: a reward of {min(rewards):g}, but "
                "orchestrator.credit.type = max_rl divides by their mean, and needs rewards that "
                "are never negative; shift them, or choose dr_grpo or grpo"
            )
        penalties = length_penalties(rewards, lengths, rules.credit.length_penalty)
        left = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        for i, penalty in zip(own, penalties, strict=True):
            group.penalties[i] = penalty
        for i, advantage in zip(own, advantages_of(group, own, left, rules), strict=True):
            group.advantages[i] = advantage
    only_batch_can_tell = (
        isinstance(rules.credit, ReinforcePlusPlusConfig) and not rules.credit.group_baseline
    )
    group.signal = (
        rules.has_teacher or any(group.advantages) or (None if only_batch_can_tell else False)
    )
    trainable = [rollout for rollout in rollouts if rollout.trainable]
    if not any(rollout.num_sampled for rollout in trainable):
        group.why = "overlong" if any(rollout.overlong for rollout in trainable) else "empty"
    elif not any(is_trained(rollout, rules.mask_truncated) for rollout in trainable):
        group.why = "truncated"
    elif rules.replace_no_signal and group.signal is False:
        group.why = "no_signal"
    else:
        filter_rollouts(group, rules)
    return group


def is_judged(group: Group) -> bool:
    """Whether a group was judged already, before its teacher was asked, and no rollout has
    failed since."""
    return bool(group.advantages) and (
        group.why is not None or not any(rollout.error for rollout in group.rollouts)
    )


def advantages_of(group: Group, own: list[int], rewards: list[float], rules: Rules) -> list[float]:
    """Returns the advantages of the rollouts `own` of a group, which are compared with each
    other."""
    if isinstance(rules.credit, CustomCreditConfig):
        assert rules.credit_function
        return custom_advantages(part_of(group, own, rewards), rules.credit_function, rules.credit)
    return group_advantages(rewards, rules.credit)


def filter_rollouts(group: Group, rules: Rules) -> None:
    """Marks the rollouts that the filter drops, and the group if nothing is left to learn from."""
    if not (rules.filter and rules.filter_function):
        return
    own = [i for i, rollout in enumerate(group.rollouts) if rollout.trainable]
    part = part_of(group, own, [group.rollouts[i].reward for i in own])
    for i, passed in zip(
        own, may_be_trained(part, rules.filter_function, rules.filter), strict=True
    ):
        group.rollouts[i].filtered = not passed
    left = [
        i for i, rollout in enumerate(group.rollouts) if is_trained(rollout, rules.mask_truncated)
    ]
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
    members: dict[tuple[str, str], list[tuple[Group, list[int]]]] = defaultdict(list)
    for group in used:
        if isinstance(rules[group.env].credit, ReinforcePlusPlusConfig):
            for agent, own in compared(group).items():
                members[group.env, agent].append((group, own))
    for (env, _), parts in members.items():
        credit = rules[env].credit
        assert isinstance(credit, ReinforcePlusPlusConfig)
        rewards = [
            [group.rollouts[i].reward - group.penalties[i] for i in own] for group, own in parts
        ]
        for (group, own), advantages in zip(
            parts, reinforce_pp(rewards, credit.group_baseline), strict=True
        ):
            for i, advantage in zip(own, advantages, strict=True):
                group.advantages[i] = advantage
