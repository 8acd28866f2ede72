"""The orchestrator of a run of recorded rollouts: reads them, forms batches of them in their order,
and answers the trainer. Nothing is played.

Which rollouts a batch has depends on the file and the settings alone, so batches that are lost or
cut off are made again as they were, and all of them are checked before the first is trained.
"""

import asyncio
import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rl.config.orchestrator import EnvConfig
from rl.config.run import RLConfig
from rl.models.folder import vocab_size
from rl.orchestrator.batches.batch_files import BatchFiles, OrchestratorState, state_after
from rl.orchestrator.groups.group_credit import credit_group, in_thread, rules_of
from rl.orchestrator.policy.trainer_requests import TrainerRequests
from rl.orchestrator.progress import Progress
from rl.orchestrator.recorded.lines import Converter, RecordedLine, lines_of, parse
from rl.orchestrator.tasks.task_source import TaskState
from rl.run_dir.access_token import run_token
from rl.run_dir.files import matching, write_file
from rl.run_dir.paths import RunDir, first_step, numbers, read_origin
from rl.run_dir.status import Phase, RunEnd, RunWarning, Status
from rl.system.errors import RunError
from rl.system.jsonl import json_objects
from rl.wire.batch_file import check_given
from rl.wire.rollouts import Group
from rl.wire.transport import TrainerServer

log = logging.getLogger(__name__)

EXAMPLE = (
    '{"task": 3, "reward": 1.0, "messages": [...], "turns": [{"prompt_ids": [...], '
    '"completion_ids": [...], ...}]}'
)


@dataclass
class RecordedRollouts:
    """The rollouts of one or several files."""

    groups: list[Group] = field(default_factory=list)
    """In the order of their first rollouts."""
    places: dict[int, list[str]] = field(default_factory=dict)
    """Group id -> file:line of each rollout."""
    counts: Counter[str] = field(default_factory=Counter)
    """What is lacking -> number of rollouts that lack it."""

    @property
    def size(self) -> int:
        """Number of rollouts."""
        return sum(map(len, self.places.values()))


def files_of(pattern: str) -> list[Path]:
    """Returns the files of recorded.rollouts. Raises RunError if there is none."""
    files = [path for path in matching(pattern) if path.is_file()]
    if not files:
        raise RunError(
            f"recorded.rollouts = {pattern!r}: there is no such file; give a JSONL file, or "
            "a pattern (data/*.jsonl)"
        )
    return files


def digests(files: list[Path]) -> dict[str, str]:
    """Returns the SHA-256 of each file, by path. Raises RunError for a damaged file of another
    run's rollouts."""
    sums = {}
    for path in files:
        check_given(path)
        with path.open("rb") as file:
            sums[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def read(config: RLConfig, model_path: str, first_group: int) -> RecordedRollouts:
    """Reads the files. Group ids count from `first_group`. Raises RunError with file, line and
    field of the first fault."""
    assert config.recorded
    recording, files = RecordedRollouts(), files_of(config.recorded.rollouts)
    convert = Converter(config, model_path, vocab_size(Path(model_path)))
    groups: dict[Any, Group] = {}
    tasks: dict[tuple[str, Any], int] = {}
    numbers: dict[tuple[int, Any], int] = {}
    firsts: dict[tuple[tuple[int, Any], str, Any], str] = {}
    sizes = Counter[tuple[int, Any]]()
    heats: dict[int, tuple[float, str]] = {}
    prompts: dict[tuple[int, str, bool], Any] = {}
    for path in files:
        for where, row in json_objects(path, EXAMPLE):
            for line in parsed(row, where):
                task = line.prompt if line.task is None else line.task
                key = msgspec.json.encode(
                    [
                        line.env,
                        task,
                        line.group_id,
                        str(path.parent) if line.group_id is not None else "",
                    ]
                )
                if (group := groups.get(key)) is None:
                    number = (
                        task
                        if isinstance(task, int)
                        else tasks.setdefault((line.env, msgspec.json.encode(task)), len(tasks))
                    )
                    group = groups[key] = Group(
                        group_id=first_group + len(groups), env=line.env, task=number, rollouts=[]
                    )
                if line.is_trainable and not line.failure:
                    heat = temperature(line, config, where)
                    group.temperature, first = heats.setdefault(group.group_id, (heat, where))
                    if heat != group.temperature:
                        why = (
                            f"not that of {first}, a rollout of the same task; give them "
                            "different group_ids"
                        )
                        raise RunError(f"{where}: temperature: {why}")
                rollout = convert.rollout(line, where)
                if line.prompt != prompts.setdefault(
                    (group.group_id, line.agent, bool(line.messages)), line.prompt
                ):
                    convert.counts[
                        "have another prompt than the first of their task: give rows of "
                        "several environments their `env`"
                    ] += 1
                sample = where if line.sample is None else (str(path), line.sample)
                episode = group.group_id, sample
                first = firsts.setdefault((episode, line.agent, line.rollout_id), where)
                # rows of verifiers, and episodes that say how many lines they have, may have
                # several of one agent
                if first != where and sizes[episode] >= line.agents:
                    raise RunError(
                        f"{where}: sample: {line.sample!r} of agent {line.agent!r} is in {first} "
                        "already; did two programs write the file? Give each rollout a sample of "
                        "its own"
                    )
                sizes[episode] += 1
                rollout.episode = numbers.setdefault(episode, group.num_episodes)
                group.rollouts.append(rollout)
                recording.places.setdefault(group.group_id, []).append(where)
    recording.groups, recording.counts = list(groups.values()), convert.counts
    if not groups:
        raise RunError(
            f"{', '.join(map(str, files))}: has no rollouts; write one a line, like {EXAMPLE}"
        )
    return recording


def parsed(row: dict[str, Any], where: str) -> list[RecordedLine]:
    """Returns the rollouts of a row. Raises RunError."""
    try:
        lines = list(lines_of(row))
    except RunError as error:
        raise RunError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise RunError(
            f"{where}: not as verifiers writes it ({type(error).__name__}: {error}); save it again"
        ) from None
    return [parse(line, where) for line in lines]


def temperature(line: RecordedLine, config: RLConfig, where: str) -> float:
    """Returns the temperature at which a rollout was sampled. Raises RunError for one at which
    nothing can be trained."""
    heat = (
        config.orchestrator.sampling.temperature if line.temperature is None else line.temperature
    )
    if not 0 < heat < math.inf:
        raise RunError(
            f"{where}: temperature: {heat} is not a finite number above 0, at which the "
            "trainer can score its tokens"
        )
    return heat


# The run ------------------------------------------------------------------------------------------


class RecordedRun:
    """Commits batches of recorded groups as the trainer needs them."""

    def __init__(self, config: RLConfig, recording: RecordedRollouts, status: Status):
        self.config, self.recording, self.status = config, recording, status
        self.run_dir, self.settings = config.run_dir, config.orchestrator
        envs = {env.label: env for env in self.settings.environment}
        names = {group.env for group in recording.groups}
        self.rules = {
            name: rules_of(self.settings, envs.get(name, EnvConfig()), has_teacher=False)
            for name in sorted(names)
        }
        self.progress = Progress(config.max_steps)
        self.requests = TrainerRequests(
            self.run_dir, self.progress, None, status, config.model.max_model_len
        )
        self.files = BatchFiles(self.run_dir, self.settings, self.rules)
        self.first = self.files.first
        self.first_group = recording.groups[0].group_id
        self.ends: list[int] = []
        """For each batch after step `first`, the number of groups that it and those before it
        settle."""

    def restore(self) -> None:
        """Judges all groups, divides them into batches and checks these, and continues after the
        newest batch. Raises RunError."""
        for group in self.recording.groups:
            credit_group(group, self.rules[group.env])
        self.ends = self.divide()
        self.check_versions()
        newest, state = self.files.newest()
        self.progress.newest = newest
        if state and newest > self.first:
            num_committed = newest - self.first
            end = self.ends[num_committed - 1] if num_committed <= len(self.ends) else -1
            if state.tasks.next_group != self.first_group + end:
                raise RunError(
                    f"batch {newest} of {self.run_dir.root} was made of other rollouts; "
                    "start a new run with these: --name NEW"
                )
        self.progress.final = min(self.config.max_steps, self.first + len(self.ends))
        self.tell()

    def divide(self) -> list[int]:
        """Returns `ends`. The last batch has the rest, and groups without anything to learn from
        go with those before them. Raises RunError if nothing can be trained."""
        ends, num_episodes, groups = list[int](), 0, self.recording.groups
        for number, group in enumerate(groups, start=1):
            num_episodes += group.num_episodes if group.why is None else 0
            if num_episodes >= self.settings.batch_size:
                ends.append(number)
                num_episodes = 0
        if num_episodes:
            ends.append(len(groups))
        if ends:
            ends[-1] = len(groups)
            return ends
        whys = Counter(group.why for group in groups).most_common()
        single = sum(len(group.rollouts) == 1 for group in groups)
        facts = [
            ", ".join(f"{count} {why}" for why, count in whys),
            *(
                [f"{single} tasks have a single rollout, which there is nothing to compare with"]
                if single
                else []
            ),
            *(f"{count} rollouts {what}" for what, count in self.recording.counts.items()),
        ]
        raise RunError(
            f"{self.recording.size} rollouts of {len(groups)} tasks, and nothing to train: "
            f"{'; '.join(facts)}: record several rollouts of each task, with different rewards, "
            "or choose orchestrator.credit.type = reinforce_pp"
        )

    def check_versions(self) -> None:
        """Raises RunError that names the first rollout that was sampled by a version later than
        its batch trains, or too much earlier."""
        start = 0
        for step, end in enumerate(self.ends, start=self.first + 1):
            if step > self.config.max_steps:
                return
            for group in self.recording.groups[start:end]:
                places = self.recording.places[group.group_id]
                for where, rollout in zip(places, group.rollouts, strict=True):
                    if group.why is None and (fault := self.version_fault(step, rollout.versions)):
                        raise RunError(f"{where}: policy_versions: {fault}")
            start = end

    def version_fault(self, step: int, versions: list[int]) -> str:
        """Describes why tokens of these versions cannot be in a batch; empty if they can."""
        trained, limit = step - 1, self.config.max_behind
        if not versions or trained - limit <= versions[0] <= versions[-1] <= trained:
            return ""
        if versions[-1] > trained:
            begins = (
                f"batch {step} trains version {trained}"
                if trained
                else "the run begins with version 0, model.name"
            )
            return (
                f"version {versions[-1]} sampled it, but {begins}; continue the run that sampled "
                "it: rl branch RUN@STEP --name NEW --recorded.rollouts FILE"
            )
        origin = read_origin(self.run_dir)
        if origin and not any(any(group.versions) for group in self.recording.groups):
            return (
                "version 0 sampled it and all others, but this branch begins with version "
                f"{self.first}; if version {self.first} did, served as a model of its own, train "
                "them in a new run: rl train --from FILE --model.name "
                f"{origin.run}/weights/{self.first}"
            )
        setting = "max_lag = 0"
        if self.config.max_lag:
            setting = f"orchestrator.max_off_policy_steps = {limit}"
        return (
            f"version {versions[0]} sampled it, {trained - versions[0]} before version {trained}, "
            f"which batch {step} trains; {setting}: raise it, or orchestrator.batch_size, or end "
            f"the run before: --max_steps {trained}"
        )

    def tell(self) -> None:
        """Logs what was read, and warns of what the rollouts lack."""
        recording, final = self.recording, self.progress.final
        whys = Counter(group.why for group in recording.groups if group.why)
        log.info(
            "%d rollouts of %d tasks make %d batches%s",
            recording.size,
            len(recording.groups),
            len(self.ends),
            "".join(f"; {n} tasks are not trained: {why}" for why, n in whys.most_common()),
        )
        schedule = self.config.trainer.optim.schedule
        warnings = [
            f"{count} of {recording.size} recorded rollouts {what}"
            for what, count in recording.counts.items()
        ]
        if schedule != "constant" and final < self.config.max_steps:
            warnings.append(
                f"trainer.optim.schedule = {schedule} ends at max_steps = "
                f"{self.config.max_steps}, but the recorded rollouts end at step {final}: give "
                f"--max_steps {final}"
            )
        for text in warnings:
            self.status.warn(RunWarning("recorded", "", text))

    async def run(self, server: TrainerServer) -> str:
        """Commits each batch that the trainer asks for, and waits until the last one is trained.
        Returns why the run ended."""
        progress = self.progress
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self.requests.serve(server, group))
            while progress.newest < progress.final:
                await self.wait_for_trainer(
                    self.published() + 1, lambda: self.requests.asked > progress.newest
                )
                self.status.enter(
                    Phase.FILLING_BATCH,
                    progress.newest + 1,
                    batch=progress.newest + 1,
                    max_steps=progress.final,
                )
                await in_thread(self.commit, progress.newest + 1)
                await progress.notify()
            if progress.final < self.config.max_steps:
                progress.end(f"all {self.recording.size} recorded rollouts are used")
                await progress.notify()
            await self.wait_for_trainer(progress.final, lambda: progress.final <= self.published())
            await self.requests.wait_for_trainer_end(self.settings.trainer_timeout_s)
            serving.cancel()
        return progress.end_reason or f"{progress.final} steps done"

    async def wait_for_trainer(self, version: int, holds: Callable[[], bool]) -> None:
        self.status.enter(Phase.WAITING_FOR_VERSION, version, batch=self.progress.newest + 1)
        await self.requests.wait_for_trainer(
            holds, f"the trainer's version {version}", self.settings.trainer_timeout_s
        )

    def published(self) -> int:
        """Returns the newest version that the trainer has announced, or has announced to an
        earlier process."""
        return max(
            [
                self.requests.published,
                *numbers(self.run_dir.weights_dir),
                *numbers(self.run_dir.checkpoints),
            ]
        )

    def commit(self, step: int) -> None:
        """Writes a batch, with its metrics in its state, and what is derived from it."""
        start, end = [0, *self.ends][step - self.first - 1 : step - self.first + 1]
        settled = self.recording.groups[start:end]
        num_used = sum(group.num_episodes for group in settled if group.why is None)
        state = OrchestratorState(
            tasks=TaskState(next_group=self.first_group + end, issued={}, in_flight=[])
        )
        counts = {"rollouts/missing": max(0, self.settings.batch_size - num_used)}
        self.files.commit(step, settled, state, counts)
        self.progress.newest = step
        self.files.metrics.write(step, state.metrics)
        self.files.put_away(step)
        self.status.advance(sum(len(group.rollouts) for group in settled))


def check_same(config: RLConfig) -> dict[str, str]:
    """Returns the checksums of the files, after a comparison with those recorded at the first
    start. Raises RunError."""
    assert config.recorded
    path, now = checksums_of(config.run_dir), digests(files_of(config.recorded.rollouts))
    before = json.loads(path.read_bytes()) if path.exists() else now
    if list(before.values()) != list(now.values()):  # whose folder may have changed
        changed = [name for name, digest in now.items() if digest not in before.values()]
        order = ", ".join(Path(name).name for name in before)
        raise RunError(
            f"{min(changed or before)}: has changed, or comes in another order, since the run "
            f"began with {order}: restore the file or its name, or train the new one in a run of "
            "its own: --name NEW, or rl branch"
        )
    return now


def checksums_of(run_dir: RunDir) -> Path:
    """The file of the checksums of recorded rollouts."""
    return run_dir.data / "recorded.json"


async def run_recorded(config: RLConfig, status: Status, model_path: str) -> RunEnd:
    """Runs everything from reading the rollouts to the trainer's end."""
    server = TrainerServer(
        config.orchestrator.host, config.orchestrator.port, run_token(config.run_dir.status_dir)
    )
    try:
        assert config.recorded
        status.enter(Phase.READING_DATA, None, config.recorded.rollouts, address=server.address)
        checksums = await asyncio.to_thread(check_same, config)
        first = first_step(config.run_dir)
        first_group = state_after(config.run_dir, first).tasks.next_group if first else 0
        run = RecordedRun(
            config, await asyncio.to_thread(read, config, model_path, first_group), status
        )
        await in_thread(run.restore)
        # only now, so that a file with a fault can be mended for a resume
        if not (path := checksums_of(config.run_dir)).exists():
            path.parent.mkdir(exist_ok=True)
            write_file(path, json.dumps(checksums, indent=1).encode())
        return RunEnd(await run.run(server), time.time(), run.progress.end_kind)
    finally:
        server.close()
