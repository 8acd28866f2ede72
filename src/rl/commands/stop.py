"""`rl stop`: ends a run from any machine that sees its directory."""

import os
import time
from pathlib import Path

from rl.cluster import kubernetes
from rl.cluster.submit import cancel
from rl.commands.options import named_run, open_run
from rl.config.command_line import fail, load_config_or_exit, option_lines, options, take
from rl.config.run import RLConfig
from rl.config.stored import continued_by, server_of
from rl.launch.children import Children
from rl.launch.watch import Life
from rl.run_dir.lease import LEASE_S, LockOwner
from rl.run_dir.nodes import Nodes, RunOver
from rl.run_dir.paths import RunDir, is_run
from rl.run_dir.status import Staleness, read_json
from rl.system.errors import ConfigError, RunError

OPTIONS = options("""
timeout N: seconds to wait for the end of its processes; default: 120, or a minute more than
    cluster.grace_s
""")
HELP = f"""usage: rl stop RUN [--timeout N]
       rl stop @ FILE [--KEY VALUE] ...

Ends a run as Ctrl-C does, wherever it runs: nothing is lost, and --resume continues it. On a
cluster it ends all machines and takes the run's jobs out of the queue. RUN is the directory of a
run, or its name under outputs/. Files and flags with which a run was started stand for its
directory, also for a run on Kubernetes whose volume is not on this machine: its JobSet is deleted
then. Exit code 0: nothing of the run is left; 1: some process is, which is named.

{option_lines(OPTIONS)}
"""
TIMEOUT_S = 120
POLL_S = 0.5
STOPPED = 130
"""Exit code of a run that was stopped, as by Ctrl-C."""


def main(args: list[str], _children: Children) -> int:
    values, rest = take("rl stop", args, OPTIONS, HELP)
    if rest and rest[0].startswith(("-", "@")):
        config, _ = load_config_or_exit(rest, "rl stop", variables=os.environ, usage=HELP)
        config = config.with_absolute_paths()
        root = config.run_dir.root
        if not is_run(root) and config.cluster and config.cluster.engine == "kubernetes":
            return stop_unseen(config)
        rest = [str(root)]
    if len(rest) != 1:
        fail(
            "rl stop",
            "which run? Give only its directory, rl stop outputs/NAME, or the files and "
            "flags it was started with",
        )
    try:
        root = named_run(rest[0]).resolve()
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nif it runs on Kubernetes, and its volume is not on this machine: `rl stop @ "
            "FILE` with what it was started with, or `kubectl delete jobset NAME` (`kubectl get "
            f"jobsets`: rl-{Path(rest[0]).name.lower()}-...)"
        ) from None
    run_dir, config = open_run(root)
    if config.kind == "serve" and server_of(root) != root:
        server = f"`rl stop {server_of(root)}` ends its server"
        raise RunError(f"{root} is a model of a client; {server}")
    grace_s = config.cluster.grace_s if config.cluster else 0.0
    stop = stop_machines if config.cluster else stop_here
    stop(run_dir, config, values["timeout"] or max(TIMEOUT_S, grace_s + 60.0))
    print(f"{root}: stopped; continue it with: {continued_by(root, config)}")
    return 0


def stop_unseen(config: RLConfig) -> int:
    """Ends a run on Kubernetes whose directory is not on this machine. Returns the exit code.
    Raises RunError."""
    jobs = kubernetes.jobs_of(config.run_dir)
    runs = kubernetes.active(jobs, config)
    kubernetes.cancel(jobs, config)
    text = "deleted" if runs else "does not run; nothing is left of it"
    print(f"{', '.join(jobs) if runs else jobs[0]}: {text}")
    return 0


def stop_here(run_dir: RunDir, config: RLConfig, timeout_s: float) -> None:
    """Asks the run's `rl` to stop, and waits until it has. Raises RunError."""
    life, deadline = Life(run_dir, config), time.monotonic() + timeout_s
    while life.is_led():
        run_dir.stop_request.touch()  # again: a start that was under way has removed it
        if time.monotonic() >= deadline:
            owner = read_json(run_dir.lock("rl"), LockOwner)
            raise RunError(
                f"rl ({owner}) has not ended within {timeout_s:g} s; end it there, or wait "
                "with --timeout"
            )
        time.sleep(POLL_S)


def stop_machines(run_dir: RunDir, config: RLConfig, timeout_s: float) -> None:
    """Declares the run over, waits until its machines have ended, and removes its jobs. Raises
    RunError."""
    nodes, heartbeats, deadline = Nodes(run_dir), Staleness(), time.monotonic() + timeout_s
    living = nodes.statuses()
    if living or nodes.over() is None:  # an end that is there may be that of an earlier start
        newest = max(living.values(), key=lambda status: status.started, default=None)
        start = newest.start if newest else ""
        text = "stopped by `rl stop`"
        nodes.end(RunOver(exit_code=STOPPED, text=text, time=time.time(), start=start))
    while living and time.monotonic() < deadline:
        living = {
            index: status
            for index, status in nodes.statuses().items()
            if heartbeats.look(str(index), status.heartbeat) < LEASE_S
        }
        time.sleep(POLL_S)
    cancel(run_dir, config)
    if living:
        names = ", ".join(f"{i} (pid {node.pid} on {node.host})" for i, node in living.items())
        limit = f"have not ended within {timeout_s:g} s"
        raise RunError(f"machines {names} {limit}; end `rl node` there")
