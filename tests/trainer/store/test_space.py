import errno
import resource
import shutil
import signal
import types

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rl.trainer.store.space import SLACK_BYTES, require_space, write_tensors


def test_numbers_that_differ_are_told_apart(tmp_path, monkeypatch):
    """Both in MiB: what is needed rounded up, what is free rounded down."""
    needed = torch.zeros(2**20 + 2**18, dtype=torch.uint8)
    for free, said in (
        (2**20 + 2**18, "no space left: 1.32 MiB are needed, 1.25 MiB are free"),
        (needed.nbytes + SLACK_BYTES - 1, "no space left: 1.32 MiB are needed, 1.31 MiB are free"),
        (0, "no space left: 1.32 MiB are needed, 0.00 MiB are free"),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: types.SimpleNamespace(free=free))
        with pytest.raises(OSError, match=said):
            require_space(tmp_path, [needed])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=needed.nbytes + SLACK_BYTES))
    require_space(tmp_path, [needed])


def test_tensors_come_back_in_a_file_that_pytorch_is_said_to_have_written(tmp_path):
    named = {"turned": torch.arange(6.0).reshape(2, 3).T, "one": torch.tensor(7, dtype=torch.int16), "none": torch.empty(0, 5)}
    write_tensors(tmp_path / "w.safetensors", named)
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == named.keys() and all(torch.equal(found[name], tensor) for name, tensor in named.items())
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_disk_that_takes_no_more_is_an_error_of_the_system(tmp_path):
    """The library's is a sentence, which nobody could tell from a fault that passes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError) as error:
            write_tensors(tmp_path / "w.safetensors", {"a": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(tmp_path / "w.safetensors"))
