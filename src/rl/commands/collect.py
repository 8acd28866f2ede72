"""`rl collect`: plays training tasks without training and appends every rollout to a JSONL file."""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

from rl.commands.options import (
    CONCURRENCY,
    ENDPOINT,
    POLICY,
    POLICY_SPECS,
    load,
    name_of_play,
    usage,
)
from rl.commands.play_session import Job, PlaySession, play_session, run, task_count
from rl.commands.policy_spec import resolve
from rl.config.command_line import CommandLine, fail
from rl.config.options import Option
from rl.config.quick import EXAMPLES
from rl.config.run import RLConfig
from rl.homes.resolve import Homes, homes_of
from rl.launch.children import Children
from rl.run_dir.files import append_file
from rl.run_dir.lease import NO_LOCKS
from rl.system.errors import RunError
from rl.system.terminal import say
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import Ready

OPTIONS = (
    Option(
        "output", "FILE", "JSONL file to append to; rollouts already in it are not played again"
    ),
    POLICY,
    *ENDPOINT,
    Option(
        "limit",
        "N",
        "total number of tasks, taken from the environments in turn; default: every task once",
    ),
    Option("samples", "N", "rollouts per task; default: 1"),
    Option("tokens", "", "also save token ids, log-probabilities and versions of every turn"),
    CONCURRENCY,
)
HELP = usage(
    "usage: rl collect [@ FILE] --output FILE.jsonl [--policy SPEC] [--KEY VALUE] ...\n\n"
    "Plays training tasks of the environments and writes one line per finished rollout. A "
    "second start continues the file.\n"
    "Exit code 1: some were lost to a server or worker that failed.",
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
        values["limit"] = min(values["limit"] or EXAMPLES, EXAMPLES)
    config.orchestrator.eval = []
    # before the policy is contacted, and where a signal stops it
    homes = homes_of(config, say, recorded=bool(line.files))
    return run("rl collect", children, collect(config, homes, line, values, children))


def task_order(sizes: dict[str, int | None]) -> Iterator[tuple[str, int]]:
    """Yields (environment, task) once per task, from the environments in turn. A size of None
    means endless."""
    for task in count():
        there = [env for env, size in sizes.items() if size is None or task < size]
        if not there:
            return
        yield from ((env, task) for env in there)


def missing(
    order: Iterator[tuple[str, int]], present: Samples, samples: int
) -> Iterator[tuple[str, int, int]]:
    """Yields (environment, task, number of samples to play) for every task with fewer than
    `samples`."""
    for env, task in order:
        lacking = samples - len(present.get((env, task), ()))
        if lacking > 0:
            yield env, task, lacking


def read_present(path: Path) -> Samples:
    """Returns the samples already in the file. Truncates an incomplete end: half a line, or an
    episode without the lines of all its agents. Raises RunError, and leaves the file as it is,
    if it is not from `rl collect`."""
    present: Samples = {}
    if not path.exists():
        return present
    foreign = "{path}: line {number} was not written by `rl collect`; choose another --output"
    # end of the last complete episode and of the last complete line; lines its episode lacks
    end = whole = lacking = 0
    with path.open("rb+") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                if line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                    raise RunError(foreign.format(path=path, number=number))
                break
            try:
                fields = json.loads(line)
                env, task, sample, agents = (
                    fields[key] for key in ("env", "task", "sample", "agents")
                )
            except (ValueError, KeyError, TypeError):
                raise RunError(foreign.format(path=path, number=number)) from None
            lacking = (lacking or agents) - 1
            whole += len(line)
            if not lacking:
                end = whole
                present.setdefault((env, task), set()).add(sample)
        file.truncate(end)
    return present


@contextmanager
def only_writer(path: Path, *, new: bool = False) -> Iterator[None]:
    """Keeps other processes from writing the file; makes it if it is missing, and deletes a
    `new` one in which nothing was written. Raises RunError if another process writes it, or has
    written a `new` one."""
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
        if new and file.tell():
            raise RunError(
                f"{path}: another process has written it since the start; start again to add "
                "to it, or choose another file"
            )
        try:
            yield
        finally:
            if new and not os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)


async def collect(
    config: RLConfig, homes: Homes, line: CommandLine, values: dict[str, Any], children: Children
) -> int:
    """Plays the tasks and samples that the file lacks, and appends them."""
    path = Path(values["output"]).expanduser()
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise RunError(f"--output {path}: {there} is not writable")

    def left(ready: dict[str, Ready]) -> list[tuple[str, int, int]]:
        """Returns what is left to play in environments of these sizes, in the form of `missing`.
        Raises RunError."""
        sizes = {
            env.label: task_count(env.max_samples, ready[env.label].num_train)
            for env in config.orchestrator.environment
        }
        if None in sizes.values() and not values["limit"]:
            raise RunError("the tasks are endless; give a number with --limit")
        order = list(islice(task_order(sizes), values["limit"]))
        if not order:
            raise RunError(
                "the environments have no training tasks; check their arguments (args, "
                "dataset) and max_samples"
            )
        return list(missing(iter(order), present, values["samples"] or 1))

    with ExitStack() as lock:
        if not (new := not path.exists()):
            lock.enter_context(only_writer(path))
        present = read_present(path)
        source = resolve(values["policy"], config, values["endpoint_model"], values["api_key_var"])
        name = name_of_play(
            config,
            line,
            [env.label for env in config.orchestrator.environment],
            source,
            values["policy"],
        )
        work = Path(config.output_dir) / f"collect-{name}"
        async with play_session(config, homes, source, work, children) as place:
            todo = left(place.ready)
            if not todo:
                print(
                    f"all {sum(map(len, present.values()))} rollouts are in {path}; nothing "
                    "is left to play"
                )
                return 0
            if new:
                lock.enter_context(only_writer(path, new=True))
            collection = Collection(
                config, source.label, present, path, tokens=bool(values["tokens"])
            )
            await collection.play(place, todo, values["concurrency"])
    return 1 if collection.lost else 0


def line_of(where: dict[str, Any], rollout: Rollout, temperature: float | None) -> bytes:
    """Returns the line of a rollout, after the fields that say `where` it belongs; with its
    tokens if their temperature is given."""
    line = {**where, **rollout.as_record()}
    del line["versions"]
    line |= {} if rollout.trainable else {"why": "not_trainable"}  # as in a run's rollouts
    if temperature is not None:
        turns = [turn.as_record() for turn in rollout.turns]
        line |= {"temperature": temperature, "turns": turns}
    return msgspec.json.encode(line) + b"\n"


class Collection:
    """The output file of rollouts, and counts of what was written."""

    def __init__(
        self, config: RLConfig, policy: str, present: Samples, path: Path, *, tokens: bool
    ):
        self.config, self.policy, self.present, self.path, self.tokens = (
            config,
            policy,
            present,
            path,
            tokens,
        )
        self.outcomes: Counter[str] = Counter()
        self.rewards: list[float] = []
        self.lost = 0
        """Episodes lost to a failure of the server or a worker; they say nothing about the
        policy and are not written."""

    async def play(
        self, place: PlaySession, todo: list[tuple[str, int, int]], concurrency: int | None
    ) -> None:
        """Plays `todo` and appends each task as it finishes."""
        entries = {env.label: env for env in self.config.orchestrator.environment}
        jobs = [
            Job(env, "train", task, number, self.config.sampling_of(entries[env]))
            for env, task, number in todo
        ]
        had = sum(map(len, self.present.values()))
        say(
            f"{had} rollouts are in {self.path}; {self.policy} will play "
            f"{sum(number for *_, number in todo)} more"
        )
        try:
            async with aclosing(place.play(self.policy, jobs, concurrency)) as played:
                async for job, rollouts in played:
                    self.write(job.env, job.task, rollouts, job.sampling["temperature"])
        finally:
            self.report()

    def write(self, env: str, task: int, rollouts: list[Rollout], temperature: float) -> None:
        """Appends the rollouts of a task. An episode is a sample with one line per agent, and
        gets the lowest free number."""
        there = self.present.setdefault((env, task), set())
        episodes: dict[int, list[Rollout]] = {}
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
                where = {
                    "env": env,
                    "task": task,
                    "sample": sample,
                    "agents": len(episode),
                    "policy": self.policy,
                }
                lines += line_of(where, rollout, temperature if self.tokens else None)
        append_file(self.path, lines)

    def report(self) -> None:
        """Prints the number of rollouts written, by outcome."""
        outcomes = (
            ", ".join(f"{number} {outcome}" for outcome, number in self.outcomes.most_common())
            or "none"
        )
        reward = (
            f"; mean reward {sum(self.rewards) / len(self.rewards):.3f}" if self.rewards else ""
        )
        print(f"rollouts written to {self.path}: {outcomes}{reward}")
        if self.lost:
            print(
                f"{self.lost} were lost to a failed server or worker and not written; run "
                "the command again to play them"
            )
