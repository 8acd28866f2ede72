"""A batch token by token: the samples of `batches/000012.batch`, and what the trainer computed
from `tokens/`."""

from collections.abc import Iterator, Mapping
from itertools import accumulate

import numpy as np

from rl.run_dir.files import CorruptFileError
from rl.run_dir.numbers import CLIPPED, LATER, MASKED, MAX_LOG_RATIO, read_token_log
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError
from rl.wire.batch_file import decode_batch, sound_batch
from rl.wire.messages import TrainingSample


class SampleTokens:
    """One sample of a batch. Arrays are aligned, [T] for T tokens; values of trained tokens are
    nan, -1 or False elsewhere."""

    def __init__(
        self, step: int, position: int, sample: TrainingSample, log: Mapping[str, np.ndarray]
    ):
        """position: its index among the batch's samples. log: the columns of its n trained tokens
        in the token log, [n]; empty without a token log."""

        def whole(
            values: np.ndarray | float, elsewhere: float = np.nan, dtype: type = np.float32
        ) -> np.ndarray:
            array = np.full(sample.num_tokens, elsewhere, dtype)
            array[sample.trained] = values
            return array

        self.step, self.place, self.sample = step, position, sample
        self.env, self.group_id, self.rollout_id = sample.env, sample.group_id, sample.rollout_id
        self.has_log = bool(log)
        """Whether the trainer's values are available."""
        self.token_ids = sample.token_ids.astype(np.int64)
        self.loss_mask = whole(True, False, bool)
        """The token was sampled and trained on."""
        self.logprobs = whole(sample.logprobs)
        """Log-probabilities of the sampler, in nats."""
        self.advantages = whole(sample.advantages)
        self.versions = whole(sample.versions, -1, np.int64)
        """The policy version that sampled the token; -1 elsewhere."""
        self.trainer_logprobs = whole(log.get("trainer_logprobs", np.nan))
        """Log-probabilities of the trainer when it first trained on the token, in nats."""
        log_ratio = self.trainer_logprobs - self.logprobs
        self.ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        """r = exp(trainer's - sampler's log-probability), with the difference clamped to +-10 as
        in the losses."""
        self.entropies = whole(log.get("entropies", np.nan))
        """Entropies of the trainer's distribution, in nats."""
        self.reference_logprobs = whole(log.get("reference_logprobs", np.nan))
        """Log-probabilities of the reference model, in nats."""
        teacher = np.nan if sample.teacher_logprobs is None else sample.teacher_logprobs
        self.teacher_gap = self.trainer_logprobs - whole(teacher)
        """Log-probability of the trainer minus the teacher's, in nats; nan without a teacher."""
        flags = whole(log.get("flags", 0), 0, np.uint8)
        self.clipped = flags & CLIPPED > 0
        """The loss's own clip left the token without gradient."""
        self.masked = flags & MASKED > 0
        """A mask on the ratio left the token out of the loss."""
        self.stopped_later = flags & LATER > 0
        """The clip or a mask excluded the token in a later epoch over the batch."""

    def __repr__(self) -> str:
        return (
            f"<SampleTokens: step {self.step}, group {self.group_id}, rollout {self.rollout_id}, "
            f"{len(self.token_ids)} tokens>"
        )

    def columns(self) -> dict[str, np.ndarray]:
        """All values as columns, with one row per token."""
        arrays = {
            name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        return {"position": np.arange(len(self.token_ids)), **arrays}


class BatchTokens:
    """The samples of one batch, with the trainer's token log if there is one."""

    def __init__(self, run_dir: RunDir, step: int):
        """Raises RunError if the batch is missing or damaged."""
        self.step, path = step, run_dir.batch(step)
        if not path.exists():
            raise RunError(
                f"{path}: no such batch; it may have been deleted (orchestrator.batches.keep_last)"
            )
        self.samples = decode_batch(sound_batch(path), str(path)).batch.samples
        self.fault = ""
        """Why there is no token log; empty if there is one."""
        self.log: dict[str, np.ndarray] = {}
        counts = [sample.num_trained for sample in self.samples]
        self.ends = [*accumulate(counts)]
        log = run_dir.tokens(step)
        try:
            self.log = read_token_log(log, sum(counts))
        except FileNotFoundError:
            self.fault = (
                f"{log}: does not exist: not trained yet, deleted (trainer.token_log.max_gib), or "
                "lost in a kill"
            )
        except CorruptFileError as error:
            self.fault = str(error)

    def __repr__(self) -> str:
        return f"<BatchTokens: step {self.step}, {len(self.samples)} samples>"

    def of(self, group: int | None = None, rollout: int | None = None) -> Iterator[SampleTokens]:
        """The samples of the batch in order; only those of the given group or rollout, if any."""
        for position, (sample, end) in enumerate(zip(self.samples, self.ends, strict=True)):
            if group in (None, sample.group_id) and rollout in (None, sample.rollout_id):
                rows = slice(end - sample.num_trained, end)
                log = {name: values[rows] for name, values in self.log.items()}
                yield SampleTokens(self.step, position, sample, log)
