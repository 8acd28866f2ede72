"""Makes flat training samples from a rollout's turns. Their ids are those sent and sampled: nothing
is tokenized again."""

from collections.abc import Iterator

from rl.wire.messages import TrainedSpan, TrainingSample, VersionSpan
from rl.wire.rollouts import Group, Rollout, why_left_out
from rl.wire.turns import AnswerSpan


def join_spans(spans: list[VersionSpan]) -> list[VersionSpan]:
    """Joins adjacent spans of the same version, and drops empty ones."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].policy_version == span.policy_version:
            joined[-1] = VersionSpan(span.policy_version, joined[-1].num_tokens + span.num_tokens)
        elif span.num_tokens:
            joined.append(span)
    return joined


def rollout_samples(group: Group, rollout_id: int) -> Iterator[TrainingSample]:
    """Yields one sample per chain of turns; every sampled token gets the rollout's advantage."""
    turns, advantage = group.rollouts[rollout_id].turns, group.advantages[rollout_id]
    for number, answers in enumerate(turns.by_chain()):
        spans = [span for answer in answers for span in spans_of(answer, advantage)]
        teacher = [answer.teacher_logprobs or bytes(len(answer.logprobs)) for answer in answers]
        yield TrainingSample(
            packed_ids=turns.ids(number),
            spans=spans,
            packed_logprobs=b"".join(answer.logprobs for answer in answers),
            packed_teacher=b"".join(teacher)
            if any(answer.teacher_logprobs for answer in answers)
            else None,
            env=group.env,
            group_id=group.group_id,
            rollout_id=rollout_id,
            temperature=group.temperature,
            routes=turns.routes(number, max((span.end for span in spans), default=1) - 1) or None,
        )


def spans_of(answer: AnswerSpan, advantage: float) -> Iterator[TrainedSpan]:
    """Yields the spans of one version in an answer."""
    start = answer.start
    for span in join_spans(answer.policy_versions):
        yield TrainedSpan(start, start + span.num_tokens, span.policy_version, advantage)
        start += span.num_tokens


def is_trained(rollout: Rollout, mask_truncated: bool) -> bool:
    """Whether a rollout is trained if its group is."""
    return why_left_out(rollout, mask_truncated) is None


def group_samples(group: Group, mask_truncated: bool = False) -> Iterator[TrainingSample]:
    """Yields the samples of a group one at a time."""
    for i, rollout in enumerate(group.rollouts):
        if is_trained(rollout, mask_truncated):
            yield from (sample for sample in rollout_samples(group, i) if sample.spans)
