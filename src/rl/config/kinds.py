"""The kinds of runs: decided in `RLConfig.kind`, so that no room asks which sections are set."""

from enum import StrEnum
from typing import Literal


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
