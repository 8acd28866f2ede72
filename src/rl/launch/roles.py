"""The processes of a run, and the command of each."""

from dataclasses import dataclass
from pathlib import Path

from rl.config.run import RLConfig
from rl.launch import devices
from rl.launch.children import Children
from rl.run_dir.paths import RunDir
from rl.system.children import PYTHON, STOP_DEADLINE_S, Child


@dataclass(frozen=True)
class Role:
    """How to start a process, at every attempt."""

    name: str
    command: list[str]
    env: dict[str, str]
    """Variables beside those that every child inherits, see launch/children.py."""
    cores: list[int] | None = None
    leaves_copy: bool = False
    """Whether it leaves a copy for a warm start of its next attempt, see system/prefork.py."""
    after_server: bool = False
    """Whether it starts only while inference is up."""
    stop_s: float = STOP_DEADLINE_S
    """Seconds that it has for its end when `rl` ends it alone."""

    @property
    def serves(self) -> bool:
        """Whether it is an inference server: `inference`, or `inference-node3` on a machine of a
        cluster."""
        return self.name.partition("-")[0] == "inference"


PREPARING = {
    "model": "rl.models.folder",
    "data": "rl.trainer.sft.tokens",
    "service": "rl.tinker.client.service",
}
"""Processes that run to their end before anything else: find or download the model, make the
examples of supervised fine-tuning, ask the service that trains."""
SERVER = "rl.commands.serve"
"""The process `tinker` of `rl serve`."""


AGENT = [*PYTHON, "-m", "torch.distributed.run", "--no-python"]
"""The agent of several ranks, which it starts by the command behind its options."""


def command(name: str, run_dir: RunDir, ranks: int) -> list[str]:
    """Returns the command of a process, which reads everything else, but the division of the
    machine, from the run's config.toml."""
    config = str(run_dir.config)
    if name in PREPARING:
        return [*PYTHON, "-m", PREPARING[name], config]
    module = SERVER if name == "tinker" else f"rl.{name}.main"
    words = [*PYTHON, "-m", module, "@", config]
    if name == "trainer" and ranks > 1:
        # --standalone: the agent picks a free port on this host, so two runs never collide. It
        # would give ranks the name of this machine,
        # which may not resolve. --shutdown-timeout: `rl` decides how long the ranks may take for
        # their end.
        options = f"--standalone --local-addr 127.0.0.1 --nproc-per-node {ranks}"
        return [*AGENT, *f"{options} --shutdown-timeout 3600".split(), *words]
    return words  # one rank needs no agent, whose import of torch takes 3 s


def start(
    children: Children, name: str, run_dir: RunDir, division: devices.Split, log_dir: Path
) -> Child:
    """Starts one process of a run on its share of the machine, for a command that supervises it
    itself."""
    share = division.inference if name == "inference" else division.trainer
    words = [*command(name, run_dir, division.ranks), *division.flags]
    return children.start(name, words, share.env, log_dir, share.cores)


def preparing(config: RLConfig) -> list[str]:
    """Returns the names of the processes that must have ended before a run begins."""
    return ["model", *["data"] * (config.kind == "sft"), *["service"] * config.is_remote]


def roles(config: RLConfig, run_dir: RunDir, division: devices.Split) -> list[Role]:
    """Returns the processes of a run: inference (unless it runs elsewhere), orchestrator and
    trainer; of `rl serve` inference and the trainer of its clients. They find each other by their
    status files, in any order.

    If inference and the process that trains share a GPU, the latter waits until the server is up:
    while vLLM starts, it attributes any loss of free memory to itself, and exits if free memory
    grows. With a service for training and sampling, both are small processes that ask it.
    """
    training = division.trainer
    shares = {"inference": division.inference, "trainer": training, "tinker": training}
    names = [name for name in config.kind.roles if name != "inference" or config.starts_inference]
    shared = "inference" in names and {*training.gpus} & {*division.inference.gpus}
    started = []
    for name in names:
        share = shares.get(name)
        if config.is_remote and share:
            asks = [*PYTHON, "-m", f"rl.tinker.client.{name}", "@", str(run_dir.config)]
            started.append(Role(name, asks, {}))
            continue
        started.append(
            Role(
                name,
                [*command(name, run_dir, division.ranks), *(division.flags if share else ())],
                share.env if share else {},
                share.cores if share else None,
                leaves_copy=name in ("inference", "orchestrator")
                or (name == "trainer" and division.ranks == 1),
                after_server=share is training and bool(shared),
            )
        )
    return started
