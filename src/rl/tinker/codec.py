"""Examples and results of the Tinker API: Protobuf in, checked arrays out, and back.

A datum has N input tokens, `target_tokens` of shape [N] or [N, K], and tensors of the same shape:
what is predicted after token i is at index i. The losses and the names of their inputs and settings
are the API's; their formulas are ours (docs/tinker.md has the table).
"""

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from rl.tinker.proto import BFLOAT16, FLOAT32, INT32, INT64, LENGTH, MESSAGE, STOP
from rl.wire.training_calls import CallError, Example, LossCall, Scored
from rl.wire.turns import Turn

DTYPES = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32}
MAX_NUMBERS = 1 << 26
"""Of one tensor."""
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, tuple[str, dict[str, float], tuple[str, ...]]] = {
    "cross_entropy": ("cross_entropy", {}, ()),
    "importance_sampling": ("clip", {}, ("logprobs", "advantages")),
    "ppo": ("clip", CLIPS, ("logprobs", "advantages")),
    "cispo": ("cispo", CLIPS, ("logprobs", "advantages")),
    "gspo": (
        "gspo",
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        ("logprobs", "advantages", "sequence_ratio_mask"),
    ),
    "dro": ("dro", {"beta": 0.05}, ("logprobs", "advantages")),
}
"""The API's loss -> our loss, its settings with defaults, and the inputs that it needs beside
target_tokens."""
STABLE_REINFORCE = (
    "no formula of stable_reinforce is published; the nearest of ours is cispo: set loss_fn=cispo"
)
NO_FORMULA = {
    "stable_reinforce": STABLE_REINFORCE,
    "custom": "losses of your own run on the client: call forward_backward_custom with a function",
}


def parse_call(body: bytes) -> Any:
    """Returns the ForwardBackwardRequest in a body. Raises CallError."""
    try:
        return MESSAGE["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise CallError(f"not a ForwardBackwardRequest: {error}") from None


def loss_call(request: Any) -> LossCall:
    """Returns our loss for that of a request. Raises CallError for a loss or a setting that does
    not exist."""
    name = request.loss_fn
    if name not in LOSSES:
        known = NO_FORMULA.get(name, f"known are {', '.join(LOSSES)}")
        raise CallError(f"loss_fn {name!r}: {known}")
    kind, defaults, _ = LOSSES[name]
    given = {entry.key: entry.value for entry in request.loss_fn_config}
    for entry in request.loss_fn_config_v2:
        given[entry.key] = entry.value.text if entry.value.HasField("text") else entry.value.number
    if unknown := [
        key
        for key, value in given.items()
        if key not in defaults or isinstance(value, str) or math.isnan(value)
    ]:
        raise CallError(
            f"loss_fn_config of {name}: {unknown[0]} = {given[unknown[0]]!r}; it takes "
            f"{', '.join(defaults) or 'nothing'} as numbers"
        )
    settings = defaults | given
    if name == "importance_sampling":  # the surrogate without a clip: -r A
        settings = {"clip_low": 1.0, "clip_high": math.inf}
    elif "clip_low_threshold" in settings:
        settings = {
            "clip_low": 1 - settings["clip_low_threshold"],
            "clip_high": settings["clip_high_threshold"] - 1,
        }
    return LossCall(kind, settings | ({"delta": math.inf} if kind in ("clip", "gspo") else {}))


def examples(request: Any, vocab_size: int, max_len: int) -> list[Example]:
    """Returns the examples of a request. Raises CallError that names the datum and the remedy."""
    if not request.data:
        raise CallError("data is empty: send at least one datum")
    found = []
    for index, datum in enumerate(request.data):
        try:
            found.append(example(datum, request.loss_fn, vocab_size, max_len))
        except (CallError, ValueError, IndexError, OverflowError) as error:
            raise CallError(f"datum {index}: {error}") from None
    return found


def example(datum: Any, loss: str, vocab_size: int, max_len: int) -> Example:
    if any(not chunk.HasField("encoded_text") for chunk in datum.model_input):
        raise CallError("model_input has an image or audio; this server trains text alone")
    token_ids = np.concatenate(
        [np.frombuffer(c.encoded_text.tokens, np.int32) for c in datum.model_input] or [np.zeros(0)]
    ).astype(np.int64)
    if not 0 < len(token_ids) < max_len:
        raise CallError(
            f"model_input has {len(token_ids)} tokens; give 1 to {max_len - 1} "
            "(model.max_model_len of the server)"
        )
    inputs = {entry.key: entry.value for entry in datum.loss_fn_inputs}
    needed = LOSSES[loss][2]
    if missing := [name for name in ("target_tokens", *needed) if name not in inputs]:
        raise CallError(f"loss_fn_inputs lack {', '.join(missing)}, which {loss} needs")
    allowed = {"target_tokens", *needed, *(() if needed else ("weights",))}
    if extra := sorted(inputs.keys() - allowed):
        raise CallError(
            f"loss_fn_inputs have {', '.join(extra)}, which {loss} does not take; it takes "
            f"{', '.join(sorted(allowed))}"
        )
    targets = tensor(inputs["target_tokens"], "target_tokens", np.int64, len(token_ids))
    for name, ids in (("model_input", token_ids), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise CallError(
                f"{name} has token id {ids.min() if ids.min() < 0 else ids.max()}; the "
                f"vocabulary has {vocab_size}"
            )
    values = {
        name: tensor(inputs[name], name, np.float32, len(token_ids), targets.shape)
        for name in inputs
        if name != "target_tokens"
    }
    zeros = np.zeros(targets.shape, np.float32)
    advantages = values.get("advantages", values.get("weights", zeros + 1))
    logprobs = values.get("logprobs", zeros)
    trained = values.get("sequence_ratio_mask", zeros + 1) != 0
    if loss == "dro":  # whose penalty has no advantage to be switched off by
        trained = (advantages != 0) | (logprobs != 0)
    if needed and targets.shape[1] > 1:
        raise CallError(
            f"target_tokens has {targets.shape[1]} targets a position; only cross_entropy "
            "takes more than one"
        )
    if (advantages[~trained] != 0).any():
        raise CallError("advantages must be 0 where sequence_ratio_mask is 0")
    return Example(token_ids, targets, advantages, logprobs, trained)


def tensor(
    message: Any, name: str, kind: type, length: int, shape: tuple[int, ...] = ()
) -> np.ndarray:
    """Returns a tensor as [length, K]; one of CSR rows has zeros elsewhere. Raises CallError for
    another dtype or shape, and for numbers that are not finite."""
    if message.dtype not in DTYPES or (np.dtype(DTYPES[message.dtype]).kind != np.dtype(kind).kind):
        raise CallError(
            f"{name} must be {np.dtype(kind).name}"
            + (", not bfloat16" if message.dtype == BFLOAT16 else "")
        )
    dtype, dims = np.dtype(DTYPES[message.dtype]), list(message.shape)
    if not 0 < math.prod(dims or [1]) <= MAX_NUMBERS:
        raise CallError(
            f"{name} has shape {dims}; give at least one number, and at most {MAX_NUMBERS}"
        )
    try:
        if message.HasField("sparse_csr"):
            csr = message.sparse_csr
            values = np.frombuffer(csr.values, dtype)
            rows, columns = (
                np.frombuffer(csr.crow_indices, np.int64),
                np.frombuffer(csr.col_indices, np.int64),
            )
            found = np.zeros(dims, dtype)
            found[np.repeat(np.arange(dims[0]), np.diff(rows)), columns] = values
        else:
            found = np.frombuffer(message.dense, dtype)
            found = found.reshape(dims or [-1])
    except (ValueError, IndexError):
        raise CallError(f"{name}: its shape {dims} does not fit its data") from None
    if (
        found.ndim not in (1, 2)
        or len(found) != length
        or (shape and found.reshape(length, -1).shape != shape)
    ):
        wanted = list(shape) if shape and shape[1] > 1 else [length]
        raise CallError(
            f"{name} has shape {list(found.shape)}; it must have one row for each input "
            f"token: {wanted}"
        )
    found = found.reshape(length, -1).astype(kind)
    if not np.isfinite(found).all():
        raise CallError(
            f"{name} has a number that is not finite at position "
            f"{int(np.argwhere(~np.isfinite(found))[0][0])}"
        )
    return found


def scored_message(request: Any, scored: Scored) -> bytes:
    """Returns the ForwardBackwardOutput with log-probabilities and losses of the targets, shaped
    as `target_tokens`: a record for each run of datums with the same number of targets."""
    flat = [
        len(entry.value.shape) < 2
        for datum in request.data
        for entry in datum.loss_fn_inputs
        if entry.key == "target_tokens"
    ]
    shapes = [
        () if is_flat else (values.shape[1],)
        for is_flat, values in zip(flat, scored.logprobs, strict=True)
    ]
    message = MESSAGE["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for shape, run in groupby(range(len(shapes)), key=shapes.__getitem__):
        indices = list(run)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(indices))
        for name, arrays in (("logprobs", scored.logprobs), ("elementwise_loss", scored.losses)):
            parts = [arrays[index].astype(np.float32) for index in indices]
            offsets = np.cumsum([0, *(part.nbytes for part in parts)], dtype=np.int64)
            data = b"".join(part.tobytes() for part in parts)
            field = MESSAGE["BatchedTensor"](
                data=data, offsets=offsets.tobytes(), dtype=FLOAT32, trailing_shape=shape
            )
            record.fields.add(key=name, value=field)
    message.metrics.add(
        key="loss:sum", value=float(sum(losses.sum(dtype=np.float64) for losses in scored.losses))
    )
    return message.SerializeToString()


def sample_message(turns: Iterable[Turn], of_prompt: bytes = b"") -> bytes:
    """Returns the SampleResponse of turns, and of the prompt's tokens: nan, which the SDK turns
    into None, for the first."""
    message = MESSAGE["SampleResponse"]()
    if of_prompt:
        message.prompt_logprobs = of_prompt
    for turn in turns:
        message.sequences.add(
            stop_reason=LENGTH if turn.finish_reason == "length" else STOP,
            tokens=turn.packed_ids,
            logprobs=turn.packed_logprobs,
        )
    return message.SerializeToString()
