"""`rl eval`: measures a policy on the configured evaluations, and compares it with another."""

import time
from contextlib import aclosing, suppress
from itertools import count
from pathlib import Path
from typing import Any

from rl.commands.eval_report import eval_part, finished_report, show, write_report
from rl.commands.options import (
    CONCURRENCY,
    ENDPOINT,
    POLICY,
    POLICY_SPECS,
    load,
    name_of_play,
    usage,
)
from rl.commands.play_session import PlaySession, play_session, run
from rl.commands.policy_spec import PolicySource, check_policy, resolve
from rl.config.command_line import CommandLine, fail
from rl.config.options import options
from rl.config.orchestrator import EnvSource, EvalConfig
from rl.config.quick import shrink
from rl.config.run import RLConfig
from rl.homes.resolve import Homes, homes_of
from rl.launch.children import Children
from rl.orchestrator.evals.eval_metrics import Results, write_eval
from rl.orchestrator.workers.setups import eval_fault, eval_workers, smallest
from rl.system.errors import RunError
from rl.system.terminal import say
from rl.wire.rollouts import Split
from rl.wire.worker_messages import Ready, derived_seed

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
    entries, names = config.orchestrator.eval, eval_workers(config)
    for entry in entries:
        label, env = entry.label, names[entry.label]
        splits[label], size = split_of(entry, session.ready[env])
        if fault := eval_fault(entry, size):
            raise RunError(fault)
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
            for task in range(smallest(size, entry.num_examples) or 0)
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
        reports[label] = eval_part(entry, splits[label], config.sampling_of(entry), by_task)
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
