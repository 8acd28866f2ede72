"""A worker in a sandbox: what it sees, what it reaches, what it may do; and that it plays, dies
and comes back like any other."""

import asyncio
import json
import os
import signal
import sys

import psutil
import pytest
from aiohttp import web

from rl.orchestrator.workers.pool import WorkerPool
from rl.orchestrator.workers.pool_worker import kill_reason
from rl.orchestrator.workers.worker_sandbox import WorkerSandbox
from rl.system import sandbox
from rl.system.errors import RunError
from rl.system.sandbox import innermost
from rl.wire.worker_messages import PolicySpec
from tests.interpreters import interpreter
from tests.orchestrator import light_worker
from tests.orchestrator.made import worker_setup
from tests.orchestrator.stub_inference import StubInference
from tests.web import WebServer, serving

pytestmark = pytest.mark.skipif(bool(sandbox.fault()), reason=sandbox.fault())
SAMPLING = {"max_tokens": 4, "temperature": 1.0}
ENVIRONMENT = '''
import json, os, pathlib, signal, socket
import neighbour
import verifiers as vf
from datasets import Dataset

def attempt(what):
    """Returns "" if it worked."""
    try:
        what()
        return ""
    except Exception as error:
        return type(error).__name__ + " " + str(error)

def ask(path, request):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(path)
        connection.sendall(request.encode())
        return int(connection.recv(4096).split()[1])

def load_environment(run_dir, port, home, inference_proxy, key, separators):
    def post(path, host="inference"):
        return ask(inference_proxy, f"POST {path} HTTP/1.1\\r\\nHost: {host}\\r\\nContent-Length: 2\\r\\n\\r\\n{{}}")

    found = {
        "its own": attempt(lambda: pathlib.Path("/tmp/mine").write_text("x")),
        "root": attempt(lambda: pathlib.Path("/pwned").write_text("x")),
        "its package": attempt(lambda: pathlib.Path(__file__).write_text("")),
        "its interpreter": attempt(lambda: pathlib.Path(vf.__file__).write_text("")),
        "run": sorted(os.listdir(run_dir)),
        "run, writing": attempt(lambda: (pathlib.Path(run_dir) / "x").write_text("x")),
        "home": attempt(lambda: (pathlib.Path(home) / ".ssh" / "id").read_text()),
        "shadow": attempt(lambda: open("/etc/shadow").read()),
        "setups": sorted(os.listdir(pathlib.Path(inference_proxy).parent)),
        "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
        "parent": attempt(lambda: os.kill(port["parent"], 0)),
        "variables": sorted(name for name in os.environ if "TOKEN" in name or "KEY" in name),
        "named": key,
        "tcp": attempt(lambda: socket.create_connection(("127.0.0.1", port["inference"]), 5)),
        "root user": attempt(lambda: os.setuid(0)),
        "load weights": post("/load_weights"), "status": post("/status"), "another host": post("/generate", "10.0.0.1"),
    }
    def same() -> float:
        return 1.0
    rows = [{"question": "say 1", "answer": "", "info": json.dumps(found)}] * 3
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[same]))
'''


def inside(worker):
    """The worker's own process, below those of its sandbox."""
    return psutil.Process(innermost([worker.child.pid])[worker.child.pid])


def setup_of(pool, model, status, python="", **env):
    policy = PolicySpec(
        model_path=str(model), max_model_len=1024, inference_status=str(status.absolute())
    )
    place = {"orchestrator": pool.address, "python": python, "policy": policy, "timeout_s": 60.0}
    return worker_setup(
        "env", sandbox=True, keys=["NAMED_TOKEN"], read=["neighbour.py"], **place, **env
    )


def test_what_a_worker_in_a_sandbox_sees_and_reaches(tmp_path, model, monkeypatch):
    """It plays through the relay, which has the token that the worker lacks; when killed, it
    comes back and leaves nothing behind."""
    python = str(interpreter("0.3.1"))  # while HOME is the user's, who has that home
    folder, run_dir, home = tmp_path / "spy", tmp_path / "run", tmp_path / "home"
    for path in (folder, run_dir / "status", home / ".ssh"):
        path.mkdir(parents=True)
    (folder / "spy.py").write_text(ENVIRONMENT)
    (folder / "neighbour.py").write_text("")
    monkeypatch.chdir(folder)
    (home / ".ssh" / "id").write_text("secret")
    (run_dir / "status" / "token").write_text("x" * 32)
    monkeypatch.setenv("HOME", str(home))
    for name in ("SECRET_TOKEN", "NAMED_TOKEN", "REFERRED_KEY"):
        monkeypatch.setenv(name, f"value of {name}")

    async def main():
        async with StubInference(model, run_dir / "status" / "inference.json") as inference:
            pool = WorkerPool(run_dir / "logs")
            port = {"inference": int(inference.url.rpartition(":")[2]), "parent": os.getpid()}
            inference_proxy = f"{pool.directory.name}/inference"
            args = {
                "run_dir": f"{run_dir}",
                "port": port,
                "home": str(home),
                "inference_proxy": inference_proxy,
                "key": "env:REFERRED_KEY",
                "separators": ["//", "../", "/tmp"],
            }
            try:
                async with asyncio.timeout(100):
                    await pool.start_all(
                        [
                            setup_of(
                                pool,
                                model,
                                run_dir / "status" / "inference.json",
                                python,
                                id="spy",
                                args=args,
                            )
                        ]
                    )
                    await pool.sizes(60.0)
                    about = await pool.describe("env", "train", 1, 10.0)
                    worker = pool.workers["env-0"]
                    inner = inside(worker)
                    assert "it used" in kill_reason(
                        worker, inner.pid, 0.001, 60.0
                    ) and not kill_reason(worker, inner.pid, 8.0, 60.0)
                    first = (await pool.play("env", "train", 0, 2, SAMPLING, 0))[0]
                    os.kill(inner.pid, signal.SIGKILL)
                    second = (await pool.play("env", "train", 1, 2, SAMPLING, 0))[0]
                    assert (
                        pool.workers["env-0"].child.pid != worker.child.pid
                        and not pool.launcher.waiting()
                    )
                    last = inside(pool.workers["env-0"])
            finally:
                await pool.close()
            zombies = [child for child in psutil.Process().children() if child.name() == "bwrap"]
            assert len(zombies) <= 1, "but for the last, which nobody came after"
            assert not psutil.pid_exists(inner.pid) and not last.is_running()
            return about.tasks[0]["info"], [first, second], inference.log

    found, rollouts, asked = asyncio.run(main())
    found = json.loads(found) if isinstance(found, str) else found
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0] and {
        route for route, _ in asked
    } == {"generate"}
    assert {
        name: found[name]
        for name in ("its own", "variables", "named", "load weights", "status", "another host")
    } == {
        "its own": "",
        "variables": ["NAMED_TOKEN", "REFERRED_KEY", "TOKENIZERS_PARALLELISM"],
        "named": "[$REFERRED_KEY]",
        "load weights": 404,
        "status": 404,
        "another host": 502,
    }
    for name in ("root", "its package", "its interpreter", "run, writing"):
        assert "Read-only file system" in found[name], name
    for name, problem in {
        "home": "No such file",
        "shadow": "No such file",
        "tcp": "refused",
        "parent": "No such process",
    }.items():
        assert problem in found[name], (name, found[name])
    assert (
        found["run"] == []
        and found["setups"] == ["env-0.json", "inference", "pool"]
        and found["processes"] == 2
    )
    assert found["root user"] and (folder / "spy.py").read_text() == ENVIRONMENT


def test_the_network_and_the_keys_that_its_settings_name(tmp_path, monkeypatch):
    """A server on this machine is reachable only with `network = true`, and a variable is
    visible only if `keys` names it."""
    monkeypatch.setattr("rl.orchestrator.workers.pool_worker.BOOTSTRAP", light_worker.BOOTSTRAP)
    monkeypatch.setenv("PYTHONPATH", str(light_worker.ROOT))
    for name in ("JUDGE_KEY", "OTHER_KEY"):
        monkeypatch.setenv(name, "secret")

    async def number(_):
        return web.Response(text="7")

    async def main(address):
        pool = WorkerPool(tmp_path / "logs")
        policy, played = PolicySpec(inference_status=str(tmp_path / "inference.json")), []
        try:
            async with asyncio.timeout(60):
                for name, network in (("open", True), ("closed", False)):
                    place = {
                        "orchestrator": pool.address,
                        "python": sys.executable,
                        "keys": ["JUDGE_KEY"] if network else [],
                    }
                    pool.start(
                        worker_setup(
                            name,
                            args={"address": address},
                            policy=policy,
                            sandbox=True,
                            network=network,
                            **place,
                        )
                    )
                await pool.sizes(30.0)
                for name in ("open", "closed"):
                    (rollout,) = await pool.play(name, "train", 0, 1, {}, 0)
                    played.append(
                        (
                            rollout.reward,
                            [
                                name
                                for name in rollout.messages[0]["content"].split()
                                if name.endswith("_KEY")
                            ],
                        )
                    )
        finally:
            await pool.close()
        return played

    with serving(WebServer(web.get("/", number))) as server:
        assert asyncio.run(main(server.url)) == [(7.0, ["JUDGE_KEY"]), (0.0, [])]


def test_a_key_that_is_not_set_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    setup = worker_setup("x", sandbox=True, keys=["JUDGE_KEY", "PATH"])
    with pytest.raises(RunError, match="environment x: keys names JUDGE_KEY, not set in the shell"):
        WorkerSandbox(tmp_path, tmp_path, print).enter(setup, tmp_path / "setup.json")
