"""Which workers a configuration starts."""

from rl.config.command_line import build, parse_args
from rl.orchestrator.setups import worker_setups
from rl.wire.worker_messages import PolicySpec


def test_every_worker_is_started_once_whatever_the_labels():
    """A training environment that is called like an evaluation's own workers has its workers once."""
    environments = '[{id = "a", name = "eval-a", workers = 2}, {id = "b"}]'
    config = build(parse_args(["--orchestrator.environment", environments, "--orchestrator.eval", '[{id = "a", name = "a"}, {id = "c"}]']))
    assert [setup.worker_id for setup in worker_setups(config, PolicySpec(), "")] == ["eval-a-0", "eval-a-1", "b-0", "eval-c-0"]
