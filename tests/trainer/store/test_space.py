import shutil
import types

import pytest
import torch

from rl.trainer.store.space import SLACK_BYTES, require_space


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
