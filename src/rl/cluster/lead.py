"""The leader of a run on a cluster: today's `rl` with its console, supervisor, repair, trackers and
orchestrator, on one of the machines that train. Its trainer is the process that forms the world of
all of them (cluster/world.py); servers announce themselves.
"""

import sys
import time

from rl.cluster.reach import own_address
from rl.cluster.world import world_end_s
from rl.config.command_line import CommandLine, write_config
from rl.config.plan import plan
from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.launch.roles import Role, command
from rl.launch.run import Placement, launch, on_this_machine, resume_command
from rl.run_dir.access_token import is_loopback
from rl.run_dir.lease import LeaseAttempt, RoleTakenError, declare_lost
from rl.run_dir.logs import last_words
from rl.run_dir.nodes import Nodes
from rl.run_dir.paths import RunDir, is_run
from rl.run_dir.status import MACHINE_LEASE
from rl.system.children import PYTHON, Child, RestartPolicy

TAKEN = 76
"""Exit code of a leader that finds another one."""
REPORT_S = 10.0
"""Seconds that the launcher of worlds has for its own end when those of all machines have ended."""
TRY_S = 1.0
"""Seconds between looks at the role of the leader; a machine's first look comes this much later
for each index before its own."""


def with_open_hosts(config: RLConfig) -> RLConfig:
    """Returns the configuration that all machines share: servers and orchestrator bind all
    interfaces unless the user chose one."""
    config = config.model_copy(deep=True)
    if config.cluster:
        config.cluster.index = None  # all else is the same on all machines
    if not plan(config).is_one_machine:
        everywhere = "::" if ":" in own_address() else "0.0.0.0"
        for section in (config.inference, config.orchestrator):
            section.host = everywhere if is_loopback(section.host) else section.host
    return config


def on_a_cluster(config: RLConfig) -> Placement:
    """Has the leader start the orchestrator and the trainer's launcher."""

    def roles(run_dir: RunDir) -> list[Role]:
        launcher = [*PYTHON, "-m", "rl.cluster.world", "@", str(run_dir.config)]
        stop_s = world_end_s(config, "save") + REPORT_S
        trainer = Role("trainer", launcher, {}, leaves_copy=True, stop_s=stop_s)
        words = command("orchestrator", run_dir, 1)
        orchestrator = Role("orchestrator", words, {}, leaves_copy=True)
        return [trainer] if config.sft else [orchestrator, trainer]

    return Placement(roles)


def run_leader(config: RLConfig, line: CommandLine, children: Children) -> int:
    """Starts or continues the run. Returns the exit code of `rl`, or TAKEN. Raises RunError,
    OSError and Stopped."""
    line.resume = -1 if is_run(config.run_dir.root) else None
    again = resume_command(["@", str(config.run_dir.config)])
    placement = on_this_machine if plan(config).is_one_machine else on_a_cluster
    try:
        return launch(config, line, children, again, placement)
    except RoleTakenError as error:
        print(f"rl: {error}", file=sys.stderr)
        return TAKEN


class Leader:
    """The leader on this machine, while no other one leads. Call `poll` several times a second."""

    def __init__(
        self, config: RLConfig, index: int, children: Children, environment: dict[str, str]
    ):
        """`environment`: further variables of the leader."""
        self.lock, self.logs = config.run_dir.lock("rl"), config.run_dir.logs
        self.children, self.environment = children, environment
        self.nodes = Nodes(config.run_dir)
        path = self.nodes.config_path(index)
        write_config(path, config)  # the user's file may change while the run lasts
        words = ["node", "--lead", "@", str(path), "--cluster.index", str(index)]
        self.command = [*PYTHON, "-m", "rl.main", *words]
        self.child: Child | None = None
        self.attempt: LeaseAttempt | None = None
        self.try_at = time.monotonic() + index * TRY_S
        settings = config.supervisor
        self.restarts = RestartPolicy(
            settings.backoff_s, settings.backoff_limit_s, settings.max_restarts, settings.window_s
        )
        self.deaths: list[float] = []

    def poll(self, may_lead: bool = True) -> tuple[int, str] | None:
        """Starts the leader if nobody leads. Returns exit code and last words of a leader that has
        ended the run.

        `may_lead`: whether this machine reaches others. One that does not leaves the role to them.
        """
        if self.child and not may_lead:
            say("this machine reaches none of the others over the network: another one is to lead")
            self.children.kill_tree(self.child)
            self.child = None
        if self.child:
            code = self.child.exit_code
            return None if code is None else self._ended(self.child, code)
        if may_lead and time.monotonic() >= self.try_at:
            self.try_at = time.monotonic() + TRY_S
            if self._is_free(takes_over=True):
                self.child = self.children.start("rl", self.command, self.environment, self.logs)
        return None

    def _is_free(self, takes_over: bool = False) -> bool:
        """Returns whether nobody holds the role `rl`; on other machines that shows after some time.

        `takes_over`: in that case ends the ranks of the last leader's world. The first of them
        holds the role `trainer`, for which the new leader would wait, and itself may wait for a
        machine that stands still.
        """
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        self.attempt = self.attempt or LeaseAttempt(self.lock)
        lease = self.attempt.take()
        if not lease:
            return False
        if takes_over and (world := self.nodes.world()):
            self.nodes.stop_world(world, "kill")
        lease.close()
        owner, self.attempt = self.attempt.owner, None
        if (
            owner
            and owner.machine
            and owner.machine != self.environment.get(MACHINE_LEASE)
            and owner.lives() is None
        ):
            # it led, and nothing has been heard of it
            declare_lost(self.lock.parent / owner.machine)
        return True

    def _ended(self, child: Child, code: int) -> tuple[int, str] | None:
        self.children.kill_tree(child)
        self.child = None
        # a leader that lost its role is not the end of the run
        if code == TAKEN or (code and not self._is_free()):
            return None
        if code >= 0:
            return code, last_words(child.log) if code else ""
        self.deaths.append(time.monotonic())
        delay_s = self.restarts.delay_s(len(self.deaths), self.deaths)
        if delay_s is None:
            return 1, f"the leader {child.ending()}, {len(self.deaths)} times; see {child.log}"
        say(f"the leader {child.ending()}; it starts again in {delay_s:g} s (log: {child.log})")
        self.try_at = time.monotonic() + delay_s
        return None


def say(text: str) -> None:
    print(f"node: {text}", flush=True)
