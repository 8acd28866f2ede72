"""Training samples as lists that are aligned with their tokens."""

from itertools import groupby
from types import SimpleNamespace

import msgspec

from rl.wire.messages import TrainingSample, VersionSpan


def aligned(sample: TrainingSample) -> SimpleNamespace:
    """What `TrainingSample.of` made the sample of."""
    trained = sample.trained.tolist()

    def whole(values, elsewhere):
        found = [elsewhere] * sample.num_tokens
        for place, value in zip(trained, values, strict=True):
            found[place] = value
        return found

    teacher = sample.teacher_logprobs
    return SimpleNamespace(
        token_ids=sample.token_ids.tolist(),
        loss_mask=whole([True] * len(trained), False),
        logprobs=whole(sample.logprobs.tolist(), 0.0),
        advantages=whole(sample.by_span("advantage", "float64").tolist(), 0.0),
        policy_versions=[
            VersionSpan(version, len([*each]))
            for version, each in groupby(sample.versions.tolist())
        ],
        teacher_logprobs=None if teacher is None else whole(teacher.tolist(), 0.0),
    )


def changed(sample: TrainingSample, **lists) -> TrainingSample:
    """A copy of the sample with other lists."""
    names = ("env", "group_id", "rollout_id", "temperature", "routes")
    return TrainingSample.of(
        **vars(aligned(sample)) | lists, **{name: getattr(sample, name) for name in names}
    )


def with_version(sample: TrainingSample, version: int) -> TrainingSample:
    """A copy of the sample, all sampled by one version."""
    spans = [msgspec.structs.replace(span, policy_version=version) for span in sample.spans]
    return msgspec.structs.replace(sample, spans=spans)
