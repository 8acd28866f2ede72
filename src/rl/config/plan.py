"""Which machine of a cluster does what: pure functions of index and configuration.

Machines 0 to T-1 train and machines T to T+I-1 serve. A machine that is replaced comes back with
its index, and so with its roles.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rl.config.base import Devices, as_ids
from rl.config.cluster import ClusterConfig
from rl.config.run import RLConfig

END_S = 30
"""Seconds that an engine gives a machine for its end beyond cluster.grace_s."""
SLURM_EARLY_S = 60
"""Seconds that Slurm may send a signal too early."""


@dataclass(frozen=True)
class Plan:
    """The division of a cluster into machines that train and machines that serve."""

    trainers: int
    servers: int

    @property
    def nodes(self) -> int:
        return self.trainers + self.servers

    def roles(self, index: int) -> list[str]:
        """Returns the roles of a machine: `trainer` or `inference`; both if there is only one."""
        if self.nodes == 1:
            return ["trainer", "inference"]
        return ["trainer"] if index < self.trainers else ["inference"]

    @property
    def server_names(self) -> list[str]:
        """The processes of the machines that serve."""
        return [f"inference-node{index}" for index in range(self.trainers, self.nodes)]

    @property
    def is_one_machine(self) -> bool:
        return self.nodes == 1


def plan(config: RLConfig) -> Plan:
    """Divides the machines. Raises ConfigError for numbers that do not fit together."""
    cluster = config.cluster
    if cluster is None or cluster.nodes == 1:
        return Plan(1, 0)
    trainers, servers = cluster.trainer_nodes, cluster.inference_nodes
    if not config.starts_inference:
        servers = servers or 0
    if trainers is None:
        trainers = (
            cluster.nodes - servers if servers is not None else trainer_share(config, cluster.nodes)
        )
    servers = cluster.nodes - trainers if servers is None else servers
    return Plan(trainers, servers)


def cluster_of(config: RLConfig) -> ClusterConfig:
    """Returns [cluster], which a run on several machines has."""
    assert config.cluster is not None
    return config.cluster


def is_ratio(config: RLConfig) -> bool:
    """Returns whether trainer.gpus and inference.gpus only say how to divide the machines."""
    cluster = config.cluster
    undivided = (
        cluster is not None and cluster.trainer_nodes is None and cluster.inference_nodes is None
    )
    return undivided and bool(count(config.trainer.gpus) and count(config.inference.gpus))


def trainer_share(config: RLConfig, nodes: int) -> int:
    """Returns the number of machines that train by default: the share of one machine's GPUs that
    the settings give to the trainer."""
    training, serving = count(config.trainer.gpus), count(config.inference.gpus)
    share = training / (training + serving) if training and serving else 0.0
    return min(nodes - 1, max(1, round(nodes * share)))


def count(devices: Devices) -> int:
    """Returns the number of devices of a setting, 0 if it is not set."""
    return devices if isinstance(devices, int) else len(as_ids(devices))


def cluster_faults(config: RLConfig) -> Iterator[tuple[str, str]]:
    """Yields (key, remedy) of faults of [cluster] that can be known before any machine starts."""
    cluster, trainer = config.cluster, config.trainer
    if cluster is None:
        return
    if cluster.engine == "slurm" and (remedy := time_fault(cluster, cluster.slurm.time)):
        yield "cluster.slurm.time", remedy
    if cluster.nodes == 1:
        if cluster.engine == "none":
            yield (
                "cluster.nodes",
                "is one machine, which needs no cluster: leave [cluster] out, or give an "
                "engine that starts it",
            )
        return
    division = plan(config)
    trainers, servers = division.trainers, division.servers
    if division.nodes != cluster.nodes or trainers < 1:
        yield (
            "cluster.nodes",
            f"is not the sum of {trainers} machines that train and {servers} that serve: change "
            "cluster.trainer_nodes, inference_nodes or nodes",
        )
    key = "cluster.inference_nodes"
    if servers < 1 and config.starts_inference:
        yield key, "leaves nobody to sample: give at least 1, or orchestrator.inference_urls"
    if servers and not config.plays:
        yield key, "has no use, because nothing is sampled: leave it out"
    if servers and config.orchestrator.inference_urls:
        yield key, "is not used with orchestrator.inference_urls: leave either of them out"
    if (cluster.min_trainer_nodes or 0) > trainers:
        yield (
            "cluster.min_trainer_nodes",
            f"is more than the {trainers} machines that train: lower it",
        )
    if cluster.index is not None and cluster.index >= cluster.nodes:
        yield "cluster.index", f"must be below cluster.nodes = {cluster.nodes}"
    copies = trainer.dp_replicate
    ranks = trainer.ranks or (0 if is_ratio(config) else count(trainer.gpus))
    for machines in range(cluster.min_trainer_nodes or trainers, trainers + 1) if ranks else ():
        divisor = f"the {machines * ranks} ranks of {machines} machines with {ranks} each"
        if (machines * ranks) % (copies * trainer.context_parallel):
            name = "dp_replicate" if copies > 1 else "context_parallel"
            yield f"trainer.{name}", f"must divide {divisor}"
            break
        if (machines * ranks) % (copies * trainer.expert_parallel):
            yield (
                "trainer.expert_parallel",
                f"times trainer.dp_replicate = {copies} must divide {divisor}",
            )
            break
    if as_ids(trainer.gpus) and as_ids(config.inference.gpus):
        yield (
            "inference.gpus",
            "names GPUs of one machine, but each machine of a cluster trains or serves: "
            "leave it out",
        )


def time_fault(cluster: ClusterConfig, limit: str) -> str:
    """Returns why a job of Slurm with this time limit would save before it can train; empty if
    it would not."""
    needed_s, limit_s = cluster.grace_s + END_S + SLURM_EARLY_S, slurm_seconds(limit)
    if not 0 < limit_s <= needed_s:
        return ""
    told = (
        f"a job is told to save up to {needed_s:g} s before its time limit (cluster.grace_s and "
        f"{END_S + SLURM_EARLY_S} s)"
    )
    return f"leaves no time to train: {told}; set a longer one, or a smaller cluster.grace_s"


def slurm_seconds(limit: str) -> int:
    """Returns the seconds of a time limit as `sbatch --time` takes it; 0 for none, and for what
    only Slurm understands."""
    days, dash, clock = limit.rpartition("-")
    fields = clock.split(":")
    if (
        not all(part.isascii() and part.isdigit() for part in [*fields, days or "0"])
        or len(fields) > 3
    ):
        return 0
    unit_s = 3600 if dash or len(fields) == 3 else 60
    return int(days or 0) * 86400 + sum(
        int(part) * unit_s // 60**power for power, part in enumerate(fields)
    )
