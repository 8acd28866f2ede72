"""Settings of a run that a service with the Tinker API trains and samples for, and its losses."""

import math
import os
from typing import Any

from pydantic import Field

from rl.config.base import Settings
from rl.config.loss import (
    EVERYTHING,
    AnyLossConfig,
    CispoConfig,
    ClipConfig,
    CrossEntropyConfig,
    GspoConfig,
    PolicyGradientConfig,
)

PACKAGE = "tinker"
MISSING = "needs the Tinker SDK: `uv sync --extra tinker`, or `pip install 'rl-triad[tinker]'`"
BASE_URL = "TINKER_BASE_URL"
PUBLIC_SERVICE = "https://tinker.thinkingmachines.dev/services/tinker-prod"


class TinkerConfig(Settings):
    """The service that trains and samples with `trainer.backend = "tinker"` (docs/tinker.md).
    Its key is in the environment variable TINKER_API_KEY, or in the file `.env` of the current
    directory."""

    base_url: str | None = None
    """Address of the service. Default: the environment variable TINKER_BASE_URL, or else the
    public service."""
    base_model: str | None = Field(None, min_length=1)
    """Name of the model at the service. Default: model.name, of which only the tokenizer and the
    chat template are used here."""
    lora_rank: int = Field(32, ge=1)
    """Rank of the adapter that is trained."""
    answer_timeout_s: float = Field(1800.0, gt=0)
    """Seconds that one answer of the service may take, or that it may be out of reach, before
    trainer or inference start again."""


def service_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the defaults of a run that a service trains: no devices here, losses as the Tinker
    API has them, groups of 16."""
    trainer = values.get("trainer")
    loss = trainer.get("loss") if isinstance(trainer, dict) else None
    loss = loss if isinstance(loss, dict) else {}
    terms = {
        "clip": {"delta": math.inf},
        "gspo": {"delta": math.inf},
        "policy_gradient": {"token_mask": EVERYTHING},
    }.get("" if "function" in loss else loss.get("type", "policy_gradient"), {})
    url = os.environ.get(BASE_URL)
    return {
        "trainer": {"gpus": 0, "loss": terms},
        "orchestrator": {"group_size": 16},
        "inference": {"gpus": 0},
        "tinker": {"base_url": url} if url else {},
    }


def service_loss(loss: AnyLossConfig) -> tuple[str, dict[str, float]] | None:
    """Returns the Tinker API's loss_fn and loss_fn_config with the gradient of a loss of ours;
    None if it has none."""
    match loss:
        case CrossEntropyConfig() | PolicyGradientConfig(importance="none"):
            return "cross_entropy", {}
        case PolicyGradientConfig(importance="token", truncate=math.inf):
            return "importance_sampling", {}
        case PolicyGradientConfig(importance="token"):
            return "cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": loss.truncate}
        case ClipConfig(delta=math.inf) | GspoConfig(delta=math.inf) | CispoConfig():
            name = "ppo" if isinstance(loss, ClipConfig) else loss.type
            return name, {
                "clip_low_threshold": 1 - loss.clip_low,
                "clip_high_threshold": 1 + loss.clip_high,
            }
    return None
