"""Requests to the server of the Tinker API: what their JSON holds (tinker 0.38), how they are let
in, and how answers look to the SDK. An error's status decides its class, 408 means "ask again".

Fields that the server does not know are ignored, except those that would change a result: they are
here with the only value that is not refused.
"""

import hmac
import json
import time
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from rl.run_dir.access_token import derived
from rl.run_dir.files import UNREADABLE
from rl.wire.serving import CLOSE, HttpGate, header
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

    user_metadata: Metadata = None
    display_name: str | None = None


class AdapterConfig(Struct):
    """The adapters of a new model."""

    rank: int = 32
    seed: int | None = None
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


KEY_PREFIX = "tml-"
"""With which the SDK wants its keys to begin."""
DOWNLOADS = "/files/"
"""Beginning of the paths that a signed address may read."""
JSON = "application/json"


def reply(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON)


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Returns an error: 400 BadRequestError, 401 AuthenticationError, 403 PermissionDeniedError,
    404 NotFoundError."""
    return Response(msgspec.json.encode({"detail": message}), status, headers, media_type=JSON)


def signature(secret: str, path: str, expires: int) -> str:
    """Returns the text with which an address may be read without the key, until `expires`
    (seconds since the epoch)."""
    return derived(secret, f"download {path} {expires}")


class KeyGate(HttpGate):
    """The gate in front of all routes: a key in `X-API-Key`, or as OpenAI's clients send it, or
    an address that is signed."""

    max_body_bytes = 256 << 20
    """The SDK sends data in parts of 5 MB, but a larger datum whole: 8,192 tokens with 256
    targets each have 25 MB."""

    def __init__(self, app: ASGIApp, token: str, secret: str, loopback: bool):
        """`secret`: what addresses are signed with; not the key, at which whoever has an address
        could guess."""
        super().__init__(app, token, loopback)
        self.secret = secret

    def is_token(self, value: bytes) -> bool:
        return super().is_token(value.removeprefix(KEY_PREFIX.encode()))

    def is_signed(self, scope: Scope) -> bool:
        """Returns whether a request has a signature for its path that has not expired."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        expires, signed = (query.get(key, [""])[0] for key in ("expires", "signature"))
        if not expires.isdecimal() or len(expires) > 12 or int(expires) < time.time():
            return False
        expected = signature(self.secret, scope["path"], int(expires))
        return hmac.compare_digest(signed.encode(), expected.encode())

    def refuse(self, scope: Scope) -> Response | None:
        if header(scope, b"origin"):
            message = "this server answers programs, not web pages: send no Origin header"
            return problem(403, message, CLOSE)
        if self.foreign_host(scope):
            message = "this server is bound to loopback: ask for localhost or 127.0.0.1 in the Host"
            return problem(403, f"{message} header", CLOSE)
        is_signed = scope["path"].startswith(DOWNLOADS) and self.is_signed(scope)
        if is_signed or self.shows_token(scope):
            return None
        message = "wrong key: set TINKER_API_KEY to the one that `rl serve` prints"
        return problem(401, message, CLOSE)
