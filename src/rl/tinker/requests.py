"""The JSON requests of the Tinker API (tinker 0.38), as far as this server reads them. Fields
that it does not know are ignored, except those that would change a result: they are here with the
only value that is not refused."""

import json
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from rl.run_dir.files import UNREADABLE
from rl.wire.training_calls import CallError

T = TypeVar("T")

Number = Annotated[int, Meta(ge=0)]
Metadata = dict[str, Any] | None
Words = dict[str, str] | None
Most = Annotated[float, Meta(ge=0, le=1e30)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}$")]
"""A checkpoint's name, which is that of a folder."""
Ttl = Annotated[int, Meta(ge=1, le=315_360_000)] | None
"""Seconds, up to ten years."""


class CreateSession(Struct):
    """A client that begins; its models and sampling sessions belong to it."""

    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    display_name: str | None = None
    project_id: str | None = None


class AdapterConfig(Struct):
    """The adapters of a new model."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: Literal[True] = True
    train_attn: Literal[True] = True


class Optimizer(Struct):
    """The kind of a model's optimizer."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Struct):
    """A new model with new adapters."""

    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: AdapterConfig
    user_metadata: Metadata = None
    optimizer_config: Optimizer = msgspec.field(default_factory=Optimizer)


class LoadWeights(Struct):
    """Into a model (`model_id`, `seq_id`), or into a new one (`session_id`, `model_seq_id`)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    optimizer_config: Optimizer | None = None


class AdamParams(Struct):
    """Settings of one AdamW step. Where a gradient is 0, AdamW divides by eps alone."""

    learning_rate: Annotated[float, Meta(ge=0, le=1)] = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Annotated[float, Meta(ge=1.2e-38, le=1e30)] = 1e-12
    weight_decay: Most = 0.0
    grad_clip_norm: Most = 0.0


class OptimStep(Struct):
    """Applies and clears the gradient."""

    model_id: str
    seq_id: Number
    adam_params: AdamParams


class SaveWeights(Struct):
    """Names the state of a model."""

    model_id: str
    seq_id: Number
    path: Name
    ttl_seconds: Ttl = None
    overwrite: bool = False
    user_metadata: Words = None


class SaveWeightsForSampler(Struct):
    """Makes a version to sample from: named, or for a sampling session."""

    model_id: str
    seq_id: Number
    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Ttl = None
    user_metadata: Words = None


class SaveWeightsExternal(Struct):
    """Writes the adapter of a model for others to load."""

    model_id: str
    seq_id: Number
    path: Name
    ttl_seconds: Ttl = None
    age_encryption_recipients: None = None


class SetTtl(Struct):
    """How long something named is to be kept from now on; None: for good."""

    ttl_seconds: Ttl = None


class CreateSamplingSession(Struct):
    """A session that samples from named weights, or from the base model."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Struct):
    """A part of a prompt."""

    type: str
    tokens: list[Annotated[int, Meta(ge=0)]] = []


class ModelInput(Struct):
    """A prompt."""

    chunks: list[Chunk]


class SamplingParams(Struct):
    """How to sample; -1 and None stand for no limit."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, Meta(ge=0, lt=100)] = 1.0
    top_k: int = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Sample(Struct):
    """Asks for answers to one prompt."""

    prompt: ModelInput
    sampling_params: SamplingParams
    sampling_session_id: str
    seq_id: Number
    num_samples: Annotated[int, Meta(ge=1, le=4096)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class RowRange(Struct):
    """Which rows of a list a request asks for."""

    limit: Number = 100
    offset: Number = 0


class GetInfo(Struct):
    """Asks what a model is."""

    model_id: str


class GetWeightsInfo(Struct):
    """Asks of which model something named is."""

    tinker_path: str


class Retrieve(Struct):
    """Asks for the answer to a call."""

    request_id: str


class WithSeq(Struct):
    """What of a training call says where it belongs."""

    model_id: str
    seq_id: Number


def decode(body: bytes, kind: type[T]) -> T:
    """Returns a JSON request, in which Python's NaN and Infinity may be numbers: they are
    refused where they are used. Raises CallError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE:
        pass
    try:
        return msgspec.convert(json.loads(body), type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CallError(f"not a {getattr(kind, '__name__', kind)}: {error}") from None
