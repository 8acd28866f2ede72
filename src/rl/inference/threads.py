"""How many threads compute a step of the engine on the CPU: one or all, whichever this machine does faster at the moment.

A step is hundreds of operations, and each of several threads waits for the last one at every one of them. Where each has a core to itself
that pays; where somebody else computes on one of the cores, it takes three times as long as on two quiet ones, and twice as long as one
thread. So both are tried, now and then, and the numbers do not change (in float32 a product's last bit may, as with any other batch).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

EACH = 2
"""Steps of a trial that all threads compute, and those that one does; the faster of them counts, for the other may have met a new size."""
ALIKE = 1.125
"""By how much the largest step of a trial may exceed its smallest."""
GAIN = 0.9
"""Another number of threads must take less than this of the time that the present one takes."""
SLOW, SLOW_STEPS = 1.5, 2
"""So many steps in a row that take so many times what the trial says have something new behind them: the next steps are a trial."""
SHARE = 0.02
"""Of the time, what trials may cost where they change nothing."""
TRIED_S = 1.0
"""What one thread might need longer for is not tried: work that all threads share without waiting."""
SKIPPED = 64
"""Steps until a trial that was not to be made is tried again."""


@contextmanager
def threads(number: int) -> Iterator[None]:
    """`number` threads compute what this thread calls inside the block. Not torch.set_num_threads, which vLLM has made do nothing."""
    before = torch.get_num_threads()
    torch._C.set_num_threads(number)
    try:
        yield
    finally:
        torch._C.set_num_threads(before)


class Choice:
    """One thread or all, for steps of about one size: by trials, of which the next comes when it costs little, or when a step is slow."""

    def __init__(self, together: int):
        self.together = together
        self.alone = False
        """Whether one thread computes the next step."""
        self.chosen = False
        """What the last trial said."""
        self.tried: list[tuple[int, float]] | None = []
        """Tokens and seconds of the trial's steps so far; None between trials."""
        self.left, self.slow = 0, 0
        """Steps until the next trial, and the slow ones of late."""
        self.expected = (0, 0.0)
        """Tokens and seconds of a step as it was chosen."""

    def took(self, tokens: int, seconds: float) -> None:
        """Told of each step, decides about the next."""
        if self.tried is None:
            expected_tokens, expected_s = self.expected
            self.slow = self.slow + 1 if seconds > SLOW * expected_s * max(1.0, tokens / expected_tokens) else 0
            self.left -= 1
            if self.left <= 0 or self.slow == SLOW_STEPS:
                self.tried, self.alone = [], False
            return
        self.tried.append((tokens, seconds))
        sizes = [size for size, _ in self.tried]
        if max(sizes) > ALIKE * min(sizes):
            self.settle(self.chosen, self.expected if self.expected[0] else (tokens, seconds), EACH)
        elif len(self.tried) == EACH and self.fastest(0)[1] * self.together > TRIED_S:
            self.settle(False, self.fastest(0), SKIPPED)
        elif len(self.tried) == 2 * EACH:
            self.compare(self.fastest(0), self.fastest(EACH))
        else:
            self.alone = len(self.tried) >= EACH

    def fastest(self, first: int) -> tuple[int, float]:
        """The fastest of EACH steps of the trial from `first` on."""
        assert self.tried is not None
        return min(self.tried[first : first + EACH], key=lambda step: step[1])

    def compare(self, together: tuple[int, float], alone: tuple[int, float]) -> None:
        """Ends a trial."""
        present, other = (alone, together) if self.chosen else (together, alone)
        change = other[1] < GAIN * present[1]
        better, worse = (other, present) if change else (present, other)
        lost_s = EACH * max(0.0, worse[1] - better[1])
        self.settle(self.chosen != change, better, int(lost_s / (SHARE * better[1])) + EACH)

    def settle(self, alone: bool, expected: tuple[int, float], steps: int) -> None:
        self.alone = self.chosen = alone
        self.tried, self.left, self.slow, self.expected = None, steps, 0, expected


class Threads:
    """Has a CPU's model runner compute each step on one thread or on all. Sampling, which follows a step, is computed by as many."""

    def __init__(self, runner: Any):
        self.runner, self.together = runner, torch.get_num_threads()
        self.choices: dict[int, Choice] = {}
        """By the binary digits of a step's tokens."""
        self.alone = False
        self.zeros: dict[int, Tensor] = {}
        """Biases that change nothing, by their length."""
        if self.together > 1:
            self.compute, runner.execute_model = runner.execute_model, self.execute_model
            self.adopt()

    def execute_model(self, scheduled: Any, *args: Any, **more: Any) -> Any:
        """The runner's own, timed."""
        tokens = scheduled.total_num_scheduled_tokens
        if not tokens:
            return self.compute(scheduled, *args, **more)
        choice = self.choices.setdefault((tokens - 1).bit_length(), Choice(self.together))
        self.alone = choice.alone
        torch._C.set_num_threads(1 if choice.alone else self.together)
        began = time.perf_counter()
        result = self.compute(scheduled, *args, **more)
        took_s, before = time.perf_counter() - began, choice.chosen
        choice.took(tokens, took_s)
        if choice.chosen != before:  # whatever it was, steps of other sizes may have met it too
            for other in self.choices.values():
                other.left = other.left if other is choice else 0
        return result

    def adopt(self) -> None:
        """Puts the products of the model that is served now under this choice; comes again with each version.

        vLLM keeps a product's kernel, which is made for a number of threads, by the sizes of the matrix, the number of tokens and
        whether there is a bias. So what one thread computes has a bias of zeros: the same numbers, and kernels of its own. A product
        that has a bias keeps the threads of its first time.
        """
        if self.together == 1:
            return
        for layer in self.runner.get_model().modules():
            if (handler := handler_of(layer)) is not None:
                layer.cpu_linear = self.product(handler)

    def product(self, handler: Any) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """The product with a matrix that vLLM has packed, in the place of `cpu_linear`."""
        multiply = torch.ops._C.onednn_mm.default
        zeros = self.zeros.setdefault(handler.n, torch.zeros(handler.n, dtype=self.runner.dtype))

        def cpu_linear(x: Tensor, _weight: Tensor, bias: Tensor | None) -> Tensor:
            if self.alone and bias is None and x.dtype == zeros.dtype:
                bias = zeros
            out = torch.empty((*x.shape[:-1], handler.n), dtype=x.dtype)
            multiply(out, x.reshape(-1, handler.k), bias, handler.handler_tensor)
            return out

        return cpu_linear


def handler_of(layer: nn.Module) -> Any:
    """vLLM's CPUDNNLGEMMHandler in a layer's `cpu_linear`: the matrix as oneDNN has it packed; None where something else multiplies."""
    cells = getattr(getattr(layer, "cpu_linear", None), "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "handler_tensor")), None)
