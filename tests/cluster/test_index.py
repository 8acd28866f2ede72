"""Where a machine's index comes from."""

import pytest

from rl.cluster.index import index_of
from rl.config.cluster import ClusterConfig
from rl.system.errors import ConfigError


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({"SLURM_NODEID": "2"}, 2),
        ({"JOB_COMPLETION_INDEX": "1", "RL_INDEX_OFFSET": "2"}, 3),
        ({"SKYPILOT_NODE_RANK": "3", "SLURM_NODEID": "0"}, 3),
        ({"DSTACK_NODE_RANK": "0"}, 0),
        ({"LWS_WORKER_INDEX": "1"}, 1),
    ],
)
def test_engines_tell_it(variables, index):
    assert index_of(ClusterConfig(nodes=4), variables) == index


def test_the_flag_comes_first():
    assert index_of(ClusterConfig(nodes=4, index=1), {"SLURM_NODEID": "2"}) == 1


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "give --cluster.index"),
        ({"SLURM_NODEID": "4"}, "cluster.nodes = 4: raise it"),
        ({"SLURM_NODEID": "x"}, "must be numbers"),
    ],
)
def test_a_wrong_one_is_refused(variables, words):
    with pytest.raises(ConfigError, match=words):
        index_of(ClusterConfig(nodes=4), variables)
