"""The commands of a run's processes, and what they inherit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.launch.roles import command, roles
from rl.run_dir.paths import RunDir
from rl.system.children import PYTHON, is_foreign
from tests.launch.test_devices import config, divide


def test_commands(tmp_path):
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    config = str(tmp_path / "config.toml")
    rank = [sys.executable, "-P", "-m", "rl.trainer.main", "@", config]
    assert command("trainer", run_dir, 1) == rank
    assert command("orchestrator", run_dir, 2) == [
        sys.executable,
        "-P",
        "-m",
        "rl.orchestrator.main",
        "@",
        config,
    ]
    two = command("trainer", run_dir, 2)
    assert two[:5] == [sys.executable, "-P", "-m", "torch.distributed.run", "--no-python"]
    assert two[-6:] == rank
    # Regression: without --local-addr, ranks on a machine whose name does not resolve waited for
    # each other without a word.
    assert two[5:-6] == [
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
        "--shutdown-timeout",
        "3600",
    ]


def test_what_lies_where_the_user_stands_is_not_what_processes_import(tmp_path):
    """Regression: a folder `rl` or a queue.py there broke all processes, and `rl doctor` called
    FSDP and vLLM broken."""
    (tmp_path / "rl").mkdir()
    for name in ("rl/__init__.py", "queue.py", "datasets.py"):
        (tmp_path / name).write_text("raise SystemExit('not this one')")
    done = subprocess.run(
        [*PYTHON, "-m", "rl.orchestrator.main", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr
    starts = [
        path
        for path in Path("src/rl").rglob("*.py")
        if re.search(r'sys.executable, "-m"', path.read_text())
    ]
    assert starts == [], "start Python as system.children.PYTHON"


FOREIGN = {
    **dict.fromkeys(
        [
            "RANK",
            "LOCAL_RANK",
            "GROUP_RANK",
            "ROLE_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "GROUP_WORLD_SIZE",
            "ROLE_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_USE_AGENT_STORE",
            "PET_NNODES",
            "PET_RDZV_ENDPOINT",
            "VLLM_DP_SIZE",
            "VLLM_PORT",
            "VLLM_HOST_IP",
            "ACCELERATE_USE_FSDP",
            "PYTHONOPTIMIZE",
            "PYTHONINSPECT",
            "NVIDIA_TF32_OVERRIDE",
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        ],
        "1",
    ),
    **dict.fromkeys(["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"], "ib7"),
    "NCCL_SOCKET_IFNAME": "=ib7,ib8",
    "PYTHONWARNINGS": "error",
}
KEPT = {
    "KEPT": "7",
    "NCCL_DEBUG": "INFO",
    "PYTHONPATH": "/nowhere",
    "HF_HUB_OFFLINE": "1",
    "TORCH_LOGS": "+inductor",
    "VLLM_PORTS": "7",
}


def test_children_inherit_nothing_that_is_meant_for_other_processes(tmp_path, monkeypatch, capsys):
    """Regression: RANK and PET_NNODES had the trainer wait for ranks that never come;
    PYTHONOPTIMIZE took the asserts out of rewards."""
    for name, value in (FOREIGN | KEPT).items():
        monkeypatch.setenv(name, value)
    children = Children()
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    logs = []
    for own in ({"RANK": "3"}, {"OWN": "1", "NCCL_SOCKET_IFNAME": "ib7"}):
        child = children.start("x", [sys.executable, "-c", program], own, tmp_path)
        assert child.wait(30) == 0
        logs.append(json.loads(child.log.read_text()))
    children.stop()
    assert not (FOREIGN.keys() - {"RANK"}) & logs[0].keys()
    assert KEPT.items() <= logs[0].items()
    assert logs[0]["RANK"] == "3"
    assert logs[1]["NCCL_SOCKET_IFNAME"] == "ib7"
    assert logs[1]["OWN"] == "1"
    assert "RANK" not in logs[1]
    told = (
        "rl: its processes do not inherit variables that are meant for others: "
        f"{', '.join(sorted(FOREIGN))}\n"
    )
    assert capsys.readouterr().err == told, "once"


@pytest.mark.parametrize("value", ["lo", "^docker", "l", "=lo", "ib7,lo"])
def test_an_interface_that_this_machine_has_is_inherited(monkeypatch, value):
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [], "eth0": []})
    assert not is_foreign("NCCL_SOCKET_IFNAME", value) and is_foreign("NCCL_SOCKET_IFNAME", "ib")


@pytest.mark.parametrize(
    ("gpus", "args", "after_server"),
    [
        (1, [], True),
        (2, [], False),
        (0, [], False),
        (1, ["--orchestrator.inference_urls", '["http://a:1"]'], False),
    ],
)
def test_on_a_shared_gpu_the_trainer_starts_when_the_server_has_its_memory(
    tmp_path, gpus, args, after_server
):
    """Regression: vLLM counted the trainer's growth as its own and had too little memory for
    keys and values, or died when it was freed."""
    found = roles(config(*args), RunDir(tmp_path, tmp_path / "weights"), divide(gpus, *args))
    assert found[-1].name == "trainer" and found[-1].after_server == after_server


@pytest.mark.parametrize(("gpus", "after_server"), [(1, True), (2, False)])
def test_on_a_shared_gpu_a_service_that_trains_waits_for_the_server_too(
    tmp_path, gpus, after_server
):
    service = RLConfig.model_validate({"serve": True})
    processes = roles(service, RunDir(tmp_path, tmp_path / "weights"), divide(gpus))
    assert [(role.name, role.after_server) for role in processes] == [
        ("inference", False),
        ("tinker", after_server),
    ]
