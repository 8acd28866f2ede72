"""`rl doctor` before a run: each check on this machine, and on machines that are made out to
lack something."""

import errno
import fcntl
import json
import os
import resource
import shutil
import socket
import time
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from rl.commands.doctor import configuration, machine
from rl.commands.doctor.main import main
from rl.launch.children import Children
from rl.models.tiny import make_tiny_model
from rl.system import linux
from tests.commands.driver import called
from tests.flags import made


def levels(checks):
    return {check.name: check.level for check in checks}


def test_this_machine_passes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--no-smoke"], Children()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:18].strip() for line in lines] == [
        "versions",
        "cores",
        "memory",
        "GPUs",
        "ports",
        "files",
        "shm",
        "disk",
        "disk speed",
        "locks",
        "clock",
    ]
    assert all(line.startswith(("ok  ", "warn")) for line in lines)
    assert lines[0].startswith("ok    versions     python 3.") and "vllm" in lines[0]
    assert not (tmp_path / "outputs").exists()  # a question leaves nothing


Usage = namedtuple("Usage", "total used free")


def refuse(number):
    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


def nameless(host, *_, find=socket.getaddrinfo, **__):
    if host == socket.gethostname():
        raise socket.gaierror(-2, "Name or service not known")
    return find(host, *_, **__)


@pytest.mark.parametrize(
    ("check", "patch", "level", "said"),
    [
        ("versions", (metadata, "version", lambda name: "0.1"), "FAIL", "torch 0.1, required "),
        (
            "memory",
            (machine, "memory_bytes", lambda: (4 << 30, 1 << 30)),
            "warn",
            "1 GiB of 4 GiB free; the default model needs about",
        ),
        (
            "gpus",
            (machine, "visible_gpus", lambda _: ["0", "1"]),
            "warn",
            "2, but vLLM is built for CPUs; run `uv sync --no-group",
        ),
        (
            "gpus",
            (machine, "is_cpu_vllm", lambda: False),
            "FAIL",
            "none; vLLM is built for GPUs, so inference will not start",
        ),
        (
            "loopback",
            (socket, "create_server", refuse(errno.EADDRNOTAVAIL)),
            "FAIL",
            "127.0.0.1: [Errno 99] ",
        ),
        ("loopback", (socket, "getaddrinfo", nameless), "warn", "this host's name"),
        (
            "open_files",
            (resource, "getrlimit", lambda _: (100, 100)),
            "FAIL",
            "100 files may be open at once",
        ),
        (
            "shared_memory",
            (shutil, "disk_usage", lambda _: Usage(1 << 30, 0, 64 << 20)),
            "warn",
            "64 MiB free in /dev/shm: ",
        ),
        (
            "shared_memory",
            (linux, "SHARED_MEMORY", Path("/nowhere")),
            "FAIL",
            "/nowhere does not exist, and torch",
        ),
    ],
)
def test_what_a_machine_lacks(monkeypatch, check, patch, level, said):
    monkeypatch.setattr(*patch)
    assert getattr(machine, check)()[0] == level and said in getattr(machine, check)()[1]


@pytest.mark.parametrize(
    ("name", "patch", "level", "said"),
    [
        (
            "disk",
            (shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(1, 1, 1 << 30)),
            "FAIL",
            "1 GiB free in ",
        ),
        (
            "disk speed",
            (machine, "SLOW_MIB_S", 1e9),
            "warn",
            "checkpoints and batches will slow training",
        ),
        (
            "locks",
            (fcntl, "flock", lambda *_: None),
            "warn",
            "two exclusive locks were granted at once: roles rely on leases alone",
        ),
        ("locks", (fcntl, "flock", refuse(errno.ENOLCK)), "warn", "flock: No locks available: "),
        (
            "clock",
            (time, "time", lambda: 1e9),
            "warn",
            "from the file server's: heartbeats of other nodes would look old or new",
        ),
    ],
)
def test_what_a_file_system_lacks(tmp_path, monkeypatch, name, patch, level, said):
    monkeypatch.setattr(machine, "WRITE_BYTES", 1 << 20)
    monkeypatch.setattr(*patch)
    found = {check.name: check for check in machine.disk_checks(tmp_path)}
    assert found[name].level == level and said in found[name].text
    assert list(tmp_path.iterdir()) == []


# A configuration ----------------------------------------------------------------------------------


def config_of(tmp_path, *more):
    line = f"--output_dir {tmp_path} --name x --orchestrator.environment.id none"
    return made(line, *more)


def test_run_directory_devices_and_network(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    assert configuration.run_directory(config).level == "ok"
    config.run_dir.config.parent.mkdir()
    config.run_dir.config.touch()  # the user's own
    found = configuration.run_directory(config)
    assert found.level == "FAIL"
    assert found.text.endswith(
        "x is not a run directory, and has config.toml; choose another --name"
    )
    config.run_dir.batch(1).parent.mkdir()
    config.run_dir.batch(1).touch()
    assert "continue that run with --resume" in configuration.run_directory(config).text
    assert configuration.division(config).level == "ok"
    assert [check.level for check in configuration.exposed(config)] == ["ok"]
    wide = config_of(tmp_path, "--trainer.cpus 4096 --inference.host 0.0.0.0")
    assert configuration.division(wide).level == "FAIL"
    assert "trainer.cpus = 4096 there are " in configuration.division(wide).text
    assert [check.level for check in configuration.exposed(wide)] == ["warn"]
    monkeypatch.setenv("RL_TOKEN", "short")
    assert levels(configuration.exposed(wide)) == {"network": "warn"}
    assert next(iter(configuration.exposed(wide))).level == "FAIL"


def test_servers_that_a_run_needs(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"http://127.0.0.1:{server.getsockname()[1]}"
        config = config_of(
            tmp_path, "--orchestrator.inference_urls", json.dumps([there, "http://127.0.0.1:1"])
        )
        found = list(configuration.servers(config))
    assert [check.level for check in found] == ["ok", "FAIL"]
    assert found[1].text.startswith(
        "orchestrator.inference_urls = http://127.0.0.1:1: [Errno 111] "
    )


def test_wandb_knows_who_we_are(tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert configuration.wandb().level == "warn"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert configuration.wandb().level == "ok"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "nothing is sent" in configuration.wandb().text


def test_sizes_of_a_model(tmp_path, monkeypatch):
    model = make_tiny_model(tmp_path / "tiny")
    config = config_of(tmp_path, f"--model.name {model}")
    found = list(configuration.sizes(config, model))
    assert [check.name for check in found] == ["memory", "disk"] and found[1].level == "ok"
    assert found[0].text.startswith("0M weights need about 4 GiB on a CPU; ")
    monkeypatch.setattr(configuration, "memory_bytes", lambda: (1 << 30, 1 << 30))
    assert next(iter(configuration.sizes(config, model))).level == "warn"


def test_faults_of_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for args, said in [
        (
            ["nowhere"],
            "nowhere: not a run of rl; give the directory with its config.toml, or the run's "
            "name under outputs/",
        ),
        (["x.toml"], "write files as `@ FILE`: rl doctor @ x.toml"),
        (["nowhere", "--seed 1"], "give only RUN"),
        (["--parity x --dtype int8"], "--dtype int8: give float32 or bfloat16"),
        (["--sed 1"], "did you mean seed?"),
    ]:
        code, _, err = called(capsys, "doctor", *args)
        assert code == 2 and err.startswith("rl doctor: ") and said in err
