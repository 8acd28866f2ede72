"""Configurations of runs on a cluster."""

from pathlib import Path

from rl.config.run import RLConfig


def run_config(folder: Path, cluster: dict[str, object], **tables: object) -> RLConfig:
    """The run `x` in a folder, on three machines unless `cluster` says otherwise."""
    usual = {"name": "x", "output_dir": str(folder), "cluster": {"nodes": 3} | cluster}
    orchestrator = {"environment": [{"id": "first-half"}]}
    return RLConfig.model_validate(usual | {"orchestrator": orchestrator} | tables)
