"""Examples and results of the Tinker API: Protobuf in, checked arrays out, and back.

A datum has N input tokens, `target_tokens` of shape [N] or [N, K], and tensors of the same shape:
what is predicted after token i is at index i. The losses and the names of their inputs and settings
are the API's; their formulas are ours (docs/tinker.md has the table).
"""

import math
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from rl.wire.training_calls import CallError, Example, LossCall, Scored
from rl.wire.turns import Turn

PACKAGE = "tinker_public"
# made when it is imported, so that type checkers do not see it
F: Any = getattr(descriptor_pb2, "FieldDescriptorProto")  # noqa: B009
SCHEMA = """
message Tensor {
  optional bytes dense = 1; SparseCsr sparse_csr = 2; int32 dtype = 3; repeated int64 shape = 4; }
message SparseCsr { bytes values = 1; bytes crow_indices = 2; bytes col_indices = 3; }
message EncodedText { bytes tokens = 1; }
message Other { }
message Chunk { EncodedText encoded_text = 1; Other image = 2; Other dmel = 3; }
message Entry { string key = 1; Tensor value = 2; }
message Value { optional double number = 1; optional string text = 2; }
message ConfigEntry { string key = 1; float value = 2; }
message ConfigEntryV2 { string key = 1; Value value = 2; }
message MetricEntry { string key = 1; double value = 2; }
message Datum { repeated Chunk model_input = 1; repeated Entry loss_fn_inputs = 2; }
message ForwardBackwardRequest {
  string model_id = 1; int32 seq_id = 2; repeated Datum data = 3; string loss_fn = 4;
  repeated ConfigEntry loss_fn_config = 5; bool forward_only = 6;
  repeated ConfigEntryV2 loss_fn_config_v2 = 7; }
message BatchedTensor {
  bytes data = 1; bytes offsets = 2; int32 dtype = 3; repeated int64 trailing_shape = 4; }
message FieldEntry { string key = 1; BatchedTensor value = 2; }
message ArrayRecord { string type_tag = 1; repeated FieldEntry fields = 2; int64 num_datums = 3; }
message ForwardBackwardOutput {
  string loss_fn_output_type = 1; repeated ArrayRecord loss_fn_outputs = 2;
  repeated MetricEntry metrics = 3; }
message SampledSequence { int32 stop_reason = 1; bytes tokens = 2; bytes logprobs = 3; }
message SampleResponse {
  repeated SampledSequence sequences = 1; optional bytes prompt_logprobs = 2; }
"""
"""The messages that this server reads and writes, by the names and numbers of their fields (tinker
0.38). Fields that we do not know are skipped, as Protobuf does. An entry of a map is a message; an
enumeration is a number."""
MESSAGES = dict(re.findall(r"message (\w+) \{(.*?)\}", SCHEMA, re.DOTALL))
FIELD = re.compile(r"(optional|repeated)? ?(\w+) (\w+) = (\d+);")
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Values of `dtype`."""
STOP, LENGTH = 0, 1
"""Values of `stop_reason`."""


def classes() -> dict[str, Any]:
    """Returns the class of each message."""
    file = getattr(descriptor_pb2, "FileDescriptorProto")(  # noqa: B009
        name="rl/tinker.proto", package=PACKAGE, syntax="proto3"
    )
    for name, body in MESSAGES.items():
        message = file.message_type.add(name=name)
        for label, kind, field_name, number in FIELD.findall(body):
            field = message.field.add(name=field_name, number=int(number))
            field.label = F.LABEL_REPEATED if label == "repeated" else F.LABEL_OPTIONAL
            if kind in MESSAGES:
                field.type, field.type_name = F.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                field.type = getattr(F, f"TYPE_{kind.upper()}")
            if label == "optional":
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field_name}")
    pool: Any = descriptor_pool.DescriptorPool()  # ty: ignore[possibly-missing-implicit-call]
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }


MESSAGE = classes()
DTYPES = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32}
MAX_NUMBERS = 1 << 26
"""Of one tensor."""
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
COMPARED = ("logprobs", "advantages")
LOSSES: dict[str, tuple[str, dict[str, float], tuple[str, ...]]] = {
    "cross_entropy": ("cross_entropy", {}, ()),
    # the surrogate without a clip: -r A
    "importance_sampling": ("clip", {}, COMPARED),
    "ppo": ("clip", CLIPS, COMPARED),
    "cispo": ("cispo", CLIPS, COMPARED),
    "gspo": (
        "gspo",
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        (*COMPARED, "sequence_ratio_mask"),
    ),
    "dro": ("dro", {"beta": 0.05}, COMPARED),
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
    values: dict[str, Any] = {entry.key: entry.value for entry in request.loss_fn_config}
    for entry in request.loss_fn_config_v2:
        is_text = entry.value.HasField("text")
        values[entry.key] = entry.value.text if is_text else entry.value.number
    for key, value in values.items():
        if key not in defaults or isinstance(value, str) or math.isnan(value):
            raise CallError(
                f"loss_fn_config of {name}: {key} = {value!r}; it takes "
                f"{', '.join(defaults) or 'nothing'} as numbers"
            )
    settings: dict[str, float] = defaults | values
    if name == "importance_sampling":
        settings = {"clip_low": 1.0, "clip_high": math.inf}
    elif "clip_low_threshold" in settings:
        low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
        settings = {"clip_low": 1 - low, "clip_high": high - 1}
    return LossCall(kind, settings | ({"delta": math.inf} if kind in ("clip", "gspo") else {}))


def examples(request: Any, vocab_size: int, max_len: int) -> list[Example]:
    """Returns the examples of a request. Raises CallError that names the datum and the remedy."""
    if not request.data:
        raise CallError("data is empty: send at least one datum")
    checked = []
    for index, datum in enumerate(request.data):
        try:
            checked.append(example(datum, request.loss_fn, vocab_size, max_len))
        except (CallError, ValueError, IndexError, OverflowError) as error:
            raise CallError(f"datum {index}: {error}") from None
    return checked


def example(datum: Any, loss: str, vocab_size: int, max_len: int) -> Example:
    if any(not chunk.HasField("encoded_text") for chunk in datum.model_input):
        raise CallError("model_input has an image or audio; this server trains text alone")
    texts = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    token_ids = np.frombuffer(texts, np.int32).astype(np.int64)
    length, needed = len(token_ids), LOSSES[loss][2]
    if not 0 < length < max_len:
        raise CallError(
            f"model_input has {length} tokens; give 1 to {max_len - 1} "
            "(model.max_model_len of the server)"
        )
    inputs = {entry.key: entry.value for entry in datum.loss_fn_inputs}
    if missing := [name for name in ("target_tokens", *needed) if name not in inputs]:
        raise CallError(f"loss_fn_inputs lack {', '.join(missing)}, which {loss} needs")
    allowed = {"target_tokens", *(needed or ("weights",))}
    if extra := sorted(inputs.keys() - allowed):
        raise CallError(
            f"loss_fn_inputs have {', '.join(extra)}, which {loss} does not take; it takes "
            f"{', '.join(sorted(allowed))}"
        )
    targets = tensor(inputs.pop("target_tokens"), "target_tokens", np.int64, length)
    for name, ids in (("model_input", token_ids), ("target_tokens", targets)):
        if (wrong := ids[(ids < 0) | (ids >= vocab_size)]).size:
            raise CallError(f"{name} has token id {wrong[0]}; the vocabulary has {vocab_size}")
    values = {
        name: tensor(value, name, np.float32, length, targets.shape)
        for name, value in inputs.items()
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
    wanted, dims = np.dtype(kind), list(message.shape)
    dtype = np.dtype(DTYPES.get(message.dtype, np.void))
    if dtype.kind != wanted.kind:
        but = ", not bfloat16" if message.dtype == BFLOAT16 else ""
        raise CallError(f"{name} must be {wanted.name}{but}")
    if not 0 < math.prod(dims or [1]) <= MAX_NUMBERS:
        raise CallError(
            f"{name} has shape {dims}; give at least one number, and at most {MAX_NUMBERS}"
        )
    try:
        if message.HasField("sparse_csr"):
            csr, array = message.sparse_csr, np.zeros(dims, dtype)
            counts = np.diff(np.frombuffer(csr.crow_indices, np.int64))
            columns = np.frombuffer(csr.col_indices, np.int64)
            rows = np.repeat(np.arange(dims[0]), counts)
            array[rows, columns] = np.frombuffer(csr.values, dtype)
        else:
            array = np.frombuffer(message.dense, dtype).reshape(dims or [-1])
    except (ValueError, IndexError):
        raise CallError(f"{name}: its shape {dims} does not fit its data") from None
    has_rows = array.ndim in (1, 2) and len(array) == length
    if not has_rows or (shape and array.reshape(length, -1).shape != shape):
        fitting = list(shape) if shape and shape[1] > 1 else [length]
        raise CallError(
            f"{name} has shape {list(array.shape)}; it must have one row for each input "
            f"token: {fitting}"
        )
    array = array.reshape(length, -1).astype(kind)
    if len(bad := np.argwhere(~np.isfinite(array))):
        raise CallError(f"{name} has a number that is not finite at position {bad[0][0]}")
    return array


def scored_message(request: Any, scored: Scored) -> bytes:
    """Returns the ForwardBackwardOutput with log-probabilities and losses of the targets, shaped
    as `target_tokens`: a record for each run of datums with the same number of targets."""
    shapes = [
        tuple(entry.value.shape[1:])
        for datum in request.data
        for entry in datum.loss_fn_inputs
        if entry.key == "target_tokens"
    ]
    message = MESSAGE["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for shape, run in groupby(range(len(shapes)), key=shapes.__getitem__):
        indices = list(run)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(indices))
        for name, arrays in (("logprobs", scored.logprobs), ("elementwise_loss", scored.losses)):
            chunks = [arrays[index].astype(np.float32).tobytes() for index in indices]
            field = MESSAGE["BatchedTensor"](
                data=b"".join(chunks),
                offsets=np.cumsum([0, *map(len, chunks)], dtype=np.int64).tobytes(),
                dtype=FLOAT32,
                trailing_shape=shape,
            )
            record.fields.add(key=name, value=field)
    total = float(sum(losses.sum(dtype=np.float64) for losses in scored.losses))
    message.metrics.add(key="loss:sum", value=total)
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
