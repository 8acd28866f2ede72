"""`rl logs`: the logs of a run's processes."""

import re
import sys
import time
from pathlib import Path

from rl.cluster.submit import is_queued
from rl.commands.policy_spec import named_run
from rl.config.command_line import fail
from rl.config.options import Option, option_lines, take
from rl.config.stored import run_dir_of, stored_config
from rl.launch.children import Children
from rl.launch.watch import LOOK_S, Life
from rl.run_dir.files import LineReader
from rl.run_dir.logs import last_lines
from rl.system.children import Stopped
from rl.system.errors import RunError
from rl.system.terminal import clip, visible

OPTIONS = (
    Option("node", "K", "only processes on machine K of a cluster"),
    Option("attempt", "N", "the log of this attempt; default: the newest"),
    Option("lines", "N", "lines to print of each log, the newest; default: 100"),
    Option(
        "follow",
        "",
        "print new lines, also those of later attempts and processes, until the run is over",
    ),
)
HELP = f"""usage: rl logs RUN [PROCESS] [-f] [-n N] [--node K] [--attempt N]

Prints the logs of a run's processes: trainer, orchestrator, inference, worker-NAME-0 and so on; on
a cluster also trainer-node1, inference-node3: trainer stands for all of them, trainer-node1 or
trainer --node 1 for that machine's. Without a process, lists them. Several logs have the name of
their process before each line. RUN is the directory of a run, or its name under outputs/. With -f
it ends when the run is over; one on a cluster that may come back is waited for, see rl watch
--help.

{option_lines(OPTIONS)}
"""
LINES = 100
POLL_S = 0.5
WIDTH = 80
LATER = ("rl", "model", "data", "service", "inference", "orchestrator", "trainer")
"""Processes that may start later, and are waited for by name."""
Logs = dict[str, dict[int, Path]]
"""The logs of each process by attempt."""


def main(args: list[str], children: Children) -> int:
    args = [{"-f": "--follow", "-n": "--lines"}.get(word, word) for word in args]
    values, rest = take("rl logs", args, OPTIONS, HELP)
    if not 1 <= len(rest) <= 2 or any(word.startswith(("-", "@")) for word in rest):
        fail(
            "rl logs",
            "which run? Give its directory and perhaps a process: rl logs outputs/NAME trainer",
        )
    root = named_run(rest[0]).resolve()
    view = View(
        root / "logs",
        rest[1] if rest[1:] else "",
        values["node"],
        values["attempt"],
        values["lines"] or LINES,
    )
    life = None
    if values["follow"]:
        config = stored_config(root)
        run_dir = run_dir_of(root, config)
        life = Life(run_dir, config, is_queued=lambda: is_queued(run_dir, config))
    found = view.found()
    if not found and not (life and view.may_come() and not life.end()):
        raise RunError(view.nothing())
    if not rest[1:] and not values["node"] and not life:
        print("\n".join(visible(line) for line in listing(found)))
        return 0
    try:
        view.start(found)
        if life:
            follow(view, life)
    except Stopped:
        children.stop_caught()
    return 0


def follow(view: "View", life: Life) -> None:
    """Prints new lines until the run is over, and why it is on stderr."""
    look_at, said = 0.0, ""
    if not view.followers:
        print(f"rl logs: {view.nothing()}; waiting for it", file=sys.stderr, flush=True)
    while True:
        end = None
        if time.monotonic() >= look_at:
            look_at, end = time.monotonic() + LOOK_S, life.end()
            if life.waiting != said and (said := life.waiting):
                print(f"rl logs: {said}", file=sys.stderr, flush=True)
        view.new()  # after the look: what was written before the end is printed
        if end:
            view.close()
            print(f"rl logs: {visible(end[1]) or 'the run is over'}", file=sys.stderr, flush=True)
            return
        time.sleep(POLL_S)


def logs_in(folder: Path) -> Logs:
    """Returns the logs of all processes by name."""
    found: Logs = {}
    for path in sorted(folder.glob("*.log")):
        match = re.fullmatch(r"(.+)-(\d+)", path.stem)
        if match and not path.stem.startswith(("worker-", "slurm-")):
            found.setdefault(match[1], {})[int(match[2])] = path
        else:
            found[path.stem] = {1: path}
    return found


def machine_of(name: str) -> tuple[str, str]:
    """Returns role and machine of a process, `trainer` and `1` for trainer-node1; the machine is
    empty where the name has none."""
    match = re.fullmatch(r"(?!worker-)(?:(.+)-)?node-?(\d+)", name)
    return (match[1] or "node", match[2]) if match else (name, "")


def listing(found: Logs) -> list[str]:
    """Returns a line for each process: its attempts, the size and the age of its newest log, and
    its last line."""
    lines = []
    for name, attempts in found.items():
        attempt = max(attempts)
        stat, last = attempts[attempt].stat(), next(iter(last_lines(attempts[attempt], 1)), "")
        age_s = max(0.0, time.time() - stat.st_mtime)
        lines.append(
            f"{name:20} attempt {attempt:3}  {stat.st_size / 1024:8.0f} KiB  {age_s:6.0f} s "
            f"ago  {clip(last, WIDTH)}"
        )
    return lines


class View:
    """The logs that are asked for, and how far each was printed."""

    def __init__(
        self, folder: Path, process: str, node: str | None, attempt: int | None, lines: int
    ):
        """`process`: empty for all. `node`: the index of a machine. `attempt`: None for the
        newest. `lines`: to print of each at first."""
        self.folder, self.process, self.node, self.attempt, self.lines = (
            folder,
            process,
            node,
            attempt,
            lines,
        )
        self.followers: dict[str, Follower] = {}

    def found(self) -> Logs:
        found = {}
        for name, attempts in logs_in(self.folder).items():
            role, machine = machine_of(name)
            if self.process in ("", name, role) and self.node in (None, machine):
                found[name] = attempts
        return found

    def may_come(self) -> bool:
        """Returns whether a process of that name may start later."""
        return not self.process or machine_of(self.process)[0] in LATER

    def nothing(self) -> str:
        where = f" on machine {self.node}" if self.node else ""
        return (
            f"{self.folder}: no log of {self.process or 'any process'}{where}; there are "
            f"{', '.join(logs_in(self.folder)) or 'none'}"
        )

    def start(self, found: Logs) -> None:
        """Prints the last lines of each. Raises RunError for an attempt that does not exist."""
        for name, attempts in found.items():
            if self.attempt and self.attempt not in attempts:
                raise RunError(
                    f"{self.folder}: {name} has no attempt {self.attempt}; there are "
                    f"{sorted(attempts)}"
                )
        wide = max(map(len, found), default=0)
        for name, attempts in found.items():
            follower = self.followers[name] = Follower(
                "" if [*found] == [self.process] else f"{name.ljust(wide)} | "
            )
            follower.last(attempts, self.attempt or max(attempts), self.lines)

    def new(self) -> None:
        """Prints new lines; all of those of new processes and attempts."""
        for name, attempts in self.found().items():
            wanted = {
                number: path for number, path in attempts.items() if self.attempt in (None, number)
            }
            self.followers.setdefault(name, Follower(f"{name} | ")).new(wanted)

    def close(self) -> None:
        """Prints the last lines that are not complete: they may be last words."""
        for follower in self.followers.values():
            follower.rest()


class Follower:
    """Prints the lines of one process's logs, each with a prefix."""

    def __init__(self, prefix: str):
        self.prefix, self.attempt = prefix, 0
        self.reader: LineReader | None = None

    def last(self, attempts: dict[int, Path], attempt: int, count: int) -> None:
        """Prints the last lines of an attempt, also one that is not complete. Moves to the end."""
        self.attempt, self.reader = attempt, LineReader(attempts[attempt])
        data = attempts[attempt].read_bytes()
        self.reader.offset = len(data)
        self.show(data.splitlines()[-count:])

    def new(self, attempts: dict[int, Path]) -> None:
        """Prints new lines, and all those of later attempts."""
        for attempt in sorted(number for number in attempts if number > self.attempt):
            self.rest()
            self.attempt, self.reader = attempt, LineReader(attempts[attempt])
            print(f"{self.prefix}--- attempt {attempt}", flush=True)
        self.show(self.reader.new() if self.reader else [])

    def rest(self) -> None:
        """Prints what remains of the current attempt."""
        while self.reader and (lines := self.reader.new()):
            self.show(lines)
        if self.reader and self.reader.path.exists():
            data = self.reader.path.read_bytes()[self.reader.offset :]
            self.reader.offset += len(data)
            self.show(data.splitlines())

    def show(self, lines: list[bytes]) -> None:
        for line in lines:
            print(self.prefix + visible(line.decode(errors="replace")), flush=True)
