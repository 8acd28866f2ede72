"""Which workers a configuration starts."""

import pytest

from rl.orchestrator.workers.setups import task_faults, worker_setups
from rl.system.errors import ConfigError
from rl.wire.worker_messages import PolicySpec, Ready
from tests.flags import made


def test_every_worker_is_started_once_whatever_the_labels():
    """A training environment with the name of an evaluation's own workers gets its workers only
    once."""
    environments = '[{id = "a", name = "eval-a", workers = 2, max_generating = 5}, {id = "b"}]'
    config = made(
        "--orchestrator.environment",
        environments,
        "--orchestrator.eval",
        '[{id = "a", name = "a"}, {id = "c"}]',
    )
    setups = {
        setup.worker_id: setup.env.max_generating
        for setup in worker_setups(config, PolicySpec(), "")
    }
    assert setups == {"eval-a-0": 3, "eval-a-1": 2, "b-0": -1, "eval-c-0": -1}


@pytest.mark.parametrize(
    ("limit", "workers", "parts"),
    [(10, 4, [3, 3, 2, 2]), (1, 3, [1, 1, 1]), (5, 1, [5]), (-1, 2, [-1, -1])],
)
def test_workers_together_score_as_many_rollouts_as_the_limit_says(limit, workers, parts):
    """Regression: four workers scored eight rollouts at once with a limit of 10. Each scores at
    least one."""
    environment = f'{{id = "a", workers = {workers}, max_scoring = {limit}}}'
    config = made("--orchestrator.environment", environment)
    assert [setup.env.max_scoring for setup in worker_setups(config, PolicySpec(), "")] == parts


def test_an_evaluation_has_no_workers_of_another_environment():
    labels = [
        "--orchestrator.environment",
        '[{id = "a", name = "eval-x"}]',
        "--orchestrator.eval",
        '[{id = "b", name = "x"}]',
    ]
    with pytest.raises(
        ConfigError,
        match=r"orchestrator.eval.0.name = 'x'\s+names its workers eval-x, like those of a "
        r"training",
    ):
        made(*labels)


def test_what_a_run_refuses_about_its_tasks():
    evals = (
        '[{id = "a", name = "held"}, {id = "b"}, {id = "c"}, {id = "d", num_examples = 0}, {id = '
        '"e"}]'
    )
    environments = '[{id = "a"}, {id = "f", max_samples = 0}]'
    config = made("--orchestrator.environment", environments, "--orchestrator.eval", evals)
    ready = {
        "a": Ready(4, 0),
        "f": Ready(9, 0),
        "eval-b": Ready(0, 2),
        "eval-c": Ready(None, None),
        "eval-d": Ready(4, 4),
        "eval-e": Ready(0, 0),
    }
    found = [fault.split(";")[0].split(":")[0] for fault in task_faults(config, ready)]
    assert found == [
        "environment f has no training examples",
        "eval held has no examples, because its environment has none for it",
        "eval c",
        "eval d has no examples, because its num_examples is 0",
        "eval e has no examples, because its environment has none for it",
    ]
