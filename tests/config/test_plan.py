"""Which machine does what, as tables."""

import pytest

from rl.config.plan import Plan, cluster_faults, plan, slurm_seconds
from rl.config.run import RLConfig

ENVIRONMENT = {"environment": [{"id": "first-half"}]}


def make(cluster: dict, **tables: dict) -> RLConfig:
    return RLConfig.model_validate({"orchestrator": ENVIRONMENT, "cluster": cluster} | tables)


@pytest.mark.parametrize(
    ("cluster", "tables", "expected"),
    [
        ({"nodes": 4}, {}, (1, 3)),
        ({"nodes": 4, "trainer_nodes": 2}, {}, (2, 2)),
        ({"nodes": 4, "inference_nodes": 1}, {}, (3, 1)),
        ({"nodes": 8}, {"trainer": {"gpus": 4}, "inference": {"gpus": 4}}, (4, 4)),
        ({"nodes": 4}, {"trainer": {"gpus": 6}, "inference": {"gpus": 2}}, (3, 1)),
        ({"nodes": 2}, {"trainer": {"gpus": 7}, "inference": {"gpus": 1}}, (1, 1)),
        ({"nodes": 3}, {"sft": {"dataset": "x.jsonl"}}, (3, 0)),
        ({"nodes": 3}, {"orchestrator": ENVIRONMENT | {"inference_urls": ["http://a:1"]}}, (3, 0)),
        ({"nodes": 1, "engine": "slurm"}, {}, (1, 0)),
    ],
)
def test_division(cluster, tables, expected):
    config = make(cluster, **tables)
    assert plan(config) == Plan(*expected)
    assert not list(cluster_faults(config))


def test_roles_follow_from_the_index():
    assert [Plan(2, 2).roles(index) for index in range(4)] == [
        ["trainer"],
        ["trainer"],
        ["inference"],
        ["inference"],
    ]
    assert Plan(1, 0).is_one_machine and Plan(1, 0).roles(0) == ["trainer", "inference"]


@pytest.mark.parametrize(
    ("cluster", "tables", "key", "words"),
    [
        ({"nodes": 1}, {}, "cluster.nodes", "leave [cluster] out"),
        (
            {"nodes": 4, "trainer_nodes": 3, "inference_nodes": 2},
            {},
            "cluster.nodes",
            "is not the sum of 3 machines that train and 2",
        ),
        (
            {"nodes": 2, "trainer_nodes": 2},
            {},
            "cluster.inference_nodes",
            "leaves nobody to sample",
        ),
        (
            {"nodes": 2, "inference_nodes": 1},
            {"sft": {"dataset": "x.jsonl"}},
            "cluster.inference_nodes",
            "has no use",
        ),
        (
            {"nodes": 4, "trainer_nodes": 2, "min_trainer_nodes": 3},
            {},
            "cluster.min_trainer_nodes",
            "more than the 2 machines",
        ),
        (
            {"nodes": 4, "inference_nodes": 2},
            {"orchestrator": ENVIRONMENT | {"inference_urls": ["http://a:1"]}},
            "cluster.inference_nodes",
            "not used with orchestrator.inference_urls",
        ),
        (
            {"nodes": 4, "trainer_nodes": 3, "min_trainer_nodes": 2},
            {"trainer": {"ranks": 1, "dp_replicate": 3}},
            "trainer.dp_replicate",
            "must divide the 2 ranks of 2 machines with 1 each",
        ),
        ({"nodes": 4, "index": 4}, {}, "cluster.index", "below cluster.nodes = 4"),
        (
            {"engine": "slurm", "slurm": {"time": "2:30"}},
            {},
            "cluster.slurm.time",
            "told to save up to 150 s before its time limit",
        ),
        (
            {"nodes": 4, "trainer_nodes": 3},
            {"trainer": {"ranks": 8, "dp_replicate": 5}},
            "trainer.dp_replicate",
            "24 ranks of 3 machines",
        ),
        (
            {"nodes": 4, "trainer_nodes": 3},
            {"trainer": {"ranks": 8, "expert_parallel": 16}},
            "trainer.expert_parallel",
            "24 ranks of 3",
        ),
        (
            {"nodes": 4},
            {"trainer": {"gpus": [0, 1]}, "inference": {"gpus": [2, 3]}},
            "inference.gpus",
            "each machine of a cluster",
        ),
    ],
)
def test_faults(cluster, tables, key, words):
    faults = list(cluster_faults(make(cluster, **tables)))
    assert [fault[0] for fault in faults] == [key] and words in faults[0][1]


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        *(
            ("90", 5400),
            ("90:30", 5430),
            ("1:02:03", 3723),
            ("2-3", 183_600),
            ("2-3:04", 183_840),
            ("2-3:04:05", 183_845),
        ),
        *(("", 0), ("0", 0), ("infinite", 0), ("n/a", 0), ("soon", 0), ("1:2:3:4", 0), ("1-", 0)),
    ],
)
def test_time_limits_of_slurm(limit, seconds):
    assert slurm_seconds(limit) == seconds
