"""`rl eval`: how good a policy is on the configured evaluations, and whether it is better than another."""

import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rl.commands.arena import Job, arena, run, say, task_count
from rl.commands.eval_report import eval_part, finished_report, show, write_report
from rl.commands.options import CONCURRENCY, ENDPOINT, POLICY, POLICY_SPECS, load, name_of_play, usage
from rl.commands.policy_spec import Source, check_policy, resolve
from rl.config.command_line import CommandLine, fail
from rl.config.options import Option
from rl.config.orchestrator import EnvSource, EvalConfig
from rl.config.quick import shrink
from rl.config.run import RLConfig
from rl.homes.settle import Homes, homes_of
from rl.launch.children import Children
from rl.orchestrator.eval_metrics import Results, write_eval
from rl.orchestrator.setups import eval_workers
from rl.system.errors import RunError
from rl.wire.rollouts import Split
from rl.wire.worker_messages import Ready

OPTIONS = (
    POLICY,
    Option("compare", "SPEC", "a second policy, or the report.json of an earlier evaluation: both on the same examples"),
    *ENDPOINT,
    Option("limit", "N", "examples of every evaluation; instead of each one's num_examples"),
    Option("samples", "N", "rollouts an example; instead of each one's samples"),
    CONCURRENCY,
    Option("output", "DIR", "where the report and the rollouts go; default: outputs/eval-NAME/TIME, NAME of the run or what is played"),
)
HELP = usage(
    "usage: rl eval [@ FILE] [--policy SPEC] [--compare SPEC] [--KEY VALUE] ...\n\n"
    "Plays [[orchestrator.eval]], or the eval splits of the environments if there is none; an environment without one is played on its\n"
    "training examples. How it samples is set by orchestrator.sampling and orchestrator.eval.sampling, where temperature 0 is greedy.",
    OPTIONS,
    POLICY_SPECS,
)


def evaluations_only(config: RLConfig, limit: int | None, samples: int | None, *, quick: bool) -> RLConfig:
    """The configuration without training environments, whose eval splits are its evaluations if it has none. Each is limited to `limit`
    examples and `samples` rollouts."""
    config = config.model_copy(deep=True)
    settings, shared = config.orchestrator, set(EnvSource.model_fields)
    settings.eval = settings.eval or [EvalConfig(**env.model_dump(include=shared)) for env in settings.environment]
    settings.environment = []
    config = shrink(config) if quick else config
    for entry in config.orchestrator.eval:
        entry.num_examples = limit or entry.num_examples
        entry.samples = samples or entry.samples
    return config


def main(args: list[str], children: Children) -> int:
    config, line, values = load("rl eval", args, OPTIONS, HELP, optional=("orchestrator.environment",))
    config = evaluations_only(config, values["limit"], values["samples"], quick="quick" in line.switches)
    if not config.orchestrator.eval:
        check_policy(values["policy"] or "")
        fail("rl eval", "nothing to evaluate: give an environment (--orchestrator.environment.id owner/name), a file (@ run.toml) or a run")
    return run("rl eval", children, evaluate(config, line, values, children))


async def evaluate(config: RLConfig, line: CommandLine, values: dict[str, Any], children: Children) -> int:
    """Plays one policy or two and writes the report. Both are resolved before the first is played."""
    homes = homes_of(config, say, recorded=bool(line.files))  # before anything is asked of the policy
    entries = config.orchestrator.eval
    labels = tuple(entry.label for entry in entries)
    second = values["compare"]
    earlier = finished_report(second) if second else None
    sources = [resolve(values["policy"], config, values["endpoint_model"], values["api_key_var"], labels)]
    if second and not earlier:
        sources.append(resolve(second, config, None, values["api_key_var"], labels))
    name = name_of_play(config, line, labels, sources[0], values["policy"])
    output = Path(values["output"] or Path(config.output_dir) / f"eval-{name}" / time.strftime("%Y%m%d-%H%M%S"))
    results: list[dict[str, Any]] = []
    for source in sources:
        slug = source.slug if not results or results[0]["files"] != source.slug else f"{source.slug}-2"
        results.append(await evaluate_policy(config, homes, source, output, slug, values["concurrency"], children))
    report = write_report(output, config, [*results, *([earlier] if earlier else [])])
    show(report, output)
    return 0


async def evaluate_policy(
    config: RLConfig, homes: Homes, source: Source, output: Path, slug: str, concurrency: int | None, children: Children
) -> dict:
    """Plays every evaluation with one policy, writes its rollouts, and returns its part of the report."""
    async with arena(config, homes, source, output, children) as place:
        names = eval_workers(config)
        splits = {entry.label: split_of(entry, place.ready[names[entry.label]]) for entry in config.orchestrator.eval}
        jobs = [
            Job(names[entry.label], split, task, entry.samples, config.sampling_of(entry), entry.label)
            for entry in config.orchestrator.eval
            for split, size in [splits[entry.label]]
            for task in range(num_examples(entry, size))
        ]
        results: dict[str, Results] = {entry.label: [] for entry in config.orchestrator.eval}
        async with aclosing(place.play(source.label, jobs, concurrency)) as played:
            async for job, rollouts in played:
                results[job.label].append((job.task, rollouts))
    parts = {}
    for entry in config.orchestrator.eval:
        by_task = sorted(results[entry.label], key=lambda result: result[0])
        warn_of_failures(source.label, entry.label, by_task)
        write_eval(output / slug / f"{entry.label}.jsonl", source.policy_version, entry.label, by_task)
        parts[entry.label] = eval_part(entry, splits[entry.label][0], config.sampling_of(entry), by_task)
    model = source.adapter or source.model
    return {"policy": source.label, "policy_version": source.policy_version, "model": model, "files": slug, "evals": parts}


def warn_of_failures(policy: str, label: str, results: Results) -> None:
    """Warns how many rollouts count as reward 0 because they failed, with the error of the first."""
    failed = [rollout.error for _, rollouts in results for rollout in rollouts if rollout.error]
    if failed:
        first = failed[0].splitlines()[0]
        say(f"warning: eval {label}: {len(failed)} rollouts of {policy} failed and count as reward 0; the first: {first}")


def split_of(entry: EvalConfig, ready: Ready) -> tuple[Split, int | None]:
    """The split that is played and its size (None: endless): as in verifiers, training examples where there are none for evaluation."""
    if ready.num_eval == 0 and ready.num_train != 0:
        say(f"warning: eval {entry.label}: its environment has no eval examples, so its training examples are played")
        return "train", ready.num_train
    return "eval", ready.num_eval


def num_examples(entry: EvalConfig, size: int | None) -> int:
    """Number of examples to play of a split with `size` examples (None: endless). Raises RunError for none and for endless ones."""
    count = task_count(entry.num_examples, size)
    if count is None:
        raise RunError(f"eval {entry.label}: its tasks are endless; say how many with --limit")
    if size == 0:
        raise RunError(f"eval {entry.label}: its environment has no examples; check its arguments (args, dataset)")
    if not count:
        raise RunError(f"eval {entry.label}: num_examples = {entry.num_examples} leaves nothing to play")
    return count
