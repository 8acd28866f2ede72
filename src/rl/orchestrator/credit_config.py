"""Settings of credit, how rewards become advantages: one class each, told apart by `type`. Formulas: rl/orchestrator/credit.py."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rl.settings import Settings


class CreditSettings(Settings):
    """What every kind of credit has."""

    length_penalty: float = Field(0.0, ge=0)
    """Taken off the reward before credit: this, times the group's mean reward (within 0..1), times the rollout's tokens relative to the
    longest of its group. Metrics show the true reward; 0: off."""


class DrGrpoConfig(CreditSettings):
    """Dr. GRPO: reward minus the mean of its group."""

    type: Literal["dr_grpo"] = "dr_grpo"


class GrpoConfig(CreditSettings):
    """GRPO: reward minus the mean of its group, divided by the group's standard deviation."""

    type: Literal["grpo"] = "grpo"
    epsilon: float = Field(1e-4, gt=0)
    """Added to the standard deviation: rewards that differ by less than this count as nearly equal."""


class RlooConfig(CreditSettings):
    """RLOO: reward minus the mean of the other rollouts of its group."""

    type: Literal["rloo"] = "rloo"


class MaxRlConfig(CreditSettings):
    """MaxRL: reward minus the mean of its group, divided by that mean; for rewards from 0 on."""

    type: Literal["max_rl"] = "max_rl"


class ReinforcePlusPlusConfig(CreditSettings):
    """REINFORCE++: rewards normalised by mean and standard deviation over each environment's rollouts of the whole batch."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    group_baseline: bool = False
    """Take the mean of its group off each reward first."""


class NoCreditConfig(CreditSettings):
    """No advantage from rewards at all: only the teacher is learned from."""

    type: Literal["none"] = "none"


AnyCreditConfig = DrGrpoConfig | GrpoConfig | RlooConfig | MaxRlConfig | ReinforcePlusPlusConfig | NoCreditConfig


def default_type(value: object) -> object:
    """A table without `type` is the default one's."""
    return {"type": "dr_grpo", **value} if isinstance(value, dict) else value


CreditConfig = Annotated[Annotated[AnyCreditConfig, Field(discriminator="type")], BeforeValidator(default_type)]
