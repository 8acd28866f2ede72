"""The JobSet of a run: what a real cluster would accept of it, by published schemas, and what
kubectl is told. No cluster is reached."""

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from rl.cluster import kubernetes
from rl.cluster.reach import index_of
from rl.config.command_line import from_toml
from rl.system.errors import RunError
from tests.cluster import configs

VERSION = "1.37"
"""Of Kubernetes, whose schemas `kubernetes-validate` has. That of JobSets is made from the
models of Kubeflow's trainer, which are generated from JobSet's own API; they know neither its
enumerations nor the rules of its webhook: `admitted` asserts those that matter."""
SPOT = {
    "node_selector": {"cloud.google.com/gke-spot": "true"},
    "tolerations": [
        {"key": "spot", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    ],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one pod": {"nodes": 1},
    "one of each": {"nodes": 2},
    "many": {"nodes": 12, "trainer_nodes": 4, "grace_s": 90.5},
    "no servers": {"nodes": 4, "trainer_nodes": 4, "inference_nodes": 0},
    "queue": {"nodes": 3, "kubernetes": {"queue": "team-a", "namespace": "research"}},
    "spot": {"nodes": 3, "kubernetes": SPOT},
    "secrets": {"nodes": 2, "kubernetes": {"secrets": ["wandb", "hub"]}},
    "no GPUs": {"nodes": 2, "kubernetes": {"gpus": 0}},
}
PODS = {"one pod": (1, 0), "many": (4, 8), "no servers": (4, 0), "queue": (1, 2), "spot": (1, 2)}
"""Pods that train and pods that serve; in the other variants one each."""


def run_config(cluster, **settings):
    given = {"image": "registry.example/rl:1", "volume_claim": "runs"} | cluster.get(
        "kubernetes", {}
    )
    cluster = cluster | {"engine": "kubernetes", "kubernetes": given}
    return configs.run_config(Path("/outputs"), cluster, **{"name": "Qwen3_Maths.v2"} | settings)


def rendered(cluster):
    """ConfigMap and JobSet, as kubectl would read them."""
    config = run_config(cluster)
    config_map, job_set = yaml.safe_load_all(kubernetes.render(config, config.run_dir))
    return config_map, job_set


def strict(schema):
    """The schema without room for keys that it does not name."""
    if isinstance(schema, dict):
        inner = {key: strict(value) for key, value in schema.items()}
        return inner | {"additionalProperties": False} if "properties" in inner else inner
    return [strict(item) for item in schema] if isinstance(schema, list) else schema


SCHEMA = strict(JobsetV1alpha2JobSet.model_json_schema())
# the generator takes it for a table
SCHEMA["$defs"]["IoK8sApimachineryPkgApiResourceQuantity"] = {"type": ["string", "number"]}
JOB_SET = jsonschema.Draft202012Validator(SCHEMA)


def jobs_of(job_set):
    """The specifications of its Jobs."""
    return {job["name"]: job["template"]["spec"] for job in job_set["spec"]["replicatedJobs"]}


def pod_of(job):
    return job["template"]["spec"]


def complaints(*manifests):
    """What the schemas have against ConfigMap, JobSet, and the Jobs that would be made from it."""
    config_map, job_set = manifests
    yield from (error.message for error in JOB_SET.iter_errors(job_set))
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}
        for name, spec in jobs_of(job_set).items()
    ]
    for manifest in (config_map, *jobs):
        try:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield error.message


def admitted(job_set):
    """Whether the rules hold that no schema tells: the API server's and JobSet's for Jobs like
    ours."""
    name, jobs = job_set["metadata"]["name"], jobs_of(job_set)
    assert job_set["spec"]["successPolicy"] == {
        "operator": "All",
        "targetReplicatedJobs": ["trainer"],
    }
    for role, job in jobs.items():
        longest = f"{name}-{role}-0-{job['completions'] - 1}-abcde"
        assert len(longest) <= 63 and longest.islower() and longest.replace("-", "").isalnum()
        # A policy for failures, and a limit of failures an index, are for Indexed Jobs whose pods
        # are not restarted in place.
        assert job["completionMode"] == "Indexed" and pod_of(job)["restartPolicy"] == "Never"
        assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == [
            "FailJob",
            "Ignore",
        ]
        names = {volume["name"] for volume in pod_of(job)["volumes"]}
        assert {
            mount["name"]
            for container in pod_of(job)["containers"]
            for mount in container["volumeMounts"]
        } == names
    return True


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cluster_would_accept_it(variant):
    config_map, job_set = rendered(VARIANTS[variant])
    assert not [*complaints(config_map, job_set)] and admitted(job_set)
    trainers, servers = PODS.get(variant, (1, 1))
    counts = {
        name: (job["completions"], job["parallelism"]) for name, job in jobs_of(job_set).items()
    }
    assert counts == {
        name: (count, count)
        for name, count in (("trainer", trainers), ("inference", servers))
        if count
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_pod_knows_its_index(variant):
    """Kubernetes counts the pods of each Job from 0."""
    cluster = run_config(VARIANTS[variant]).cluster
    assert cluster
    indices = []
    for job in jobs_of(rendered(VARIANTS[variant])[1]).values():
        (container,) = pod_of(job)["containers"]
        variables = {entry["name"]: entry["value"] for entry in container["env"]}
        indices += [
            index_of(cluster, variables | {"JOB_COMPLETION_INDEX": str(i)})
            for i in range(job["completions"])
        ]
    assert indices == [*range(cluster.nodes)]


def test_what_the_settings_become(tmp_path):
    def pod(variant, role="trainer"):
        pod = pod_of(jobs_of(rendered(VARIANTS[variant])[1])[role])
        return pod, pod["containers"][0]

    config_map, job_set = rendered(VARIANTS["many"])
    many, container = pod("many", "inference")
    assert container["command"] == ["rl", "node", "@", "/etc/rl/config.toml"]
    assert many["terminationGracePeriodSeconds"] == 91 + 30
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "8"},
        "requests": {"cpu": "2", "memory": "8Gi"},
    }
    assert jobs_of(job_set)["trainer"]["backoffLimitPerIndex"] == 100
    volumes = {volume["name"]: volume for volume in many["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/outputs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert mounts["/etc/rl"]["configMap"] == {"name": config_map["metadata"]["name"]}
    (path := tmp_path / "config.toml").write_text(config_map["data"]["config.toml"])
    # and not the run in the folder of that file
    assert from_toml(path) == run_config(VARIANTS["many"])
    spot = pod("spot")[0]
    assert spot["nodeSelector"] == SPOT["node_selector"]
    assert spot["tolerations"] == SPOT["tolerations"]
    named = [{"secretRef": {"name": name}} for name in ("wandb", "hub")]
    assert pod("secrets")[1]["envFrom"] == named
    assert [*pod("no GPUs")[1]["resources"]] == ["requests"]
    queued = rendered(VARIANTS["queue"])
    assert queued[1]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
    assert [manifest["metadata"]["namespace"] for manifest in queued] == ["research", "research"]


def test_a_run_elsewhere_has_another_name():
    """Two runs of one name in different directories, and names that Kubernetes does not allow."""
    here, there = run_config({"nodes": 2}), run_config({"nodes": 2}, output_dir="/outputs/b")
    names = [
        kubernetes.job_name(config.run_dir)
        for config in (here, there, run_config({"nodes": 2}, name="é" * 50 + "x" * 50))
    ]
    assert len({*names}) == 3
    assert names[0].startswith("rl-qwen3-maths-v2-")
    assert max(map(len, names)) <= 40


def test_a_planted_error_is_found():
    config_map, job_set = rendered(VARIANTS["many"])
    job_set["spec"]["replicatedJobs"][1]["replicas"] = "one"
    assert [*complaints(config_map, job_set)]


# kubectl ------------------------------------------------------------------------------------------

KUBECTL = f"""#!{sys.executable}
import json, os, pathlib, sys, time
here = pathlib.Path(__file__).parent
text = sys.stdin.read()
with open(here / "calls.jsonl", "a") as file:
    print(json.dumps([sys.argv[1:], text]), file=file)
answers = json.loads((here / "answers.json").read_text())
words = " ".join(sys.argv[1:])
code, out, err, wait_s = next((answer for start, answer in answers.items() if start in words), [0, "", "", 0])
time.sleep(wait_s)
print(out)
print(err, file=sys.stderr)
sys.exit(code)
"""
"""Records what it is told, and answers as `answers.json` says."""


class Kubectl:
    """A kubectl on the PATH that reaches nothing."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "kubectl").write_text(KUBECTL)
        (folder / "kubectl").chmod(stat.S_IRWXU)
        self.answers: dict[str, tuple[int, str, str, float]] = {
            "get pvc": (0, '["ReadWriteMany"]', "", 0.0)
        }

    def answer(self, words, code=0, out="", err="", wait_s=0.0):
        self.answers[words] = (code, out, err, wait_s)
        (self.folder / "answers.json").write_text(json.dumps(self.answers))

    def calls(self):
        return [
            (words, text)
            for words, text in map(
                json.loads, (self.folder / "calls.jsonl").read_text().splitlines()
            )
        ]


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake = Kubectl(tmp_path)
    fake.answer("nothing")
    return fake


def submit(variant="many"):
    config = run_config(VARIANTS[variant])
    return kubernetes.submit(config, config.run_dir)


def test_what_is_applied_and_deleted(kubectl):
    config = run_config(VARIANTS["queue"])
    jobs, name = submit("queue"), kubernetes.job_name(config.run_dir)
    assert jobs == [f"jobset/{name}", f"configmap/{name}"]
    looks, (words, text) = kubectl.calls()[:3], kubectl.calls()[3]
    assert [look[0][2:5] for look in looks] == [
        ["get", "pvc", "runs"],
        ["get", "jobset", name],
        ["delete", *jobs],
    ]
    assert words == ["--namespace", "research", "apply", "-f", "-"]
    start = re.compile(r"start-\w+")
    assert start.sub("", text) == start.sub("", kubernetes.render(config, config.run_dir))
    assert (
        len({*start.findall(text)})
        == 1
        != len({*start.findall(text + kubernetes.render(config, config.run_dir))})
    )
    kubernetes.cancel(jobs, config)
    assert kubectl.calls()[4][0][2:5] == ["delete", *jobs]
    assert "--timeout=90s" in kubectl.calls()[4][0]


def test_a_run_that_has_ended_is_replaced_and_one_that_has_not_is_left_alone(kubectl):
    kubectl.answer("get jobset", out="rl-x=")
    with pytest.raises(
        RunError, match=r"has not ended: stop it first, with `rl stop /outputs/Qwen3_Maths\.v2`"
    ):
        submit()
    assert [call[0][0] for call in kubectl.calls()] == ["get", "get"]
    assert kubernetes.active(["jobset/rl-x", "configmap/rl-x"], run_config(VARIANTS["many"])) == [
        "jobset/rl-x"
    ]
    kubectl.answer("get jobset", out="rl-x=Completed")
    assert not kubernetes.active(["jobset/rl-x", "configmap/rl-x"], run_config(VARIANTS["many"]))
    submit()
    assert [call[0][0] for call in kubectl.calls()[4:]] == ["get", "get", "delete", "apply"]


NO_JOB_SETS = (
    'error: resource mapping not found: no matches for kind "JobSet" in version '
    '"jobset.x-k8s.io/v1alpha2"'
)
ANSWERS = {
    "no claim": (
        "get pvc",
        1,
        "",
        'Error from server (NotFound): persistentvolumeclaims "runs" not found',
        "create the claim",
    ),
    "one machine's claim": ("get pvc", 0, '["ReadWriteOnce"]', "", "must be ReadWriteMany"),
    "no JobSets": (
        "get jobset",
        1,
        "",
        'error: the server doesn\'t have a resource type "jobset"',
        "controller of https://jobset.sigs",
    ),
    "no JobSets yet": ("apply", 1, "", NO_JOB_SETS, "controller of https://jobset.sigs"),
    "no right": (
        "apply",
        1,
        "",
        'Error from server (Forbidden): jobsets is forbidden: User "x" cannot',
        "ask for the right",
    ),
    "no cluster": (
        "get pvc",
        1,
        "",
        "dial tcp 127.0.0.1:8080: connection refused",
        "kubectl cluster-info",
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_kubectl_complains_of_is_told_with_the_remedy(kubectl, case):
    words, code, out, err, remedy = ANSWERS[case]
    kubectl.answer(words, code, out, err)
    with pytest.raises(RunError) as raised:
        submit()
    assert err in str(raised.value) and remedy in str(raised.value) and raised.value.exit_code != 0


def test_a_kubectl_that_hangs(kubectl, monkeypatch):
    kubectl.answer("get pvc", wait_s=60.0)
    monkeypatch.setattr(kubernetes.kubectl, "__kwdefaults__", {"text": "", "timeout_s": 0.5})
    with pytest.raises(
        RunError, match="has not ended within 0 s: see whether `kubectl cluster-info` reaches"
    ):
        submit()


def test_faults_that_need_no_cluster(kubectl, monkeypatch):
    assert not [*kubernetes.faults(run_config(VARIANTS["many"]))]
    unset = {"image": "", "volume_claim": ""}
    bare = run_config({"nodes": 2, "kubernetes": unset}, output_dir="/home/me/outputs")
    monkeypatch.setenv("PATH", "/nowhere")
    faults = {key: remedy for key, _, remedy in kubernetes.faults(bare)}
    section = "cluster.kubernetes"
    assert [*faults] == [
        "cluster.engine",
        f"{section}.image",
        f"{section}.volume_claim",
        "output_dir",
    ]
    assert faults["output_dir"].endswith("give /outputs or a folder in it")
    with pytest.raises(RunError, match="`kubectl`, which is not on the PATH"):
        submit()
