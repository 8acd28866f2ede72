"""How many threads compute a step of the engine on the CPU: one or all, whichever this machine does faster.

Between two operations that several threads share, Python is at work, so the others fall asleep and have to be woken. On two cores of a
virtual machine that takes 240 microseconds, where one thread needs 12 for the norm of 64 tokens and 55 for a product; a layer has a dozen
of them.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn

SIZES = (64, 256, 1024)
"""Tokens of the steps that are tried, rising."""
PRODUCTS, ROUNDS = 8, 3
"""Of the model's own products, and how often they are computed."""
BETWEEN_S = 20e-6
"""What Python takes between two operations."""
VECTOR = 16
"""Values that vLLM's norm in C++ computes at once; a row is a whole number of these."""
NORMS = 2
"""Behind each product, for all small operations of a layer."""


@contextmanager
def threads(number: int) -> Iterator[None]:
    """`number` threads compute what this thread calls inside the block. Not torch.set_num_threads, which vLLM has made do nothing."""
    before = torch.get_num_threads()
    torch._C.set_num_threads(number)
    try:
        yield
    finally:
        torch._C.set_num_threads(before)


def largest_for_one(seconds: Callable[[int, int], float]) -> int:
    """Tokens of the largest step that one thread computes faster than all: 0 if there is none. seconds(tokens, threads) tries a step.

    Sizes differ a little, for vLLM keeps a product's kernel, and the threads that it was made for, by the number of its tokens.
    """
    most = 0
    for size in SIZES:
        if seconds(size - 2, 1) > seconds(size - 3, torch.get_num_threads()):
            break
        most = size
    return most


def products_of(model: nn.Module) -> list[nn.Module]:
    """The first of a model's linear layers, packed as vLLM does on CPUs; none where it keeps them otherwise (quantized ones)."""
    wanted = ("cpu_linear", "input_size_per_partition")
    layers = [module for module in model.modules() if all(hasattr(module, name) for name in wanted)]
    return [layer for layer in layers if layer.input_size_per_partition % VECTOR == 0][:PRODUCTS]


def try_products(layers: list[nn.Module], dtype: torch.dtype) -> Callable[[int, int], float]:
    """Median seconds of some of the model's products, each with smaller operations behind it, by tokens and threads."""
    widths = {layer.input_size_per_partition for layer in layers}
    weights = {width: torch.ones(width, dtype=dtype) for width in widths}

    def seconds(tokens: int, num_threads: int) -> float:
        inputs = {width: torch.ones(tokens, width, dtype=dtype) for width in widths}
        outputs = {width: torch.empty_like(x) for width, x in inputs.items()}
        took = []
        with threads(num_threads):
            for _ in range(ROUNDS + 1):
                began = time.perf_counter()
                for layer in layers:
                    width = layer.input_size_per_partition
                    layer.cpu_linear(inputs[width], layer.weight, None)
                    for _ in range(NORMS):
                        pause()
                        torch.ops._C.rms_norm(outputs[width], inputs[width], weights[width], 1e-6)
                    pause()
                took.append(time.perf_counter() - began)
        return median(took[1:])

    return seconds


def pause() -> None:
    """Keeps this thread busy for a moment; others that wait for it go to sleep."""
    end = time.perf_counter() + BETWEEN_S
    while time.perf_counter() < end:
        pass


def choose_threads(runner: Any) -> None:
    """Has a CPU's model runner compute steps of few tokens on one thread, if the model's own products say that this is faster here.

    Sampling, which follows a step, is computed by as many.
    """
    layers, together = products_of(runner.get_model()), torch.get_num_threads()
    if together == 1 or not layers:
        return
    with torch.no_grad():
        most = largest_for_one(try_products(layers, runner.dtype))
    print(f"inference: steps of at most {most} tokens are computed by one thread, others by {together}", file=sys.stderr, flush=True)
    if most:
        compute = runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **more: Any) -> Any:
            torch._C.set_num_threads(1 if scheduled.total_num_scheduled_tokens <= most else together)
            return compute(scheduled, *args, **more)

        runner.execute_model = execute_model
