"""From a rollout's turns to flat training samples: ids as they were sent and sampled, never tokenised again."""

from rl.wire.messages import TrainingSample, VersionSpan
from rl.wire.rollouts import Group, Rollout, Turn


def merge_turns(turns: list[Turn]) -> list[list[Turn]]:
    """Chains of turns that continue each other: a turn joins the first chain whose ids, prompt and completion, its prompt starts with.

    A template that rewrites history starts a new chain; either way every trained token follows exactly the ids that it was sampled after.
    """
    chains: list[list[Turn]] = []
    for turn in turns:
        for chain in chains:
            before = chain[-1].token_ids
            if turn.prompt_ids[: len(before)] == before:
                chain.append(turn)
                break
        else:
            chains.append([turn])
    return chains


def join_spans(spans: list[VersionSpan]) -> list[VersionSpan]:
    """The same spans with neighbours of one version joined, and without empty ones."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].policy_version == span.policy_version:
            joined[-1] = VersionSpan(span.policy_version, joined[-1].num_tokens + span.num_tokens)
        elif span.num_tokens:
            joined.append(span)
    return joined


def rollout_samples(group: Group, rollout_id: int) -> list[TrainingSample]:
    """One sample for each chain of turns; every sampled token of a rollout has the rollout's advantage."""
    rollout, advantage = group.rollouts[rollout_id], group.advantages[rollout_id]
    samples = []
    for chain in merge_turns(rollout.turns):
        token_ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        teacher: list[float] = []
        for turn in chain:
            new = turn.prompt_ids[len(token_ids) :]
            token_ids += new + turn.completion_ids
            mask += [False] * len(new) + [True] * len(turn.completion_ids)
            logprobs += [0.0] * len(new) + turn.logprobs
            teacher += [0.0] * len(new) + (turn.teacher_logprobs or [])
        samples.append(
            TrainingSample(
                token_ids=token_ids,
                loss_mask=mask,
                logprobs=logprobs,
                advantages=[advantage if sampled else 0.0 for sampled in mask],
                policy_versions=join_spans([span for turn in chain for span in turn.policy_versions]),
                env=group.env,
                group_id=group.group_id,
                rollout_id=rollout_id,
                temperature=group.temperature,
                teacher_logprobs=teacher if any(turn.teacher_logprobs for turn in chain) else None,
            )
        )
    return samples


def is_trained(rollout: Rollout, mask_truncated: bool) -> bool:
    """Whether a rollout is trained if its group is: not failed or filtered ones, untrained agents, or masked truncated answers."""
    return rollout.trainable and not rollout.error and not rollout.filtered and not (rollout.truncated and mask_truncated)


def group_samples(group: Group, mask_truncated: bool = False) -> list[TrainingSample]:
    """The samples of a group. Rollouts without a sampled token have none."""
    return [
        sample
        for i, rollout in enumerate(group.rollouts)
        if is_trained(rollout, mask_truncated)
        for sample in rollout_samples(group, i)
        if any(sample.loss_mask)
    ]
