"""A rollout token by token: the text of each token, and its values from the sampler and the
trainer."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from rl.records.run import Run
from rl.records.tokens import BatchTokens
from rl.records.tokens import SampleTokens as Sample
from rl.system.errors import RunError
from rl.system.terminal import visible
from rl.view.responses import Signal, Tokens

DIGITS = {"ratio": 6}
"""Significant digits by signal, 4 by default. A ratio is near 1, and a model in float32 has a
mismatch of 1e-5."""
USUAL = 0.98
"""Share of a rollout's tokens whose values are within the colour scale; the others get the
colours of its ends."""
LEAST_RATIO = 1e-5
SIGNALS = {
    "trainer_logprobs": "log-probability by the trainer, nats",
    "logprobs": "log-probability by the sampler, nats",
    "gap": "trainer minus sampler log-probability, nats",
    "ratio": "importance ratio r, trainer over sampler",
    "stopped": "1: clipped by the loss, without gradient; 2: masked out of the loss; 3: either of "
    "them in a later epoch",
    "entropies": "entropy of the trainer's distribution, nats",
    "advantages": "advantage",
    "teacher_gap": "trainer minus teacher log-probability, nats",
    "reference_gap": "trainer minus reference log-probability, nats",
    "versions": "policy version that sampled it",
}
"""Descriptions of the signals. A rollout offers those that it has values of."""


def tokens(
    run: Run, step: int, group: int, rollout: int, offset: int = 0, limit: int | None = None
) -> Tokens:
    """The tokens of a trained rollout from `offset` on, with its samples concatenated. Raises
    RunError if its batch is gone."""
    batch, (tokenizer, note) = run.batch(step), tokenizer_of(run)
    whole = whole_rollout(batch, group, rollout)
    part = slice(offset, len(whole.ids) if limit is None else offset + limit)
    ids = whole.ids[part].tolist()
    return Tokens(
        total=len(whole.ids),
        starts=whole.starts,
        offset=offset,
        pieces=[piece(tokenizer, number) for number in ids],
        ids=ids,
        trained=whole.trained[part].tolist(),
        values={
            name: rounded(values[part], DIGITS.get(name, 4))
            for name, values in whole.values.items()
        },
        signals=whole.signals,
        note="; ".join(text for text in (note, batch.fault) if text),
    )


class Whole(NamedTuple):
    """All tokens of a rollout, with its samples concatenated: ids [T], whether they are trained
    [T], signals by name, each [T]."""

    starts: list[int]
    ids: np.ndarray
    trained: np.ndarray
    values: dict[str, np.ndarray]
    signals: dict[str, Signal]


@lru_cache(maxsize=2)
def whole_rollout(batch: BatchTokens, group: int, rollout: int) -> Whole:
    """All tokens of a rollout, cached because a long one is requested in many parts. Raises
    RunError if the batch has no sample of it."""
    samples = list(batch.of(group, rollout))
    if not samples:
        raise RunError(f"batch {batch.step} has no sample of rollout {rollout} of group {group}")
    ids, trained = (
        np.concatenate([getattr(sample, name) for sample in samples])
        for name in ("token_ids", "loss_mask")
    )
    by_sample = [signals_of(sample) for sample in samples]
    values = {name: np.concatenate([signals[name] for signals in by_sample]) for name in SIGNALS}
    values = {name: array for name, array in values.items() if np.isfinite(array[trained]).any()}
    starts = [0, *np.cumsum([len(sample.token_ids) for sample in samples])[:-1].tolist()]
    signals = {name: signal(name, array[trained]) for name, array in values.items()}
    return Whole(starts, ids, trained, values, signals)


def signal(name: str, values: np.ndarray) -> Signal:
    """The description and scale of a signal. values: of the n trained tokens, [n]."""
    values = values[np.isfinite(values)]
    sizes = np.sort(np.abs(np.log(np.maximum(values, LEAST_RATIO)) if name == "ratio" else values))
    most = float(sizes[int(len(sizes) * USUAL)]) or float(sizes[-1]) or 1.0
    return Signal(
        what=SIGNALS[name],
        most=most,
        values=np.unique(values).tolist() if name == "versions" else [],
    )


def signals_of(sample: Sample) -> dict[str, np.ndarray]:
    """The signals by name, each float [T], nan where there is no value."""
    trained = sample.loss_mask
    stopped = np.select([sample.masked, sample.clipped, sample.stopped_later], [2, 1, 3])
    return {
        "trainer_logprobs": sample.trainer_logprobs,
        "logprobs": sample.logprobs,
        "gap": sample.trainer_logprobs - sample.logprobs,
        "ratio": sample.ratio,
        "stopped": np.where(trained & sample.has_log, stopped, np.nan),
        "entropies": sample.entropies,
        "advantages": sample.advantages,
        "teacher_gap": sample.teacher_gap,
        "reference_gap": sample.trainer_logprobs - sample.reference_logprobs,
        "versions": np.where(trained, sample.versions, np.nan),
    }


def rounded(values: np.ndarray, digits: int) -> list[float | None]:
    """Values rounded to `digits` significant digits; None for those that are not finite."""
    return [
        float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()
    ]


def piece(tokenizer: Tokenizer | None, number: int) -> str:
    """The text of a token, or its id without a tokenizer. Part of a character becomes the
    replacement character."""
    if tokenizer is None or not 0 <= number < 1 << 32:
        return f"{number} "
    token = tokenizer.id_to_token(number)
    text = tokenizer.decode([number], skip_special_tokens=False)
    # sentencepiece tokenizers drop the leading blank when decoding
    if token and token.startswith("▁"):
        text = f" {text.lstrip(' ')}"
    return visible(text) or f"[{token or number}]"


def tokenizer_of(run: Run) -> tuple[Tokenizer | None, str]:
    """The tokenizer of the run's model and "", or None and the reason why there is none.
    Downloads nothing."""
    try:
        path = run.tokenizer_folder / "tokenizer.json"
    except RunError as error:
        return None, f"tokens are shown by their ids: {str(error).splitlines()[0]}"
    if not path.is_file():
        return (
            None,
            f"tokens are shown by their ids: {path}: does not exist; the model has another "
            "kind of tokenizer",
        )
    return load(path), ""


@lru_cache(maxsize=4)
def load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
