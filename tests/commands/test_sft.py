"""`rl sft` as a user has it: from examples or rollouts to weights, stopped and resumed; and what
it says of wrong settings and data."""

import signal
import time

import pytest

from rl.config.run import shrink
from rl.models.tiny import make_tiny_model
from tests import jsonl
from tests.commands.driver import rl, start
from tests.flags import made


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a tiny model and the rollouts of a run."""
    root = tmp_path_factory.mktemp("sft")
    make_tiny_model(root / "tiny")
    (root / "outputs" / "x" / "rollouts").mkdir(parents=True)
    lines = []
    for task in range(20):
        for reward, answer in ((1.0, str(task)), (0.0, "I do not know")):
            messages = [
                {"role": "user", "content": f"Say {task}"},
                {"role": "assistant", "content": answer},
            ]
            lines.append(
                {
                    "env": "e",
                    "task": task,
                    "messages": messages,
                    "reward": reward,
                    "outcome": "finished",
                }
            )
    (root / "outputs" / "x" / "rollouts" / "000001.jsonl").write_text(jsonl.text(*lines))
    return root


SETTINGS = (
    "--model.name tiny --model.dtype float32 --model.max_model_len 128 --name warm",
    "--sft.dataset outputs/x --sft.min_reward 1 --sft.batch_size 4 --sft.validation_fraction 0.2",
    # --resume 2 starts there, however many steps were done before the signal came
    "--trainer.checkpoint.keep_every 2",
    "--sft.validation_interval 2 --learning_rate 3e-3 --trainer.checkpoint.interval 1",
)


def test_from_rollouts_to_weights_with_a_stop_in_between(place):
    process = start(place, "sft", *SETTINGS, "--max_steps 100000", OMP_NUM_THREADS="1")
    checkpoint, deadline = (
        place / "outputs" / "warm" / "checkpoints" / "000003",
        time.monotonic() + 120,
    )
    while not checkpoint.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"resume with: rl sft {' '.join(SETTINGS)} --max_steps 100000 --resume\n" in err
    assert "data      " in out
    assert "40 rows -> 20 examples" in out
    assert "; 20 rollouts with a reward below 1" in out
    header = next(line for line in out.splitlines() if line.startswith("  step"))
    assert header.split()[1:8] == ["loss", "valid", "entropy", "grad", "lr", "epoch", "tok/s"]
    code, out, err = rl(place, "sft", *SETTINGS, "--max_steps 6 --resume 2", OMP_NUM_THREADS="1")
    assert code == 0, err
    assert "moved everything after step 2 to " in out and "checkpoint 2" in out
    assert [line.split()[0] for line in out.splitlines() if line[:6].strip().isdigit()] == [
        "3",
        "4",
        "5",
        "6",
    ]
    assert [line.split()[0] for line in out.splitlines()[-9:]] == [
        "loss",
        "valid",
        "tokens",
        "cost",
        "weights",
        "curves",
        "metrics",
        "logs",
        "all",
    ]
    assert (place / "outputs" / "warm" / "curves.png").stat().st_size > 30_000
    assert (place / "outputs" / "warm" / "weights" / "000006" / "model.safetensors").exists()
    # no orchestrator, no inference
    assert not list((place / "outputs" / "warm" / "logs").glob("[oi]*"))


def test_wrong_data_is_said_before_anything_starts(place):
    (place / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "c"}\n')
    code, _, err = rl(
        place,
        "sft",
        *SETTINGS,
        "--name bad --sft.dataset bad.jsonl --sft.min_reward none",
    )
    assert code == 2 and "sft.min_reward = 'none'" in err
    code, out, err = rl(
        place,
        "sft",
        *SETTINGS[:-1],
        "--name bad --sft.dataset outputs/x --sft.min_reward 2",
    )
    assert code == 1
    assert err.startswith("rl: sft.dataset = ")
    assert "nothing is left of 40 rows: 40 rollouts with a reward below 2\n" in err
    assert "trainer" not in out and not list((place / "outputs" / "bad" / "logs").glob("trainer*"))


def test_a_resolved_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    config = made("--sft.dataset run --sft.validation d/*.jsonl --sft.epochs 3 --model.name a/b")
    assert (config.name, config.trainer.loss.type, config.trainer.optim.lr) == (
        "sft-b",
        "cross_entropy",
        2e-5,
    )
    absolute = config.with_absolute_paths()
    assert (absolute.sft.dataset, absolute.sft.validation) == (
        str(tmp_path / "run"),
        str(tmp_path / "d" / "*.jsonl"),
    )
    assert made("--sft.dataset owner/name").with_absolute_paths().sft.dataset == "owner/name"
    assert made("--sft.dataset d --learning_rate 1e-4").trainer.optim.lr == 1e-4
    quick = shrink(config)
    assert (quick.max_steps, quick.sft.epochs, quick.sft.batch_size, quick.name) == (
        2,
        None,
        8,
        "sft-b-quick",
    )
