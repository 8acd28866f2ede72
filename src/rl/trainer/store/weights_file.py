"""Tensors as a safetensors file (https://huggingface.co/docs/safetensors), written past the page cache."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rl.run_dir.direct import DirectFile

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types in the format's own words."""
LABEL = b'{"__metadata__":{"format":"pt"}'
"""The begin of a header's JSON; transformers wants to know that PyTorch wrote the file."""


def header_of(tensors: Mapping[str, Tensor], label: bytes = LABEL) -> bytes:
    """The header's JSON, which begins with `label`, of tensors that stand one behind the other."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    return label + b"," + json.dumps(entries).encode()[1:] if entries else label + b"}"


def write_weights(path: Path, named: Mapping[str, Tensor]) -> None:
    """Writes tensors of the CPU, each at a multiple of its items' size. Raises OSError."""
    tensors = dict(sorted(named.items(), key=lambda item: -item[1].itemsize))
    header = header_of(tensors)
    length = -(-len(header) // 8) * 8
    with DirectFile(path) as file:
        file.write(length.to_bytes(8, "little") + header.ljust(length))
        for tensor in tensors.values():
            file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
