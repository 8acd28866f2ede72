"""Judges a finished group: its advantages, or why it is not trained. Pure."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from rl.config.orchestrator import CreditSettings, DrGrpoConfig, EnvConfig, OrchestratorConfig, ReinforcePlusPlusConfig
from rl.orchestrator.credit import group_advantages, length_penalties, reinforce_pp
from rl.orchestrator.samples import is_trained
from rl.wire.rollouts import Group


@dataclass(frozen=True)
class Rules:
    """How the groups of an environment are judged."""

    credit: CreditSettings = field(default_factory=DrGrpoConfig)
    has_teacher: bool = False
    """Whether a teacher scores the tokens: then there is something to learn whatever the rewards are."""
    keep_partial: bool = False
    replace_no_signal: bool = True
    mask_truncated: bool = False


def rules_of(settings: OrchestratorConfig, env: EnvConfig, has_teacher: bool) -> Rules:
    """The rules that are configured for an environment."""
    return Rules(
        credit=env.credit or settings.credit,
        has_teacher=has_teacher,
        keep_partial=settings.keep_partial_groups,
        replace_no_signal=settings.replace_no_signal,
        mask_truncated=settings.mask_truncated,
    )


def judge(group: Group, rules: Rules) -> Group:
    """Gives a finished group its advantages, and the reason if it is not to be trained.

    A group with a failed member trains none of it, unless `keep_partial`: what is left is biased, for failing may depend on the answer.
    """
    rollouts = group.rollouts
    whole = [rollout for rollout in rollouts if not rollout.error]
    group.advantages, group.penalties = [0.0] * len(rollouts), [0.0] * len(rollouts)
    group.why, group.signal = None, False
    if len(whole) < len(rollouts) and not (rules.keep_partial and len({rollout.episode for rollout in whole}) > 1):
        group.why = "error"
        return group
    for own in compared(group).values():
        rewards, lengths = [rollouts[i].reward for i in own], [rollouts[i].num_tokens for i in own]
        penalties = length_penalties(rewards, lengths, rules.credit.length_penalty)
        left = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        for i, penalty, advantage in zip(own, penalties, group_advantages(left, rules.credit), strict=True):
            group.penalties[i], group.advantages[i] = penalty, advantage
    only_batch_can_tell = isinstance(rules.credit, ReinforcePlusPlusConfig) and not rules.credit.group_baseline
    group.signal = rules.has_teacher or any(group.advantages) or (None if only_batch_can_tell else False)
    trainable = [rollout for rollout in whole if rollout.trainable]
    if not any(rollout.num_tokens for rollout in trainable):
        group.why = "overlong" if any(rollout.overlong for rollout in trainable) else "empty"
    elif not any(rollout.num_tokens for rollout in trainable if is_trained(rollout, rules.mask_truncated)):
        group.why = "truncated"
    elif rules.replace_no_signal and group.signal is False:
        group.why = "no_signal"
    return group


def compared(group: Group) -> dict[str, list[int]]:
    """Indices of the rollouts that are compared with each other, by agent: without failed rollouts and agents that are not trained."""
    indices: dict[str, list[int]] = defaultdict(list)
    for i, rollout in enumerate(group.rollouts):
        if rollout.trainable and not rollout.error:
            indices[rollout.agent].append(i)
    return indices


def normalise(used: list[Group], rules: Mapping[str, Rules]) -> None:
    """Makes the advantages of a batch's groups final, where credit is over the batch: for each environment and agent by itself."""
    members: dict[tuple[str, str], list[tuple[Group, list[int]]]] = defaultdict(list)
    for group in used:
        if isinstance(rules[group.env].credit, ReinforcePlusPlusConfig):
            for agent, own in compared(group).items():
                members[group.env, agent].append((group, own))
    for (env, _), parts in members.items():
        credit = rules[env].credit
        assert isinstance(credit, ReinforcePlusPlusConfig)
        rewards = [[group.rollouts[i].reward - group.penalties[i] for i in own] for group, own in parts]
        for (group, own), advantages in zip(parts, reinforce_pp(rewards, credit.group_baseline), strict=True):
            for i, advantage in zip(own, advantages, strict=True):
                group.advantages[i] = advantage
