"""Scales the workers of an environment with `workers = "auto"`: adds one while all are busy, removes one if fewer suffice."""

from collections.abc import Sequence

BUSY = 0.85
"""Mean busy share above which there are too few workers. An event loop responds late long before its share reaches 1."""
SPARE = 0.6
"""A worker is removed if the others would each stay below this share. Well below BUSY, or the number would oscillate."""
CHECKS_UP, CHECKS_DOWN = 3, 30
"""Consecutive load checks, two seconds apart, that must agree. Starting a worker takes a tenth of a second; lacking one costs more."""


class Autoscaler:
    """Observed load of one environment's workers."""

    def __init__(self, most: int):
        self.most = most
        self.num_high = self.num_low = 0

    def change(self, busy: Sequence[float]) -> int:
        """Returns 1 to add a worker, -1 to remove one, 0 to keep the number. `busy`: each worker's busy share of the time."""
        total, num = sum(busy), len(busy)
        self.num_high = self.num_high + 1 if total > BUSY * num and num < self.most else 0
        self.num_low = self.num_low + 1 if num > 1 and total < SPARE * (num - 1) else 0
        if self.num_high >= CHECKS_UP:
            self.num_high = 0
            return 1
        if self.num_low >= CHECKS_DOWN:
            self.num_low = 0
            return -1
        return 0
