"""How many workers an environment gets whose number is `auto`: another one while all are busy, one less when fewer would do."""

from collections.abc import Sequence

BUSY = 0.85
"""Share of the time above which the workers are too few. One event loop answers late long before it is at 1."""
SPARE = 0.6
"""Share that each of one fewer would have, below which one is too many. Well below BUSY, or the number would swing."""
CHECKS_UP, CHECKS_DOWN = 3, 30
"""Looks at the load in a row that must agree; a look every two seconds. A worker is had in a tenth of a second and missed for longer."""


class Load:
    """The load of one environment's workers as it was seen."""

    def __init__(self, most: int):
        self.most = most
        self.num_high = self.num_low = 0

    def change(self, busy: Sequence[float]) -> int:
        """1: one worker more, -1: one less, 0: as many. `busy`: the share of the time in which each one was."""
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
