"""The real `rl` command: real vLLM, real environments, real trainer, on a model that the test
makes."""

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl.config.orchestrator import OrchestratorConfig
from rl.models.tiny import make_tiny_model
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import numbered
from tests.test_reference import in_the_table

STEPS = 14
RL = str(Path(sys.executable).parent / "rl")
TRAINER = """
learning_rate = 3e-3
[checkpoint]
interval = 5
[weights]
keep_last = 100
"""
ORCHESTRATOR = """
batch_size = 32
group_size = 8
[environment]
id = "first-half"
[sampling]
max_tokens = 24
[eval]
interval = 7
samples = 4
"""
INFERENCE = """
[vllm]
max-num-seqs = 64
"""

pytestmark = pytest.mark.timeout(600)


def environment():
    return os.environ | {
        "PYTHONPATH": str(Path(__file__).parent / "environments"),
        "HF_HUB_OFFLINE": "1",
    }


def rl(folder, *words):
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([RL, *words], cwd=folder, env=environment(), **output)


def start_rl(folder, *flags):
    """`rl` from three files and flags, as a user types it."""
    typed = (
        "--trainer @ t.toml --orchestrator @o.toml --inference @ i.toml --model.name model "
        "--model.dtype float32 "
    )
    typed += f"--model.max_model_len 128 --name run --max_lag 1 --trainer.steps {STEPS}"
    return rl(folder, *typed.split(), *flags)


def finish(process, timeout_s=300):
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"rl did not end:\n{output}") from None
    return process.returncode, output


def ours(folder):
    """Processes of this test that are alive."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if str(folder) in " ".join(process.info["cmdline"] or []) or process.info["cwd"] == str(
            folder
        ):
            found.append(process)
    return found


def test_reward_rises_and_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    make_tiny_model(tmp_path / "model")
    for name, text in (("t.toml", TRAINER), ("o.toml", ORCHESTRATOR), ("i.toml", INFERENCE)):
        (tmp_path / name).write_text(text)
    run = tmp_path / "outputs" / "run"

    process = start_rl(tmp_path)
    deadline = time.monotonic() + 240
    while (
        8 not in numbered(run / "weights")
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 143, output
    assert "--resume" in output
    assert ours(tmp_path) == []
    newest = max(numbered(run / "weights"))
    assert 8 <= newest < STEPS and {*numbered(run / "checkpoints")} in ({5}, {10}, {5, 10}), output

    code, output = finish(start_rl(tmp_path))
    assert code != 0 and "--resume" in output and "--clean" in output

    code, output = finish(start_rl(tmp_path, "--resume"))
    assert code == 0, output
    assert ours(tmp_path) == []
    metrics = read_metrics(run / "metrics.jsonl")
    rewards = [metrics[step, "orchestrator"]["reward/mean"] for step in range(1, STEPS + 1)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    first, last = (metrics[step, "eval"]["eval/first-half/reward_mean"] for step in (0, STEPS))
    assert last > first + 0.15
    for step in range(1, STEPS + 1):
        if metrics[step, "orchestrator"]["lag/max"] == 0:
            assert metrics[step, "trainer"]["mismatch_kl/mean"] < 1e-3
    named = {name for line in metrics.values() for name in line} - {"step", "time", "source"}
    assert len(named) > 60 and not [name for name in named if not in_the_table(name)]
    lags = [metrics[step, "orchestrator"]["lag/mean"] for step in range(1, STEPS + 1)]
    # Groups that newer ones overtake lag more than max_lag, all of them after a hiccup: what holds
    # always is max_off_policy_steps.
    assert statistics.median(lags) <= 2 and max(lags) <= OrchestratorConfig().max_off_policy_steps
    assert (run / "curves.png").stat().st_size > 10_000

    code, output = finish(rl(tmp_path, "replay", str(run)), timeout_s=240)
    assert code == 0, output
    assert f"EQUAL: versions 1-{STEPS}, retrained from the base model" in output
