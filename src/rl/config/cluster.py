"""Settings of a run on several machines, and the engine that provides them."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rl.config.base import NAMES, Settings

Engine = Literal["none", "slurm", "kubernetes", "ray"]
Lines = Annotated[
    list[str],
    BeforeValidator(lambda value: value.splitlines() if isinstance(value, str) else value),
]
"""Lines of text, given as a list or as one text."""


class SlurmConfig(Settings):
    """Settings that are passed to `sbatch`. Empty ones are left to the cluster's defaults."""

    partition: str = ""
    """Partition to submit to."""
    account: str = ""
    """Account that is charged."""
    qos: str = ""
    """Quality of service."""
    time: str = ""
    """Time limit of a job, as `sbatch --time` takes it: `4:00:00`. A job that reaches it saves a
    checkpoint and is queued again."""
    gres: str = ""
    """Generic resources of each node, such as `gpu:8`."""
    container_image: str = ""
    """Image in which each node runs, for clusters with the pyxis plugin (`srun
    --container-image`)."""
    setup: Lines = []
    """Shell lines at the start of the batch script: `module load cuda`, or exports of variables,
    which reach every node."""
    extra: Annotated[list[str], NAMES] = []
    """Further options of `sbatch`, such as `--exclude=node7`."""


class KubernetesConfig(Settings):
    """Settings of the JobSet."""

    image: str = ""
    """Container image with `rl` installed. Required."""
    namespace: str = ""
    """Namespace. Default: that of kubectl's context."""
    volume_claim: str = ""
    """Name of an existing PersistentVolumeClaim that all pods may write (ReadWriteMany).
    Required."""
    mount: str = "/outputs"
    """Path at which the pods see the volume. The run's output_dir must lie in it."""
    queue: str = ""
    """Queue of Kueue that admits the job."""
    gpus: int = Field(8, ge=0)
    """GPUs of each pod."""
    requests: dict[str, str] = {"cpu": "2", "memory": "8Gi"}
    """CPU and memory that each pod is sure to have; without them it is the first to be evicted,
    and a quota may refuse it."""
    node_selector: dict[str, str] = {}
    """Labels that a machine must have to run a pod."""
    tolerations: list[dict[str, str | int]] = []
    """Taints of machines that pods tolerate, in the form of a pod's specification."""
    secrets: Annotated[list[str], NAMES] = []
    """Names of Secrets whose entries become environment variables of the pods, such as
    WANDB_API_KEY."""
    shared_memory: str = "16Gi"
    """Size of /dev/shm in each pod."""


class RayConfig(Settings):
    """Settings of the Ray actors, of which there is one a machine."""

    address: str = "auto"
    """Address of the Ray cluster: `auto`, or that of its head, `host:6379`."""
    gpus: int | None = Field(None, ge=0)
    """GPUs of each actor. Default: those of the machine with the fewest."""
    resources: dict[str, float] = {}
    """Custom resources that each actor takes."""


class ClusterConfig(Settings):
    """A run on several machines, which the run calls its nodes. See docs/clusters.md."""

    engine: Engine = "none"
    """What starts `rl node` on each machine and replaces machines: slurm, kubernetes, ray, or
    none if you start it yourself."""
    nodes: int = Field(2, ge=1)
    """Number of machines."""
    trainer_nodes: int | None = Field(None, ge=1)
    """Machines that train, with indices from 0 on. Default: the share of the GPUs that
    trainer.gpus has beside inference.gpus, in whole machines, or 1; for supervised fine-tuning
    all."""
    inference_nodes: int | None = Field(None, ge=0)
    """Machines that serve, one server each. Default: those that do not train."""
    min_trainer_nodes: int | None = Field(None, ge=1)
    """Machines with which training goes on if others are lost and not replaced. Default: all
    trainer_nodes."""
    index: int | None = Field(None, ge=0)
    """This machine's index, for `rl node`. Default: the engine's variable: SLURM_NODEID,
    JOB_COMPLETION_INDEX, LWS_WORKER_INDEX, SKYPILOT_NODE_RANK or DSTACK_NODE_RANK."""
    join_timeout_s: float = Field(1800.0, gt=0)
    """Seconds that machines wait for each other, and for the one that leads the run. So long,
    too, a run without machines is waited for by `rl watch` if no engine tells whether it is
    queued."""
    grace_s: float = Field(60.0, ge=0)
    """Seconds from SIGTERM, by which an engine takes a machine away, to the end of its
    processes: the trainer writes a checkpoint in them. Give more than a checkpoint takes (metric
    `time/checkpoint_cost`)."""
    max_requeues: int = Field(100, ge=0)
    """How often a job that was preempted or reached its time limit asks for another start;
    `--resume` counts anew."""
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    ray: RayConfig = RayConfig()
