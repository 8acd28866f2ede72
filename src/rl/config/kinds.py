"""The kinds of runs: decided in `RLConfig.kind`, so that no room asks which sections are set."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from rl.config.base import PATH, Host, Settings
from rl.config.sft import LEARNING_RATE
from rl.config.tinker import service_defaults


class Kind(StrEnum):
    """What a run is; equal to its name, so that `config.kind == "sft"` and tables by name work."""

    RL = "rl"
    SFT = "sft"
    RECORDED = "recorded"
    SERVE = "serve"

    @property
    def roles(self) -> tuple[str, ...]:
        """The processes of a run on one machine, in the order in which they are started."""
        return ROLES[self]

    @property
    def program(self) -> str:
        """The command that trains."""
        return {"sft": "rl sft", "recorded": "rl train"}.get(self, "rl")

    @property
    def has_rollouts(self) -> bool:
        """Whether an orchestrator makes batches of rollouts."""
        return "orchestrator" in self.roles


ROLES = {
    Kind.RL: ("inference", "orchestrator", "trainer"),
    Kind.SFT: ("trainer",),
    Kind.RECORDED: ("orchestrator", "trainer"),
    Kind.SERVE: ("inference", "tinker"),
}
BatchesFrom = Literal["orchestrator", "examples", "clients", "fake", "replay"]
SOURCES: dict[Kind, BatchesFrom] = {
    Kind.RL: "orchestrator",
    Kind.SFT: "examples",
    Kind.RECORDED: "orchestrator",
    Kind.SERVE: "clients",
}
"""Who gives the trainer its batches; instead of them, trainer.data may name random samples
(`fake`) or the batches of an earlier run (`replay`)."""
DEFAULTS = {
    "sft": {"loss": {"type": "cross_entropy"}, "optim": {"lr": LEARNING_RATE}},
    "serve": {"lora": {"rank": 32}},
}
"""Section of a kind of run -> the trainer's defaults in it."""


def with_defaults(values: Any) -> Any:
    """Returns a run's raw settings with the defaults of its kind, and of who trains."""
    for kind, trainer in DEFAULTS.items():
        if isinstance(values, dict) and values.get(kind) not in (None, False):
            values = completed(values, {"trainer": trainer})
    match values:
        case {"trainer": {"backend": "tinker"}}:
            return completed(values, service_defaults(values))
    return values


def completed(values: Any, defaults: dict[str, Any]) -> Any:
    """Returns nested tables with these defaults where they say nothing. What should be a table
    and is none stays as it is."""
    if not isinstance(values, dict):
        return defaults if values is None else values
    return values | {
        key: completed(values.get(key), default)
        if isinstance(default, dict)
        else values.get(key, default)
        for key, default in defaults.items()
    }


class RecordedConfig(Settings):
    """Training on recorded rollouts: orchestrator and trainer, without environments and
    inference. Batches have orchestrator.batch_size rollouts, whole tasks in the order of the
    file, and orchestrator.credit is theirs."""

    rollouts: Annotated[str, PATH]
    """A JSONL file or pattern ("data/*.jsonl"): lines of `rl collect` or `rl.record`, results
    that verifiers has saved, or the rollouts of a run. docs/recorded.md has the form of a line."""


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
