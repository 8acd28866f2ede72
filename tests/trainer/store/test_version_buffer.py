"""Tensors in a file in memory that others read as safetensors."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rl.run_dir.in_memory import opened
from rl.run_dir.safetensors import read_header
from rl.trainer.store.version_buffer import VersionBuffer

LIKE = {
    "a": (torch.Size([3, 5]), torch.bfloat16),
    "b": (torch.Size([7]), torch.float32),
    "c": (torch.Size([]), torch.int64),
    "d": (torch.Size([4, 2]), torch.bfloat16),
}


@pytest.fixture
def buffer():
    made = VersionBuffer(LIKE)
    for number, tensor in enumerate(made.tensors.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 100 * number)
    return made


def test_a_sealed_arena_is_a_safetensors_file_for_others(buffer):
    file = buffer.write_header({f"model.{name}": tensor for name, tensor in buffer.tensors.items()})
    with opened(file) as path:
        assert read_header(path).keys() == {f"model.{name}" for name in LIKE}
        expected = {f"model.{name}": tensor.clone() for name, tensor in buffer.tensors.items()}
        os.close(buffer.file.fd)  # as its maker does with the last of it; the reader goes on
        with opened(file) as late:
            assert late is None
        with safe_open(path, framework="pt") as weights:
            found = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in expected)
    os.open("/dev/null", os.O_RDONLY)  # takes the number, which the arena closes at its end


def test_without_a_file_in_memory_there_is_room_but_nothing_for_others(monkeypatch, capsys):
    """A trainer that the system gives no such file ended at its first step."""
    monkeypatch.setattr(os, "ftruncate", lambda *_: os.open("/nowhere", os.O_RDONLY))
    files = os.listdir("/proc/self/fd")
    made = VersionBuffer(LIKE)
    made.tensors["b"].copy_(torch.arange(7))
    assert made.write_header(made.tensors) is None and made.claim(LIKE) and not made.claim({})
    assert "servers read each version from its folder" in capsys.readouterr().err
    assert os.listdir("/proc/self/fd") == files


def test_parts_of_its_tensors_are_a_file_and_converted_ones_are_none(buffer):
    parts = dict(buffer.tensors)
    parts |= {f"d.{row}": parts["d"][row] for row in range(4)}
    del parts["d"]
    with opened(buffer.write_header(parts)) as path:
        assert read_header(path)["d.3"].shape == (2,)
    whole = buffer.tensors
    assert buffer.write_header({**whole, "d": whole["d"].clone()}) is None
    assert buffer.write_header({**whole, "d": whole["d"].T}) is None
    assert buffer.write_header({name: whole[name] for name in "abc"}) is None
    assert buffer.write_header({**whole, "e": whole["d"]}) is None
    assert buffer.write_header({"x" * 9000 if name == "a" else name: tensor for name, tensor in whole.items()}) is None


def test_a_file_of_another_place_process_or_descriptor_is_not_opened(buffer):
    file = buffer.write_header(buffer.tensors)
    for other in ({"place": "elsewhere"}, {"pid": 2**22 + 1}, {"fd": 0}, {"name": "rl-" + "0" * 32}):
        changed = type(file)(**{name: getattr(file, name) for name in file.__struct_fields__} | other)
        before = len(list(Path("/proc/self/fd").iterdir()))
        with opened(changed) as path:
            assert path is None
        assert len(list(Path("/proc/self/fd").iterdir())) <= before  # garbage of other tests may be collected meanwhile
    with opened(None) as path:
        assert path is None


def test_its_memory_is_used_again_once_nobody_reads_it(buffer):
    file, pages = buffer.write_header(buffer.tensors), buffer.memory.data_ptr()
    with opened(file) as path:
        assert not buffer.claim(LIKE), "it was given away under a reader"
        assert read_header(path).keys() == LIKE.keys()
    assert not buffer.claim({"a": LIKE["a"]})
    assert buffer.claim(LIKE) and buffer.file.fd == file.fd and buffer.memory.data_ptr() == pages
    with opened(file) as before, opened(buffer.file) as unfinished:  # of what it held, and of what it does not hold yet
        assert before is None and unfinished is None
    assert buffer.write_header(buffer.tensors).name != file.name
    with opened(file) as before, opened(buffer.file) as now:
        assert before is None and read_header(now).keys() == LIKE.keys()
