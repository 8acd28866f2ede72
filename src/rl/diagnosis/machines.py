"""The machines of a run on a cluster, for people: which one does what, since when, and which one
is lost."""

import re
import time

from rl.diagnosis.state import Machine, RunState
from rl.run_dir.nodes import NodeStatus
from rl.system.terminal import span

VERBS = {"trainer": "trains", "inference": "serves", "leader": "leads"}


def does(machine: Machine) -> str:
    """Returns what a machine does, or is for: `trains and leads`."""
    return " and ".join(VERBS[role] for role in machine.roles)


def facts(machine: Machine, status: NodeStatus) -> str:
    """Returns a machine's devices, its part in the training, and why it cannot take part: `8
    GPUs, 8 ranks in generation 3`."""
    parts = [f"{status.gpus} GPUs"]
    if status.ranks:
        part_of = machine.generation is not None
        parts.append(
            f"{status.ranks} ranks in generation {machine.generation}"
            if part_of
            else "not in the current generation"
        )
    return ", ".join([*parts, *filter(None, [status.fault])])


def processes_on(machine: Machine, state: RunState) -> list[str]:
    """Returns the processes on a machine that have a status, the ranks of a trainer as one:
    `orchestrator`, `ranks 8 to 15`."""
    names = [name for name, process in state.processes.items() if machine.runs(process.status)]
    ranks = sorted(
        int(name.partition("-")[2] or 0) for name in names if re.fullmatch(r"trainer(-\d+)?", name)
    )
    others = [name for name in names if not re.fullmatch(r"trainer(-\d+)?", name)]
    span_of = (
        f"ranks {ranks[0]} to {ranks[-1]}" if ranks[1:] else f"rank {ranks[0]}" if ranks else ""
    )
    return [*others, *filter(None, [span_of])]


def machine_line(machine: Machine, state: RunState) -> str:
    status = machine.status
    if status is None:
        return f"machine {machine.index}: is not there; it {does(machine)}"
    parts = [f"{status.host} {does(machine)}", facts(machine, status)]
    if machine.state == "lost":
        since = time.strftime("%H:%M:%S", time.localtime(status.heartbeat))
        parts.append(
            "lost: its `rl node` is gone"
            if machine.ended
            else f"lost: no sign of life since {since} by its clock"
        )
    else:
        parts.append(f"for {span(max(0.0, status.heartbeat - status.started))}")
    leaving = ["leaving"] if machine.state == "leaving" else []
    return f"machine {machine.index}: " + ", ".join(
        [*parts, *leaving, *processes_on(machine, state)]
    )


def changes(told: dict[int, str], machines: list[Machine]) -> list[str]:
    """Returns what became of machines since the last call, which left its knowledge in `told`."""
    lines = []
    for machine in machines:
        name = f"machine {machine.index}" + (f" ({machine.status.host})" if machine.status else "")
        lost = (
            f"is lost: no sign of life for {machine.silent_s:.0f} s"
            if not machine.ended
            else "is lost: its `rl node` is gone"
        )
        texts = {"absent": "has left", "lost": lost, "leaving": "is leaving", "live": does(machine)}
        sign = f"{machine.state} {texts['live']}" if machine.there else machine.state
        if told.get(machine.index, "absent") != sign:
            lines.append(f"  {name} {texts[machine.state]}")
        told[machine.index] = sign
    return lines
