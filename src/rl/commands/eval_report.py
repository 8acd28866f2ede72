"""Reports an evaluation of one policy or two side by side: report.json for programs, report.md
and a table for people."""

import json
import sys
import time
from pathlib import Path
from typing import Any
from zlib import crc32

from rl.config.orchestrator import EvalConfig
from rl.config.run import RLConfig
from rl.orchestrator.evals.eval_metrics import (
    Difference,
    Results,
    difference,
    episodes,
    eval_metrics,
    example_rewards,
    pass_at_k,
)
from rl.run_dir.files import write_file
from rl.run_dir.metric_names import PASS
from rl.system.errors import RunError
from rl.system.terminal import say
from rl.wire.rollouts import Split

Part = dict[str, Any]
WIDTH = 160
"""Width of the table in columns if the output is not a terminal."""


def eval_part(entry: EvalConfig, split: Split, sampling: dict[str, Any], results: Results) -> Part:
    """Returns the report of one policy on one evaluation. `examples` holds all that a later
    comparison needs."""
    metrics, rows = (
        eval_metrics(entry.label, results),
        Path(entry.eval_dataset or entry.dataset or "").expanduser(),
    )
    rewards = example_rewards(results)
    examples = {}
    for task, rollouts in results:
        played = episodes(rollouts)
        examples[str(task)] = {
            "reward": rewards[task],
            "samples": len(played),
            "solved": sum(play.solved for play in played),
        }
    return {
        "environment": {
            key: value
            for key, value in entry.source.items()
            if value != EvalConfig.model_fields[key].default
        }
        | ({"rows_crc32": crc32(rows.read_bytes())} if rows.is_file() else {}),
        "split": split,
        "sampling": sampling,
        "num_examples": len(results),
        "samples": min(example["samples"] for example in examples.values()),
        "metrics": {
            key.removeprefix(f"eval/{entry.label}/"): value for key, value in metrics.items()
        },
        "examples": examples,
    }


def finished_report(spec: str) -> dict[str, Any] | None:
    """Returns the first policy of an earlier report, or None if `spec` is neither a report.json nor
    its directory.

    Raises RunError for a report that cannot be read.
    """
    path = Path(spec).expanduser()
    path = path / "report.json" if (path / "report.json").is_file() else path
    if path.suffix != ".json":
        return None
    try:
        first = json.loads(path.read_text())["policies"][0]
        return first | {
            "policy": f"{first['policy']} ({path.resolve().parent.name})",
            "evals": first["evals"],
        }
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise RunError(
            f"--compare {spec}: not a report of `rl eval` ({type(error).__name__}: {error})"
        ) from None


def compare(ours: Part, theirs: Part, seed: int) -> dict[str, Difference]:
    """Returns paired differences of the mean reward and of each pass@k that both measured, over the
    examples that both played.

    `seed` is the seed of the bootstrap.
    """
    mine, other = ours["examples"], theirs["examples"]
    common = sorted(set(mine) & set(other), key=int)
    if not common:
        return {}
    rewards = [{int(task): part[task]["reward"] for task in common} for part in (mine, other)]
    found = {"reward_mean": difference(*rewards, seed)}
    smallest = min(part[task]["samples"] for part in (mine, other) for task in common)
    for name in (
        name
        for name in ours["metrics"]
        if name.startswith("pass@") and not name.endswith("_stderr")
    ):
        k = int(name.removeprefix("pass@"))
        if k <= smallest and name in theirs["metrics"]:
            rates = [
                {
                    int(task): pass_at_k(part[task]["samples"], part[task]["solved"], k)
                    for task in common
                }
                for part in (mine, other)
            ]
            found[name] = difference(*rates, seed)
    return found


def write_report(output: Path, config: RLConfig, policies: list[Part]) -> dict[str, Any]:
    """Writes report.json and report.md. Differences of two policies are the first minus the
    second."""
    comparison = {}
    if len(policies) == 2:
        ours, theirs = policies[0]["evals"], policies[1]["evals"]
        for label in [label for label in ours if label in theirs]:
            comparison[label] = {
                name: gap._asdict()
                for name, gap in compare(ours[label], theirs[label], config.seed).items()
            }
            warn_of_differences(label, ours[label], theirs[label])
        if not any(comparison.values()):
            raise RunError(
                "the two policies have no examples in common: the evaluations are "
                f"{', '.join(ours)} and {', '.join(theirs)}"
            )
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    report = {
        "name": config.name,
        "time": now,
        "seed": config.seed,
        "policies": policies,
        "comparison": comparison,
    }
    write_file(output / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    write_file(output / "report.md", markdown(report).encode())
    return report


def warn_of_differences(label: str, ours: Part, theirs: Part) -> None:
    """Warns when an earlier report evaluated something else under the same label."""
    for key in ("environment", "split", "sampling", "samples"):
        if ours[key] != theirs[key]:
            say(
                f"warning: eval {label}: the two policies differ in {key}: {ours[key]} and "
                f"{theirs[key]}"
            )
    if set(ours["examples"]) != set(theirs["examples"]):
        common = len(set(ours["examples"]) & set(theirs["examples"]))
        say(
            f"warning: eval {label}: {ours['num_examples']} and {theirs['num_examples']} "
            f"examples; the {common} common ones are compared"
        )


# Tables -------------------------------------------------------------------------------------------


def value_text(part: Part | None, name: str) -> str:
    """Formats a metric with its standard error, as `0.512 ± 0.021`; `-` for a policy without it."""
    if part is None or name not in part["metrics"]:
        return "-"
    value, error = part["metrics"][name], part["metrics"].get(f"{name}_stderr")
    return f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def headings(report: dict[str, Any]) -> list[str]:
    policies = [policy["policy"] for policy in report["policies"]]
    return [
        "eval",
        "measure",
        *policies,
        *(["difference", "95% interval"] if len(policies) == 2 else []),
    ]


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Returns the cells of the table: one row per metric of each evaluation, one column per
    policy."""
    policies = report["policies"]
    lines = []
    for label, part in policies[0]["evals"].items():
        parts = [policy["evals"].get(label) for policy in policies]
        shown = (
            f"{label} ({part['num_examples']} x "
            f"{part['samples']}{', training examples' if part.get('split') == 'train' else ''})"
        )
        for name in (
            name
            for name in part["metrics"]
            if not name.endswith("_stderr") and not name.startswith("avg@")
        ):
            line = [shown, name, *(value_text(one, name) for one in parts)]
            gap = report["comparison"].get(label, {}).get(name)
            if len(policies) == 2:
                line += (
                    [f"{gap['mean']:+.3f}", f"{gap['low']:+.3f} to {gap['high']:+.3f}"]
                    if gap
                    else ["", ""]
                )
            lines.append(line)
            shown = ""
    return lines


def note(report: dict[str, Any]) -> str:
    """Returns the line below the table that explains its numbers."""
    text = f"(examples x samples); ± is the standard error over examples; {PASS}"
    if report["comparison"]:
        text += (
            "; the interval of the difference is a paired bootstrap over examples; if it "
            "excludes 0, the two policies differ"
        )
    return text


def markdown(report: dict[str, Any]) -> str:
    head = headings(report)
    table = [head, ["---"] * len(head), *rows(report)]
    body = "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table
    )
    title = " and ".join(policy["policy"] for policy in report["policies"])
    return f"# Evaluation of {title}\n\n{report['time']}\n\n{body}\n\n{note(report)}\n"


def show(report: dict[str, Any], output: Path) -> None:
    """Prints the table and the paths of the report and the rollouts."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for i, heading in enumerate(headings(report)):
        table.add_column(
            heading, justify="left" if i < 2 else "right", overflow="fold", no_wrap=i != 0
        )
    for line in rows(report):
        table.add_row(*line)
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    print(note(report))
    files = ", ".join(
        f"{policy['files']}/"
        for policy in report["policies"]
        if (output / policy["files"]).is_dir()
    )
    print(f"{output}: report.json, report.md, rollouts in {files}")
