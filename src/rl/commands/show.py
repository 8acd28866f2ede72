"""`rl show`: the rollouts of a run, or of any file of rollouts, in the terminal."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rl.commands.pager import page
from rl.commands.policy_spec import named_run
from rl.config.command_line import fail
from rl.config.options import Option, option_lines, take
from rl.diagnosis.rollouts import Row, Selection, ranked, read_all, rollout_files, rollout_text
from rl.launch.children import Children
from rl.launch.prepare import ranges
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError

OPTIONS = (
    Option("step", "N", "those that were finished for batch N; default: all, the newest first"),
    Option("env", "NAME", "those of one environment"),
    Option("task", "TASK", "those of one task, by its number"),
    Option(
        "why", "REASON", "those that were not trained for a reason: no_signal, surplus, stale, error, truncated, pending ...; or: trained"
    ),
    Option("sort", "FIELD", "by a number of theirs, the highest first: reward, advantage, num_tokens, num_turns, or one of their metrics"),
    Option("reverse", "", "with --sort: the lowest first"),
    Option("limit", "N", "no more than so many; default: all, and 100 with --sort"),
)
HELP = f"""usage: rl show RUN [--step N] [--env NAME] [--task TASK] [--why REASON] [--sort FIELD [--reverse]] [--limit N]

Prints rollouts in full: messages, reward with each reward function's value, advantage, and what became of them. RUN is the directory of
a run, alive or dead, or its name under outputs/; or a file of rollouts: outputs/x/evals/000010/NAME.jsonl, or what `rl collect` wrote.
Control characters are shown as \\x1b, and on a terminal $PAGER shows it all.

{option_lines(OPTIONS)}
"""
MOST_SORTED = 100
"""So many are printed in order without --limit; all of them would have to be in memory."""
MOST_LISTED = 12
"""Values that an error lists."""


def main(args: list[str], _children: Children) -> int:
    values, rest = take("rl show", args, OPTIONS, HELP)
    if len(rest) != 1 or rest[0].startswith(("-", "@")):
        what = f"{rest[-1]}: not understood." if rest else "which run?"
        fail("rl show", f"{what} Give one run, its directory or its name, and flags of `rl show --help`")
    return show(rest[0], values)


def show(spec: str, values: dict[str, Any]) -> int:
    """Prints what is chosen. Returns 1 if a file was damaged. Raises RunError where there is nothing to print."""
    files = files_of(spec, values["step"])
    selection, damaged = Selection(values["env"], values["task"], values["why"]), list[str]()
    rows = chosen(files, selection, values, damaged)
    if (first := next(rows, None)) is None:
        raise RunError("\n".join([*damaged, nothing(spec, selection, values)]))
    page(texts(first, rows))
    if values["sort"] and not values["limit"] and selection.taken > MOST_SORTED:
        print(f"rl show: these were the first {MOST_SORTED} of {selection.taken:,} in this order; --limit N prints more", file=sys.stderr)
    for fault in damaged:
        print(f"rl show: {fault}", file=sys.stderr)
    return 1 if damaged else 0


def files_of(spec: str, step: int | None) -> list[Path]:
    """The files of rollouts that are meant. Raises RunError."""
    path = Path(spec).expanduser()
    if path.is_file():
        if step is not None:
            raise RunError(f"--step {step}: {spec} is a file; a step is one of a run")
        return [path]
    run_dir = RunDir(root := named_run(spec), root / "weights")
    files = rollout_files(run_dir, step)
    if not files and step is not None:
        there = ranges(run_dir.rollout_files())
        raise RunError(f"--step {step}: there are no rollouts of it in {run_dir.rollouts_dir}; of these steps there are: {there}")
    return files


def chosen(files: list[Path], selection: Selection, values: dict[str, Any], damaged: list[str]) -> Iterator[Row]:
    """The rollouts that are wanted, in the wanted order."""
    rows: Iterable[Row] = filter(selection.takes, read_all(files, damaged))
    limit = values["limit"]
    if values["sort"]:
        rows = ranked(rows, values["sort"], limit or MOST_SORTED, lowest_first=bool(values["reverse"]))
    elif values["reverse"]:
        raise RunError("--reverse: turns the order of --sort FIELD; give that, too")
    return islice(rows, limit)


def nothing(spec: str, selection: Selection, values: dict[str, Any]) -> str:
    """Why nothing is printed, and what could be."""
    if not selection.seen["env"]:
        one = "give a run, its directory or its name, or a file that `rl` has written rollouts into, one JSON object a line"
        remedy = one if Path(spec).is_file() else f"`rl doctor {spec}` says what the run waits for"
        return f"{spec}: there is no finished rollout; {remedy}"
    for name, wanted in selection.wanted.items():
        if wanted is not None and not selection.seen[name][wanted]:
            there = selection.seen[name].most_common(MOST_LISTED)
            more = ", ..." if len(selection.seen[name]) > MOST_LISTED else ""
            listed = ", ".join(f"{value} ({count})" for value, count in there)
            return f"--{name} {wanted}: no rollout has it; there are: {listed}{more}"
    if values["sort"] and selection.numbers:
        return f"--sort {values['sort']}: the rollouts have no such number; there are: {', '.join(sorted(selection.numbers))}"
    return f"{spec}: no rollout is like that"


def texts(first: Row, others: Iterable[Row]) -> Iterator[str]:
    """The text of each rollout, with an empty line between two."""
    yield rollout_text(first)
    for row in others:
        yield "\n" + rollout_text(row)
