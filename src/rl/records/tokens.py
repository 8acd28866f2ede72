"""A batch token by token: the samples of `batches/000012.batch`, and what the trainer computed from `tokens/`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir
from rl.run_dir.token_log import CLIPPED, LATER, MASKED, read_token_log
from rl.system.errors import RunError
from rl.wire.batch_file import decode_batch, sound_batch
from rl.wire.messages import TrainingSample

MAX_LOG_RATIO = 10.0
"""The trainer's clamp of log r in nats, see rl.trainer.loss.kl."""


@dataclass(frozen=True, repr=False)
class SampleTokens:
    """One sample of a batch. Arrays are aligned, [T] for T tokens; values of trained tokens are nan, -1 or False elsewhere."""

    step: int
    place: int
    """Index among the batch's samples."""
    sample: TrainingSample
    log: dict[str, np.ndarray]
    """Columns of the token log, [n] for the n trained tokens; empty without a token log."""

    def __repr__(self) -> str:
        return f"<SampleTokens: step {self.step}, group {self.group_id}, rollout {self.rollout_id}, {len(self.token_ids)} tokens>"

    @property
    def env(self) -> str:
        return self.sample.env

    @property
    def group_id(self) -> int:
        return self.sample.group_id

    @property
    def rollout_id(self) -> int:
        return self.sample.rollout_id

    @property
    def has_log(self) -> bool:
        """Whether the trainer's values are available."""
        return bool(self.log)

    @cached_property
    def token_ids(self) -> np.ndarray:
        """Token ids, int64."""
        return np.array(self.sample.token_ids, np.int64)

    @cached_property
    def loss_mask(self) -> np.ndarray:
        """Bool: the token was sampled and trained on."""
        return np.array(self.sample.loss_mask, bool)

    @cached_property
    def logprobs(self) -> np.ndarray:
        """Log-probabilities of the sampler, in nats."""
        return np.where(self.loss_mask, np.array(self.sample.logprobs, np.float32), np.nan)

    @cached_property
    def advantages(self) -> np.ndarray:
        return np.where(self.loss_mask, np.array(self.sample.advantages, np.float32), np.nan)

    @cached_property
    def versions(self) -> np.ndarray:
        """The policy version that sampled the token, int64; -1 elsewhere."""
        spans = self.sample.policy_versions
        versions = np.full(len(self.token_ids), -1)
        versions[self.loss_mask] = np.repeat([span.policy_version for span in spans], [span.num_tokens for span in spans])
        return versions

    @cached_property
    def trainer_logprobs(self) -> np.ndarray:
        """Log-probabilities of the trainer when it first trained on the token, in nats."""
        return self._column("trainer_logprobs")

    @cached_property
    def ratio(self) -> np.ndarray:
        """r = exp(trainer's - sampler's log-probability), with the difference clamped to +-10 as in the losses."""
        gap = np.clip(self.trainer_logprobs - self.logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return np.exp(gap)

    @cached_property
    def entropies(self) -> np.ndarray:
        """Entropies of the trainer's distribution, in nats."""
        return self._column("entropies")

    @cached_property
    def reference_logprobs(self) -> np.ndarray:
        """Log-probabilities of the reference model, in nats."""
        return self._column("reference_logprobs")

    @cached_property
    def teacher_gap(self) -> np.ndarray:
        """Log-probability of the trainer minus the teacher's, in nats; nan without a teacher."""
        teacher = self.sample.teacher_logprobs
        return self.trainer_logprobs - np.array([np.nan] * len(self.token_ids) if teacher is None else teacher, np.float32)

    @cached_property
    def clipped(self) -> np.ndarray:
        """Bool: the loss's own clip left the token without gradient."""
        return self._flag(CLIPPED)

    @cached_property
    def masked(self) -> np.ndarray:
        """Bool: a mask on the ratio left the token out of the loss."""
        return self._flag(MASKED)

    @cached_property
    def stopped_later(self) -> np.ndarray:
        """Bool: the clip or a mask excluded the token in a later epoch over the batch."""
        return self._flag(LATER)

    def _column(self, name: str) -> np.ndarray:
        values = np.full(len(self.token_ids), np.nan, np.float32)
        if name in self.log:
            values[self.loss_mask] = self.log[name]
        return values

    def _flag(self, bit: int) -> np.ndarray:
        flags = np.zeros(len(self.token_ids), bool)
        if "flags" in self.log:
            flags[self.loss_mask] = self.log["flags"] & bit > 0
        return flags

    def columns(self) -> dict[str, np.ndarray]:
        """All values as columns, with one row per token."""
        names = ("token_ids", "loss_mask", "logprobs", "advantages", "versions")
        of_trainer = ("trainer_logprobs", "ratio", "entropies", "reference_logprobs", "teacher_gap", "clipped", "masked", "stopped_later")
        place = {"position": np.arange(len(self.token_ids))}
        return place | {name: getattr(self, name) for name in (*names, *of_trainer)}


class BatchTokens:
    """The samples of one batch, with the trainer's token log if there is one."""

    def __init__(self, run_dir: RunDir, step: int):
        """Raises RunError if the batch is missing or damaged."""
        self.step, path = step, run_dir.batch(step)
        if not path.exists():
            raise RunError(f"{path}: no such batch; it may have been deleted (see orchestrator.batches.keep_last)")
        self.samples = decode_batch(sound_batch(path), str(path)).batch.samples
        self.fault = ""
        """Why there is no token log; empty if there is one."""
        self.log: dict[str, np.ndarray] = {}
        counts = [sum(sample.loss_mask) for sample in self.samples]
        self.ends = [*accumulate(counts)]
        log = run_dir.tokens(step)
        try:
            self.log = read_token_log(log, sum(counts))
        except FileNotFoundError:
            self.fault = f"{log}: does not exist: not trained yet, deleted (trainer.token_log.max_gib), or lost in a kill"
        except CorruptFileError as error:
            self.fault = str(error)

    def __repr__(self) -> str:
        return f"<BatchTokens: step {self.step}, {len(self.samples)} samples>"

    def of(self, group: int | None = None, rollout: int | None = None) -> Iterator[SampleTokens]:
        """The samples of the batch in order; only those of the given group or rollout, if any."""
        for place, (sample, end) in enumerate(zip(self.samples, self.ends, strict=True)):
            if group in (None, sample.group_id) and rollout in (None, sample.rollout_id):
                own = slice(end - sum(sample.loss_mask), end)
                yield SampleTokens(self.step, place, sample, {name: values[own] for name, values in self.log.items()})
