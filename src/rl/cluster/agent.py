"""The ranks of the trainer on one machine: torchrun's agent, or the rank itself if there is only
one."""

import os
import signal
import time
from contextlib import closing

from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.launch.devices import Split
from rl.launch.roles import AGENT
from rl.run_dir.nodes import AgentState, TrainerWorld
from rl.run_dir.status import read_status
from rl.system.children import PYTHON, STOP_DEADLINE_S, Child
from rl.system.linux import listen_everywhere
from rl.trainer.departure import GRACE


class RankAgent:
    """Starts the ranks of each new world that this machine belongs to, and ends them when it is
    over. Call `poll` twice a second."""

    def __init__(
        self,
        config: RLConfig,
        index: int,
        lease: int,
        share: Split,
        children: Children,
        environment: dict[str, str],
    ):
        """`lease`: the number of this machine's lease. `environment`: further variables of the
        ranks."""
        assert config.cluster is not None
        self.run_dir, self.index, self.lease, self.share = config.run_dir, index, lease, share
        self.children, self.environment = children, environment
        self.grace_s = config.cluster.grace_s
        self.world: TrainerWorld | None = None
        """The world that its ranks belong to, or have belonged to."""
        self.child: Child | None = None
        self.exit_code: int | None = None
        self.log = ""
        self.port = free_port()
        self.barren = 0
        """Starts in a row without progress of the ranks."""
        self.kill_at: float | None = None
        """Time (time.monotonic) at which ranks are killed that were told to end."""

    @property
    def state(self) -> AgentState:
        return "running" if self.child else "ended" if self.world else "idle"

    @property
    def generation(self) -> int:
        return self.world.generation if self.world else 0

    def poll(self, world: TrainerWorld | None) -> None:
        """Starts and ends ranks so that they belong to the newest world."""
        if not self.child:
            is_new = world and not world.stop and world.generation > self.generation
            if world and is_new and world.has(self.index, self.lease):
                self._start(world)
        elif self.child.exit_code is not None:
            self._ended(self.child, self.child.exit_code)
        elif world is None or world.generation != self.generation or world.stop == "kill":
            self.kill()
        elif world.stop == "save":
            self.leave()

    def leave(self) -> None:
        """Tells the ranks to end after a checkpoint, once."""
        if self.child and self.kill_at is None:
            self.kill_at = time.monotonic() + self.grace_s + STOP_DEADLINE_S
            os.kill(self.child.pid, signal.SIGTERM)
        elif self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.kill()

    def kill(self) -> None:
        """Ends the ranks at once."""
        if self.child:
            self._ended(self.child, -signal.SIGKILL)

    def _start(self, world: TrainerWorld) -> None:
        rank, size = world.nodes.index(self.index), len(world.nodes)
        address, port, ranks = world.address, world.port, self.share.ranks
        command = [*PYTHON, "-m", "rl.trainer.main", "@", str(self.run_dir.config)]
        env = self.share.trainer.env | self.environment | {GRACE: f"{self.grace_s:g}"}
        if ranks == 1:  # needs no agent, whose import of torch takes 3 s
            env |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
            env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        else:
            options = (
                f"--nnodes {size} --node-rank {rank} --nproc-per-node {ranks} --rdzv-backend "
                f"static --master-addr {address} --master-port {port} --max-restarts 0 "
                f"--shutdown-timeout {self.grace_s + STOP_DEADLINE_S:.0f}"
            )
            command = [*AGENT, *options.split(), *command]
        name, cores = f"trainer-node{self.index}", self.share.trainer.cores
        # From a copy of its predecessor, but not twice without progress: the fault may be in the
        # state that a copy inherits.
        warm = (self.world is not None and self.barren <= 1) if ranks == 1 else None
        self.child = self.children.start(name, command, env, self.run_dir.logs, cores, warm)
        self.world, self.exit_code, self.kill_at, self.log = world, None, None, str(self.child.log)

    def _rank_name(self) -> str:
        """Returns the name of the first rank on this machine, as in its status."""
        rank = sum(self.world.ranks[: self.world.nodes.index(self.index)]) if self.world else 0
        return f"trainer-{rank}" if rank else "trainer"

    def _ended(self, child: Child, code: int) -> None:
        status = read_status(self.run_dir.status(self._rank_name()))
        self.barren = 0 if status and status.progress else self.barren + 1
        # once: what it does not reap, because a thread has not ended yet, is later reaped as an
        # orphan
        self.children.kill_tree(child)
        self.child, self.exit_code, self.port = None, code, free_port()


def free_port() -> int:
    """Returns a port that is free now on all interfaces."""
    with closing(listen_everywhere()) as server:
        return server.getsockname()[1]
