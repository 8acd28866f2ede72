import errno
import resource
import shutil
import signal
import types

import pytest
import torch

from rl.trainer.store.space import SLACK_BYTES, require_space, write_tensors


def test_numbers_that_differ_are_told_apart(tmp_path, monkeypatch):
    """Both in MiB: what is needed rounded up, what is free rounded down."""
    needed = torch.zeros(2**20 + 2**18, dtype=torch.uint8)
    for free, said in (
        (2**20 + 2**18, "no space left: 1.32 MiB are needed, 1.25 MiB are free"),
        (needed.nbytes + SLACK_BYTES - 1, "no space left: 1.32 MiB are needed, 1.31 MiB are free"),
        (0, "no space left: 1.32 MiB are needed, 0.00 MiB are free"),
    ):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _, free=free: types.SimpleNamespace(free=free)
        )
        with pytest.raises(OSError, match=said):
            require_space(tmp_path, [needed])
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: types.SimpleNamespace(free=needed.nbytes + SLACK_BYTES)
    )
    require_space(tmp_path, [needed])


def test_a_full_disk_is_told_as_one(tmp_path):
    """Regression: safetensors says it in its own words, which count as a fault of the program."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(4096)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "a.safetensors")
