"""Settings of the server of the Tinker API: `rl serve`."""

from typing import Any

from pydantic import Field

from rl.config.base import Host, Settings


class ServeConfig(Settings):
    """A server of the Tinker API over `model`: clients train adapters on it and sample from them
    (docs/tinker.md). trainer.lora.rank is the largest rank of an adapter, and defaults to 32."""

    alias: str | None = Field(None, min_length=1)
    """Name by which clients ask for the model. Default: model.name. Programs that know only
    certain names, as the Tinker cookbook does, need one of theirs."""
    host: Host = "127.0.0.1"
    """Address to bind. Anything but loopback opens the server to other machines that have its
    key (docs/security.md)."""
    port: int = Field(8600, ge=0, le=65535)
    """Port to bind; 0: any free one."""
    checkpoint_s: float = Field(60.0, gt=0)
    """Shortest time in seconds between two copies of a model's state, after which a restarted
    trainer computes again at most this much."""


def with_serve_defaults(values: Any) -> Any:
    """Returns raw settings with the defaults of a server: adapters of rank 32."""
    if (
        not isinstance(values, dict)
        or values.get("serve") in (None, False)
        or not isinstance(trainer := values.get("trainer", {}), dict)
    ):
        return values
    lora = trainer.get("lora") or {}
    return (
        {**values, "trainer": {**trainer, "lora": {"rank": 32} | lora}}
        if isinstance(lora, dict)
        else values
    )
