"""What the processes of a run do, for the console."""

from collections.abc import Iterable

from rl.config.plan import plan
from rl.config.run import RLConfig
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, RoleStatus, describe, read_status


def processes_of(config: RLConfig) -> list[str]:
    """Returns the processes whose phases are shown; on a cluster one inference server for each
    machine that serves."""
    if config.sft:
        return ["data", "trainer"]
    division = plan(config)
    return [
        *(["inference"] if division.is_one_machine else division.server_names),
        "orchestrator",
        "trainer",
    ]


def read_statuses(run_dir: RunDir, names: Iterable[str]) -> dict[str, RoleStatus]:
    """Returns the statuses of processes; for a trainer without one that of its launcher, which
    says for which machines it waits."""
    found = {name: status for name in names if (status := read_status(run_dir.status(name)))}
    launcher = None if "trainer" in found else read_status(run_dir.status("trainer-launcher"))
    return found | {"trainer": launcher} if launcher else found


def alike(statuses: dict[str, RoleStatus]) -> dict[str, RoleStatus]:
    """Returns the statuses, those of servers that do the same as one, with the newest change:
    `inference-node2, 3`."""
    servers: dict[tuple[Phase | None, int | None], list[str]] = {}
    others = {}
    for name, status in statuses.items():
        if name.startswith("inference-node"):
            servers.setdefault((status.phase, status.step), []).append(name)
        else:
            others[name] = status
    grouped = {}
    for names in servers.values():
        label = ", ".join([names[0], *(name.removeprefix("inference-node") for name in names[1:])])
        grouped[label] = max(
            (statuses[name] for name in names), key=lambda status: status.since or 0.0
        )
    return grouped | others


def phase_text(name: str, status: RoleStatus, now: float) -> str:
    """Describes what a process does and for how long: `trainer: waiting for batch 3 (12 s)`."""
    seconds = now - status.since if status.since else 0.0
    return f"{name}: {describe(status)}" + (f" ({seconds:.0f} s)" if seconds >= 1 else "")
