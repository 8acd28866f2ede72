"""The messages that trainer and orchestrator exchange, and what clients ask of a server of
inference: few types, no torch."""

from array import array
from typing import TYPE_CHECKING, Annotated

import msgspec

from rl.run_dir.in_memory import Memory
from rl.run_dir.status import RoleStatus

if TYPE_CHECKING:
    # here by those that compute: its import starts threads, which processes that fork may not have
    import numpy as np

VersionNumber = Annotated[int, msgspec.Meta(ge=0)]
ITEM_BYTES = 4
"""Bytes of a token's id, and of its log-probability."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`num_tokens` consecutive tokens sampled by `policy_version`; -1 in supervised fine-tuning,
    where no version sampled them."""

    policy_version: int
    num_tokens: Annotated[int, msgspec.Meta(ge=0)]


class TrainedSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive trained tokens of a sample that one policy version sampled, and that have one
    advantage."""

    start: Annotated[int, msgspec.Meta(ge=1)]
    """Index of the first. The first token of a sample cannot be trained, because no token
    precedes it."""
    end: int
    policy_version: int
    """-1: no version has sampled them, in supervised fine-tuning."""
    advantage: float


TOO_MANY = -1
"""The count of a sampled token for which more ids were kept than were asked for."""


class KeptTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The ids that truncation (top_p, top_k, min_p) kept at each of N sampled tokens. The sampler
    drew from these alone, so the trainer renormalises over the same."""

    packed_counts: bytes
    """[N] int32: the number of ids at each token, in order. 0: all ids, nothing was truncated;
    TOO_MANY: the token cannot be trained."""
    packed_ids: bytes
    """[sum of the positive counts] int32."""

    def __post_init__(self) -> None:
        ids = len(self.packed_ids) / ITEM_BYTES
        if len(self.packed_counts) % ITEM_BYTES or sum(self.sizes) != ids:
            raise ValueError(f"the kept tokens have {ids:g} ids, their counts say otherwise")

    @property
    def sizes(self) -> list[int]:
        """The number of ids at each token, TOO_MANY as 0."""
        return [max(0, count) for count in array("i", self.packed_counts)]

    @property
    def counts(self) -> "np.ndarray":
        """[N] int32."""
        return column(self.packed_counts, "int32")

    @property
    def ids(self) -> "np.ndarray":
        """[sum of the positive counts] int32."""
        return column(self.packed_ids, "int32")


class TrainingSample(msgspec.Struct, kw_only=True):
    """One token sequence with the inputs of the loss. Numbers are bytes, so that no rank makes
    a Python object of each token. T is the number of tokens, N that
    of the trained ones.

    Example: two turns of one rollout (reward 0.5 above the group's mean; weights updated during the
    second answer)::

        tokens     <user> 1 + 1 <asst> 2 <end> <user> sure ? <asst> yes <end>
        spans      (5, 7, version 3, 0.5), (11, 12, 3, 0.5), (12, 13, 4, 0.5)
        logprobs   -.7 -.1 -.4 -.2
    """

    packed_ids: bytes
    """[T] int32."""
    spans: list[TrainedSpan]
    """The trained tokens, in order."""
    packed_logprobs: bytes
    """[N] float32: log-probability of each trained token under the distribution that it was
    sampled from, nats."""
    env: str
    group_id: int
    rollout_id: int
    """Index of the rollout in its group; one rollout can give several samples."""
    temperature: float = 1.0
    packed_teacher: bytes | None = None
    """[N] float32: the teacher's log-probabilities, nats; None without a teacher."""
    kept: KeptTokens | None = None
    """Of the N trained tokens, none of which has TOO_MANY; None if no token was truncated."""
    routes: bytes | None = None
    """The experts, in each layer, of each token before the last trained one, as the sampler
    chose them: see the trainer's Routers."""

    def __post_init__(self) -> None:
        num_tokens, end = len(self.packed_ids) // ITEM_BYTES, 0
        for span in self.spans:
            if not end <= span.start < span.end <= num_tokens:
                raise ValueError(
                    f"tokens {span.start} to {span.end} of a sample of {num_tokens} are "
                    f"trained, after those to {end}"
                )
            end = span.end
        columns = {
            len(column)
            for column in (
                self.packed_logprobs,
                self.packed_teacher,
                self.kept.packed_counts if self.kept else None,
            )
            if column is not None
        }
        if len(self.packed_ids) % ITEM_BYTES or columns != {self.num_trained * ITEM_BYTES}:
            raise ValueError(
                f"a sample with {self.num_trained} trained tokens has columns of "
                f"{sorted(columns)} bytes"
            )
        if self.routes is not None and len(self.routes) % max(1, end - 1):
            raise ValueError(
                "a sample's routes do not cover exactly the tokens before the last trained one"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.packed_ids) // ITEM_BYTES

    @property
    def num_trained(self) -> int:
        return sum(span.end - span.start for span in self.spans)

    @property
    def token_ids(self) -> "np.ndarray":
        """[T] int32."""
        return column(self.packed_ids, "int32")

    @property
    def trained(self) -> "np.ndarray":
        """[N] int64: the indices of the trained tokens."""
        import numpy as np

        return np.concatenate(
            [np.arange(span.start, span.end) for span in self.spans] or [np.arange(0)]
        )

    @property
    def logprobs(self) -> "np.ndarray":
        """[N] float32."""
        return column(self.packed_logprobs, "float32")

    @property
    def teacher_logprobs(self) -> "np.ndarray | None":
        """[N] float32."""
        return None if self.packed_teacher is None else column(self.packed_teacher, "float32")

    @property
    def advantages(self) -> "np.ndarray":
        """[N] float32."""
        return self.by_span("advantage", "float32")

    @property
    def versions(self) -> "np.ndarray":
        """[N] int64: the policy versions that sampled the trained tokens."""
        return self.by_span("policy_version", "int64")

    def by_span(self, name: str, dtype: str) -> "np.ndarray":
        """Returns [N]: a value of the spans, for each of their tokens."""
        import numpy as np

        values = np.array([getattr(span, name) for span in self.spans], dtype)
        return np.repeat(values, [span.end - span.start for span in self.spans])


def column(data: bytes, dtype: str) -> "np.ndarray":
    """Returns the numbers of packed bytes, which are not copied."""
    import numpy as np

    return np.frombuffer(data, dtype)


class TrainBatch(msgspec.Struct, kw_only=True):
    """The samples that step `step` trains on, which turns policy version step-1 into version
    step."""

    step: int
    samples: list[TrainingSample]

    @property
    def envs(self) -> list[str]:
        """The environments of the samples, sorted."""
        return sorted({sample.env for sample in self.samples})

    @property
    def num_loss_tokens(self) -> int:
        """The normaliser of the loss, known before the first backward pass and equal on every
        rank."""
        return sum(sample.num_trained for sample in self.samples)


class WeightVersion(msgspec.Struct, frozen=True):
    """A complete set of weights."""

    policy_version: VersionNumber
    path: Annotated[str, msgspec.Meta(max_length=4096)]
    """The version's folder."""
    memory: Memory | None = None
    """Where the version can be read before its folder exists."""
    content: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """See rl.run_dir.checksums.content_id; it may differ if a version is trained again. Empty:
    unknown."""


# Trainer -> orchestrator. All requests are idempotent, so a restarted trainer needs no special
# protocol.


class GetBatch(msgspec.Struct, tag=True):
    """Asks whether the batch of `step` is ready."""

    step: Annotated[int, msgspec.Meta(ge=1)]


class Published(msgspec.Struct, tag=True):
    """Announces that a version is complete, in memory if `memory` is set, else on disk; the
    orchestrator loads it into inference."""

    version: WeightVersion


class GetProbe(msgspec.Struct, tag=True):
    """Asks for a few completions by exactly this version: the trainer compares its
    log-probabilities with inference's."""

    policy_version: VersionNumber


# Orchestrator -> trainer.


class BatchReady(msgspec.Struct, tag=True, frozen=True):
    """The batch is in its file, `batches/000012.batch`, from which the trainer reads it: batches
    are not sent over the wire."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    """Size of the file, bytes."""
    checksum: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Checksum in the file's header. A file of that name with another checksum is of another
    run, or incomplete."""


class NotReady(msgspec.Struct, tag=True):
    """The answer is not available yet. The trainer asks again, and meanwhile shows what the
    orchestrator is doing."""

    status: RoleStatus


class RunEnded(msgspec.Struct, tag=True):
    """There will be no further batches: the run is over (for example, every task is solved)."""

    reason: str


class Acknowledged(msgspec.Struct, tag=True):
    """`Published` was received. Versions below `oldest_needed` may be deleted, except those in
    `keep`."""

    oldest_needed: int
    keep: list[int] = []
    """Older versions that must not be deleted: an evaluation found them best, or an inference
    server is reading them."""


class Probe(msgspec.Struct, tag=True):
    """The requested completions; empty if inference already holds a later version."""

    samples: list[TrainingSample]


Request = GetBatch | Published | GetProbe
Reply = BatchReady | NotReady | RunEnded | Acknowledged | Probe


TokenId = Annotated[int, msgspec.Meta(ge=0)]
MAX_BODY_BYTES = 16 << 20
"""A prompt of a million token ids takes 7 MB."""


class Sampling(msgspec.Struct, forbid_unknown_fields=True):
    """Sampling parameters; the defaults are neutral (the model's generation_config.json is
    ignored)."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[TokenId] = []
    stop: list[str] | str = []
    ignore_eos: bool = False
    routes: bool = False
    """Return the routes of all tokens but the last."""
    max_kept: int = 0
    """If tokens are left out, return those that are kept, up to so many for each sampled token;
    0: none."""
    prompt_logprobs: bool = False

    def truncates(self, vocab_size: int) -> bool:
        """Whether tokens are left out of what is sampled."""
        return self.temperature > 0 and (
            self.top_p < 1 or 0 < self.top_k < vocab_size or self.min_p > 0
        )


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/generate`, in JSON. The answer is a `rl.wire.turns.Turn` in msgpack."""

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling: Sampling
    session: int | None = None
    """Requests of one session go to one engine of several (`data_parallel_size`), which has
    their prefix cached."""


class LoadWeightsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/load_weights`; the server's machine must see the path."""

    policy_version: Annotated[int, msgspec.Meta(ge=0)]
    path: str
    memory: Memory | None = None
    """Where it can be read before it is at `path`."""
    content: str = ""
    """Digest that tells it apart from other weights with the same version number; empty: not
    known."""
