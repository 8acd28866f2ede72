"""Counts what one process of each kind on a cluster does in the run directory, beside the files of all the others."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rl.cluster.node import POLL_S, Node
from rl.cluster.world import Launcher
from rl.config.command_line import build, parse_args, to_toml
from rl.launch import run as leader
from rl.launch.children import Children
from rl.launch.keeper import SLOW_POLL_S, Keeper
from rl.launch.roles import Role
from rl.run_dir.lease import hold_role
from rl.run_dir.nodes import World
from rl.run_dir.status import RoleStatus, write_status

GPUS, WATCH_S = 8, 4.0
EVENTS = {"os.rename": "renames", "os.listdir": "listings", "os.scandir": "listings", "os.utime": "touches", "os.remove": "removals"}
counts: Counter[str] = Counter()
"""File operations of this process in the run directory so far, and messages."""


def count_files(root: Path) -> None:
    """Counts this process's file operations below `root` from now on: Python announces all but `stat`, which is wrapped."""
    stat, below = os.stat, f"{root}/"

    def note(event: str, args: tuple[Any, ...]) -> None:
        if (event == "open" or event in EVENTS) and str(args[0]).startswith(below):
            writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
            counts[EVENTS.get(event) or ("writes" if writes else "reads")] += 1

    def counted(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        counts["stats"] += str(path).startswith(below)
        return stat(path, *args, **kwargs)

    sys.addaudithook(note)
    os.stat = counted


class OverError(BaseException):
    """The time is over."""


def rates(work: Callable[[], Any], every_s: float = 0.0) -> dict[str, float]:
    """Returns how often work that is repeated, or never ends, reaches the run directory: operations a second."""

    def stop(*_: Any) -> None:
        raise OverError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, WATCH_S)
    before = counts.copy()
    try:
        while True:
            work()
            time.sleep(every_s)
    except OverError:
        return {key: round(number / WATCH_S, 1) for key, number in sorted((counts - before).items())}


def cluster(machines: int, folder: Path) -> dict[str, Any]:
    """Returns the operations a second of one process of each kind in a cluster of which half trains, with a rank for each GPU."""
    half = max(1, machines // 2)
    flags = ["--name", "run", "--output_dir", str(folder), "--orchestrator.environment.id", "e", "--cluster.nodes", str(machines)]
    config = build(parse_args([*flags, "--cluster.trainer_nodes", str(half)]))
    run_dir, children, found = config.run_dir, Children(), dict[str, dict[str, float]]()
    names = [f"trainer-{rank}" for rank in range(1, half * GPUS)] + [f"inference-node{index}" for index in range(half, machines)]
    for name in ("trainer", *names):
        now = time.time()
        write_status(run_dir.status(name), RoleStatus(process=name, pid=1, host="h", heartbeat=now, progress=1, address="http://h:1"))
    run_dir.config.write_text(to_toml(config))
    lead, sleep = hold_role(run_dir.lock("rl")), [sys.executable, "-c", "import time; time.sleep(100)"]
    world = World(generation=1, nodes=[*range(half)], ranks=[GPUS] * half, stop="kill")
    for name, index in {"machine that trains": half - 1, "machine that serves": machines - 1}.items():
        node = Node(config, [], index, children)
        node.server_role = lambda name=f"inference-node{index}": Role(name, sleep, {**os.environ})  # type: ignore[method-assign]
        for other in range(machines):
            node.nodes.write(node.nodes.status_path(other), msgspec.structs.replace(node.status, index=other))
        node.nodes.write(node.nodes.world_path, world)
        found[name] = rates(node.poll, POLL_S)
        node.lease.close()
    launcher = Launcher(config)
    launcher.alive = lambda *_: True  # type: ignore[method-assign]  # nobody beats here
    found["launcher"] = rates(lambda: launcher.watch(world))
    launcher.status.close()
    keeper = Keeper(config, run_dir, children, print)
    keeper.begin([Role(name, sleep, {**os.environ}) for name in ("orchestrator", "trainer")])
    keeper.slow_at = -SLOW_POLL_S  # so that two slow polls fall into WATCH_S
    found["supervisor"] = rates(keeper.poll, leader.POLL_S)
    children.kill()
    lead.close()
    return {"machines": machines, "ranks": half * GPUS, "per_s": found}
