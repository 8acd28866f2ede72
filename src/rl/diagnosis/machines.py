"""The machines of a run on a cluster, for people: which one does what, since when, and which one
is lost."""

import re

from rl.diagnosis.state import RunMachine, RunState
from rl.run_dir.nodes import NodeStatus
from rl.system.terminal import span

VERBS = {"trainer": "trains", "inference": "serves", "leader": "leads"}
RANK = re.compile(r"trainer(?:-(\d+))?")


def does(machine: RunMachine) -> str:
    """Returns what a machine does, or is for: `trains and leads`."""
    return " and ".join(VERBS[role] for role in machine.roles)


def facts(machine: RunMachine, status: NodeStatus) -> str:
    """Returns a machine's devices, its part in the training, and why it cannot take part: `8
    GPUs, 8 ranks in generation 3`."""
    generation, ranks = machine.generation, ""
    if status.ranks:
        ranks = (
            "not in the current generation"
            if generation is None
            else f"{status.ranks} ranks in generation {generation}"
        )
    return ", ".join(filter(None, [f"{status.gpus} GPUs", ranks, status.fault]))


def loss(machine: RunMachine) -> str:
    """Returns why a machine counts as lost."""
    if machine.ended:
        return "lost: its `rl node` is gone"
    return f"lost: no sign of life for {span(machine.silent_s)}"


def processes_on(machine: RunMachine, state: RunState) -> list[str]:
    """Returns the processes on a machine that have a status, the ranks of a trainer as one:
    `orchestrator`, `ranks 8 to 15`."""
    names = [name for name, process in state.processes.items() if machine.runs(process.status)]
    ranks = sorted(int(match[1] or 0) for name in names if (match := RANK.fullmatch(name)))
    others = [name for name in names if not RANK.fullmatch(name)]
    return [*others, f"ranks {ranks[0]} to {ranks[-1]}"] if ranks else others


def machine_line(machine: RunMachine, state: RunState) -> str:
    status = machine.status
    if status is None:
        return f"machine {machine.index}: is not there; it {does(machine)}"
    age_s = max(0.0, status.heartbeat - status.started)
    life = loss(machine) if machine.state == "lost" else f"for {span(age_s)}"
    leaving = "leaving" if machine.state == "leaving" else ""
    what = filter(None, [facts(machine, status), life, leaving, *processes_on(machine, state)])
    return f"machine {machine.index}: {status.host} {does(machine)}, {', '.join(what)}"


def changes(told: dict[int, str], machines: list[RunMachine]) -> list[str]:
    """Returns what became of machines since the last call, which left its knowledge in `told`."""
    lines = []
    for machine in machines:
        host = f" ({machine.status.host})" if machine.status else ""
        texts = {
            "absent": "has left",
            "lost": f"is {loss(machine)}",
            "leaving": "is leaving",
            "live": does(machine),
        }
        sign = f"{machine.state} {does(machine)}" if machine.is_up else machine.state
        if told.get(machine.index, "absent") != sign:
            lines.append(f"  machine {machine.index}{host} {texts[machine.state]}")
        told[machine.index] = sign
    return lines
