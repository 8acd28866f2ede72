"""Which machine does what, as tables."""

import pytest

from rl.config.plan import Plan, plan, slurm_seconds
from tests.flags import faults, made

ENVIRONMENT = "--orchestrator.environment.id first-half"
URL = "--orchestrator.inference_urls http://a:1"


def line(cluster, more):
    """A command line; each word of `cluster` is a key of that table and its value."""
    keys = (word.split("=") for word in cluster.split())
    return " ".join([ENVIRONMENT, *(f"--cluster.{key} {value}" for key, value in keys), more])


@pytest.mark.parametrize(
    ("cluster", "more", "expected"),
    [
        ("nodes=4", "", (1, 3)),
        ("nodes=4 trainer_nodes=2", "", (2, 2)),
        ("nodes=4 inference_nodes=1", "", (3, 1)),
        ("nodes=8", "--trainer.gpus 4 --inference.gpus 4", (4, 4)),
        ("nodes=4", "--trainer.gpus 6 --inference.gpus 2", (3, 1)),
        ("nodes=2", "--trainer.gpus 7 --inference.gpus 1", (1, 1)),
        ("nodes=3", "--sft.dataset x.jsonl", (3, 0)),
        ("nodes=3", URL, (3, 0)),
        ("nodes=1 engine=slurm", "", (1, 0)),
    ],
)
def test_division(cluster, more, expected):
    assert plan(made(line(cluster, more))) == Plan(*expected)


def test_roles_follow_from_the_index():
    assert [Plan(2, 2).roles(index) for index in range(4)] == [
        ["trainer"],
        ["trainer"],
        ["inference"],
        ["inference"],
    ]
    assert Plan(1, 0).is_one_machine and Plan(1, 0).roles(0) == ["trainer", "inference"]


@pytest.mark.parametrize(
    ("cluster", "more", "key", "words"),
    [
        ("nodes=1", "", "cluster.nodes", "leave [cluster] out"),
        (
            "nodes=4 trainer_nodes=3 inference_nodes=2",
            "",
            "cluster.nodes",
            "is not the sum of 3 machines that train and 2",
        ),
        ("nodes=2 trainer_nodes=2", "", "cluster.inference_nodes", "leaves nobody to sample"),
        (
            "nodes=2 inference_nodes=1",
            "--sft.dataset x.jsonl",
            "cluster.inference_nodes",
            "has no use",
        ),
        (
            "nodes=4 trainer_nodes=2 min_trainer_nodes=3",
            "",
            "cluster.min_trainer_nodes",
            "more than the 2 machines",
        ),
        (
            "nodes=4 inference_nodes=2",
            URL,
            "cluster.inference_nodes",
            "not used with orchestrator.inference_urls",
        ),
        (
            "nodes=4 trainer_nodes=3 min_trainer_nodes=2",
            "--trainer.ranks 1 --trainer.dp_replicate 3",
            "trainer.dp_replicate",
            "must divide the 2 ranks of 2 machines with 1 each",
        ),
        ("nodes=4 index=4", "", "cluster.index", "below cluster.nodes = 4"),
        (
            "engine=slurm slurm.time=2:30",
            "",
            "cluster.slurm.time",
            "told to save up to 150 s before its time limit",
        ),
        (
            "nodes=4 trainer_nodes=3",
            "--trainer.ranks 8 --trainer.dp_replicate 5",
            "trainer.dp_replicate",
            "24 ranks of 3 machines",
        ),
        (
            "nodes=4 trainer_nodes=3",
            "--trainer.ranks 8 --trainer.expert_parallel 16",
            "trainer.expert_parallel",
            "24 ranks of 3",
        ),
        (
            "nodes=4",
            "--trainer.gpus 0,1 --inference.gpus 2,3",
            "inference.gpus",
            "each machine of a cluster",
        ),
    ],
)
def test_faults(cluster, more, key, words):
    said = faults(line(cluster, more))
    assert said.startswith(f"1 fault in the configuration\n  {key} = ") and words in said


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:02:03", 3723),
        ("2-3", 183_600),
        ("2-3:04", 183_840),
        ("2-3:04:05", 183_845),
        ("", 0),
        ("0", 0),
        ("infinite", 0),
        ("n/a", 0),
        ("soon", 0),
        ("1:2:3:4", 0),
        ("1-", 0),
    ],
)
def test_time_limits_of_slurm(limit, seconds):
    assert slurm_seconds(limit) == seconds
