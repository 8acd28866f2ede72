"""`rl show`: prints the rollouts of a run, or of a file of rollouts."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rl.commands.pager import page
from rl.commands.policy_spec import named_run
from rl.config.command_line import fail
from rl.config.options import option_lines, options, take
from rl.diagnosis.rollouts import Row, Selection, ranked, read_all, rollout_files, rollout_text
from rl.launch.children import Children
from rl.launch.prepare import ranges
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError

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
    if len(rest) != 1 or rest[0].startswith(("-", "@")):
        what = f"{rest[-1]}: not understood." if rest else "which run?"
        fail(
            "rl show",
            f"{what} Give one run, its directory or its name, and flags of `rl show --help`",
        )
    spec = rest[0]
    files = files_of(spec, values["step"])
    selection, damaged = Selection(values["env"], values["task"], values["why"]), list[str]()
    rows = chosen(files, selection, values, damaged)
    if (first := next(rows, None)) is None:
        raise RunError("\n".join([*damaged, nothing(spec, selection, values)]))
    page(texts(first, rows))
    if values["sort"] and not values["limit"] and selection.taken > MOST_SORTED:
        print(
            f"rl show: printed the first {MOST_SORTED} of {selection.taken:,} in this order; "
            "--limit N prints more",
            file=sys.stderr,
        )
    for fault in damaged:
        print(f"rl show: {fault}", file=sys.stderr)
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
        there = ranges(run_dir.rollout_files())
        raise RunError(
            f"--step {step}: no rollouts of this step in {run_dir.rollouts_dir}; steps with "
            f"rollouts: {there}"
        )
    return files


def chosen(
    files: list[Path], selection: Selection, values: dict[str, Any], damaged: list[str]
) -> Iterator[Row]:
    """Returns the selected rollouts in the requested order. Raises RunError."""
    rows: Iterable[Row] = filter(selection.takes, read_all(files, damaged))
    limit = values["limit"]
    if values["sort"]:
        rows = ranked(
            rows, values["sort"], limit or MOST_SORTED, lowest_first=bool(values["reverse"])
        )
    elif values["reverse"]:
        raise RunError("--reverse: needs --sort FIELD, whose order it reverses")
    return islice(rows, limit)


def nothing(spec: str, selection: Selection, values: dict[str, Any]) -> str:
    """Returns why nothing is printed, and the remedy."""
    if not selection.seen["env"]:
        one = (
            "give a run's directory or name, or a file of rollouts that `rl` has written, one "
            "JSON object per line"
        )
        remedy = (
            one if Path(spec).is_file() else f"`rl doctor {spec}` shows what the run is waiting for"
        )
        return f"{spec}: no finished rollouts; {remedy}"
    for name, wanted in selection.wanted.items():
        if wanted is not None and not selection.seen[name][wanted]:
            there = selection.seen[name].most_common(MOST_LISTED)
            more = ", ..." if len(selection.seen[name]) > MOST_LISTED else ""
            listed = ", ".join(f"{value} ({count})" for value, count in there)
            return f"--{name} {wanted}: no rollout matches; existing values: {listed}{more}"
    if values["sort"] and selection.numbers:
        return (
            f"--sort {values['sort']}: the rollouts have no such number; they have: "
            f"{', '.join(sorted(selection.numbers))}"
        )
    return f"{spec}: no rollout matches all filters"


def texts(first: Row, others: Iterable[Row]) -> Iterator[str]:
    """Yields the text of each rollout, separated by empty lines."""
    yield rollout_text(first)
    for row in others:
        yield "\n" + rollout_text(row)
