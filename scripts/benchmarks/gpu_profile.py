"""The part of scripts/gpu_check.py that says what the GPU does during a step: its time by kind
of kernel, and the gaps between them."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu_bench import Bench, say
from torch.profiler import ProfilerActivity

KINDS = {
    "flex_attention": "attention",
    "softmax": "softmax of the head",
    "memcpy": "copies",
    "multi_tensor": "optimizer",
    "gemm": "matrix products",
    "nvjet": "matrix products",
    "cutlass": "matrix products",
    "copy_kernel": "casts and transpositions",
    "triton": "compiled elementwise",
}
"""Kinds of kernels by a part of their names; the first that is found counts."""


def kind_of(kernel: str) -> str:
    return next((kind for part, kind in KINDS.items() if part in kernel.lower()), "other")


def profile_step(bench: Bench, title: str, step: Callable[[], Any]) -> None:
    """Says the milliseconds of one step of `title`, which has run before, by kind of kernel,
    greatest first."""
    activities = [ProfilerActivity.CUDA if bench.on_gpu else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        bench.synchronize()
    device = torch.autograd.DeviceType.CUDA if bench.on_gpu else torch.autograd.DeviceType.CPU
    spans = sorted(
        (x.time_range.start, x.time_range.end, x.name)
        for x in profiler.events()
        if x.device_type == device
    )
    kinds: dict[str, float] = defaultdict(float)
    busy_until = spans[0][0]
    idle = 0.0
    for start, end, name in spans:
        kinds[kind_of(name)] += (end - start) / 1e3
        idle += max(0.0, start - busy_until) / 1e3
        busy_until = max(busy_until, end)
    say(
        title,
        **{kind: round(ms, 1) for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])},
        idle=round(idle, 1),
        unit="ms",
    )
