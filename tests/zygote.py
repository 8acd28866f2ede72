"""Warm processes that fork: what costs seconds to import is imported once, and a process of ours
starts in hundredths of one.

Each has one thread, and torch is told so by variables, or a fork would copy locks that nobody opens
any more.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from rl.system.prefork import without_collection

NUMBER = 12
"""Bytes of a pid or an exit code on its way to the test."""

TRAINER = (
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "rl.trainer.train",
    "rl.trainer.store.checkpoint",
    "rl.trainer.data.batch_sources",
)
ORCHESTRATOR = ("rl.launch.prepare", "rl.orchestrator.main", "tests.stub_pool")


def readable(fd: int, timeout: float | None) -> bool:
    """Whether there is something to read within `timeout` seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


class Forked:
    """A process that a zygote forked, with the part of Popen's interface that tests use. What it
    prints is in the file `log`."""

    def __init__(self, pid: int, answers: int, log: Path):
        self.pid, self.answers, self.log = pid, answers, log
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for the signal that ended it."""
        if self.returncode is None:
            if not readable(self.answers, timeout):
                raise subprocess.TimeoutExpired(str(self.log), timeout or 0.0)
            self.returncode = int(os.read(self.answers, NUMBER))
            os.close(self.answers)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The test's side of a process that has imported `modules`."""

    def __init__(self, *modules: str, **environment: str):
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = [sys.executable, "-m", "tests.zygote", *modules]
        env = os.environ | threads | environment
        self.process = subprocess.Popen(
            command, cwd=Path(__file__).parent.parent, env=env, stdin=subprocess.PIPE, text=True
        )
        self.environment = threads | environment
        self.fifos = tempfile.TemporaryDirectory(prefix="zygote-")
        self.num_forked = 0

    def fork(
        self,
        role: str,
        *arguments: str,
        log: Path,
        env: Mapping[str, str] = os.environ,
        setup: str = "",
        fault: str = "",
        trace: str = "",
    ) -> Forked:
        """Runs `python -m rl.ROLE.main ARGUMENTS` in a fork, in a session of its own; before that
        it calls `setup`, "module:function".

        A role with a dot is a module whose `main` is called.
        """
        assert self.process.stdin
        self.num_forked += 1
        fifo = f"{self.fifos.name}/{self.num_forked}"
        os.mkfifo(fifo)
        answers = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        order = {
            "role": role,
            "argv": [role, *arguments],
            "log": str(log),
            "env": self.environment | dict(env),
            "setup": setup,
        }
        self.process.stdin.write(
            json.dumps(order | {"fifo": fifo, "fault": fault, "trace": trace}) + "\n"
        )
        self.process.stdin.flush()
        if not readable(answers, 240):
            raise TimeoutError(f"the zygote of {role} did not fork within 240 s")
        return Forked(int(os.read(answers, NUMBER)), answers, log)

    def live(self, role: str, config: Path, log: Path, fault: str = "", trace: str = "") -> int:
        """One process from its start to its end; returns its exit code."""
        return self.fork(role, "@", str(config), log=log, fault=fault, trace=trace).wait(200)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)
        self.fifos.cleanup()


@cache
def trainer_zygote() -> Zygote:
    """The zygote of all trainers that this process of pytest starts; it ends with it."""
    return Zygote(*TRAINER)


@cache
def inference_zygote() -> Zygote:
    """The zygote of all vLLM servers that this process of pytest starts; it ends with it."""
    return Zygote("rl.inference.main")


def preload(modules: list[str]) -> None:
    """Everything that the roles import, and what is slow the first time."""
    for module in modules:
        importlib.import_module(module)
    if "rl.inference.main" in modules:
        from rl.config.run import RLConfig
        from rl.inference.main import preload as preload_inference

        preload_inference(RLConfig())


def run(role: str) -> None:
    """The process itself."""
    if role == "prepare":
        from rl.config.command_line import from_toml
        from rl.launch.prepare import prepare

        settings = from_toml(Path(sys.argv[-1]))
        prepare(settings, resume=int(os.environ.get("RESUME", "2")), clean=False)
    elif role == "orchestrator":
        import rl.orchestrator.main
        from tests.stub_pool import StubPool

        rl.orchestrator.main.WorkerPool = StubPool  # type: ignore[misc]
        rl.orchestrator.main.main()
    else:
        importlib.import_module(role if "." in role else f"rl.{role}.main").main()


def live(order: dict) -> None:
    """After the fork: never returns."""
    from rl.system import faults

    os.setsid()
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = order["argv"]
    with open(order["log"], "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if order["fault"] or order["trace"]:
        faults.plan = faults.FaultPlan(order["fault"], order["trace"], process=order["role"])
    code = 0
    try:
        if order["setup"]:
            module, _, function = order["setup"].partition(":")
            getattr(importlib.import_module(module), function)()
        run(order["role"])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def keep(order: dict) -> None:
    """In the first fork: the parent of the process, which tells its pid and how it ended. Never
    returns."""
    answers = os.open(order["fifo"], os.O_WRONLY)
    if (pid := os.fork()) == 0:
        os.close(answers)
        live(order)
    os.write(answers, f"{pid:{NUMBER}}".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # who asked may be gone
        os.write(answers, f"{code:{NUMBER}}".encode())
    os._exit(0)


def main() -> None:
    with without_collection():
        preload(sys.argv[1:])
    # a million objects, through which each fork would look for garbage again and again, and so
    # write to all pages
    gc.freeze()
    for line in sys.stdin:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            keep(json.loads(line))


if __name__ == "__main__":
    main()
