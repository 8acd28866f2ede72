"""Five runs that fail on purpose (configs/why_not): the diagnosis names the cause of each first,
from the numbers that the run had."""

import pytest

from rl.diagnosis.waits import diagnose
from tests import jsonl
from tests.diagnosis.test_waits import Run

TEMPLATE = (
    "the chat template writes no special token after an answer: a model that was not fine-tuned "
    "with it hardly stops: give another"
)
SETTINGS = {
    "orchestrator": {"environment": [{"id": "sums"}], "sampling": {"max_tokens": 16}},
    "trainer": {"optim": {"lr": 1e-3}},
}


COLLAPSE = {
    "rewards": [0.156, 0.104, 0.015],
    "entropy": [2.18, 0.30, 0.49],
    "truncated": [0.69, 1.0, 1.0],
    "zero_advantage": [0.5, 0.92, 0.94],
}


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, **SETTINGS)


def hints(run, rewards, entropy=1.0, trainer=None, **orchestrator):
    """The texts of the hints after steps with these rewards; other metrics are one number, or
    one for each step."""
    steps = range(1, len(rewards) + 1)
    shares = {f"rollouts/{name}": value for name, value in orchestrator.items()}
    run.metrics(steps, "orchestrator", **{"reward/mean": rewards, **shares})
    run.metrics(steps, **{"entropy/mean": entropy} | (trainer or {}))
    return [hint.text for hint in diagnose(run.dir, run.config).hints]


def test_rewards_that_are_always_0(run):
    head, cause = hints(run, [0.0] * 3, truncated=0.1, zero_advantage=1.0)
    assert head == "the reward is low: 0.000 in the first step, 0.000 in step 3."
    assert cause.startswith(
        "all rewards are 0 (rollouts/zero_advantage): either no answer is right, or the "
        "reward function misses the right"
    )
    assert "`rl sft` first" in cause and cause.endswith(f"`rl show {run.dir.root}` shows them")


def test_rewards_that_are_always_the_same(run):
    _, cause, other = hints(run, [0.5] * 3, truncated=0.9, zero_advantage=1.0)
    assert other.startswith("90% of the answers were cut off")
    assert cause.startswith(
        "all rewards are 0.5 (rollouts/zero_advantage): the reward function does not tell "
        "answers apart: call it with"
    )


def test_answers_that_are_cut_off_come_before_rewards_that_are_therefore_equal(run):
    _, *causes = hints(run, [0.0] * 3, truncated=[0.98, 1.0, 0.99], zero_advantage=1.0)
    assert causes[0].startswith(
        "99% of the answers were cut off: raise orchestrator.sampling.max_tokens = 16; if "
        "they run on"
    )
    assert causes[1].startswith("all rewards are 0 ") and len(causes) == 2


def test_a_collapse_explains_answers_that_are_cut_off(run):
    """Regression: with the numbers of configs/why_not/learning_rate.toml, a larger max_tokens
    was the remedy."""
    _, *causes = hints(run, **COLLAPSE)
    assert causes == [
        "the policy has collapsed: the reward fell from 0.156 in step 1 to 0.015, and the "
        "share cut off went from 0.69 to 1 (rollouts/truncated). The usual cause is a "
        "learning rate that is too high: start over with "
        "a tenth of trainer.optim.lr = 0.001"
    ]


def test_a_collapse_after_a_file_was_edited_is_not_blamed_on_the_learning_rate(run):
    line = {
        "step": 2,
        "key": "orchestrator.environment.0.reward (content of r.py)",
        "old": "3f",
        "new": "77",
    }
    run.dir.changes.write_text(jsonl.text(line))
    _, *causes = hints(run, **COLLAPSE)
    assert causes[0].endswith(f". Look first at what was edited before a resume: {line['key']}")


def test_a_collapse_is_told_before_the_reward_is_0(run):
    """Regression: the numbers of another run of the same configuration."""
    _, *causes = hints(
        run,
        [0.286, 0.062, 0.081],
        [2.15, 1.13, 1.26],
        truncated=[0.54, 1.0, 1.0],
        zero_advantage=[0.5, 0.75, 0.92],
    )
    (cause,) = causes
    assert cause.startswith(
        "the policy has collapsed: the reward fell from 0.286 in step 1 to 0.081, and the "
        "share cut off went from 0.54 to 1"
    )


def test_a_late_collapse_is_told_first_although_the_reward_has_risen_since_the_beginning(run):
    rewards = [0.05, 0.06, 0.05, 0.06, *[0.9] * 8, *[0.2] * 8]
    head, cause, *_ = hints(run, rewards, [1.0] * 12 + [6.0] * 8, truncated=[0.1] * 12 + [1.0] * 8)
    assert head.startswith("the reward does not rise: ")
    assert cause.startswith("the policy has collapsed: the reward fell from 0.900 in step 5")


def test_a_wrong_chat_template_explains_answers_that_are_cut_off_and_nothing_else(run):
    run.event("warning", "orchestrator", 60, about="template", reason=TEMPLATE)
    assert [hint.text for hint in diagnose(run.dir, run.config).hints] == [
        "the reward is low: no step has been trained.",
        TEMPLATE,
    ]
    _, cause, last = hints(run, [0.5] * 3, truncated=0.1, zero_advantage=1.0)
    assert cause.startswith("all rewards are 0.5 ") and last == TEMPLATE
    assert hints(
        run,
        [0.083, 0.021, 0.083],
        [3.2, 2.5, 2.6],
        truncated=[0.92, 0.85, 0.88],
        zero_advantage=0.8,
    )[1:] == [TEMPLATE]


@pytest.mark.parametrize(
    ("rewards", "entropy", "shares"),
    [
        ([0.0] * 2, 1.0, {"truncated": 1.0, "zero_advantage": 1.0}),  # too early
        ([0.1, 0.2, 0.3], 1.0, {"truncated": 0.9}),  # the quickstart begins so
        ([1.0] * 3, 1.0, {"zero_advantage": 1.0}),
        ([0.0, 0.1, 0.0], 1.0, {"truncated": 0.1, "zero_advantage": 0.9}),
        ([0.4, 0.3, 0.05], 1.0, {"truncated": 0.1}),  # nothing confirms a collapse
        # entropy falls as the policy learns
        ([0.2, 0.5, 0.9], [1.4, 0.5, 0.02], {"truncated": 0.1}),
        # one lucky step, and an entropy that falls as it should
        ([0.02, 0.4, 0.15], [1.4, 0.5, 0.3], {"truncated": 0.1}),
        ([-0.8, 0.05, 0.01], [1.0, 2.0, 3.5], {"truncated": 0.1}),  # rewards below 0 that rise
    ],
)
def test_nothing_is_said_of_what_is_not_clear(run, rewards, entropy, shares):
    assert hints(run, rewards, entropy, **shares) == []


def test_a_teacher_makes_equal_rewards_useful(tmp_path):
    taught = {
        **SETTINGS["orchestrator"],
        "teacher": {"base_url": "http://t:1"},
        "credit": {"type": "none"},
    }
    assert (
        hints(Run(tmp_path, **SETTINGS | {"orchestrator": taught}), [0.0] * 3, zero_advantage=1.0)
        == []
    )


@pytest.mark.parametrize(
    ("metric", "value", "said"),
    [
        ("entropy/mean", 0.001, "the policy is nearly certain of each token"),
        ("mismatch_kl/mean", 0.5, "trainer and inference disagree: mismatch_kl/mean 0.5 is above"),
        ("lag_kl/mean", 5.0, "rollouts are far from the trained policy: lag_kl/mean 5"),
        ("optim/grad_norm", 90.0, "gradients are 90 times the clipping limit"),
    ],
)
def test_what_the_trainer_shows_is_told_while_the_reward_rises(run, metric, value, said):
    """Regression: nothing was said before the reward had stopped to rise."""
    rising = [step / 40 for step in range(20)]
    (told,) = hints(run, rising, trainer={metric: value})
    assert told.startswith(said)
    (told,) = hints(run, [0.1, 0.2, 0.3], trainer={metric: value})
    assert told.startswith(said), "before there is a trend, too"


def test_a_policy_that_solves_its_tasks_may_be_certain(run):
    assert hints(run, [0.2] * 8 + [0.97] * 12, trainer={"entropy/mean": 0.001}) == []
