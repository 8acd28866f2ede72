"""`rl node`: one machine of a run on a cluster. It runs the roles that follow from its index until
the run is over.

    trains: the ranks of the current World (cluster/agent.py); one of these machines also leads the
            run (cluster/lead.py)
    serves: one inference server, kept alive by a Keeper (launch/keeper.py)

Whatever started it (Slurm, Kubernetes, Ray, a shell) replaces a machine that is lost; the new one
has the same index.
"""

import contextlib
import os
import platform
import signal
import socket
import sys
import time
from hashlib import blake2b
from importlib import metadata
from typing import Any

import msgspec

from rl.cluster.agent import RankAgent
from rl.cluster.lead import Leader, run_leader, say, with_open_hosts
from rl.cluster.reach import Reach, index_of, own_address
from rl.config.command_line import from_toml, load_config_or_exit, to_toml
from rl.config.help import SETTINGS
from rl.config.plan import is_ratio, plan
from rl.config.run import RLConfig
from rl.launch import devices
from rl.launch.children import Children
from rl.launch.keeper import Keeper
from rl.launch.roles import Role
from rl.run_dir.lease import (
    LEASE_S,
    ROLE_WAIT_S,
    hold_role,
    lease_path,
    lost_to,
    newest_lease,
)
from rl.run_dir.nodes import START, Nodes, NodeStatus, RunOver
from rl.run_dir.status import (
    HEARTBEAT_S,
    MACHINE_LEASE,
    NODE_ADDRESS,
    SERVER_NAME,
    Staleness,
    read_status,
    server_files,
)
from rl.system.children import PYTHON, STOP_DEADLINE_S, Stopped
from rl.system.errors import GIVE_UP, RESTART, ConfigError, RunError, system_error
from rl.system.linux import pid_scope, shared_memory_fault
from rl.system.machine import DISTRIBUTION, Machine, machine
from rl.trainer.departure import GRACE

POLL_S = 0.5
START_AGAIN = 75
"""Exit code of a machine that ends before the run does, because its engine takes it away:
EX_TEMPFAIL of sysexits.h."""
TELL_S = 45.0
"""Seconds without a leader after which that is said."""
PREPARED_S = 120.0
"""Seconds after which a configuration of the run that is not this machine's will not become so."""
LEADER_S = 5.0
"""Seconds after SIGTERM in which the leader is to stop the ranks of all machines; after that
this machine stops its own."""
REPORT_S = 10.0
"""Seconds that a single machine's leader has for its end when its processes have ended."""
USAGE = f"""usage: {{program}} @ FILE [--KEY VALUE] ...

Runs what this machine has to do in a run on several machines, until the run is over. Engines start
it (docs/clusters.md); by hand, start it on every machine with the same file and `--cluster.index`
0, 1, 2, ...

{SETTINGS}
Exit codes: 0 the run is over; 75 stopped before that, and 1 a fault of this machine: start it
again; 2 and 3 do not start it again.
"""


def main(args: list[str], children: Children) -> int:
    """See USAGE. With --lead, which `rl node` itself gives, it is the leader of the run."""
    leads = "--lead" in args
    args = [word for word in args if word != "--lead"]
    config, line = load_config_or_exit(args, "rl node", usage=USAGE)
    if config.cluster is None:
        raise RunError(
            "the configuration has no [cluster]: give --cluster.nodes, or start the run as `rl`"
        )
    index, config = index_of(config.cluster), with_open_hosts(config.with_absolute_paths())
    cluster = config.cluster
    if leads and cluster and plan(config).is_one_machine:
        # Slurm sends it SIGTERM, and a bit later so does `rl node`, which does not know that.
        children.forwarded_s = max(children.forwarded_s, cluster.grace_s)
    try:
        return run_leader(config, line, children) if leads else Node(config, index, children).run()
    except ConfigError:
        raise
    except RunError as error:  # whose exit code tells the engine what to do
        print(f"rl node: {error}", file=sys.stderr)
        return error.exit_code


class Node:
    """This machine in a run."""

    def __init__(self, config: RLConfig, index: int, children: Children):
        assert config.cluster is not None
        self.config, self.cluster, self.index = config, config.cluster, index
        self.children, self.run_dir, self.nodes = children, config.run_dir, Nodes(config.run_dir)
        self.plan, box = plan(config), machine()
        self.roles = self.plan.roles(index)
        self.lease = hold_role(self.nodes.lock(index), ROLE_WAIT_S)
        self.environment = {
            NODE_ADDRESS: own_address(),
            MACHINE_LEASE: str(self.lease.path.relative_to(self.run_dir.status_dir)),
        }
        self.stop_s = STOP_DEADLINE_S
        # its leader waits for the trainer's checkpoint, and then has to report
        if self.plan.is_one_machine:
            self.environment[GRACE] = f"{self.cluster.grace_s:g}"
            self.stop_s = max(STOP_DEADLINE_S, self.cluster.grace_s) + REPORT_S
        self.status = NodeStatus(
            index=index,
            host=socket.gethostname(),
            address=self.environment[NODE_ADDRESS],
            port=0,
            roles=self.roles,
            ranks=0,
            gpus=len(box.gpus),
            software=f"rl {metadata.version(DISTRIBUTION)}, Python {platform.python_version()}",
            config=digest(config),
            lease=self.lease.number,
            pid=os.getpid(),
            place=pid_scope(),
            started=time.time(),
            heartbeat=time.time(),
            start=os.environ.get(START, ""),
        )
        self.share = self.fit(box)
        self.began = self.beat_at = time.monotonic()
        """Time (time.monotonic) of this start, and that at which the status is to be written
        though nothing has changed."""
        self.leaving = False
        self.signs, self.looked, self.told = Staleness(), 0.0, False
        """Signs of life of the leader, the time (time.monotonic) of the last look at them, and
        whether it was said that there are none."""
        self.reach = Reach(self.nodes, index)
        self.agent: RankAgent | None = None
        self.leader: Leader | None = None
        self.server: Keeper | None = None
        """Of a machine that serves, once its server was started."""
        if "trainer" in self.roles:
            self.leader = Leader(config, index, children, self.environment)
            if not self.plan.is_one_machine:
                lease = self.lease.number
                self.agent = RankAgent(config, index, lease, self.share, children, self.environment)

    def fit(self, box: Machine) -> devices.Split:
        """Returns this machine's devices. If it cannot take part, its status says why, and
        others that have its role may go on without it or with its successor; if all of them say
        so, that is the end of the run. Raises RunError."""
        try:
            if fault := shared_memory_fault():
                raise RunError(fault)
            share = own_share(self.config, self.roles, box)
        except RunError as error:
            status = msgspec.structs.replace(self.status, fault=str(error))
            self.nodes.write(self.nodes.status_path(self.index), status)
            self.lease.close()
            peers = [i for i in range(self.plan.nodes) if self.plan.roles(i) == self.roles]
            statuses = self.nodes.statuses(peers)
            faults = {
                status.fault: f"machine {index} ({status.host}): {status.fault}"
                for index, status in statuses.items()
            }
            if "" in faults or len(statuses) < len(peers):
                raise RunError(str(error), RESTART) from None
            self.nodes.end(self.run_over(error.exit_code, "\n".join(faults.values())))
            raise
        ranks = share.ranks if "trainer" in self.roles else 0
        self.status = msgspec.structs.replace(self.status, ranks=ranks)
        return share

    def run_over(self, exit_code: int, text: str) -> RunOver:
        return RunOver(exit_code=exit_code, text=text, time=time.time(), start=self.status.start)

    # The loop -------------------------------------------------------------------------------------

    def run(self) -> int:
        """Takes part until the run is over, or until this machine is taken away. Returns the
        exit code. Raises OSError."""
        say(
            f"machine {self.index} ({self.status.host}, {self.status.address}): "
            f"{' and '.join(self.roles)} of {self.run_dir.root}"
        )
        over, answered, told = None, time.monotonic(), ""
        try:
            while over is None:
                try:
                    over, answered = self.poll(), time.monotonic()
                # the disk does not answer, or is full: it may pass until others count this machine
                # as lost
                except OSError as error:
                    if time.monotonic() - answered >= LEASE_S:
                        raise
                    if told != (told := system_error(error)):
                        say(f"warning: {told}")
                time.sleep(POLL_S)
        except Stopped as stopped:
            self.children.stop_caught()
            say(f"{stopped}: leaving within {self.cluster.grace_s:g} s")
            self.leave()
            is_asked = stopped.signum == signal.SIGTERM
            return self.finish(START_AGAIN if is_asked else 128 + stopped.signum)
        except RunError as error:  # whose exit code tells the engine what to do
            print(f"rl node: {error}", file=sys.stderr, flush=True)
            return self.finish(error.exit_code)
        code = f" (exit code {over.exit_code})" if over.exit_code else ""
        say(f"the run is over: {over.text or 'all is done'}{code}")
        if self.run_dir.config.exists():
            say(f"it stays so until it is started again: rl @ {self.run_dir.config} --resume")
        if over.exit_code > 128:  # on request: nothing failed
            self.leave()
            return self.finish(0)
        return self.finish(GIVE_UP if over.exit_code else 0)

    def poll(self) -> RunOver | None:
        """Does what is due. Returns the end of the run, once it has ended. Raises RunError if
        this machine cannot go on."""
        self.publish()
        self.children.poll()
        over = self.nodes.over()
        if over and over.start == self.status.start:
            return over
        if self.agent:
            self.agent.poll(self.nodes.world())
        if not self.leader:
            self.serve_or_end()
            self.check_leader()
            return None
        end = self.leader.poll(may_lead=not self.reach.is_alone())
        if end is None:
            return None
        over = self.run_over(*end)
        # the disk is full, on which others cannot lead either
        with contextlib.suppress(OSError):
            self.nodes.end(over)
        return over

    def publish(self) -> None:
        """Writes this machine's status if it has changed, or is older than a heartbeat. Raises
        RunError if another one has its index."""
        leads = self.leader and self.leader.child
        fields: dict[str, Any] = {
            "roles": [*self.roles, *(["leader"] if leads else [])],
            "leaving": self.leaving,
            "door": self.reach.port,
            "cut_off": self.reach.cut_off(),
        }
        if agent := self.agent:
            names = "generation", "exit_code", "log", "port"
            fields |= {"agent": agent.state} | {name: getattr(agent, name) for name in names}
        status = msgspec.structs.replace(self.status, **fields)
        now = time.monotonic()
        if status != self.status or now >= self.beat_at:
            self.check_lease()
            self.status = msgspec.structs.replace(status, heartbeat=time.time())
            self.nodes.write(self.nodes.status_path(self.index), self.status)
            # at first more often, so that others see at once that it lives
            self.beat_at = now + min(HEARTBEAT_S, now - self.began)

    def check_lease(self) -> None:
        """Raises RunError if this machine is lost to the run. That does not end the run, as
        GIVE_UP would where the engine reads it."""
        try:
            self.lease.check()
        except RunError:
            raise RunError(
                f"{self.run_dir.root}: machine {self.index} counts as lost, or is replaced: it "
                f"gave no sign of life for {LEASE_S:.0f} s, or could not be reached; it ends, and "
                "may be started again",
                RESTART,
            ) from None

    def serve_or_end(self) -> None:
        """Does `serve`. A server that cannot go on ends the run if there is no other, else only
        this machine. Raises RunError."""
        try:
            self.serve()
        except RunError as error:
            mine = self.run_dir.status(f"inference-node{self.index}")
            for path in server_files(self.run_dir.status_dir):
                if path != mine and (status := read_status(path)) and status.address:
                    raise RunError(str(error), RESTART) from None
            self.nodes.end(self.run_over(GIVE_UP, str(error)))
            raise

    def serve(self) -> None:
        """Keeps the server alive, from the moment at which the leader has prepared the run's
        directory. Raises RunError."""
        if self.server:
            for death in self.server.poll():
                if death.verdict:
                    raise death.verdict
                say(f"{death.role} {death.reason}, {death.again}")
        elif self.is_prepared():
            name = f"{self.run_dir.events.stem}-node{self.index}.jsonl"
            events = self.run_dir.events.with_name(name)
            self.server = Keeper(self.config, self.run_dir, self.children, say, events)
            self.server.begin([self.server_role()])

    def server_role(self) -> Role:
        """Returns how to start this machine's inference server."""
        name, share = f"inference-node{self.index}", self.share.inference
        words = [*PYTHON, "-m", "rl.inference.main", "@", str(self.run_dir.config)]
        variables = share.env | self.environment | {SERVER_NAME: name}
        return Role(
            name, [*words, *self.share.vllm_flags], variables, share.cores, leaves_copy=True
        )

    def is_prepared(self) -> bool:
        """Returns whether the run's config.toml is that of this start. Raises RunError if
        somebody leads and it is not so for long."""
        path, prepared = self.run_dir.config, False
        with contextlib.suppress(ConfigError):
            prepared = path.exists() and digest(from_toml(path)) == self.status.config
        if (
            not prepared
            and path.exists()
            and self.signs.moved("leader")
            and self.signs.look("config", path.stat().st_mtime_ns) > PREPARED_S
        ):
            raise RunError(
                f"this machine's configuration differs from {path}, which the leader has written: "
                "start all machines with the same file and flags, and the same version of rl"
            )
        return prepared

    def check_leader(self) -> None:
        """Looks every two seconds. Raises RunError if nobody has led the run for
        cluster.join_timeout_s."""
        if time.monotonic() - self.looked < HEARTBEAT_S:
            return
        self.looked = time.monotonic()
        lock = self.run_dir.lock("rl")
        number = newest_lease(lock) if lock.exists() else 0
        path = lease_path(lock, number)
        sign = (number, path.stat().st_mtime_ns if path.exists() else 0)
        silent_s = self.signs.look("leader", sign)
        if silent_s >= TELL_S and not self.told:
            self.told = True
            say(
                f"nobody leads the run in {self.run_dir.root}: waits for a machine that trains, "
                f"up to cluster.join_timeout_s = {self.cluster.join_timeout_s:g} s"
            )
        if silent_s >= self.cluster.join_timeout_s:
            raise RunError(
                f"nobody has led the run in {self.run_dir.root} for cluster.join_timeout_s = "
                f"{self.cluster.join_timeout_s:g} s: do the machines that train run `rl node`, and "
                "see the same directory?",
                START_AGAIN,
            )

    # The end --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Has the ranks of all machines write a checkpoint and end, and waits for it up to
        cluster.grace_s."""
        self.leaving = True
        began = time.monotonic()
        while self.agent and self.agent.child and time.monotonic() - began < self.cluster.grace_s:
            self.publish()
            self.agent.poll(self.nodes.world())
            if time.monotonic() - began >= LEADER_S or self.nodes.over():
                self.agent.leave()
            time.sleep(POLL_S)
        self.publish()

    def finish(self, code: int) -> int:
        """Ends all processes on this machine and gives its role back. Returns the exit code."""
        if self.agent:
            self.agent.kill()
            # another machine has this index, or the disk does not answer
            with contextlib.suppress(OSError, RunError):
                self.publish()  # the launcher, which may be one of these processes, waits for it
        if stuck := self.children.stop(self.stop_s):
            say(f"these processes do not end, even after SIGKILL: {stuck}")
        if not lost_to(self.lease.lock):  # otherwise these are its successor's
            if self.server:
                self.server.archive_statuses()
            self.nodes.status_path(self.index).unlink(missing_ok=True)
        self.lease.close()
        return code


def own_share(config: RLConfig, roles: list[str], box: Machine) -> devices.Split:
    """Returns the devices of this machine's one role: all of them, or as many as trainer.gpus or
    inference.gpus says, unless these two only say how to divide the machines. Raises
    ConfigError."""
    config = config.model_copy(deep=True)
    trainer, inference = config.trainer, config.inference
    if is_ratio(config):
        trainer.gpus = inference.gpus = None
    # they divide the ranks of all machines
    trainer.dp_replicate = trainer.context_parallel = trainer.expert_parallel = 1
    if "trainer" in roles:
        trainer.gpus = len(box.gpus) if trainer.gpus is None else trainer.gpus
        inference.gpus = 0
    else:
        if fault := devices.check_build(config, box):
            raise ConfigError(fault.removeprefix("warning: "))
        trainer.gpus, trainer.ranks, trainer.cpus = 0, None, None
    return devices.split(config, box)


def digest(config: RLConfig) -> str:
    """Returns a short hash of the settings that all machines must share."""
    config = config.model_copy(deep=True)
    if config.cluster:
        config.cluster.index = None
    return blake2b(to_toml(config).encode(), digest_size=4).hexdigest()
