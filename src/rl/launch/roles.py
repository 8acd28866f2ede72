"""Which processes a run has, and the command of each."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rl.config.run import RLConfig
from rl.launch import devices
from rl.launch.children import Children
from rl.run_dir.paths import RunDir
from rl.system.children import Child


@dataclass(frozen=True)
class Role:
    """How a process is started, each time anew."""

    name: str
    command: list[str]
    env: dict[str, str]
    cores: list[int] | None = None
    leaves_copy: bool = False
    """For a warm start of its next attempt, see standby.py."""
    after: str = ""
    """The role that is to be up before its first attempt, or the supervisor's patience at its end; empty: none."""


MANY_CORES = 3
"""With fewer the trainer starts last: it has nothing to do before the first batch, and would hold up what makes that."""


PREPARING = {"model": "rl.models.folder", "data": "rl.trainer.sft.tokens"}
"""What runs to its end before anything else starts: finds or downloads the model, and makes the examples of supervised fine-tuning."""


def command(name: str, run_dir: RunDir, ranks: int) -> list[str]:
    """How a process is started. It reads everything from the run's config.toml."""
    if name in PREPARING:
        return [sys.executable, "-m", PREPARING[name], str(run_dir.config)]
    module = ["-m", f"rl.{name}.main", "@", str(run_dir.config)]
    if name == "trainer" and ranks > 1:
        # --standalone: the agent finds its own free port on this host, so two runs never meet.
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *module]
    return [sys.executable, *module]  # one rank needs no agent, which would import torch first: 3 s


def start(children: Children, name: str, run_dir: RunDir, share: devices.Share, ranks: int, log_dir: Path) -> Child:
    """Starts one process of a run on its share of the machine, for a command that watches over it itself."""
    return children.start(name, command(name, run_dir, ranks), {**os.environ, **share.env}, log_dir, share.cores)


def roles(config: RLConfig, run_dir: RunDir, division: devices.Split) -> list[Role]:
    """Inference (unless it runs elsewhere), orchestrator and trainer. They find each other by their status files, in any order.

    On a GPU that both share, the trainer waits until the server is up: vLLM takes for its own whatever free memory goes while it starts,
    and ends if some comes back. Supervised fine-tuning needs the trainer alone.
    """
    shares = {"inference": division.inference, "orchestrator": None, "trainer": division.trainer}
    if config.orchestrator.inference_urls:
        del shares["inference"]
    if config.sft:
        shares = {"trainer": division.trainer}
    found, few_cores = [], len({*division.trainer.cores, *division.inference.cores}) < MANY_CORES
    shared = "inference" in shares and set(division.trainer.gpus) & set(division.inference.gpus)
    for name, share in shares.items():
        env, cores = ({**os.environ, **share.env}, share.cores) if share else (dict(os.environ), None)
        one_process = name != "trainer" or division.ranks == 1
        after = ("inference" if shared else "orchestrator" if few_cores else "") if name == "trainer" else ""
        found.append(Role(name, command(name, run_dir, division.ranks), env, cores, leaves_copy=one_process, after=after))
    return found
