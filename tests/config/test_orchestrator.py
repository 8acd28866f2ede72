"""Credit, difficulty and teacher in the configuration: told apart by `type`, inherited, and
checked."""

import pytest

from rl.config.command_line import build, parse_args, to_toml
from rl.config.orchestrator import (
    DrGrpoConfig,
    GrpoConfig,
    OrchestratorConfig,
    ReinforcePlusPlusConfig,
)
from rl.launch.prepare import may_change
from rl.orchestrator.groups.group_credit import rules_of
from rl.system.errors import ConfigError
from tests.flags import made

ENV = ["--orchestrator.environment.id", "say-digit"]
TEACHER = ["--orchestrator.teacher.base_url", "http://host:8000/v1"]


def test_an_environment_has_its_own_credit_or_the_runs(tmp_path):
    envs = (
        '[{id = "a", credit = {type = "reinforce_pp", group_baseline = true}}, {id = "b"}, {id = '
        '"c", credit = {length_penalty = 0.1}}]'
    )
    config = made("--orchestrator.environment", envs, "--orchestrator.credit.type", "grpo")
    credits = [
        rules_of(config.orchestrator, env, has_teacher=False).credit
        for env in config.orchestrator.environment
    ]
    assert credits == [
        ReinforcePlusPlusConfig(group_baseline=True),
        GrpoConfig(),
        DrGrpoConfig(length_penalty=0.1),
    ]
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert made("@", str(tmp_path / "c.toml")) == config


def test_difficulty_is_a_switch():
    (env,) = made(*ENV, "--orchestrator.environment.difficulty").orchestrator.environment
    assert env.difficulty and env.difficulty.easy_weight == 0.2
    (env,) = made(*ENV).orchestrator.environment
    assert env.difficulty is None


@pytest.mark.parametrize(
    ("arguments", "key", "remedy"),
    [
        ("x = nan", "args.x = nan", "leave it out, or use a string: '\"nan\"'"),
        ("x = -inf", "args.x = -inf", "leave it out, or use a string: '\"-inf\"'"),
        (
            "t = {deep = [1.0, {y = inf}]}",
            "args.t = {'deep': [1.0, {'y': inf}]}",
            "use a string: '\"inf\"'",
        ),
        (
            "since = 2024-01-31",
            "args.since = datetime.date(2024, 1, 31)",
            'use a string: "2024-01-31"',
        ),
        ("at = 07:30:00", "args.at = datetime.time(7, 30)", 'use a string: "07:30:00"'),
    ],
)
def test_an_argument_that_an_environment_cannot_be_given_is_refused_where_it_is_written(
    arguments, key, remedy, tmp_path
):
    environment = (
        "[orchestrator.environment]\nid = "
        '"single-digit-addition"\n[orchestrator.environment.args]\n'
    )
    (tmp_path / "run.toml").write_text(f"{environment}{arguments}\n")
    with pytest.raises(ConfigError) as caught:
        build(parse_args(["@", str(tmp_path / "run.toml")]), outside=True)
    assert (
        f"1 fault in the configuration\n  orchestrator.environment.0.{key}\n    arguments "
        "are passed to" in str(caught.value)
    )
    assert str(caught.value).endswith(remedy)


def test_what_a_loss_of_ones_own_is_given_may_be_infinite():
    loss = ["--trainer.loss.function", "math:fsum", "--trainer.loss.args.clip", "inf"]
    kept = made(*ENV, *loss, "--orchestrator.environment.args.x", '"nan"')
    assert (kept.trainer.loss.args, kept.orchestrator.environment[0].args) == (
        {"clip": float("inf")},
        {"x": "nan"},
    )


def test_what_fits():
    config = made(*ENV, *TEACHER, "--orchestrator.credit.type", "none")
    assert config.orchestrator.teacher.base_url == "http://host:8000/v1"


def test_a_resume_may_find_the_teacher_elsewhere_but_not_another_one():
    assert may_change("orchestrator.teacher.base_url")
    assert may_change("orchestrator.environment.0.teacher.timeout_s")
    for key in (
        "orchestrator.teacher.model",
        "orchestrator.credit.type",
        "orchestrator.environment.1.difficulty.hard_weight",
    ):
        assert not may_change(key)


@pytest.mark.parametrize("flag", ["network false", "keys OPENAI_API_KEY", "read corpus"])
def test_what_has_no_effect_outside_of_a_sandbox_has_one_in_it(flag):
    given = f"--orchestrator.environment.isolation sandbox --orchestrator.environment.{flag}"
    (env,) = made(*ENV, *given.split()).orchestrator.environment
    assert env.isolation == "sandbox" and not env.network


@pytest.mark.parametrize(
    ("entry", "held_out"),
    [
        ({}, None),  # of the training environment: no rows are held out
        ({"dataset": "train.jsonl", "reward": "r.py:f"}, None),
        ({"dataset": "held_out.jsonl", "reward": "r.py:f"}, "held_out.jsonl"),
        (
            {"dataset": "held_out.jsonl", "eval_dataset": "others.jsonl", "reward": "r.py:f"},
            "others.jsonl",
        ),
        ({"id": "e"}, None),
    ],
)
def test_rows_that_are_trained_on_are_not_held_out(entry, held_out):
    """Regression: a run evaluated on its training rows without a word. The same when its
    config.toml is read again."""
    config = OrchestratorConfig(
        environment=[{"dataset": "train.jsonl", "reward": "r.py:f"}], eval=[entry]
    )
    for found in (config, OrchestratorConfig(**config.model_dump())):
        assert found.eval[0].eval_dataset == held_out
