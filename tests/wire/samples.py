"""Training samples as lists that are aligned with their tokens."""

from itertools import groupby, pairwise
from types import SimpleNamespace

import msgspec
import numpy as np

from rl.wire.messages import TrainedSpan, TrainingSample, VersionSpan
from rl.wire.turns import pack_kept, unpack_kept


def aligned_sample(
    token_ids,
    loss_mask,
    logprobs,
    advantages,
    policy_versions,
    teacher_logprobs=None,
    kept=None,
    **names,
) -> TrainingSample:
    """Makes a sample from aligned lists. `policy_versions` covers the tokens with loss_mask True,
    in order."""
    trained = np.flatnonzero(loss_mask)
    sizes = [span.num_tokens for span in policy_versions]
    versions = np.repeat([span.policy_version for span in policy_versions], sizes)
    weights = np.asarray(advantages, float)[trained]
    ends = (np.diff(trained) > 1) | (np.diff(versions) != 0) | (np.diff(weights) != 0)
    bounds = [0, *(np.flatnonzero(ends) + 1).tolist(), len(trained)]
    spans = [
        TrainedSpan(
            int(trained[first]),
            int(trained[end - 1]) + 1,
            int(versions[first]),
            float(weights[first]),
        )
        for first, end in pairwise(bounds)
        if first < end
    ]

    def packed(values) -> bytes:
        return np.asarray(values, np.float32)[trained].tobytes()

    return TrainingSample(
        packed_ids=np.asarray(token_ids, np.int32).tobytes(),
        spans=spans,
        packed_logprobs=packed(logprobs),
        packed_teacher=None if teacher_logprobs is None else packed(teacher_logprobs),
        kept=kept and pack_kept([kept[index] for index in trained]),
        **names,
    )


def aligned(sample: TrainingSample) -> SimpleNamespace:
    """What `aligned_sample` made the sample of."""
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
        kept=None if sample.kept is None else whole(unpack_kept(sample.kept), []),
    )


def changed(sample: TrainingSample, **lists) -> TrainingSample:
    """A copy of the sample with other lists."""
    names = ("env", "group_id", "rollout_id", "temperature", "routes")
    return aligned_sample(
        **vars(aligned(sample)) | lists, **{name: getattr(sample, name) for name in names}
    )


def with_version(sample: TrainingSample, version: int) -> TrainingSample:
    """A copy of the sample, all sampled by one version."""
    spans = [msgspec.structs.replace(span, policy_version=version) for span in sample.spans]
    return msgspec.structs.replace(sample, spans=spans)
