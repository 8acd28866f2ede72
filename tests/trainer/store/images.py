"""The memory of a trainer that has cast a version into it."""

from collections.abc import Mapping

from torch import Tensor

from rl.trainer.store.image import Image, Slice, VersionTensor
from rl.trainer.store.threads import RankThreads


def laid_out(tensors: Mapping[str, Tensor]) -> list[VersionTensor]:
    """The tensors as they follow each other in a file."""
    found: list[VersionTensor] = []
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        end = found[-1].end if found else 0
        found.append(VersionTensor(name, tensor.dtype, tensor.shape, end, (name,), 0))
    return found


def image_like(tensors: Mapping[str, Tensor]) -> Image:
    """Memory for these tensors of one rank."""
    found = laid_out(tensors)
    return Image(found, [Slice(tensor, 0, tensor.size) for tensor in found], RankThreads())


def fill(image: Image, tensors: Mapping[str, Tensor]) -> Image:
    """Puts a version into it, for servers to read."""
    image.claim()
    for tensor in image.tensors:
        image.bytes_of(tensor).view(tensor.dtype).view(tensor.shape).copy_(tensors[tensor.name])
    image.write_header()
    return image
