"""`rl collect`: plays training tasks without training and appends every rollout to a JSONL file."""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from rl.commands.options import (
    CONCURRENCY,
    ENDPOINT,
    POLICY,
    POLICY_SPECS,
    check_writable,
    load,
    name_of_play,
    resolve,
    usage,
)
from rl.commands.play_session import play_session, run
from rl.config.command_line import CommandLine, fail, options
from rl.config.run import QUICK_EXAMPLES, RLConfig
from rl.homes.resolve import Homes, homes_of
from rl.launch.children import Children
from rl.orchestrator.workers.setups import smallest
from rl.run_dir.files import append_file
from rl.run_dir.lease import NO_LOCKS
from rl.system.errors import RunError
from rl.system.terminal import say
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import Ready

if TYPE_CHECKING:
    from rl.orchestrator.workers.pool import PlayJob

OPTIONS = (
    *options("""
output FILE: JSONL file to append to; rollouts already in it are not played again
"""),
    POLICY,
    *ENDPOINT,
    *options("""
limit N: total number of tasks, taken from the environments in turn; default: every task once
samples N: rollouts per task; default: 1
tokens: also save token ids, log-probabilities and versions of every turn
"""),
    CONCURRENCY,
)
HELP = usage(
    """\
usage: rl collect [@ FILE] --output FILE.jsonl [--policy SPEC] [--KEY VALUE] ...

Plays training tasks of the environments and writes one line per finished rollout. A second start
continues the file.
Exit code 1: some were lost to a server or worker that failed.""",
    OPTIONS,
    POLICY_SPECS,
)
BEGINNING = b'{"env":'
"""The first bytes of each line; see `Collection.write`."""
Samples = dict[tuple[str, int | str], set[int]]
"""(environment, task) -> sample numbers in the file."""


def main(args: list[str], children: Children) -> int:
    config, line, values = load("rl collect", args, OPTIONS, HELP)
    if not values["output"]:
        fail("rl collect", "where to? Name the file: --output rollouts.jsonl")
    if "quick" in line.switches:
        values["limit"] = min(values["limit"] or QUICK_EXAMPLES, QUICK_EXAMPLES)
    config.orchestrator.eval = []
    # before the policy is contacted, and where a signal stops it
    homes = homes_of(config, say, recorded=bool(line.files))
    return run("rl collect", children, collect(config, homes, line, values, children))


def task_order(sizes: dict[str, int | None]) -> Iterator[tuple[str, int]]:
    """Yields (environment, task) once per task, from the environments in turn. A size of None
    means endless."""
    for task in count():
        envs = [env for env, size in sizes.items() if size is None or task < size]
        if not envs:
            return
        yield from ((env, task) for env in envs)


def jobs_left(
    config: RLConfig, ready: dict[str, Ready], present: Samples, values: dict[str, Any]
) -> list["PlayJob"]:
    """Returns the tasks of which the file has too few samples. Raises RunError if there are no
    tasks, or no end of them."""
    from rl.orchestrator.workers.pool import PlayJob

    entries = {env.label: env for env in config.orchestrator.environment}
    sizes = {
        label: smallest(ready[label].num_train, env.max_samples) for label, env in entries.items()
    }
    if None in sizes.values() and not values["limit"]:
        raise RunError("the tasks are endless; give a number with --limit")
    if not any(size is None or size for size in sizes.values()):
        raise RunError(
            "the environments have no training tasks; check their arguments (args, dataset) and "
            "max_samples"
        )
    jobs = list[PlayJob]()
    for env, task in islice(task_order(sizes), values["limit"]):
        lacking = (values["samples"] or 1) - len(present.get((env, task), ()))
        if lacking > 0:
            jobs.append(PlayJob(env, "train", task, lacking, config.sampling_of(entries[env])))
    return jobs


def read_present(path: Path) -> Samples:
    """Returns the samples already in the file. Truncates an incomplete end: half a line, or an
    episode without the lines of all its agents. Raises RunError, and leaves the file as it is,
    if it is not from `rl collect`."""
    present: Samples = {}
    if not path.exists():
        return present
    # end of the last complete episode and of the last complete line; lines its episode lacks
    end = whole = lacking = 0
    with path.open("rb+") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and line[: len(BEGINNING)] == BEGINNING[: len(line)]:
                break
            try:
                fields = json.loads(line) if line.endswith(b"\n") else {}
                env, task, sample, agents = map(
                    fields.__getitem__, ("env", "task", "sample", "agents")
                )
            except (ValueError, KeyError, TypeError, AttributeError):
                raise RunError(
                    f"{path}: line {number} was not written by `rl collect`; choose another "
                    "--output"
                ) from None
            lacking = (lacking or agents) - 1
            whole += len(line)
            if not lacking:
                end = whole
                present.setdefault((env, task), set()).add(sample)
        file.truncate(end)
    return present


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Keeps other processes from writing the file; makes it and its folders if they are missing,
    and deletes them if nothing was written. Raises RunError if another process writes it."""
    new_folders = [folder for folder in path.absolute().parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{path}: another `rl collect` or rl.record writes it; wait for its end, or "
                "choose another file"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        try:
            yield
        finally:
            if not os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # another process has written there
                    for folder in new_folders:
                        folder.rmdir()


async def collect(
    config: RLConfig, homes: Homes, line: CommandLine, values: dict[str, Any], children: Children
) -> int:
    """Plays the tasks and samples that the file lacks, and appends them."""
    path = Path(values["output"]).expanduser()
    check_writable("--output", path)
    with only_writer(path):
        present = read_present(path)
        source = resolve(values["policy"], config, values["endpoint_model"], values["api_key_var"])
        labels = [env.label for env in config.orchestrator.environment]
        name = name_of_play(config, line, labels, source, values["policy"])
        work, num_present = (
            Path(config.output_dir) / f"collect-{name}",
            sum(map(len, present.values())),
        )
        async with play_session(config, homes, source, work, children) as session:
            jobs = jobs_left(config, session.ready, present, values)
            if not jobs:
                print(f"all {num_present} rollouts are in {path}; nothing is left to play")
                return 0
            num_jobs = sum(job.num_episodes for job in jobs)
            say(f"{num_present} rollouts are in {path}; {source.label} will play {num_jobs} more")
            collection = Collection(source.label, present, path, tokens=bool(values["tokens"]))
            try:
                async with aclosing(
                    session.play(source.label, jobs, values["concurrency"])
                ) as plays:
                    async for job, rollouts in plays:
                        collection.write(job.env, job.task, rollouts, job.sampling["temperature"])
            finally:
                collection.report()
    return 1 if collection.lost else 0


def append_episode(
    path: Path,
    present: Samples,
    episode: list[Rollout],
    env: str,
    task: int | str,
    policy: str,
    temperature: float | None,
) -> None:
    """Appends an episode: a sample with one line for each agent, which gets the lowest free
    number; with its tokens if their temperature is given."""
    samples = present.setdefault((env, task), set())
    sample = next(number for number in count() if number not in samples)
    samples.add(sample)
    where = {"env": env, "task": task, "sample": sample, "agents": len(episode), "policy": policy}
    lines = b""
    for rollout in episode:
        line = {**where, **rollout.as_record()}
        del line["versions"]
        if not rollout.trainable:
            line["why"] = "not_trainable"  # as in a run's rollouts
        if temperature is not None:
            turns = [turn.as_record() for turn in rollout.turns]
            line |= {"temperature": temperature, "turns": turns}
        lines += msgspec.json.encode(line) + b"\n"
    append_file(path, lines)


class Collection:
    """The output file of rollouts, and counts of what was written."""

    def __init__(self, policy: str, present: Samples, path: Path, *, tokens: bool):
        self.policy, self.present, self.path, self.tokens = policy, present, path, tokens
        self.outcomes: Counter[str] = Counter()
        self.rewards: list[float] = []
        self.lost = 0
        """Episodes lost to a failure of the server or a worker; they say nothing about the
        policy and are not written."""

    def write(self, env: str, task: int, rollouts: list[Rollout], temperature: float) -> None:
        """Appends the rollouts of a task."""
        episodes: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            episodes.setdefault(rollout.episode, []).append(rollout)
        for episode in episodes.values():
            if any(rollout.cause in ("inference", "worker") for rollout in episode):
                self.lost += 1
                continue
            self.outcomes.update(rollout.outcome for rollout in episode)
            self.rewards += [rollout.reward for rollout in episode if not rollout.error]
            heat = temperature if self.tokens else None
            append_episode(self.path, self.present, episode, env, task, self.policy, heat)

    def report(self) -> None:
        """Prints the number of rollouts written, by outcome."""
        outcomes = [f"{number} {outcome}" for outcome, number in self.outcomes.most_common()]
        reward = f"; mean reward {fmean(self.rewards):.3f}" if self.rewards else ""
        print(f"rollouts written to {self.path}: {', '.join(outcomes) or 'none'}{reward}")
        if self.lost:
            print(
                f"{self.lost} were lost to a failed server or worker and not written; run "
                "the command again to play them"
            )
