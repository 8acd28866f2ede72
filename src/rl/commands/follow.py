"""`rl watch` and `rl logs`: what a run and its processes say, from any machine that sees its
directory."""

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from rl.cluster.submit import is_queued
from rl.commands.options import named_run, open_run, runs_given
from rl.config.command_line import need_names, option_lines, options, take
from rl.launch.children import Children
from rl.launch.watch import LOOK_S, Life
from rl.launch.watch import watch as follow_run
from rl.run_dir.files import LineReader
from rl.run_dir.logs import last_lines
from rl.system.children import Stopped
from rl.system.errors import RunError
from rl.system.terminal import clip, did_you_mean, say, size, span, visible

WATCH_HELP = """usage: rl watch RUN

Shows a run as `rl` does while it runs: steps, evaluations, deaths, warnings and, if nothing moves,
what everything waits for. It only reads, so it works on any machine that sees the run's directory,
any number of times; Ctrl-C ends it and not the run. A run on a cluster that has no machines is
waited for while it can come back: while its engine has jobs of it, or, where no engine tells that,
for cluster.join_timeout_s after the last sign of a machine that it has seen. RUN is the directory
of a run, or its name under outputs/. The exit code is that of the run.
"""
OPTIONS = options("""
node K: only processes on machine K of a cluster
attempt N: the log of this attempt; default: the newest
lines N: lines to print of each log, the newest; default: 100
follow: print new lines, also those of later attempts and processes, until the run is over
""")
LOGS_HELP = f"""usage: rl logs RUN [PROCESS] [-f] [-n N] [--node K] [--attempt N]

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


def watch(args: list[str], children: Children) -> int:
    _, [root] = runs_given("rl watch", args, (), WATCH_HELP)
    run_dir, config = open_run(root.resolve())
    return follow_run(run_dir, config, children, is_queued=lambda: is_queued(run_dir, config))


def logs(args: list[str], children: Children) -> int:
    args = [{"-f": "--follow", "-n": "--lines"}.get(word, word) for word in args]
    values, rest = take("rl logs", args, OPTIONS, LOGS_HELP)
    which = "which run? Give its directory and perhaps a process: rl logs outputs/NAME trainer"
    need_names("rl logs", rest, (1, 2), which)
    root, life = named_run(rest[0]).resolve(), None
    process, node = rest[1] if rest[1:] else "", values["node"]
    view = View(root / "logs", process, node, values["attempt"])
    if values["follow"]:
        run_dir, config = open_run(root)
        life = Life(run_dir, config, is_queued=lambda: is_queued(run_dir, config))
    logs = view.logs()
    if not logs and not (life and view.may_come() and not life.end()):
        raise RunError(view.nothing())
    if not process and not node and not life:
        print(*listing(logs), sep="\n")
        return 0
    try:
        view.show_last(logs, values["lines"] or LINES)
        if life:
            follow(view, life)
    except Stopped:
        children.stop_caught()
    return 0


def follow(view: "View", life: Life) -> None:
    """Prints new lines until the run is over, and why it is on stderr."""
    look_at, told, end = 0.0, "", None
    if not view.readers:
        say(f"rl logs: {view.nothing()}; waiting for it")
    while not end:
        if time.monotonic() >= look_at:
            look_at, end = time.monotonic() + LOOK_S, life.end()
            if life.waiting not in ("", told):
                say(f"rl logs: {life.waiting}")
            told = life.waiting
        view.show_new(is_last=bool(end))  # after the look: what was written before is printed
        time.sleep(0 if end else POLL_S)
    say(f"rl logs: {end[1] or 'the run is over'}")


def logs_in(folder: Path) -> Logs:
    """Returns the logs of all processes by name."""
    logs: Logs = {}
    for path in sorted(folder.glob("*.log")):
        match = re.fullmatch(r"(?!worker-|slurm-)(.+)-(\d+)", path.stem)
        name, attempt = (match[1], int(match[2])) if match else (path.stem, 1)
        logs.setdefault(name, {})[attempt] = path
    return logs


def machine_of(name: str) -> tuple[str, str]:
    """Returns role and machine of a process, `trainer` and `1` for trainer-node1; the machine is
    empty where the name has none."""
    match = re.fullmatch(r"(?!worker-)(?:(.+)-)?node-?(\d+)", name)
    return (match[1] or "node", match[2]) if match else (name, "")


def listing(logs: Logs) -> Iterator[str]:
    """Yields a line for each process: its attempts, the size and the age of its newest log, and
    its last line."""
    for name, attempts in logs.items():
        attempt = max(attempts)
        stat, last = attempts[attempt].stat(), next(iter(last_lines(attempts[attempt], 1)), "")
        age = f"{span(max(0.0, time.time() - stat.st_mtime))} ago"
        about = f"{name:20} attempt {attempt:3}  {size(stat.st_size):>9}  {age:>10}"
        yield visible(f"{about}  {clip(last, WIDTH)}")


class View:
    """The logs that are asked for, and how far each was printed."""

    def __init__(self, folder: Path, process: str, node: str | None, attempt: int | None):
        """`process`: empty for all. `node`: the index of a machine. `attempt`: None for the newest
        and later ones."""
        self.folder, self.process, self.node, self.attempt = folder, process, node, attempt
        self.readers: dict[str, tuple[int, LineReader]] = {}
        """The newest attempt that was printed of each process, and how far."""

    def logs(self) -> Logs:
        logs = {}
        for name, attempts in logs_in(self.folder).items():
            role, machine = machine_of(name)
            if self.process in ("", name, role) and self.node in (None, machine):
                logs[name] = attempts
        return logs

    def may_come(self) -> bool:
        """Returns whether a process of that name may start later."""
        return not self.process or machine_of(self.process)[0] in LATER

    def nothing(self) -> str:
        where = f" on machine {self.node}" if self.node else ""
        return (
            f"{self.folder}: no log of {self.process or 'any process'}{where}; "
            f"{did_you_mean(self.process, logs_in(self.folder))}"
        )

    def show_last(self, logs: Logs, count: int) -> None:
        """Prints the last lines of each, also one that is not complete. Raises RunError for an
        attempt that does not exist."""
        for name, attempts in logs.items():
            if self.attempt and self.attempt not in attempts:
                remedy = f"there are {sorted(attempts)}"
                raise RunError(f"{self.folder}: {name} has no attempt {self.attempt}; {remedy}")
        chosen = {name: self.attempt or max(attempts) for name, attempts in logs.items()}
        texts = {name: logs[name][attempt].read_bytes() for name, attempt in chosen.items()}
        for name, attempt in chosen.items():
            self.readers[name] = attempt, LineReader(logs[name][attempt], len(texts[name]))
        for name, text in texts.items():
            self.show(name, text.splitlines()[-count:])

    def show_new(self, *, is_last: bool) -> None:
        """Prints new lines; all of those of new processes and attempts. `is_last`: also lines that
        are not complete, as when an attempt has ended, for they may be last words."""
        for name, attempts in self.logs().items():
            for attempt in sorted(
                attempts if self.attempt is None else {self.attempt} & {*attempts}
            ):
                shown, reader = self.readers.get(name, (0, None))
                if attempt > shown:
                    self.show_rest(name, reader)
                    reader = LineReader(attempts[attempt])
                    self.readers[name] = attempt, reader
                    print(f"{self.prefix(name)}--- attempt {attempt}")
                if attempt >= shown and reader:
                    self.show(name, reader.all())
        for name, (_, reader) in self.readers.items() if is_last else ():
            self.show_rest(name, reader)

    def show_rest(self, name: str, reader: LineReader | None) -> None:
        """Prints what remains of a log, also a line that is not complete."""
        if reader and reader.path.exists():
            data = reader.path.read_bytes()[reader.offset :]
            reader.offset += len(data)
            self.show(name, data.splitlines())

    def prefix(self, name: str) -> str:
        width = max(map(len, self.readers))
        return "" if [*self.readers] == [self.process] else f"{name.ljust(width)} | "

    def show(self, name: str, lines: Iterable[bytes]) -> None:
        for line in lines:
            print(self.prefix(name) + visible(line.decode(errors="replace")))
