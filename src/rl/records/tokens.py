"""A batch token by token: the samples of `batches/000012.batch`, and what the trainer computed
from `tokens/`."""

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class SampleTokens:
    """One sample of a batch. Arrays are aligned, [T] for T tokens; values of trained tokens are
    nan, -1 or False elsewhere."""

    step: int
    place: int
    """Index among the batch's samples."""
    sample: TrainingSample
    env: str
    group_id: int
    rollout_id: int
    has_log: bool
    """Whether the trainer's values are available."""
    token_ids: np.ndarray
    """Token ids, int64."""
    loss_mask: np.ndarray
    """Bool: the token was sampled and trained on."""
    logprobs: np.ndarray
    """Log-probabilities of the sampler, in nats."""
    advantages: np.ndarray
    versions: np.ndarray
    """The policy version that sampled the token, int64; -1 elsewhere."""
    trainer_logprobs: np.ndarray
    """Log-probabilities of the trainer when it first trained on the token, in nats."""
    ratio: np.ndarray
    """r = exp(trainer's - sampler's log-probability), with the difference clamped to +-10 as in
    the losses."""
    entropies: np.ndarray
    """Entropies of the trainer's distribution, in nats."""
    reference_logprobs: np.ndarray
    """Log-probabilities of the reference model, in nats."""
    teacher_gap: np.ndarray
    """Log-probability of the trainer minus the teacher's, in nats; nan without a teacher."""
    clipped: np.ndarray
    """Bool: the loss's own clip left the token without gradient."""
    masked: np.ndarray
    """Bool: a mask on the ratio left the token out of the loss."""
    stopped_later: np.ndarray
    """Bool: the clip or a mask excluded the token in a later epoch over the batch."""

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


def sample_tokens(
    step: int, place: int, sample: TrainingSample, log: dict[str, np.ndarray]
) -> SampleTokens:
    """The tokens of a sample. log: the columns of its n trained tokens in the token log, [n];
    empty without a token log."""
    trained = sample.trained

    def whole(
        values: np.ndarray | float, elsewhere: float = np.nan, dtype: type = np.float32
    ) -> np.ndarray:
        found = np.full(sample.num_tokens, elsewhere, dtype)
        found[trained] = values
        return found

    flags = whole(log.get("flags", 0), 0, np.uint8)
    logprobs, trainer_logprobs = whole(sample.logprobs), whole(log.get("trainer_logprobs", np.nan))
    teacher = np.nan if sample.teacher_logprobs is None else sample.teacher_logprobs
    return SampleTokens(
        step=step,
        place=place,
        sample=sample,
        env=sample.env,
        group_id=sample.group_id,
        rollout_id=sample.rollout_id,
        has_log=bool(log),
        token_ids=sample.token_ids.astype(np.int64),
        loss_mask=whole(True, False, bool),
        logprobs=logprobs,
        advantages=whole(sample.advantages),
        versions=whole(sample.versions, -1, np.int64),
        trainer_logprobs=trainer_logprobs,
        ratio=np.exp(np.clip(trainer_logprobs - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)),
        entropies=whole(log.get("entropies", np.nan)),
        reference_logprobs=whole(log.get("reference_logprobs", np.nan)),
        teacher_gap=trainer_logprobs - whole(teacher),
        clipped=flags & CLIPPED > 0,
        masked=flags & MASKED > 0,
        stopped_later=flags & LATER > 0,
    )


class BatchTokens:
    """The samples of one batch, with the trainer's token log if there is one."""

    def __init__(self, run_dir: RunDir, step: int):
        """Raises RunError if the batch is missing or damaged."""
        self.step, path = step, run_dir.batch(step)
        if not path.exists():
            raise RunError(
                f"{path}: no such batch; it may have been deleted (see "
                "orchestrator.batches.keep_last)"
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
                f"{log}: does not exist: not trained yet, deleted (trainer.token_log.max_gib), "
                "or lost in a kill"
            )
        except CorruptFileError as error:
            self.fault = str(error)

    def __repr__(self) -> str:
        return f"<BatchTokens: step {self.step}, {len(self.samples)} samples>"

    def of(self, group: int | None = None, rollout: int | None = None) -> Iterator[SampleTokens]:
        """The samples of the batch in order; only those of the given group or rollout, if any."""
        for place, (sample, end) in enumerate(zip(self.samples, self.ends, strict=True)):
            if group in (None, sample.group_id) and rollout in (None, sample.rollout_id):
                own = slice(end - sample.num_trained, end)
                yield sample_tokens(
                    self.step,
                    place,
                    sample,
                    {name: values[own] for name, values in self.log.items()},
                )
