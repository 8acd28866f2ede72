"""`rl eval`: measures a policy on the configured evaluations, compares it with another, and reports
both side by side: report.json for programs, report.md and a table for people.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from rl.commands.options import (
    CONCURRENCY,
    ENDPOINT,
    POLICY,
    POLICY_SPECS,
    PolicySource,
    check_policy,
    load,
    name_of_play,
    resolve,
    usage,
)
from rl.commands.play_session import PlaySession, play_session, run
from rl.config.command_line import CommandLine, fail, options
from rl.config.orchestrator import EnvSource, EvalConfig
from rl.config.run import RLConfig, shrink
from rl.homes.resolve import Homes, homes_of
from rl.launch.children import Children
from rl.orchestrator.evals.eval_metrics import (
    Difference,
    Results,
    difference,
    episodes,
    eval_metrics,
    example_rewards,
    pass_at_k,
    write_eval,
)
from rl.orchestrator.workers.setups import eval_fault, eval_workers, smallest
from rl.run_dir.files import write_file
from rl.run_dir.metrics import PASS
from rl.system.errors import RunError
from rl.system.terminal import say, table, visible, with_error
from rl.wire.rollouts import Split
from rl.wire.worker_messages import Ready, derived_seed

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
    fewest = min(part[task]["samples"] for part in both for task in common)
    for name in ours["metrics"]:
        prefix, _, k = name.partition("@")
        if prefix == "pass" and k.isdigit() and int(k) <= fewest and name in theirs["metrics"]:
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


OPTIONS = (
    POLICY,
    *options("""
compare SPEC: a second policy to play on the same examples, or the report.json of an earlier
    evaluation
"""),
    *ENDPOINT,
    *options("""
limit N: examples of every evaluation; overrides num_examples
samples N: rollouts per example; overrides samples
"""),
    CONCURRENCY,
    *options("""
output DIR: directory for the report and rollouts; default: outputs/eval-NAME/TIME, NAME being
    the run or what is played
"""),
)
HELP = usage(
    """\
usage: rl eval [@ FILE] [--policy SPEC] [--compare SPEC] [--KEY VALUE] ...

Plays [[orchestrator.eval]], or the eval splits of the environments if there is none; an environment
without one is played on its
training examples. Sampling is set by orchestrator.sampling and orchestrator.eval.sampling;
temperature 0 is greedy.""",
    OPTIONS,
    POLICY_SPECS,
)


def evaluations_only(
    config: RLConfig, limit: int | None, samples: int | None, *, quick: bool
) -> RLConfig:
    """Returns the configuration without training environments; without evaluations, the
    environments' eval splits become those. Each is limited to `limit` examples and `samples`
    rollouts."""
    config = config.model_copy(deep=True)
    settings, shared = config.orchestrator, set(EnvSource.model_fields)
    settings.eval = settings.eval or [
        EvalConfig(**env.model_dump(include=shared)) for env in settings.environment
    ]
    settings.environment = []
    config = shrink(config) if quick else config
    for entry in config.orchestrator.eval:
        entry.num_examples = limit or entry.num_examples
        entry.samples = samples or entry.samples
    return config


def main(args: list[str], children: Children) -> int:
    config, line, values = load(
        "rl eval",
        args,
        OPTIONS,
        HELP,
        optional=("orchestrator.environment", "orchestrator.sampling.temperature"),
    )
    config = evaluations_only(
        config, values["limit"], values["samples"], quick="quick" in line.switches
    )
    if not config.orchestrator.eval:
        check_policy(values["policy"] or "")
        fail(
            "rl eval",
            "nothing to evaluate: give an environment (--orchestrator.environment.id "
            "owner/name), a file (@ run.toml) or a run",
        )
    # before the policy is contacted, and where a signal stops it
    homes = homes_of(config, say, recorded=bool(line.files))
    return run("rl eval", children, evaluate(config, homes, line, values, children))


async def evaluate(
    config: RLConfig, homes: Homes, line: CommandLine, values: dict[str, Any], children: Children
) -> int:
    """Plays one policy or two, resolving both before the first is played, and writes the report."""
    labels = tuple(entry.label for entry in config.orchestrator.eval)
    policy, second, key_var = values["policy"], values["compare"], values["api_key_var"]
    earlier = finished_report(second) if second else None
    sources = [resolve(policy, config, values["endpoint_model"], key_var, labels)]
    if second and not earlier:
        sources.append(resolve(second, config, None, key_var, labels))
    name = name_of_play(config, line, labels, sources[0], policy)
    output = Path(values["output"] or new_folder(Path(config.output_dir) / f"eval-{name}"))
    results: list[dict[str, Any]] = []
    for source in sources:
        slug = source.slug
        if results and results[0]["files"] == slug:
            slug = f"{slug}-2"
        async with play_session(config, homes, source, output, children) as session:
            evals = await evaluate_policy(session, source, output / slug, values["concurrency"])
        results.append(
            {
                "policy": source.label,
                "policy_version": source.policy_version,
                "model": source.adapter or source.model,
                "files": slug,
                "evals": evals,
            }
        )
    report = write_report(output, config, [*results, *([earlier] if earlier else [])])
    show(report, output)
    return 0


def new_folder(parent: Path) -> Path:
    """Makes a folder that has the time as its name, and a number if another evaluation began in
    the same second."""
    folder = first = parent / time.strftime("%Y%m%d-%H%M%S")
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(2):
        with suppress(FileExistsError):
            folder.mkdir()
            break
        folder = first.with_name(f"{first.name}-{number}")
    return folder


async def evaluate_policy(
    session: PlaySession, source: PolicySource, folder: Path, concurrency: int | None
) -> dict[str, Any]:
    """Plays every evaluation with one policy, writes its rollouts, and returns its parts of the
    report."""
    from rl.orchestrator.workers.pool import PlayJob

    config, jobs, splits = session.config, list[PlayJob](), dict[str, Split]()
    tasks = dict[str, list[dict[str, Any]]]()
    entries, names = config.orchestrator.eval, eval_workers(config)
    for entry in entries:
        label, env = entry.label, names[entry.label]
        splits[label], size = split_of(entry, session.ready[env])
        if fault := eval_fault(entry, size):
            raise RunError(fault)
        num_tasks = smallest(size, entry.num_examples) or 0
        tasks[label] = await session.tasks(env, splits[label], num_tasks)
        jobs += [
            PlayJob(
                env,
                splits[label],
                task,
                entry.samples,
                config.sampling_of(entry),
                label,
                derived_seed(config.seed, label, task),
            )
            for task in range(num_tasks)
        ]
    results: dict[str, Results] = {entry.label: [] for entry in entries}
    async with aclosing(session.play(source.label, jobs, concurrency)) as plays:
        async for job, rollouts in plays:
            results[job.label].append((job.task, rollouts))
    reports = {}
    for entry in entries:
        label = entry.label
        by_task = sorted(results[label], key=lambda result: result[0])
        warn_of_failures(source.label, label, by_task)
        write_eval(folder / f"{label}.jsonl", source.policy_version, label, by_task)
        sampling = config.sampling_of(entry)
        reports[label] = eval_part(entry, splits[label], sampling, by_task, tasks[label])
    return reports


def warn_of_failures(policy: str, label: str, results: Results) -> None:
    """Warns how many rollouts failed and count as reward 0, with the first error."""
    failed = [rollout.error for _, rollouts in results for rollout in rollouts if rollout.error]
    if failed:
        first = failed[0].splitlines()[0]
        say(
            f"warning: eval {label}: {len(failed)} rollouts of {policy} failed and count as "
            f"reward 0; the first error: {first}"
        )


def split_of(entry: EvalConfig, ready: Ready) -> tuple[Split, int | None]:
    """Returns the split to play and its size (None: endless). As in verifiers, training examples
    are used if there are no eval examples."""
    if ready.num_eval == 0 and ready.num_train != 0:
        say(
            f"warning: eval {entry.label}: its environment has no eval examples, so its "
            "training examples are played"
        )
        return "train", ready.num_train
    return "eval", ready.num_eval
