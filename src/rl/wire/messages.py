"""The messages that trainer and orchestrator exchange: few types, typed msgpack, no torch."""

from typing import Annotated

import msgspec

from rl.run_dir.over_network import Memory
from rl.run_dir.status import RoleStatus

VersionNumber = Annotated[int, msgspec.Meta(ge=0)]
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of decoding if bytes are not a message of the expected type; RecursionError is for too deeply nested data."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`num_tokens` consecutive sampled tokens of one policy version (-1: of none, in supervised fine-tuning)."""

    policy_version: int
    num_tokens: Annotated[int, msgspec.Meta(ge=0)]


class TrainingSample(msgspec.Struct, kw_only=True):
    """One token sequence with the inputs of the loss at each token. The first four lists are aligned, length T.

    Example: two turns of one rollout (reward 0.5 above the group's mean; weights updated during the second answer)::

        tokens           <user> 1 + 1 <asst> 2 <end> <user> sure ? <asst> yes <end>
        loss_mask           0   0 0 0    0   1   1      0     0  0   0     1    1
        logprobs            0   0 0 0    0 -.7 -.1      0     0  0   0   -.4  -.2
        advantages          0   0 0 0    0  .5  .5      0     0  0   0    .5   .5
        policy_versions  [(3, 3), (4, 1)]      # over the sampled tokens, in order

    Token t is predicted from tokens 0..t-1, so a mask at position 0 is an error.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    """True where the token was sampled by the policy and is to be trained."""
    logprobs: list[float]
    """Log-probability of each sampled token under the distribution it was sampled from, nats; 0.0 where not sampled."""
    advantages: list[float]
    policy_versions: list[VersionSpan]
    """Spans of one version over the tokens with loss_mask True, in order."""
    env: str
    group_id: int
    rollout_id: int
    """Index of the rollout in its group; one rollout can give several samples."""
    temperature: float = 1.0
    teacher_logprobs: list[float] | None = None
    routes: bytes | None = None
    """The experts, in each layer, of each token before the last trained one, as the sampler chose them: see the trainer's Routers."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.logprobs), len(self.advantages)}
        if len(lengths) != 1:
            raise ValueError(f"a sample's lists differ in length: {sorted(lengths)}")
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError("the first token of a sample cannot be trained, because no token precedes it")
        if sum(span.num_tokens for span in self.policy_versions) != sum(self.loss_mask):
            raise ValueError("policy_versions must cover exactly the tokens with loss_mask True")
        if self.routes is not None and len(self.routes) % max(1, "".join("01"[trained] for trained in self.loss_mask).rfind("1")):
            raise ValueError("a sample's routes do not cover exactly the tokens before the last trained one")


class TrainBatch(msgspec.Struct, kw_only=True):
    """The samples that step `step` trains on, which turns policy version step-1 into version step."""

    step: int
    samples: list[TrainingSample]

    @property
    def envs(self) -> list[str]:
        """The environments of the samples, sorted."""
        return sorted({sample.env for sample in self.samples})

    @property
    def num_loss_tokens(self) -> int:
        """The normaliser of the loss, known before the first backward pass and equal on every rank."""
        return sum(sum(sample.loss_mask) for sample in self.samples)


class WeightVersion(msgspec.Struct, frozen=True):
    """A complete set of weights."""

    policy_version: VersionNumber
    path: Annotated[str, msgspec.Meta(max_length=4096)]
    """The version's folder."""
    memory: Memory | None = None
    """Where the version can be read before its folder exists."""
    content: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """See rl.run_dir.checksums.content_id; it may differ if a version is trained again. Empty: unknown."""


# Trainer -> orchestrator. All requests are idempotent, so a restarted trainer needs no special protocol.


class GetBatch(msgspec.Struct, tag=True):
    """Asks whether the batch of `step` is ready."""

    step: Annotated[int, msgspec.Meta(ge=1)]


class Published(msgspec.Struct, tag=True):
    """Announces that a version is complete, in memory if `memory` is set, else on disk; the orchestrator loads it into inference."""

    version: WeightVersion


class GetProbe(msgspec.Struct, tag=True):
    """Asks for a few completions by exactly this version: the trainer compares its log-probabilities with inference's."""

    policy_version: VersionNumber


# Orchestrator -> trainer.


class BatchReady(msgspec.Struct, tag=True, frozen=True):
    """The batch is in its file, `batches/000012.batch`, from which the trainer reads it: batches are not sent over the wire."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    """Size of the file, bytes."""
    checksum: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Checksum in the file's header. A file of that name with another checksum is of another run, or incomplete."""


class NotReady(msgspec.Struct, tag=True):
    """The answer is not available yet. The trainer asks again, and meanwhile shows what the orchestrator is doing."""

    status: RoleStatus


class RunEnded(msgspec.Struct, tag=True):
    """There will be no further batches: the run is over (for example, every task is solved)."""

    reason: str


class Acknowledged(msgspec.Struct, tag=True):
    """`Published` was received. Versions below `oldest_needed` may be deleted, except those in `keep`."""

    oldest_needed: int
    keep: list[int] = []
    """Older versions that must not be deleted: an evaluation found them best, or an inference server is reading them."""


class Probe(msgspec.Struct, tag=True):
    """The requested completions; empty if inference already holds a later version."""

    samples: list[TrainingSample]


Request = GetBatch | Published | GetProbe
Reply = BatchReady | NotReady | RunEnded | Acknowledged | Probe
