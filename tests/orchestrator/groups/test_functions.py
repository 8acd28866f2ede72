"""The user's credit, filter and rollout metrics, through the judge and into a batch; and the
error messages for faulty ones."""

import asyncio
import json
import random
import re

import pytest

from rl.config.base import FunctionConfig
from rl.config.orchestrator import CustomCreditConfig, ReinforcePlusPlusConfig, RlooConfig
from rl.orchestrator.batches.contents import batch_metrics, group_samples
from rl.orchestrator.batches.early_stop import RewardHistory, only_failures
from rl.orchestrator.groups.group_credit import (
    Rules,
    credit_group,
    load_functions,
    metrics_function,
    rules_of,
)
from rl.system.errors import GIVE_UP, RunError
from rl.system.functions import UserFunction
from rl.wire.rollouts import Group, rollout_lines
from tests.flags import made
from tests.orchestrator.batches.test_batch_selection import rollout
from tests.orchestrator.test_loop_lag import HELD_S, builder, least_hold, long_group

FILE = """
def scaled(group, config):
    rewards = group.rewards
    for one in group.rollouts:
        one.reward, one.metrics["m"] = 99.0, 99.0
    return [config.args["scale"] * reward for reward in rewards]

def answers(group, config):
    return eval(config.args["answer"], {"group": group, "nan": float("nan")})

def shape(rollout, config):
    rollout.metrics["m"] = 99.0
    return eval(config.args["answer"], {"rollout": rollout, "nan": float("nan")})
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return str(path)


def credited(file, name="scaled", **settings):
    config = CustomCreditConfig(function=f"{file}:{name}", **settings)
    function = UserFunction("orchestrator.credit.function", config.function, "group, config")
    return Rules(config, credit_function=function)


def filtered(file, answer, *credit, **options):
    config = FunctionConfig(function=f"{file}:answers", args={"answer": answer})
    function = UserFunction("orchestrator.filter.function", config.function, "group, config")
    return Rules(*credit, filter=config, filter_function=function, **options)


def group_of(*rewards, **options):
    return Group(
        group_id=0,
        env="e",
        task=5,
        rollouts=[rollout(reward, episode=i, **options) for i, reward in enumerate(rewards)],
    )


def test_credit_gives_the_advantages_and_changes_nothing_else(file):
    rules = credited(file, args={"scale": 2})
    judged = credit_group(group_of(1.0, 0.0, 0.5), rules)
    assert (judged.advantages, judged.why, judged.signal) == ([2.0, 0.0, 1.0], None, True)
    assert [one.reward for one in judged.rollouts] == [1.0, 0.0, 0.5] and judged.rollouts[
        0
    ].metrics == {"m": 2.0}
    # equal rewards do not imply zero
    assert credit_group(group_of(1.0, 1.0), rules).advantages == [2.0, 2.0]
    assert credit_group(group_of(0.0, 0.0), rules).why == "no_signal"
    with_penalty = credited(file, args={"scale": 2}, length_penalty=0.5)
    # 0.5 x mean 0.5 x tokens 2/2 are taken off
    assert credit_group(group_of(1.0, 0.0), with_penalty).advantages == [1.5, -0.5]
    agents = group_of(1.0, 4.0, 2.0)
    agents.rollouts[1].agent, agents.rollouts[2].trainable = "rival", False
    assert credit_group(agents, rules).advantages == [2.0, 8.0, 0.0]


def test_the_filter_drops_rollouts_and_groups(file):
    rules = filtered(file, "[one.reward < 1 for one in group.rollouts]")
    some = credit_group(group_of(1.0, 0.0, 0.5), rules)
    assert (some.why, some.advantages) == (None, [0.5, -0.5, 0.0]) and [
        one.filtered for one in some.rollouts
    ] == [True, False, False]
    whole = credit_group(group_of(1.0, 1.5), rules)
    zeros = credit_group(group_of(1.0, 0.5, 0.0), rules)
    assert (whole.why, zeros.why) == ("filtered", None)
    lines = [json.loads(line) for line in rollout_lines([some, whole], 1, False).splitlines()]
    assert [line["why"] for line in lines] == [
        "filtered",
        None,
        None,
        "filtered",
        "filtered",
    ] and not lines[0]["trained"]
    assert [sample.rollout_id for sample in group_samples(some)] == [1, 2]
    metrics = batch_metrics(1, [some, whole])
    assert metrics["rollouts/filtered"] == metrics["rollouts/e/filtered"] == 3 / 5
    assert metrics["rollouts/trained"] == 2
    assert credit_group(some, Rules()).rollouts[0].filtered is False  # judged again, by other rules


def test_a_group_that_the_filter_leaves_without_signal_is_dropped(file):
    """Of rewards 1, 1, 0.5, 0 with the median as the baseline, only those with advantage 0 would
    be left."""
    rules = filtered(file, "[not advantage for advantage in group.advantages]")
    assert credit_group(group_of(1.0, 0.0, 0.5), rules).why == "filtered"
    assert credit_group(group_of(1.0, 0.0, 0.5), filtered(file, "False")).why == "filtered"
    kept = filtered(
        file, "[not advantage for advantage in group.advantages]", replace_no_signal=False
    )
    assert credit_group(group_of(1.0, 0.0, 0.5), kept).why is None
    only_batch = filtered(file, "group.rollouts[0].reward > 0", ReinforcePlusPlusConfig())
    assert (
        credit_group(group_of(1.0, 1.0), only_batch).why,
        credit_group(group_of(0.0, 0.0), only_batch).why,
    ) == (None, "filtered")


def test_the_filter_sees_what_would_be_trained_and_its_advantages(file):
    rules = filtered(file, "1 / 0", RlooConfig())
    assert credit_group(group_of(1.0, 1.0), rules).why == "no_signal"
    assert credit_group(group_of(1.0, 0.0, error="boom"), rules).why == "error"
    seen = filtered(
        file,
        "group.rewards == [1.0, 0.0] and group.advantages == [0.5, -0.5] and group.task == 5",
    )
    partly = group_of(1.0, 0.0, 7.0)
    partly.rollouts[2].trainable = False
    assert credit_group(partly, seen).why is None
    assert credit_group(group_of(1.0, 0.5), seen).why == "filtered"


def test_a_filter_that_lets_nothing_pass_ends_the_run(file):
    group = credit_group(group_of(1.0, 0.0), filtered(file, "False"))
    assert (
        only_failures([group, group], 4)
        == "orchestrator.filter left nothing to train on in the last 2 groups: make it less strict"
    )
    history = RewardHistory()
    for one in (group, credit_group(group_of(1.0, 1.0), Rules())):
        history.add(one)
    assert history.without_signal == [("e", 1.0), ("e", 0.0), ("e", 1.0), ("e", 1.0)]
    assert not history.is_solved()


def metrics_of(file, answer):
    flags = [
        "--orchestrator.environment.id",
        "e",
        "--orchestrator.metrics.function",
        f"{file}:shape",
    ]
    settings = made(*flags).orchestrator
    settings.metrics.args["answer"] = answer
    return metrics_function(settings)


def test_metrics_join_those_of_the_environment(file):
    group = group_of(1.0, 0.0, 3.0)
    group.rollouts.append(rollout(0.0, error="boom", episode=3))
    metrics_of(file, "{'half': rollout.reward / 2} if rollout.reward else {}")(group.rollouts)
    assert [one.metrics for one in group.rollouts] == [
        {"m": 2.0, "half": 0.5},
        {"m": 0.0},
        {"m": 6.0, "half": 1.5},
        {"m": 0.0},
    ]
    assert batch_metrics(1, [credit_group(group, Rules())])["reward/e/half"] == 1.0


ONE_EACH = "return a list of 2 finite numbers, one for each of group.rollouts"
A_BOOL = "return a bool for all of group.rollouts, or a list of 2, one for each"
WRONG = [
    ("credit", "[1.0]", f"returned [1.0] (at {{file}}:8); {ONE_EACH}"),
    ("credit", "[1.0, nan]", f"returned [1.0, nan] (at {{file}}:8); {ONE_EACH}"),
    (
        "credit",
        "group.reward",
        "raised AttributeError: 'Group' object has no attribute 'reward' (at {file}:9); correct it",
    ),
    ("filter", "[True]", f"returned [True] (at {{file}}:8); {A_BOOL}"),
    ("filter", "[1, 0]", f"returned [1, 0] (at {{file}}:8); {A_BOOL}"),
    ("filter", "1 / 0", "raised ZeroDivisionError: division by zero (at {file}:9); correct it"),
    ("metrics", "1.0", "returned 1.0 (at {file}:11); return a dict of numbers by name"),
    (
        "metrics",
        "{'m': 1.0}",
        "returned a metric 'm' (at {file}:11); give it another name: the environment has a "
        "metric of that name",
    ),
    (
        "metrics",
        "{'mean': 1.0}",
        "returned a metric 'mean' (at {file}:11); give it another name: this one is a "
        "built-in metric's",
    ),
    (
        "metrics",
        "{'a b': 1.0}",
        "returned a metric 'a b' (at {file}:11); give it a name without spaces and slashes",
    ),
    (
        "metrics",
        "{'x': nan}",
        "returned nan as 'x' (at {file}:11); return finite numbers, and leave out a metric "
        "that has none",
    ),
]


@pytest.mark.parametrize(("kind", "answer", "said"), WRONG)
def test_what_is_wrong_is_named_and_ends_the_run(file, kind, answer, said):
    calls = {
        "credit": lambda: credit_group(
            group_of(1.0, 0.0), credited(file, "answers", args={"answer": answer})
        ),
        "filter": lambda: credit_group(group_of(1.0, 0.0), filtered(file, answer)),
        "metrics": lambda: metrics_of(file, answer)([rollout(1.0)]),
    }
    with pytest.raises(RunError) as error:
        calls[kind]()
    name = "shape" if kind == "metrics" else "answers"
    assert str(error.value) == f"orchestrator.{kind}.function {file}:{name} {said}".replace(
        "{file}", file
    )
    assert error.value.exit_code == GIVE_UP


def test_they_are_loaded_by_the_keys_that_name_them(file, tmp_path):
    (tmp_path / "broken.py").write_text(
        "def advantages(group, config): ...\nimport nowhere_at_all\n"
    )
    envs = f"[{{ id = 'a' }}, {{ id = 'b', credit.function = '{tmp_path}/broken.py:advantages' }}]"
    flags = [
        "--orchestrator.environment",
        envs,
        "--orchestrator.filter.function",
        f"{file}:answers",
    ]
    config = made(*flags)
    with pytest.raises(
        RunError,
        match=r"^orchestrator\.environment\.1\.credit\.function .*broken\.py:2\); correct it",
    ):
        load_functions(config)
    first, second = config.orchestrator.environment
    assert rules_of(config.orchestrator, first, False).filter_function.place == f"{file}:8"
    (tmp_path / "broken.py").write_text("def advantages(group, config): ...\n")
    assert rules_of(config.orchestrator, second, False).credit_function.what.startswith(
        "orchestrator.environment.1.credit.function "
    )


SLOW = """
import time

def credit(group, config):
    time.sleep(config.args["seconds"])
    return [reward - 0.5 for reward in group.rewards]
"""


def test_a_slow_function_holds_nothing_up_and_one_that_does_not_return_ends_the_run(
    tmp_path, monkeypatch
):
    (tmp_path / "slow.py").write_text(SLOW)
    rules = credited(f"{tmp_path}/slow.py", "credit", args={"seconds": 0.3})

    async def judged():
        one = builder(tmp_path / str(random.random()), 7)
        one.rules = {"e": rules}
        await one.restore()
        await one.add([long_group(0, 1, 5)])
        assert one.pending.groups[0].advantages == [-0.5, 0.5] * 4

    assert least_hold(judged) < HELD_S
    monkeypatch.setattr("rl.orchestrator.groups.group_credit.CALL_S", 0.1)
    place = (
        f"orchestrator.credit.function {tmp_path}/slow.py:credit did not return within 0.1 s (at "
        f"{tmp_path}/slow.py:4); make it faster"
    )
    with pytest.raises(RunError, match=f"^{re.escape(place)}"):
        asyncio.run(judged())
