"""Dither: noise that float32 master weights begin with, so that a model that computes in bfloat16
learns from its first update on.

The weights of a published model are bfloat16 numbers, and its masters begin exactly at them, in the
middle of all the numbers that round to the same weight. An update of 1e-6 is lost there: a weight
of 0.05 lies 1e-4 from the nearest number that rounds differently, a hundred updates away. A master
with dither begins anywhere among the numbers that round to its weight. The rounded model is the
same to the last bit; but each update moves some weights to the next bfloat16, and rounded weights
move as far as the masters on average (Widrow and Kollár, Quantization Noise, 2008, on dither).
"""

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Number of weights that are changed at once, by type of device. It bounds the memory; and on a
CPU one thread works, because more threads would wait for each other at every operation while the
inference server starts on the same cores."""


@torch.no_grad()
def dither(model: nn.Module, seed: int) -> None:
    """Adds noise to the model's float32 parameters, in place. It depends on the seed and a weight's
    name and position, but not on how the model is sharded.

    Weights that are not bfloat16 numbers get no noise, because they already round both ways; nor do
    zeros, which any update changes, and parameters that stay in float32.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and not hasattr(parameter, "file_type"):
            rows, offsets = parameter.detach(), (0,) * parameter.ndim
            if isinstance(rows, DTensor):
                _, offsets = compute_local_shape_and_global_offset(
                    rows.shape, rows.device_mesh, rows.placements
                )
                rows = rows.to_local()
            for part, first in parts(rows, offsets[0]):
                add_noise(
                    part, hashes(zlib.crc32(f"{seed} {name}".encode()), part, (first, *offsets[1:]))
                )


def parts(rows: Tensor, first: int) -> Iterator[tuple[Tensor, int]]:
    """Yields parts of about CHUNK weights, but of at least one row, each with the index of its
    first row; that of `rows` is `first`."""
    if rows.numel():
        size = max(1, CHUNK[rows.device.type] * len(rows) // rows.numel())
        yield from ((part, first + size * number) for number, part in enumerate(rows.split(size)))


def hashes(seed: int, rows: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Returns a hash of each number's indices in a tensor of which `rows` begins at `offsets`:
    int32 in the shape of `rows`, with a uniform upper half."""
    hashed = torch.tensor(seed, device=rows.device).to(torch.int32)  # wraps around
    for size, offset in zip(rows.shape, offsets, strict=True):
        hashed = scrambled(
            hashed.unsqueeze(-1)
            ^ torch.arange(offset, offset + size, dtype=torch.int32, device=rows.device)
        )
    return hashed


def scrambled(numbers: Tensor) -> Tensor:
    """Returns an int32 for each number; its upper half depends on all bits of the number.

    The factors are two random odd numbers (multiplicative hashing: Knuth, The Art of Computer
    Programming, 6.4).
    """
    numbers = numbers * 0x7FEB352D
    numbers ^= (numbers >> 15) & 0x1FFFF
    return numbers.mul_(0x2C1B3C6D)


def add_noise(weights: Tensor, noise: Tensor) -> None:
    """Adds noise to the float32 weights that are finite bfloat16 numbers other than 0, in place:
    each becomes one of the 65,535 numbers between the midpoints to its two neighbours, chosen by
    the upper half of its `noise`.

    Read as integers, float32 numbers of one sign are in the order of their sizes, and their upper
    16 bits are a bfloat16.
    """
    bits = weights.view(torch.int32)
    movable = (bits & 0xFFFF == 0) & (bits << 1 != 0) & (bits & 0x7F800000 != 0x7F800000)
    bits += (noise >> 16).clamp_(min=-0x7FFF).mul_(movable)
