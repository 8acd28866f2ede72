"""What trainer and orchestrator exchange: few types, typed msgpack, no torch."""

from typing import Annotated

import msgspec

from rl.run_dir.in_memory import InMemory
from rl.run_dir.status import RoleStatus

Version = Annotated[int, msgspec.Meta(ge=0)]
PART_BYTES = 4 << 20
"""Of a file that is sent in parts."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no message of the expected type; the last for tables nested without end."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`num_tokens` sampled tokens in a row of one policy version (-1: of none, in supervised fine-tuning)."""

    policy_version: int
    num_tokens: Annotated[int, msgspec.Meta(ge=0)]


class TrainingSample(msgspec.Struct, kw_only=True):
    """One token sequence with what the loss needs at each token. The first four lists are aligned, length T.

    Example, two turns of one rollout (reward above the group's mean by 0.5; weights updated within the second answer)::

        tokens           <user> 1 + 1 <asst> 2 <end> <user> sure ? <asst> yes <end>
        loss_mask           0   0 0 0    0   1   1      0     0  0   0     1    1
        logprobs            0   0 0 0    0 -.7 -.1      0     0  0   0   -.4  -.2
        advantages          0   0 0 0    0  .5  .5      0     0  0   0    .5   .5
        policy_versions  [(3, 3), (4, 1)]      # over the sampled tokens, in order

    Token t is predicted from tokens 0..t-1, so a mask at position 0 is an error.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    """True where the policy sampled the token and it is to be trained."""
    logprobs: list[float]
    """Log-probability of each sampled token under the distribution that it was sampled from, nats; 0.0 where not sampled."""
    advantages: list[float]
    policy_versions: list[VersionSpan]
    """Runs of one version over the tokens with loss_mask True, in order."""
    env: str
    group_id: int
    rollout_id: int
    """Place of the rollout in its group; several samples can come from one rollout."""
    temperature: float = 1.0
    teacher_logprobs: list[float] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.logprobs), len(self.advantages)}
        if len(lengths) != 1:
            raise ValueError(f"a sample's lists differ in length: {sorted(lengths)}")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError("the first token of a sample has nothing before it and cannot be trained")
        if sum(span.num_tokens for span in self.policy_versions) != sum(self.loss_mask):
            raise ValueError("policy_versions must cover exactly the tokens with loss_mask True")


class TrainBatch(msgspec.Struct, kw_only=True):
    """What step `step` trains on; that turns policy version step-1 into version step."""

    step: int
    samples: list[TrainingSample]

    @property
    def envs(self) -> list[str]:
        """The environments of its samples, in order."""
        return sorted({sample.env for sample in self.samples})

    @property
    def num_loss_tokens(self) -> int:
        """The normaliser of the loss, known before the first backward and the same on every rank."""
        return sum(sum(sample.loss_mask) for sample in self.samples)


class WeightVersion(msgspec.Struct, frozen=True):
    """A complete set of weights."""

    policy_version: Version
    path: Annotated[str, msgspec.Meta(max_length=4096)]
    """Its folder."""
    memory: InMemory | None = None
    """Where processes of the trainer's host can read it before its folder is there."""


# Trainer -> orchestrator. All are repeatable: asking twice is harmless, so a restarted trainer needs no special protocol.


class GetBatch(msgspec.Struct, tag=True):
    """Asks whether the batch of `step` is there."""

    step: Annotated[int, msgspec.Meta(ge=1)]


class GetBatchPart(msgspec.Struct, tag=True):
    """Asks for bytes of the file of a batch, from `offset` on: a trainer that does not see the file reads it so."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    offset: Annotated[int, msgspec.Meta(ge=0)]


class Published(msgspec.Struct, tag=True):
    """Announces that a version is complete, in memory or, without that, on disk; the orchestrator loads it into inference."""

    version: WeightVersion


class Coming(msgspec.Struct, tag=True):
    """Tells of a version that is in memory while its digests are not written yet: servers may prepare it, and nobody may use it."""

    version: WeightVersion


class GetProbe(msgspec.Struct, tag=True):
    """Asks for a few completions by exactly this version: the trainer compares its log-probabilities with inference's."""

    policy_version: Version


# Orchestrator -> trainer.


class BatchReady(msgspec.Struct, tag=True, frozen=True):
    """The batch is in its file, `batches/000012.batch`, which the trainer reads: however large it is, it does not cross the wire."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    """Of the file, bytes."""
    checksum: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Of its content, as in the head of the file: one of the same name that differs is of another run, or not all there yet."""


class BatchPart(msgspec.Struct, tag=True):
    """Bytes of a batch's file, at most PART_BYTES; fewer only at its end."""

    data: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES)]


class NotReady(msgspec.Struct, tag=True):
    """No such batch yet. The trainer asks again, and shows meanwhile what the orchestrator does."""

    status: RoleStatus


class RunEnded(msgspec.Struct, tag=True):
    """There will be no further batch: the run is over (every task solved, for example)."""

    reason: str


class Acknowledged(msgspec.Struct, tag=True):
    """`Published` or `Coming` has been noted. Versions below `oldest_needed` may be deleted: nothing waits for them any more."""

    oldest_needed: int
    keep: list[int] = []
    """Versions that are not deleted either: an evaluation found them best, or an inference server is reading them."""


class Probe(msgspec.Struct, tag=True):
    """The completions that were asked for; none when inference has gone on to a later version."""

    samples: list[TrainingSample]


Request = GetBatch | GetBatchPart | Published | Coming | GetProbe
Reply = BatchReady | BatchPart | NotReady | RunEnded | Acknowledged | Probe
