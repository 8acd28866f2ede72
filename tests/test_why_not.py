"""Runs of docs/why_not.md for real, in small: the console and `rl doctor` name the cause and the
remedy."""

import subprocess
from pathlib import Path

import pytest

from tests.test_integration import RL, environment

ROOT = Path(__file__).parents[1]


def fails(name, output_dir, *flags):
    """What a run of configs/why_not prints, and then `rl doctor` about it."""
    small = ["--orchestrator.batch_size", "4", "--output_dir", str(output_dir), *flags]
    commands = (
        [RL, "@", "configs/why_not/base.toml", "@", f"configs/why_not/{name}.toml", *small],
        [RL, "doctor", str(output_dir / name)],
    )
    return [
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
        ).stdout
        for command in commands
    ]


@pytest.mark.proof
@pytest.mark.timeout(1100)
def test_a_reward_function_that_never_fires(tmp_path):
    said = (
        "40 rollouts in a row without any signal: in each group all rewards are equal (rewards "
        "of tasks: 40 times 0). Either no answer"
    )
    printed, doctor = fails("never", tmp_path)
    assert f"orchestrator: {said}" in printed
    assert (
        doctor.splitlines()[-1].startswith("FAIL  the run ended ")
        and said in doctor.splitlines()[-1]
    )


@pytest.mark.proof
@pytest.mark.timeout(1100)
def test_a_chat_template_without_an_end(tmp_path):
    said = (
        "the chat template writes no special token after an answer: a model that was not "
        "fine-tuned with it hardly stops: give"
    )
    printed, doctor = fails("template", tmp_path, "--max_steps", "1")
    assert f"warning: {said}" in printed
    lines = doctor.splitlines()
    at = next(
        number for number, line in enumerate(lines) if line.startswith("  the reward is low: ")
    )
    assert lines[at + 1].startswith(f"    - {said}")
