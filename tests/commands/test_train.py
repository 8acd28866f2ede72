"""`rl train --from` as a user has it: a run like any other, whoever is killed, and what it says
of a wrong file."""

import json
import os
import signal
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.config.command_line import load_config_or_exit
from rl.models.tiny import make_tiny_model
from rl.run_dir.checksums import read_digests
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import RunDir
from rl.run_dir.status import read_status
from tests import jsonl
from tests.commands.driver import rl, start

SETTINGS = (
    "--from r.jsonl --model.name tiny --model.dtype float32 --model.max_model_len 128",
    "--orchestrator.batch_size 4 --learning_rate 1e-3 --trainer.checkpoint.interval 1",
)
STEPS = 4


@torch.no_grad()
def sampled(model, ids, count):
    """A turn that a model has sampled."""
    made, logprobs = [], []
    for _ in range(count):
        scores = model(torch.tensor([ids + made])).logits[0, -1].log_softmax(-1)
        made.append(int(torch.multinomial(scores.exp(), 1)))
        logprobs.append(float(scores[made[-1]]))
    return {
        "prompt_ids": ids,
        "completion_ids": made,
        "logprobs": logprobs,
        "policy_versions": [[0, count]],
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a tiny model, and rollouts of two turns that it has sampled."""
    root = tmp_path_factory.mktemp("recorded")
    folder = make_tiny_model(root / "tiny")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    torch.manual_seed(0)
    lines = []
    for number in range(4 * STEPS):
        first = sampled(model, tokenizer.encode(f"say {number // 2}\n"), 6)
        second = sampled(
            model,
            [*first["prompt_ids"], *first["completion_ids"], *tokenizer.encode("\nmore\n")],
            4,
        )
        lines.append(
            {"env": "e", "task": number // 2, "reward": number % 2, "turns": [first, second]}
        )
    (root / "r.jsonl").write_text(jsonl.text(*lines))
    return root


def tensors(run_dir):
    """What the digests say of each version."""
    return [read_digests(run_dir.digests(step)) for step in range(1, STEPS + 1)]


def run_of(place, name):
    return RunDir(place / "outputs" / name, place / "outputs" / name / "weights")


@pytest.fixture(scope="module")
def whole(place):
    code, out, err = rl(place, "train", *SETTINGS, "--name whole", OMP_NUM_THREADS="1")
    assert code == 0, err
    return out, run_of(place, "whole")


def test_a_file_becomes_a_run(whole):
    out, run_dir = whole
    assert "r.jsonl\n" in out
    assert (
        f"the run ended at step {STEPS} of 100: all {4 * STEPS} recorded rollouts are used" in out
    )
    assert "inference" not in out.replace("between inference and trainer", "")
    measured = read_metrics(run_dir.metrics)
    for step in range(1, STEPS + 1):
        mine = measured[step, "trainer"] | measured[step, "orchestrator"]
        assert mine["reward/mean"] == 0.5
        assert mine["lag/max"] == step - 1
        assert mine["rollouts/turns_mean"] == 2
    assert measured[1, "trainer"]["mismatch_kl/mean"] < 1e-9
    assert measured[2, "trainer"]["lag_kl/mean"] > 1e-3
    assert run_dir.weights(STEPS).is_dir()
    assert run_dir.checkpoint(STEPS).is_dir()
    assert run_dir.rollouts(STEPS).exists()


@pytest.mark.proof
def test_whoever_is_killed_the_weights_are_the_same(place, whole):
    """SIGKILL of the trainer, of the orchestrator, and of `rl` itself, which is then resumed."""
    run_dir = run_of(place, "killed")
    process = start(place, "train", *SETTINGS, "--name killed", OMP_NUM_THREADS="1")
    for step, role in ((1, "trainer"), (2, "orchestrator"), (3, "rl")):
        deadline = time.monotonic() + 120
        while not run_dir.checkpoint(step).exists() or (
            role != "rl" and read_status(run_dir.status(role)) is None
        ):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.01)
        os.kill(
            process.pid if role == "rl" else read_status(run_dir.status(role)).pid, signal.SIGKILL
        )
    process.communicate(timeout=60)
    code, out, err = rl(place, "train", *SETTINGS, "--name killed --resume", OMP_NUM_THREADS="1")
    assert code == 0, err
    assert tensors(run_dir) == tensors(whole[1])
    code, out, err = rl(place, "train", *SETTINGS, "--name killed --resume 2", OMP_NUM_THREADS="1")
    assert code == 0 and "moved everything after step 2" in out, err
    assert tensors(run_dir) == tensors(whole[1])
    assert [run_dir.batch(step).read_bytes() for step in range(1, 5)] == [
        whole[1].batch(step).read_bytes() for step in range(1, 5)
    ]
    code, out, err = rl(place, "replay", "outputs/killed", OMP_NUM_THREADS="1")
    assert code == 0 and f"EQUAL: versions 1-{STEPS}" in out, out + err


def test_a_wrong_file_is_refused_before_a_step(place):
    rows = (place / "r.jsonl").read_text().splitlines()
    broken = json.loads(rows[5])
    broken["turns"][1]["logprobs"][2] = 7.0
    (place / "bad.jsonl").write_text("\n".join([*rows[:5], json.dumps(broken), *rows[6:]]))
    code, _, err = rl(place, "train", *SETTINGS, "--from bad.jsonl --name bad", OMP_NUM_THREADS="1")
    assert (
        code == 1
        and f"{place / 'bad.jsonl'}:6: turns[1].logprobs[2]: 7.0 is not the logarithm of a "
        "probability"
        in err
    ), err
    assert "nothing was made yet" in err and not run_of(place, "bad").anything_made()


def test_a_flag_that_a_run_of_recorded_rollouts_does_not_read_is_warned_about(tmp_path, capsys):
    (tmp_path / "r.jsonl").touch()
    recorded = ["--recorded.rollouts", str(tmp_path / "r.jsonl")]

    def warned(flags, **settings):
        load_config_or_exit([*recorded, *flags.split()], "rl train", variables={}, **settings)
        lines = capsys.readouterr().err.splitlines()
        return [line.split("warning: ")[1].split(" = ")[0] for line in lines]

    unread = ["inference.gpus", "orchestrator.group_size", "orchestrator.environment.id"]
    flags = "--inference.gpus 1 --orchestrator.group_size 4 --orchestrator.environment.id sums"
    assert warned(flags) == unread and warned(flags, plays=True) == []
    # max_tokens divides the loss; an environment of the rollouts with its name has credit
    of_name = "--orchestrator.environment.id sums --orchestrator.environment.credit.type grpo"
    assert warned("--orchestrator.sampling.max_tokens 9 --max_lag 1") == warned(of_name) == []
