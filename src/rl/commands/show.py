"""`rl show`: prints the rollouts of a run, or of a file of rollouts."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from types import FrameType

from rl.commands.options import named_run
from rl.config.command_line import need_names, option_lines, options, take
from rl.diagnosis.rollouts import Row, Selection, ranked, read_all, rollout_files, rollout_text
from rl.launch.children import Children
from rl.launch.prepare import ranges
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError
from rl.system.terminal import say

OPTIONS = options("""
step N: only rollouts of batch N; default: all, the newest first
env NAME: only rollouts of one environment
task TASK: only rollouts of one task, by its number
why REASON: only rollouts not trained for this reason: no_signal, surplus, stale, error,
    truncated, pending ...; or: trained
sort FIELD: sort by a number, the highest first: reward, advantage, num_tokens, num_turns, or
    one of the metrics
reverse: with --sort: lowest first
limit N: most rollouts to print; default: all, or 100 with --sort
""")
HELP = f"""usage: rl show RUN [--step N] [--env NAME] [--task TASK] [--why REASON] [--sort FIELD
               [--reverse]] [--limit N]

Prints rollouts in full: messages, reward with each reward function's value, advantage, and whether
they were trained on. RUN is the directory of a run, alive or dead, or its name under outputs/; or a
file of rollouts: outputs/x/evals/000010/NAME.jsonl, or an output of `rl collect`. Control
characters are shown as \\x1b. On a terminal, the output goes through $PAGER.

{option_lines(OPTIONS)}
"""
MOST_SORTED = 100
"""Rollouts printed by --sort without --limit; printing all would need all of them in memory."""
MOST_LISTED = 12
"""Most values that an error lists."""


def main(args: list[str], _children: Children) -> int:
    """Prints the selected rollouts. Returns 1 if a file was damaged. Raises RunError if there is
    nothing to print."""
    values, rest = take("rl show", args, OPTIONS, HELP)
    which = "which run? Give one, its directory or its name, and flags of `rl show --help`"
    [spec] = need_names("rl show", rest, (1,), which)
    field, limit = values["sort"], values["limit"]
    files, damaged = files_of(spec, values["step"]), list[str]()
    selection = Selection(values["env"], values["task"], values["why"])
    rows: Iterable[Row] = filter(selection.takes, read_all(files, damaged))
    if field:
        is_reverse = bool(values["reverse"])
        rows = ranked(rows, field, limit or MOST_SORTED, lowest_first=is_reverse)
    elif values["reverse"]:
        raise RunError("--reverse: needs --sort FIELD, whose order it reverses")
    rows = islice(rows, limit)
    if (first := next(rows, None)) is None:
        raise RunError("\n".join([*damaged, nothing(spec, selection, field)]))
    page(chain([rollout_text(first)], (f"\n{rollout_text(row)}" for row in rows)))
    if field and not limit and selection.taken > MOST_SORTED:
        say(
            f"rl show: printed the first {MOST_SORTED} of {selection.taken:,} in this order; "
            "--limit N prints more"
        )
    for fault in damaged:
        say(f"rl show: {fault}")
    return 1 if damaged else 0


def files_of(spec: str, step: int | None) -> list[Path]:
    """Returns the files of rollouts that `spec` names. Raises RunError."""
    path = Path(spec).expanduser()
    if path.is_file():
        if step is not None:
            raise RunError(f"--step {step}: {spec} is a file; only a run has steps")
        return [path]
    run_dir = RunDir(root := named_run(spec), root / "weights")
    files = rollout_files(run_dir, step)
    if not files and step is not None:
        steps = ranges(run_dir.rollout_files())
        raise RunError(
            f"--step {step}: no rollouts of this step in {run_dir.rollouts_dir}; steps with "
            f"rollouts: {steps}"
        )
    return files


def nothing(spec: str, selection: Selection, field: str | None) -> str:
    """Returns why nothing is printed, and the remedy."""
    if not selection.seen["env"]:
        remedy = f"`rl doctor {spec}` shows what the run is waiting for"
        if Path(spec).is_file():
            remedy = (
                "give a run's directory or name, or a file of rollouts that `rl` has written, one "
                "JSON object per line"
            )
        return f"{spec}: no finished rollouts; {remedy}"
    for name, wanted in selection.wanted.items():
        seen = selection.seen[name]
        if wanted is not None and not seen[wanted]:
            listed = ", ".join(f"{v} ({count})" for v, count in seen.most_common(MOST_LISTED))
            rest = ", ..." if len(seen) > MOST_LISTED else ""
            return f"--{name} {wanted}: no rollout matches; existing values: {listed}{rest}"
    if field and selection.numbers:
        names = ", ".join(sorted(selection.numbers))
        return f"--sort {field}: the rollouts have no such number; they have: {names}"
    return f"{spec}: no rollout matches all filters"


def page(texts: Iterable[str]) -> None:
    """Prints texts, each followed by a newline: on a terminal through $PAGER (default: less),
    otherwise directly.

    Texts are generated on demand, and no more of them after the pager has quit. There is no time
    limit for reading.
    """
    pager = None
    with contextlib.suppress(OSError, ValueError):  # not installed, or not a valid command
        if sys.stdout.isatty():
            command = shlex.split(os.environ.get("PAGER") or "less")
            environ = {"LESS": "FRX", **os.environ}
            pager = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
    if pager is None:
        encoding = sys.stdout.encoding
        for text in texts:
            print(text.encode(encoding, "backslashreplace").decode(encoding))
        return

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        """Leaves Ctrl-C to the pager, which shares the terminal, while it is running."""
        if pager.poll() is not None and callable(before):
            before(signum, frame)

    assert pager.stdin
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with contextlib.suppress(BrokenPipeError), pager.stdin:
            for text in texts:
                pager.stdin.write(f"{text}\n".encode(errors="backslashreplace"))
                pager.stdin.flush()
    finally:
        pager.wait()
        signal.signal(signal.SIGINT, before)
