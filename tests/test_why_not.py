"""Runs of docs/why_not.md for real, in small: the console and `rl doctor` name the cause and the
remedy."""

from pathlib import Path

import pytest

from tests.test_integration import finish, rl

ROOT = Path(__file__).parents[1]


def fails(name, output_dir, *flags):
    """What a run of configs/why_not prints, and then `rl doctor` about it."""
    small = f"--orchestrator.batch_size 4 --output_dir {output_dir}"
    run = f"@ configs/why_not/base.toml @ configs/why_not/{name}.toml {small}"
    commands = ([*run.split(), *flags], ["doctor", str(output_dir / name)])
    return [finish(rl(ROOT, *words), timeout_s=500)[1] for words in commands]


@pytest.mark.proof
@pytest.mark.timeout(1100)
def test_a_reward_function_that_never_fires(tmp_path):
    said = (
        "40 rollouts in a row without any signal: in each group all rewards are equal (rewards "
        "of tasks: 40 times 0). Either no answer"
    )
    printed, doctor = fails("never", tmp_path)
    assert f"orchestrator: {said}" in printed
    last = doctor.splitlines()[-1]
    assert last.startswith("FAIL  the run ended ") and said in last


@pytest.mark.proof
@pytest.mark.timeout(1100)
def test_a_chat_template_without_an_end(tmp_path):
    said = (
        "the chat template writes no special token after an answer: a model that was not "
        "fine-tuned with it hardly stops: give"
    )
    printed, doctor = fails("template", tmp_path, "--max_steps", "1")
    assert f"warning: {said}" in printed
    assert (
        doctor.partition("\n  the reward is low: ")[2].splitlines()[1].startswith(f"    - {said}")
    )
