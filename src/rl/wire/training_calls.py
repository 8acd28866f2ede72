"""What a server asks a trainer of adapters to do, and what it answers: plain arrays, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl.system.errors import RunError


class CallError(RunError):
    """A call of a client is wrong; the message is for the client, and nothing has been changed."""


class NoRoomError(CallError):
    """There is no memory for another model."""


@dataclass(frozen=True)
class Example:
    """N tokens and, at each, the K tokens whose log-probability after it is trained."""

    token_ids: np.ndarray  # [N] int64
    targets: np.ndarray  # [N, K] int64: usually K = 1 and the next token
    advantages: np.ndarray  # [N, K] float32: the weight of each target's loss
    logprobs: np.ndarray  # [N, K] float32, the sampler's; 0 for losses that do not compare with it
    # [N, K] bool: targets that have a loss; those of a sequence make its ratio (gspo)
    trained: np.ndarray


@dataclass(frozen=True)
class Scored:
    """Log-probability and loss of each target, one array [N, K] float32 for each example."""

    logprobs: list[np.ndarray]
    losses: list[np.ndarray]


@dataclass(frozen=True)
class Step:
    """Settings of one AdamW step."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    """Largest norm of the gradient; 0: no limit."""


@dataclass(frozen=True)
class LossCall:
    """A loss by its name in trainer.loss.type, with its settings."""

    type: str
    settings: Mapping[str, float] = field(default_factory=dict)


class Learner(Protocol):
    """Trains any number of adapters over one model, each with its own optimizer. Not
    thread-safe; every method raises CallError or RunError."""

    vocab_size: int

    def create(self, name: str, rank: int, seed: int) -> None:
        """Makes adapters that change nothing yet, in place of those of the same name."""
        ...

    def forget(self, name: str) -> None: ...

    def forward_backward(
        self, name: str, examples: list[Example], loss: LossCall, backward: bool
    ) -> Scored:
        """Scores the examples and, with `backward`, adds the gradient of the sum of their
        losses."""
        ...

    def optimizer_step(self, name: str, step: Step) -> float:
        """Applies and clears the gradient. Returns its norm before clipping."""
        ...

    def save(self, name: str, folder: Path, notes: Mapping[str, Any]) -> None:
        """Writes adapters and optimizer, without a gradient, complete by rename, with notes that
        `notes` returns."""
        ...

    def notes(self, folder: Path) -> dict[str, Any]:
        """Returns the notes of a saved state and `rank`, once its files are found intact. Raises
        CorruptFileError."""
        ...

    def load(self, name: str, folder: Path, optimizer: bool) -> None:
        """Reads what `save` wrote, under any name; without `optimizer`, its moments begin at 0."""
        ...

    def publish(self, name: str, folder: Path, record: Path | None) -> None:
        """Writes adapters as a policy version that inference loads, and its digests."""
        ...
