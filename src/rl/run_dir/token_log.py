"""`tokens/000012.safetensors`: values that the trainer computed at each trained token of batch 12,
in the order of the batch's samples.

Columns [n], one entry per token with loss_mask True: `trainer_logprobs` (float32, nats, when the
token was first trained), `entropies` (float16, nats), `flags` (uint8: the bits CLIPPED, MASKED,
LATER), and with a reference model `reference_logprobs` (float32, nats). The sampler's
log-probabilities are in the batch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rl.run_dir.files import CorruptFileError, reading, write_file

SUFFIX = ".safetensors"
CLIPPED, MASKED, LATER = 1, 2, 4
"""Bits: the loss's own clip left the token without gradient; a mask on the ratio left it out of
the loss; either happened in a later epoch. MASKED is thus narrower than the metric
`masked_fraction`, which counts the clipped tokens as well."""


def write_token_log(
    path: Path, columns: Mapping[str, np.ndarray], fence: Callable[[], None] | None = None
) -> int:
    """Writes a step's columns and returns the size of the file in bytes. fence: see write_file."""
    data = save(dict(columns))
    write_file(path, data, fence=fence)
    return len(data)


def read_token_log(path: Path, num_tokens: int) -> dict[str, np.ndarray]:
    """Reads the columns of a step with `num_tokens` trained tokens. Raises FileNotFoundError or
    CorruptFileError."""
    try:
        with reading(path):
            columns = load(path.read_bytes())
    except (SafetensorError, ValueError, KeyError) as error:
        raise CorruptFileError(
            f"{path}: damaged ({error}); move it away to continue without it"
        ) from None
    if any(len(values) != num_tokens for values in columns.values()):
        raise CorruptFileError(
            f"{path}: does not match this batch, which trains {num_tokens} tokens; move it "
            "away to continue without it"
        )
    return columns
