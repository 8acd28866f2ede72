"""The disk that a run will use."""

import json
from collections import namedtuple

from rl.diagnosis import disk
from tests.commands.driver import words
from tests.flags import made


def model(folder):
    shapes = {"embed": [1000, 64], "q": [64, 64], "norm": [64]}
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
            for name, shape in shapes.items()
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def config(tmp_path, *flags):
    return made(
        f"--orchestrator.environment.id e --output_dir {tmp_path} --model.dtype bfloat16", *flags
    )


def test_what_is_kept_is_counted(tmp_path, monkeypatch):
    weights = 1000 * 64 + 64 * 64 + 64
    (need,) = disk.needs(
        config(tmp_path, *words("--max_steps 50 --trainer.checkpoint.keep_every 20")),
        model(tmp_path),
    )
    assert need.files == {
        # the newest three, two before one is deleted, those of two checkpoints
        "7 policy versions": 7 * 2 * weights,
        "5 checkpoints": 5 * 12 * weights,  # two, the one that is written, 20 and 40
        "50 batches": 50 * 64 * 2048 * disk.TOKEN_BYTES,
        "token logs": 50 * 64 * 2048 * 7,
    }
    (need,) = disk.needs(
        config(tmp_path, *words("--max_steps 100000 --trainer.token_log.max_gib 0.5")),
        model(tmp_path),
    )
    assert need.files["token logs"] == 1 << 29
    (need,) = disk.needs(
        config(tmp_path, *words("--trainer.lora.rank 4 --orchestrator.batches.keep_last 7")),
        model(tmp_path),
    )
    assert need.files["3 checkpoints"] == 3 * 12 * 4 * 128 and "7 batches" in need.files
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(0, 0, 2**20))
    _, said, warning = disk.disk_estimate(config(tmp_path), model(tmp_path))
    assert "416 MiB" in said
    assert "1 MiB are free" in said
    assert "may become full: free some" in warning


def test_what_is_kept_is_told(tmp_path):
    assert disk.kept_text(config(tmp_path)) == (
        "keeps: checkpoints: the newest 2; policy versions: the newest 3, those of "
        "checkpoints, those being written, and the best of each "
        "evaluation; batches: all; rollouts: all, as gzip after 100 steps; "
        "token logs: the newest 1 GiB"
    )
    assert "token logs: none" in disk.kept_text(config(tmp_path, "--trainer.token_log.max_gib 0"))
    flags = [*words("--orchestrator.batches.keep_last 7 --trainer.checkpoint.keep_every 20")]
    told = disk.kept_text(config(tmp_path, *flags))
    assert "checkpoints: the newest 2 and every 20th" in told
    assert "batches: the newest 7 and those since the oldest checkpoint;" in told
