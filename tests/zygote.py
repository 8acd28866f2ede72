"""A warm process that forks: what costs seconds to import is imported once, and a trainer or orchestrator starts in hundredths of one.

One thread, and torch with one thread, or a fork would copy locks that nobody opens any more.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path


class Zygote:
    """The test's side: `live` is one process from its start to its end."""

    def __init__(self, **environment: str):
        root = Path(__file__).parent.parent
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote"],
            cwd=root,
            env=os.environ | threads | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def live(self, role: str, config: Path, log: Path, fault: str = "", trace: str = "") -> int:
        """Runs `role` in a fork; returns its exit code, negative for the signal that ended it."""
        assert self.process.stdin and self.process.stdout
        order = {"role": role, "config": str(config), "log": str(log), "fault": fault, "trace": trace}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


def preload() -> None:
    """Everything that the roles import, and what is slow the first time."""
    import torch
    import torch.distributed.checkpoint
    import transformers.models.llama.modeling_llama  # noqa: F401

    import rl.launch.prepare
    import rl.orchestrator.main
    import rl.trainer.main
    import rl.trainer.sft.source
    import rl.trainer.store.checkpoint
    import rl.trainer.train  # noqa: F401
    import tests.stub_pool  # noqa: F401

    torch.set_num_threads(1)


def run(role: str, config: str) -> None:
    """The process itself."""
    if role == "prepare":
        from rl.config.command_line import from_toml
        from rl.launch.prepare import prepare

        settings = from_toml(Path(config))
        prepare(settings, resume=int(os.environ.get("RESUME", "2")), clean=False)
        return
    sys.argv = [role, "@", config]
    if role == "orchestrator":
        import rl.orchestrator.main
        from tests.stub_pool import StubPool

        rl.orchestrator.main.WorkerPool = StubPool  # type: ignore[misc]
        rl.orchestrator.main.main()
    else:
        import rl.trainer.main

        rl.trainer.main.main()


def child(order: dict[str, str]) -> None:
    """After the fork: never returns."""
    from rl.system import faults

    with open(order["log"], "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if order["fault"] or order["trace"]:
        faults.plan = faults.Plan(order["fault"], order["trace"], process=order["role"])
    code = 0
    try:
        run(order["role"], order["config"])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main() -> None:
    preload()
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            child(json.loads(line))
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
