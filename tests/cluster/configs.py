"""Configurations of runs on a cluster, and what their machines say of themselves."""

import time
from pathlib import Path
from typing import Any

from rl.config.run import RLConfig
from rl.run_dir.nodes import NodeStatus


def run_config(folder: Path, cluster: dict[str, object], **tables: object) -> RLConfig:
    """The run `x` in a folder, on three machines unless `cluster` says otherwise."""
    usual = {"name": "x", "output_dir": str(folder), "cluster": {"nodes": 3} | cluster}
    orchestrator = {"environment": [{"id": "first-half"}]}
    return RLConfig.model_validate(usual | {"orchestrator": orchestrator} | tables)


def status_of(index: int, **fields: Any) -> NodeStatus:
    """What a machine that trains says of itself."""
    usual = {"host": f"host{index}", "address": f"10.0.0.{index}", "port": 1000 + index}
    usual |= {"roles": ["trainer"], "ranks": 2, "gpus": 2, "software": "rl 1", "config": "abc"}
    usual |= {"lease": 1, "pid": 1, "place": "", "started": time.time(), "heartbeat": 0.0}
    return NodeStatus(index=index, **usual | fields)
