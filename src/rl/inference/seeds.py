"""Seeded requests on the CPU, where vLLM's engine would die of them.

A request whose prompt is computed in several pieces is sampled for with each of them, and but for the last the draw is taken back: by the
random generator's offset, which that of the CPU does not have ("CPU Generator does not use offset" ends the engine). Here it is taken back
by the generator's state, so a seed gives the same tokens however its prompt was cut.
"""

from collections.abc import ItemsView
from typing import Any

import torch


class Draw:
    """A generator and where it was before its last draw; what vLLM sees of it."""

    def __init__(self, generator: torch.Generator, before: torch.Tensor | None):
        self.generator, self.before = generator, before

    def get_offset(self) -> int:
        return 0

    def set_offset(self, _offset: int) -> None:
        """Takes the last draw back."""
        if self.before is not None:
            self.generator.set_state(self.before)


class Generators(dict[int, Any]):
    """In the place of `InputBatch.generators`, by row of the batch. The sampler goes over `items()`, once a step; whoever takes a draw
    back, or moves a request to another row, uses `get`."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, torch.Tensor] = {}

    def items(self) -> ItemsView[int, Any]:
        self.before = {row: generator.get_state() for row, generator in super().items()}
        return super().items()

    def get(self, row: int, default: Any = None) -> Any:
        generator = super().get(row)
        return default if generator is None else Draw(generator, self.before.get(row))

    def __setitem__(self, row: int, generator: Any) -> None:
        super().__setitem__(row, generator.generator if isinstance(generator, Draw) else generator)
