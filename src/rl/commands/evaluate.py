"""`rl eval`: how good a policy is on the configured evaluations, and whether it is better than another."""

import time
from pathlib import Path
from typing import Any

from rl.commands.options import CONCURRENCY, ENDPOINT, POLICY, POLICY_SPECS, Option, load, usage
from rl.config import RLConfig
from rl.orchestrator.config import EnvSource, EvalConfig
from rl.processes import Children
from rl.quick import made_quick

OPTIONS = (
    POLICY,
    Option("compare", "SPEC", "a second policy, or the report.json of an earlier evaluation: both on the same examples"),
    *ENDPOINT,
    Option("limit", "N", "examples of every evaluation; instead of each one's num_examples"),
    Option("samples", "N", "rollouts an example; instead of each one's samples"),
    CONCURRENCY,
    Option("output", "DIR", "where the report and the rollouts go; default: outputs/eval-NAME/TIME"),
)
HELP = usage(
    "usage: rl eval [@ FILE] [--policy SPEC] [--compare SPEC] [--KEY VALUE] ...\n\n"
    "Plays [[orchestrator.eval]], or the eval splits of the environments if there is none. How it samples is set by\n"
    "orchestrator.sampling and orchestrator.eval.sampling, where temperature 0 is greedy.",
    OPTIONS,
    POLICY_SPECS,
)


def eval_entries(config: RLConfig) -> list[EvalConfig]:
    """What is evaluated: the configured evaluations, else the eval splits of the training environments."""
    if config.orchestrator.eval:
        return config.orchestrator.eval
    shared = set(EnvSource.model_fields)
    return [EvalConfig(**env.model_dump(include=shared)) for env in config.orchestrator.environment]


def evaluations_only(config: RLConfig, limit: int | None, samples: int | None, *, quick: bool) -> RLConfig:
    """The configuration with nothing but its evaluations to play."""
    config = config.model_copy(deep=True)
    config.orchestrator.eval, config.orchestrator.environment = eval_entries(config), []
    config = made_quick(config) if quick else config
    for entry in config.orchestrator.eval:
        entry.num_examples = limit or entry.num_examples
        entry.samples = samples or entry.samples
    return config


def main(args: list[str], children: Children) -> int:
    """The command."""
    config, line, values = load("rl eval", args, OPTIONS, HELP, optional=("orchestrator.environment",))
    config = evaluations_only(config, values["limit"], values["samples"], quick="quick" in line.switches)
    from rl.commands.playing import run

    return run("rl eval", children, evaluate(config, values, children))


async def evaluate(config: RLConfig, values: dict[str, Any], children: Children) -> int:
    """From the policies to the report. Both are looked for before the first is played."""
    from rl.commands.eval_report import finished_report, show, write_report
    from rl.commands.playing import PlayError, check_environments
    from rl.commands.policy import resolve

    entries = config.orchestrator.eval
    if not entries:
        raise PlayError("nothing to evaluate: give an environment (--orchestrator.environment.id owner/name), a file (@ run.toml) or a run")
    check_environments(entries)
    labels = tuple(entry.label for entry in entries)
    second = values["compare"]
    earlier = finished_report(second) if second else None
    sources = [resolve(values["policy"], config, values["endpoint_model"], values["api_key_var"], labels)]
    if second and not earlier:
        sources.append(resolve(second, config, None, values["api_key_var"], labels))
    output = Path(values["output"] or Path(config.output_dir) / f"eval-{config.name}" / time.strftime("%Y%m%d-%H%M%S"))
    results: list[dict[str, Any]] = []
    for source in sources:
        slug = source.slug if not results or results[0]["files"] != source.slug else f"{source.slug}-2"
        results.append(await evaluate_policy(config, source, output, slug, values["concurrency"], children))
    report = write_report(output, config, [*results, *([earlier] if earlier else [])])
    show(report, output)
    return 0


async def evaluate_policy(config: RLConfig, source: Any, output: Path, slug: str, concurrency: int | None, children: Children) -> dict:
    """Plays every evaluation with one policy, writes its rollouts, and returns its part of the report."""
    from rl.commands.eval_report import eval_part
    from rl.commands.playing import Job, Progress, arena
    from rl.orchestrator.evals import Results, write_eval
    from rl.orchestrator.main import eval_workers

    async with arena(config, source, output, children) as place:
        names = eval_workers(config)
        labels = {names[entry.label]: entry.label for entry in config.orchestrator.eval}
        jobs = [
            Job(names[entry.label], "eval", task, entry.samples, config.sampling_of(entry))
            for entry in config.orchestrator.eval
            for task in range(num_examples(entry, place.ready[names[entry.label]].num_eval))
        ]
        results: dict[str, Results] = {label: [] for label in labels.values()}
        progress = Progress(source.label, sum(job.num_episodes for job in jobs))

        def on_done(job: Job, rollouts: list) -> None:
            results[labels[job.env]].append((job.task, rollouts))
            progress.advance(job.num_episodes)

        try:
            await place.play(jobs, concurrency, on_done)
        finally:
            progress.close()
    parts = {}
    for entry in config.orchestrator.eval:
        played = sorted(results[entry.label], key=lambda result: result[0])
        warn_of_failures(source.label, entry.label, played)
        metrics = write_eval(output / slug / f"{entry.label}.jsonl", source.policy_version, entry.label, played)
        parts[entry.label] = eval_part(entry, config.sampling_of(entry), played, metrics)
    model = source.adapter or source.model
    return {"policy": source.label, "policy_version": source.policy_version, "model": model, "files": slug, "evals": parts}


def warn_of_failures(policy: str, label: str, results: Any) -> None:
    """Says how many rollouts count as 0 because they failed, and how one of them did."""
    from rl.commands.playing import say

    failed = [rollout.error for _, rollouts in results for rollout in rollouts if rollout.error]
    if failed:
        how = failed[0].splitlines()[0]
        say(f"warning: eval {label}: {len(failed)} rollouts of {policy} failed and count as reward 0; the first: {how}")


def num_examples(entry: EvalConfig, size: int | None) -> int:
    """How many examples an evaluation has. Raises PlayError for none, and for no end of them."""
    from rl.commands.playing import PlayError

    if size is None and entry.num_examples < 0:
        raise PlayError(f"eval {entry.label}: its tasks are endless; say how many with --limit")
    if size == 0:
        raise PlayError(f"eval {entry.label}: its environment has no eval examples; give it an eval dataset (args, eval_dataset)")
    asked = entry.num_examples if entry.num_examples >= 0 else size
    count = min(size if size is not None else asked, asked) if asked is not None else 0
    if not count:
        raise PlayError(f"eval {entry.label}: num_examples = {entry.num_examples} leaves nothing to play")
    return count
