"""Kubernetes: one JobSet for a run, with an Indexed Job of the pods that train and another of those
that serve.

    ConfigMap rl-NAME   the resolved configuration, which each pod reads as CONFIG: this machine
                        need not see the volume
    JobSet rl-NAME      trainer: indices 0 to T-1; inference: indices T to T+I-1, since
                        RL_INDEX_OFFSET = T

A Job replaces its pods: one that was evicted always, one that failed up to cluster.max_requeues
times, and none once a pod has said `never again`: that ends the Job, and so the JobSet. The end of
the Job `trainer` is the end of the JobSet.
"""

import math
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml

from rl.cluster.reach import OFFSET
from rl.config.base import Fault
from rl.config.cluster import ClusterConfig
from rl.config.command_line import to_toml
from rl.config.plan import END_S, cluster_of, plan
from rl.config.run import RLConfig
from rl.run_dir.nodes import START
from rl.run_dir.paths import RunDir
from rl.system.errors import GIVE_UP, WRONG_SETTINGS, RunError

CONFIG = "/etc/rl/config.toml"
"""The configuration in a pod."""
TIMEOUT_S = 60.0
"""Seconds that kubectl has to answer."""
MAX_SLUG = 28
"""Characters of the run's name in that of the JobSet: names of pods,
`rl-SLUG-DIGEST-inference-0-INDEX-SUFFIX`, have at most 63."""
NO_KUBECTL = "which is not on the PATH: install it, or submit where it is"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
EXPLAINED = {
    r"no matches for kind \"JobSet\"|resource type \"jobsets?\"": "the cluster has no JobSets: "
    "have the controller of "
    "https://jobset.sigs.k8s.io installed",
    r"persistentvolumeclaims .* not found": "create the claim, or give the name of another as "
    "cluster.kubernetes.volume_claim "
    "(`kubectl get pvc` lists them)",
    r"[Ff]orbidden": "ask for the right to do that, or give another cluster.kubernetes.namespace",
}
"""Remedies, by what kubectl says."""
REACHES = "see whether `kubectl cluster-info` reaches the cluster you mean"


def faults(config: RLConfig) -> Iterator[Fault]:
    """Yields what can be seen to be wrong before the cluster is asked."""
    settings, key = cluster_of(config).kubernetes, "cluster.kubernetes"
    if not shutil.which("kubectl"):
        yield "cluster.engine", "kubernetes", f"needs `kubectl`, {NO_KUBECTL}"
    if not settings.image:
        yield f"{key}.image", "", "name a container image in which `rl` is installed"
    if not settings.volume_claim:
        remedy = "name a PersistentVolumeClaim that all pods may write (ReadWriteMany)"
        yield f"{key}.volume_claim", "", remedy
    folders = {"output_dir": config.output_dir, "trainer.weights.dir": config.trainer.weights.dir}
    for name, folder in folders.items():
        if folder and not Path(folder).is_relative_to(settings.mount):
            remedy = (
                f"is not on the volume, which pods see as {key}.mount: give {settings.mount} or a "
                "folder in it"
            )
            yield name, folder, remedy


def stays(config: RLConfig) -> bool:
    """Returns False: the run does not end with this process."""
    return False


def submit(config: RLConfig, run_dir: RunDir) -> list[str]:
    """Applies ConfigMap and JobSet and returns their names for kubectl. Raises RunError.

    Deletes a JobSet of the same run that has ended before, since applying the same one again would
    start nothing.
    """
    cluster, jobs = cluster_of(config), jobs_of(run_dir)
    claim = cluster.kubernetes.volume_claim
    modes = kubectl(cluster, "get", "pvc", claim, "-o", "jsonpath={.spec.accessModes}")
    if cluster.nodes > 1 and "ReadWriteMany" not in modes:
        raise RunError(
            f"volume claim {claim} has access modes {modes}, but pods on several machines "
            "write to it: it must be ReadWriteMany"
        )
    if active(jobs, config):
        raise RunError(
            f"{jobs[0]} of this run exists and has not ended: stop it first, with `rl "
            f"stop {run_dir.root}`"
        )
    cancel(jobs, config)
    kubectl(cluster, "apply", "-f", "-", text=render(config, run_dir))
    return jobs


def active(jobs: list[str], config: RLConfig) -> list[str]:
    """Returns the JobSet, unless it has ended. Raises RunError."""
    state = "jsonpath={.metadata.name}={.status.terminalState}"
    words = "get", *jobs[0].split("/"), "--ignore-not-found", "-o", state
    return jobs[:1] if kubectl(cluster_of(config), *words).endswith("=") else []


def cancel(jobs: list[str], config: RLConfig) -> None:
    """Deletes what `submit` has applied, and waits until its pods have ended. Raises RunError."""
    cluster = cluster_of(config)
    wait_s = math.ceil(cluster.grace_s) + END_S
    flags = ["--ignore-not-found", "--cascade=foreground", "--wait", f"--timeout={wait_s}s"]
    kubectl(cluster, "delete", *jobs, *flags, timeout_s=wait_s + TIMEOUT_S)


def kubectl(
    cluster: ClusterConfig, *arguments: str, text: str = "", timeout_s: float = TIMEOUT_S
) -> str:
    """Returns what kubectl prints. Raises RunError with what it complains of, and the remedy."""
    namespace = cluster.kubernetes.namespace
    command = ["kubectl", *(["--namespace", namespace] if namespace else []), *arguments]
    shown = f"`{' '.join(command)}`"
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeout_s
        )
    except FileNotFoundError:
        raise RunError(f"needs `kubectl`, {NO_KUBECTL}") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{shown} has not ended within {timeout_s:.0f} s: {REACHES}") from None
    if done.returncode:
        words = done.stderr.strip() or f"exit code {done.returncode}"
        remedies = (EXPLAINED[pattern] for pattern in EXPLAINED if re.search(pattern, words))
        raise RunError(f"{shown} failed: {words}\n{next(remedies, REACHES)}")
    return done.stdout.strip()


class Dumper(yaml.SafeDumper):
    """Writes text of several lines as such, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def render(config: RLConfig, run_dir: RunDir) -> str:
    """Returns ConfigMap and JobSet as YAML."""
    return yaml.dump_all(manifests(config, run_dir), Dumper=Dumper, sort_keys=False, width=140)


def manifests(config: RLConfig, run_dir: RunDir) -> list[dict[str, Any]]:
    division, settings = plan(config), cluster_of(config).kubernetes
    start = f"start-{secrets.token_hex(4)}"
    jobs = {
        "trainer": (division.trainers, 0),
        "inference": (division.servers, division.trainers),
    }
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
        "replicatedJobs": [
            job(name, count, offset, config, run_dir, start)
            for name, (count, offset) in jobs.items()
            if count
        ],
    }
    metadata = filled({"name": job_name(run_dir), "namespace": settings.namespace})
    labels = {QUEUE_LABEL: settings.queue} if settings.queue else {}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {Path(CONFIG).name: to_toml(config)},
    }
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": filled(metadata | {"labels": labels}),
        "spec": spec,
    }
    return [config_map, job_set]


def job_name(run_dir: RunDir) -> str:
    """Returns the name of a run's JobSet: that of the run as far as Kubernetes allows it, and a
    digest of its directory."""
    slug = re.sub(r"[^a-z0-9]+", "-", run_dir.root.name.lower())[:MAX_SLUG].strip("-")
    digest = blake2b(bytes(run_dir.root), digest_size=4).hexdigest()
    return "-".join(filter(None, ["rl", slug, digest]))


def jobs_of(run_dir: RunDir) -> list[str]:
    """Returns what is applied for a run, as kubectl names it."""
    return [f"{kind}/{job_name(run_dir)}" for kind in ("jobset", "configmap")]


def job(
    name: str, count: int, offset: int, config: RLConfig, run_dir: RunDir, start: str
) -> dict[str, Any]:
    """Returns a replicated Job of `count` pods, whose indices begin at `offset`. `start`: see
    START."""
    again = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    never = {"containerName": "rl", "operator": "In", "values": [WRONG_SETTINGS, GIVE_UP]}
    spec = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": cluster_of(config).max_requeues,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": never}, again]},
        "template": {"spec": pod(offset, config, run_dir, start)},
    }
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def pod(offset: int, config: RLConfig, run_dir: RunDir, start: str) -> dict[str, Any]:
    cluster = cluster_of(config)
    settings = cluster.kubernetes
    volumes = {
        "run": (settings.mount, {"persistentVolumeClaim": {"claimName": settings.volume_claim}}),
        "config": (str(Path(CONFIG).parent), {"configMap": {"name": job_name(run_dir)}}),
        "shm": (
            "/dev/shm",
            {"emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
        ),
    }
    variables = {OFFSET: str(offset), START: start}
    limits = {"nvidia.com/gpu": str(settings.gpus)} if settings.gpus else {}
    container = {
        "name": "rl",
        "image": settings.image,
        "command": ["rl", "node", "@", CONFIG],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "envFrom": [{"secretRef": {"name": name}} for name in settings.secrets],
        "resources": filled({"limits": limits, "requests": settings.requests}),
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    spec = {
        "restartPolicy": "Never",  # the Job makes new pods, on other machines if need be
        "terminationGracePeriodSeconds": math.ceil(cluster.grace_s) + END_S,
        "nodeSelector": settings.node_selector,
        "tolerations": settings.tolerations,
        "containers": [filled(container)],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }
    return filled(spec)


def filled(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value not in ("", [], {})}
