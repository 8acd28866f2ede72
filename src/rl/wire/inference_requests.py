"""What clients ask of a server of inference: the bodies of `/generate` and `/load_weights`."""

from typing import Annotated

from msgspec import Meta, Struct

from rl.run_dir.in_memory import Memory

TokenId = Annotated[int, Meta(ge=0)]
MAX_BODY_BYTES = 16 << 20
"""A prompt of a million token ids takes 7 MB."""


class Sampling(Struct, forbid_unknown_fields=True):
    """Sampling parameters; the defaults are neutral (the model's generation_config.json is
    ignored)."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[TokenId] = []
    stop: list[str] | str = []
    ignore_eos: bool = False
    routes: bool = False
    """Return the routes of all tokens but the last."""
    prompt_logprobs: bool = False


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """Body of `/generate`, in JSON. The answer is a `rl.wire.turns.Turn` in msgpack."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling: Sampling
    session: int | None = None
    """Requests of one session go to one engine of several (`data_parallel_size`), which has
    their prefix cached."""


class LoadWeightsRequest(Struct, forbid_unknown_fields=True):
    """Body of `/load_weights`; the server's machine must see the path."""

    policy_version: Annotated[int, Meta(ge=0)]
    path: str
    memory: Memory | None = None
    """Where it can be read before it is at `path`."""
    content: str = ""
    """Digest that tells it apart from other weights with the same version number; empty: not
    known."""
