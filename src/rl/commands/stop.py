"""`rl stop`: ends a run from any machine that sees its directory."""

import os
import time
from pathlib import Path

from rl.cluster import kubernetes
from rl.cluster.submit import cancel
from rl.commands.policy_spec import named_run
from rl.config.command_line import fail, load_config_or_exit
from rl.config.options import option_lines, options, take
from rl.config.run import RLConfig
from rl.config.stored import continued_by, run_dir_of, server_of, stored_config
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
        config = load_config_or_exit(rest, "rl stop", variables=os.environ, usage=HELP)[
            0
        ].with_absolute_paths()
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
    root = seen(rest[0])
    config = stored_config(root)
    if config.serve and server_of(root) != root:
        raise RunError(
            f"{root} is a model of a client; `rl stop {server_of(root)}` ends its server"
        )
    grace_s = config.cluster.grace_s if config.cluster else 0.0
    run_dir, timeout_s = (
        run_dir_of(root, config),
        values["timeout"] or max(TIMEOUT_S, grace_s + 60.0),
    )
    if config.cluster:
        stop_machines(run_dir, config, timeout_s)
    else:
        stop_here(run_dir, config, timeout_s)
    print(f"{root}: stopped; continue it with: {continued_by(root, config)}")
    return 0


def seen(name: str) -> Path:
    """Returns the directory of a run. Raises ConfigError."""
    try:
        return named_run(name).resolve()
    except ConfigError as error:
        slug = Path(name).name.lower()
        remedy = (
            "`rl stop @ FILE` with what it was started with, or `kubectl delete jobset NAME` "
            f"(`kubectl get jobsets`: rl-{slug}-...)"
        )
        raise ConfigError(
            f"{error}\nif it runs on Kubernetes, and its volume is not on this machine: {remedy}"
        ) from None


def stop_unseen(config: RLConfig) -> int:
    """Ends a run on Kubernetes whose directory is not on this machine. Returns the exit code.
    Raises RunError."""
    jobs = kubernetes.jobs_of(config.run_dir)
    there = kubernetes.active(jobs, config)
    kubernetes.cancel(jobs, config)
    print(
        f"{', '.join(jobs)}: deleted"
        if there
        else f"{jobs[0]}: does not run; nothing is left of it",
        flush=True,
    )
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
        start = (
            max((status.started, status.start) for status in living.values())[1] if living else ""
        )
        nodes.end(
            RunOver(exit_code=STOPPED, text="stopped by `rl stop`", time=time.time(), start=start)
        )
    while living and time.monotonic() < deadline:
        silent_s = {
            index: heartbeats.look(str(index), status.heartbeat)
            for index, status in nodes.statuses().items()
        }
        living = {
            index: status
            for index, status in nodes.statuses().items()
            if silent_s.get(index, 0.0) < LEASE_S
        }
        time.sleep(POLL_S)
    cancel(run_dir, config)
    if living:
        names = ", ".join(
            f"{index} (pid {status.pid} on {status.host})" for index, status in living.items()
        )
        raise RunError(
            f"machines {names} have not ended within {timeout_s:g} s; end `rl node` there"
        )
