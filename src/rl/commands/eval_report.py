"""Reports an evaluation of one policy or two side by side: report.json for programs, report.md
and a table for people."""

import json
import time
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

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
from rl.run_dir.metrics import PASS
from rl.system.errors import RunError
from rl.system.terminal import say, table, visible, with_error
from rl.wire.rollouts import Split

Part = dict[str, Any]
NUMBERS = ("example_id", "idx")
"""Fields of a task that only tell its place among the others."""


def eval_part(
    entry: EvalConfig,
    split: Split,
    sampling: dict[str, Any],
    results: Results,
    tasks: list[dict[str, Any]],
) -> Part:
    """Returns the report of one policy on one evaluation, whose `tasks` are in the order of their
    numbers. `examples`, by the digest of their task, holds all that a later comparison needs."""
    names, rewards = digests(tasks), example_rewards(results)
    examples, fields = {}, EvalConfig.model_fields
    for task, rollouts in results:
        plays = episodes(rollouts)
        scores = {"reward": rewards[task], "samples": len(plays)}
        solved = sum(play.solved for play in plays)
        examples[names[task]] = {"task": task, **scores, "solved": solved}
    source = {key: value for key, value in entry.source.items() if value != fields[key].default}
    metrics = eval_metrics(entry.label, results).items()
    return {
        "environment": source,
        "split": split,
        "sampling": sampling,
        "num_examples": len(results),
        "samples": min(example["samples"] for example in examples.values()),
        "metrics": {key.removeprefix(f"eval/{entry.label}/"): value for key, value in metrics},
        "examples": examples,
    }


def digests(tasks: list[dict[str, Any]]) -> list[str]:
    """Returns a name for the content of each task, wherever it stands among the others; equal tasks
    are counted. The system prompt is not part of it: two may be compared."""
    names, counts = list[str](), Counter[str]()
    for task in tasks:
        content = {key: value for key, value in task.items() if key not in NUMBERS}
        if isinstance(prompt := task.get("prompt"), list):
            content["prompt"] = [message for message in prompt if message["role"] != "system"]
        text = json.dumps(content, sort_keys=True).encode()
        name = blake2b(text, digest_size=8).hexdigest()
        counts[name] += 1
        names.append(f"{name}-{counts[name]}")
    return names


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
        name = f"{first['policy']} ({path.resolve().parent.name})"
        return first | {"policy": name, "evals": first["evals"]}
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise RunError(
            f"--compare {spec}: not a report of `rl eval` ({type(error).__name__}: {error})"
        ) from None


def compare(ours: Part, theirs: Part, seed: int) -> dict[str, Difference]:
    """Returns paired differences of the mean reward and of each pass@k that both measured, over the
    examples that both played.

    `seed` is the seed of the bootstrap.
    """
    both = (ours["examples"], theirs["examples"])
    common = sorted(set(both[0]) & set(both[1]))
    if not common:
        return {}

    def gap(value: Callable[[dict[str, Any]], float]) -> Difference:
        return difference(*({task: value(part[task]) for task in common} for part in both), seed)

    gaps = {"reward_mean": gap(lambda example: example["reward"])}
    smallest = min(part[task]["samples"] for part in both for task in common)
    for name in ours["metrics"]:
        prefix, _, k = name.partition("@")
        if prefix == "pass" and k.isdigit() and int(k) <= smallest and name in theirs["metrics"]:
            gaps[name] = gap(lambda e, k=int(k): pass_at_k(e["samples"], e["solved"], k))
    return gaps


def write_report(output: Path, config: RLConfig, policies: list[Part]) -> dict[str, Any]:
    """Writes report.json and report.md. Differences of two policies are the first minus the
    second."""
    comparison = {}
    if len(policies) == 2:
        ours, theirs = policies[0]["evals"], policies[1]["evals"]
        for label in [label for label in ours if label in theirs]:
            gaps = compare(ours[label], theirs[label], config.seed)
            comparison[label] = {name: gap._asdict() for name, gap in gaps.items()}
            warn_of_differences(label, ours[label], theirs[label])
        if not any(comparison.values()):
            raise RunError(
                "the two policies have no examples in common: the evaluations are "
                f"{', '.join(ours)} and {', '.join(theirs)}"
            )
    report = {
        "name": config.name,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
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
            differ = f"the two policies differ in {key}: {ours[key]} and {theirs[key]}"
            say(f"warning: eval {label}: {differ}")
    common, counts = (
        set(ours["examples"]) & set(theirs["examples"]),
        [len(part["examples"]) for part in (ours, theirs)],
    )
    if counts != [len(common)] * 2:
        say(
            f"warning: eval {label}: {counts[0]} and {counts[1]} examples; the {len(common)} "
            "that both have are compared"
        )


# Tables -------------------------------------------------------------------------------------------


def headings(report: dict[str, Any]) -> list[str]:
    policies = [policy["policy"] for policy in report["policies"]]
    gap = ["difference", "95% interval"] if len(policies) == 2 else []
    return ["eval", "measure", *policies, *gap]


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Returns the cells of the table: one row per metric of each evaluation, one column per
    policy."""
    policies, lines = report["policies"], []
    for label, part in policies[0]["evals"].items():
        metrics = [policy["evals"].get(label, {"metrics": {}})["metrics"] for policy in policies]
        trains = ", training examples" if part.get("split") == "train" else ""
        head = f"{label} ({part['num_examples']} x {part['samples']}{trains})"
        for name in part["metrics"]:
            if name.endswith("_stderr") or name.startswith("avg@"):
                continue
            cells = [with_error(each.get(name), each.get(f"{name}_stderr")) for each in metrics]
            if len(policies) == 2:
                gap = report["comparison"].get(label, {}).get(name)
                interval = f"{gap['low']:+.3f} to {gap['high']:+.3f}" if gap else ""
                cells += [f"{gap['mean']:+.3f}" if gap else "", interval]
            lines.append([head, name, *cells])
            head = ""
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
    body = "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in [head, ["---"] * len(head), *rows(report)]
    )
    title = " and ".join(policy["policy"] for policy in report["policies"])
    return f"# Evaluation of {title}\n\n{report['time']}\n\n{body}\n\n{note(report)}\n"


def show(report: dict[str, Any], output: Path) -> None:
    """Prints the table and the paths of the report and the rollouts."""
    print(*map(visible, table(headings(report), rows(report), left=2)), "", note(report), sep="\n")
    names = [policy["files"] for policy in report["policies"]]
    files = ", ".join(f"{name}/" for name in names if (output / name).is_dir())
    print(f"{output}: report.json, report.md, rollouts in {files}")
