"""The trainer on two nodes: network namespaces with addresses and names of their own, torchrun on each, one run directory."""

import sys
import time
from pathlib import Path

import pytest

from rl.config.command_line import from_toml
from rl.config.run import RLConfig
from rl.models.tiny import make_tiny_model
from rl.run_dir.metrics import read_metrics
from tests.proofs.two_nodes import ADDRESSES, Nodes, environment, largest_difference, trainer_command, wait_for, write_config
from tests.trainer.samples import make_batch
from tests.trainer.stub_orchestrator import StubOrchestrator

STEPS = 3
DEADLINE_S = 150


def serve(config: Path) -> None:
    """In node a: the orchestrator's side of the wire, until it is ended."""
    with StubOrchestrator(from_toml(config).run_dir, batches(), host=ADDRESSES["a"]):
        time.sleep(DEADLINE_S)


def batches():
    """Batch 2 has a single group: fewer trees than ranks."""
    return [make_batch(step, groups=1 if step == 2 else 4) for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def nodes():
    try:
        with Nodes() as nodes:
            yield nodes
    except (OSError, FileNotFoundError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")


def make_config(root: Path, name: str, model: Path) -> RLConfig:
    trainer = {
        "optim": {"lr": 1e-3},
        "micro_batch_tokens": 128,
        "checkpoint": {"interval": 100},
        "weights": {"keep_last": 10},
        "batch_timeout_s": 60,
        "strict_parity": False,  # the stub's log-probabilities are no model's
    }
    return RLConfig.model_validate(
        {
            "name": name,
            "output_dir": str(root),
            "max_steps": STEPS,
            "model": {"name": str(model), "dtype": "float32"},
            "orchestrator": {"environment": [{"id": "test"}]},
            "trainer": trainer,
        }
    )


@pytest.mark.proof
def test_two_nodes_equal_one_rank(nodes, children, tmp_path):
    model = make_tiny_model(tmp_path / "model")
    far, near = (make_config(tmp_path, name, model) for name in ("far", "near"))
    path, logs = write_config(far), far.run_dir.logs
    stub = children.start("stub", nodes.inside("a", [sys.executable, "-m", "tests.test_two_nodes", str(path)]), environment(), logs)
    trainers = [children.start(f"trainer-{node}", nodes.inside(node, trainer_command(path)), environment(), logs) for node in ADDRESSES]
    wait_for(trainers, DEADLINE_S, [stub])
    with StubOrchestrator(near.run_dir, batches()):
        command = [sys.executable, "-m", "rl.trainer.main", "@", str(write_config(near))]
        wait_for([children.start("trainer", command, environment(), near.run_dir.logs)], DEADLINE_S)
    ours, theirs = (read_metrics(config.run_dir.metrics) for config in (far, near))
    assert ours.keys() == theirs.keys() and len(ours) == STEPS
    for key, line in theirs.items():
        assert ours[key]["optim/grad_norm"] == pytest.approx(line["optim/grad_norm"], rel=1e-4)
        assert ours[key]["loss/mean"] == pytest.approx(line["loss/mean"], rel=1e-5, abs=1e-7)
    assert largest_difference(*(config.run_dir.weights(STEPS) for config in (far, near)))[0] <= 1e-5


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
