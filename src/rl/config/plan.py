"""Which machine of a cluster does what: pure functions of index and configuration.

Machines 0 to T-1 train and machines T to T+I-1 serve. A machine that is replaced comes back with
its index, and so with its roles.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rl.config.base import Devices, Fault, as_ids
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


def cluster_faults(config: RLConfig) -> Iterator[Fault]:
    """Yields faults of [cluster] that can be known before any machine starts."""
    cluster = config.cluster
    if cluster is None:
        return
    if cluster.engine == "slurm" and (remedy := time_fault(cluster, cluster.slurm.time)):
        yield "cluster.slurm.time", cluster.slurm.time, remedy
    if cluster.nodes == 1:
        if cluster.engine == "none":
            yield (
                "cluster.nodes",
                1,
                "is one machine, which needs no cluster: leave [cluster] out, or give an "
                "engine that starts it",
            )
        return
    division = plan(config)
    fields = f"{division.trainers} machines that train and {division.servers} that serve"
    if division.nodes != cluster.nodes or division.trainers < 1:
        remedy = (
            f"is not the sum of {fields}: change cluster.trainer_nodes, inference_nodes or nodes"
        )
        yield "cluster.nodes", cluster.nodes, remedy
    if division.servers < 1 and config.starts_inference:
        yield (
            "cluster.inference_nodes",
            division.servers,
            "leaves nobody to sample: give at least 1, or orchestrator.inference_urls",
        )
    if division.servers and not config.plays:
        yield (
            "cluster.inference_nodes",
            division.servers,
            "has no use without sampling: leave it out",
        )
    if cluster.min_trainer_nodes and cluster.min_trainer_nodes > division.trainers:
        yield (
            "cluster.min_trainer_nodes",
            cluster.min_trainer_nodes,
            f"is more than the {division.trainers} machines that train: lower it",
        )
    if cluster.index is not None and cluster.index >= cluster.nodes:
        yield "cluster.index", cluster.index, f"must be below cluster.nodes = {cluster.nodes}"
    if division.servers and config.orchestrator.inference_urls:
        yield (
            "cluster.inference_nodes",
            division.servers,
            "is not used with orchestrator.inference_urls: leave either of them out",
        )
    copies, context, experts = (
        config.trainer.dp_replicate,
        config.trainer.context_parallel,
        config.trainer.expert_parallel,
    )
    ranks = config.trainer.ranks or (0 if is_ratio(config) else count(config.trainer.gpus))
    for machines in (
        range(cluster.min_trainer_nodes or division.trainers, division.trainers + 1)
        if ranks
        else ()
    ):
        of = f"the {machines * ranks} ranks of {machines} machines with {ranks} each"
        if (machines * ranks) % (copies * context):
            remedy = f"must divide {of}"
            yield (
                ("trainer.dp_replicate", copies, remedy)
                if copies > 1
                else ("trainer.context_parallel", context, remedy)
            )
            break
        if (machines * ranks) % (copies * experts):
            yield (
                "trainer.expert_parallel",
                experts,
                f"times trainer.dp_replicate = {copies} must divide {of}",
            )
            break
    if len(as_ids(config.trainer.gpus)) and len(as_ids(config.inference.gpus)):
        yield (
            "inference.gpus",
            config.inference.gpus,
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
