"""This machine's index among the machines of a run."""

import os
from collections.abc import Mapping

from rl.config.cluster import ClusterConfig
from rl.system.errors import ConfigError

INDICES = (
    "RL_NODE_INDEX",
    "JOB_COMPLETION_INDEX",
    "LWS_WORKER_INDEX",
    "SKYPILOT_NODE_RANK",
    "DSTACK_NODE_RANK",
    "SLURM_NODEID",
)
"""Environment variables that hold a machine's index, the most specific first."""
OFFSET = "RL_INDEX_OFFSET"
"""Environment variable whose value is added to such an index: an engine counts the machines that
serve from 0, too."""


def index_of(cluster: ClusterConfig, variables: Mapping[str, str] = os.environ) -> int:
    """Returns this machine's index. Raises ConfigError if nothing tells it, or if it is out of
    range."""
    found = next(((name, variables[name]) for name in INDICES if variables.get(name, "")), None)
    if cluster.index is not None:
        return cluster.index
    if found is None:
        raise ConfigError(
            "cluster.index\n    no engine has told this machine's index "
            f"({', '.join(INDICES)}): give --cluster.index"
        )
    name, text = found
    offset = variables.get(OFFSET, "0")
    if not (text.isdigit() and offset.isdigit()):
        raise ConfigError(
            f"{name} = {text!r}, {OFFSET} = {offset!r}\n    must be numbers: unset it, or "
            "give --cluster.index"
        )
    index = int(text) + int(offset)
    if index >= cluster.nodes:
        raise ConfigError(
            f"{name} = {text}\n    this machine's index is {index}, but cluster.nodes = "
            f"{cluster.nodes}: raise it"
        )
    return index
