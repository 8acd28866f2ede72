"""`rl collect`: plays training tasks without training and appends every rollout to a JSONL file."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO

from rl.commands.options import CONCURRENCY, ENDPOINT, POLICY, POLICY_SPECS, Option, load, usage
from rl.config import RLConfig
from rl.processes import Children
from rl.quick import EXAMPLES

OPTIONS = (
    Option("output", "FILE", "JSONL file that is appended to; what is in it is not played again"),
    POLICY,
    *ENDPOINT,
    Option("limit", "N", "tasks in all, taken from the environments in turn; default: every task once"),
    Option("samples", "N", "rollouts a task; default: 1"),
    Option("tokens", "", "keep token ids, log-probabilities and versions of every turn, too"),
    CONCURRENCY,
)
HELP = usage(
    "usage: rl collect [@ FILE] --output FILE.jsonl [--policy SPEC] [--KEY VALUE] ...\n\n"
    "Plays training tasks of the environments and writes a line for each finished rollout. Started again it goes on.",
    OPTIONS,
    POLICY_SPECS,
)
Samples = dict[tuple[str, int], set[int]]
"""(environment, task) -> its samples that are in the file."""


def main(args: list[str], children: Children) -> int:
    """The command."""
    config, line, values = load("rl collect", args, OPTIONS, HELP)
    config = config.model_copy(deep=True)
    if "quick" in line.switches:
        values["limit"] = min(values["limit"] or EXAMPLES, EXAMPLES)
    config.orchestrator.eval = []
    from rl.commands.playing import run

    return run("rl collect", children, collect(config, values, children))


def task_order(sizes: dict[str, int | None]) -> Iterator[tuple[str, int]]:
    """The environments' tasks in turn, each task once; an endless environment has no last one."""
    for task in count():
        there = [env for env, size in sizes.items() if size is None or task < size]
        if not there:
            return
        yield from ((env, task) for env in there)


def missing(order: Iterator[tuple[str, int]], present: Samples, samples: int) -> Iterator[tuple[str, int, int]]:
    """(environment, task, how many samples are to be played) for every task that has too few."""
    for env, task in order:
        lacking = samples - len(present.get((env, task), ()))
        if lacking > 0:
            yield env, task, lacking


def read_present(path: Path) -> Samples:
    """What an earlier start has written. What it did not finish is cut off: a last line, or an episode that lacks an agent's line."""
    from rl.commands.playing import PlayError

    present: Samples = {}
    if not path.exists():
        return present
    end = whole = lacking = 0  # the end of the last whole episode, and of the last whole line; lines that its episode lacks
    with path.open("rb+") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                fields = json.loads(line)
                env, task, sample, agents = (fields[key] for key in ("env", "task", "sample", "agents"))
            except (ValueError, KeyError, TypeError):
                raise PlayError(f"{path}: line {number} was not written by `rl collect`; choose another --output") from None
            lacking = (lacking or agents) - 1
            whole += len(line)
            if not lacking:
                end = whole
                present.setdefault((env, task), set()).add(sample)
        file.truncate(end)
    return present


def line_of(policy: str, env: str, task: int, sample: int, agents: int, rollout: Any, *, tokens: bool) -> bytes:
    """One rollout, of one of an episode's `agents`."""
    import msgspec

    from rl.orchestrator.evals import rollout_line

    line = {key: value for key, value in rollout_line(env, task, rollout).items() if key not in ("rollout", "versions")}
    line = {"env": env, "task": task, "sample": sample, "agents": agents, "policy": policy, **line}
    return msgspec.json.encode(line | ({"turns": rollout.turns} if tokens else {})) + b"\n"


async def collect(config: RLConfig, values: dict[str, Any], children: Children) -> int:
    """From the file as it is to its last rollout."""
    from rl.commands.playing import PlayError, arena, check_environments
    from rl.commands.policy import resolve

    if not values["output"]:
        raise PlayError("where to? Name the file: --output rollouts.jsonl")
    check_environments(config.orchestrator.environment)
    path = Path(values["output"]).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    present = read_present(path)
    source = resolve(values["policy"], config, values["endpoint_model"], values["api_key_var"])
    async with arena(config, source, Path(config.output_dir) / f"collect-{config.name}", children) as place:
        sizes = {env.label: task_count(env.max_samples, place.ready[env.label].num_train) for env in config.orchestrator.environment}
        if None in sizes.values() and not values["limit"]:
            raise PlayError("tasks are endless: say how many with --limit")
        order = list(islice(task_order(sizes), values["limit"]))
        if not order:
            raise PlayError("the environments have no training tasks; check their arguments (args, dataset) and max_samples")
        todo = list(missing(iter(order), present, values["samples"] or 1))
        with path.open("ab") as file:
            await Collection(config, source.label, present, file, tokens=bool(values["tokens"])).play(place, todo, values["concurrency"])
    return 0


def task_count(max_samples: int, size: int | None) -> int | None:
    """Tasks of an environment; None: endless."""
    return size if max_samples < 0 else max_samples if size is None else min(size, max_samples)


class Collection:
    """The file, and what has been written to it."""

    def __init__(self, config: RLConfig, policy: str, present: Samples, file: BinaryIO, *, tokens: bool):
        self.config, self.policy, self.present, self.file, self.tokens = config, policy, present, file, tokens
        self.outcomes: Counter[str] = Counter()
        self.rewards: list[float] = []
        self.lost = 0
        """Rollouts that say nothing of the policy, because it could not be asked: they are not written."""

    async def play(self, place: Any, todo: list[tuple[str, int, int]], concurrency: int | None) -> None:
        """Plays what is missing and writes it, the lines of a task at once."""
        from rl.commands.playing import Job, Progress, say

        entries = {env.label: env for env in self.config.orchestrator.environment}
        jobs = (Job(env, "train", task, number, self.config.sampling_of(entries[env])) for env, task, number in todo)
        had = sum(map(len, self.present.values()))
        say(f"{had} rollouts are in {self.file.name}; {sum(number for *_, number in todo)} are to be played by {self.policy}")
        progress = Progress(self.policy, sum(number for *_, number in todo))

        def on_done(job: Job, rollouts: list) -> None:
            self.write(job.env, job.task, rollouts)
            progress.advance(job.num_episodes)

        try:
            await place.play(jobs, concurrency, on_done)
        finally:
            progress.close()
            self.report()

    def write(self, env: str, task: int, rollouts: list) -> None:
        """Appends the rollouts of a task. Each episode is a sample, numbered from where the file ends; its agents have a line each."""
        there = self.present.setdefault((env, task), set())
        episodes: dict[int, list] = {}
        for rollout in rollouts:
            episodes.setdefault(rollout.episode, []).append(rollout)
        lines = b""
        for episode in episodes.values():
            if any(rollout.cause in ("inference", "worker") for rollout in episode):
                self.lost += 1
                continue
            sample = next(number for number in count() if number not in there)
            there.add(sample)
            for rollout in episode:
                self.outcomes[rollout.outcome] += 1
                if not rollout.error:
                    self.rewards.append(rollout.reward)
                lines += line_of(self.policy, env, task, sample, len(episode), rollout, tokens=self.tokens)
        self.file.write(lines)
        self.file.flush()
        os.fsync(self.file.fileno())

    def report(self) -> None:
        """The last words."""
        outcomes = ", ".join(f"{number} {outcome}" for outcome, number in self.outcomes.most_common()) or "none"
        reward = f"; mean reward {sum(self.rewards) / len(self.rewards):.3f}" if self.rewards else ""
        print(f"rollouts written to {self.file.name}: {outcomes}{reward}")
        if self.lost:
            print(f"{self.lost} were lost with the server or a worker and not written: start again to play them")
