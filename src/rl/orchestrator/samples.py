"""A rollout's turns to training samples: ids as sampled, never tokenised again."""

from rl.messages import TrainingSample, VersionSpan
from rl.orchestrator.rollouts import Group, Rollout, Turn


def merge_turns(turns: list[Turn]) -> list[list[Turn]]:
    """Turns that continue each other: a turn joins the first chain whose ids, prompt and answer, its prompt starts with.

    A template that rewrites history starts a new chain; both ways every trained token stands behind exactly the ids it was sampled after.
    """
    chains: list[list[Turn]] = []
    for turn in turns:
        for chain in chains:
            whole = chain[-1].prompt_ids + chain[-1].completion_ids
            if turn.prompt_ids[: len(whole)] == whole:
                chain.append(turn)
                break
        else:
            chains.append([turn])
    return chains


def join_spans(spans: list[VersionSpan]) -> list[VersionSpan]:
    """Neighbouring runs of one version become one; empty ones vanish."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].policy_version == span.policy_version:
            joined[-1] = VersionSpan(span.policy_version, joined[-1].num_tokens + span.num_tokens)
        elif span.num_tokens:
            joined.append(span)
    return joined


def rollout_samples(
    rollout: Rollout, advantage: float, env: str, group_id: int, rollout_id: int, temperature: float
) -> list[TrainingSample]:
    """One sample a chain of turns; every sampled token of a rollout has the rollout's advantage."""
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
                env=env,
                group_id=group_id,
                rollout_id=rollout_id,
                temperature=temperature,
                teacher_logprobs=teacher if any(turn.teacher_logprobs for turn in chain) else None,
            )
        )
    return samples


def is_trained(rollout: Rollout, mask_truncated: bool) -> bool:
    """Whether the tokens of a rollout whose group is trained are: not those of failed ones, and of agents that are not trained."""
    return rollout.trainable and not rollout.error and not (rollout.truncated and mask_truncated)


def group_samples(group: Group, mask_truncated: bool = False) -> list[TrainingSample]:
    """The samples of a group. Rollouts without a sampled token have none."""
    return [
        sample
        for i, (rollout, advantage) in enumerate(zip(group.rollouts, group.advantages, strict=True))
        if is_trained(rollout, mask_truncated)
        for sample in rollout_samples(rollout, advantage, group.env, group.group_id, i, group.temperature)
        if any(sample.loss_mask)
    ]
