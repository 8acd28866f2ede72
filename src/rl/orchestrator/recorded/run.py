"""The orchestrator of a run of recorded rollouts: forms batches of them in their order, and answers
the trainer. Nothing is played.

Which rollouts a batch has depends on the file and the settings alone, so batches that are lost or
cut off are made again as they were, and all of them are checked before the first is trained.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rl.config.orchestrator import EnvConfig
from rl.config.run import RLConfig
from rl.orchestrator.batches import batch_selection as batches
from rl.orchestrator.batches.batch_metrics import batch_metrics
from rl.orchestrator.batches.batch_selection import OrchestratorState
from rl.orchestrator.batches.old_files import OldFiles
from rl.orchestrator.groups.functions import in_thread
from rl.orchestrator.groups.group_credit import credit_group, normalise, rules_of
from rl.orchestrator.policy.trainer_requests import TrainerRequests
from rl.orchestrator.progress import Progress
from rl.orchestrator.recorded.recording import Recording, digests, files_of, read
from rl.orchestrator.tasks.task_source import TaskState
from rl.run_dir import spans
from rl.run_dir.access_token import run_token
from rl.run_dir.files import write_file
from rl.run_dir.lease import check_fence
from rl.run_dir.metrics import NEWEST_BYTES, MetricsLog, read_metrics
from rl.run_dir.origin import first_step, read_origin
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.status import Phase, RunEnd, RunWarning, Status
from rl.system.errors import RunError
from rl.wire.batch_file import EncodedBatch, remove_rollouts
from rl.wire.rollouts import rollout_lines
from rl.wire.transport import TrainerServer

log = logging.getLogger(__name__)


class RecordedRun:
    """Commits batches of recorded groups as the trainer needs them."""

    def __init__(self, config: RLConfig, recording: Recording, status: Status):
        self.config, self.recording, self.status, self.run_dir = (
            config,
            recording,
            status,
            config.run_dir,
        )
        self.settings = config.orchestrator
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
        self.fence = partial(check_fence, self.run_dir.lock("orchestrator"))
        self.metrics = MetricsLog(self.run_dir.metrics, "orchestrator", self.fence)
        self.old_files = OldFiles(self.run_dir, self.settings)
        self.first = first_step(self.run_dir)
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
        newest = self.progress.newest = self.run_dir.newest_batch()
        remove_rollouts(self.run_dir, after=newest)
        if newest > self.first:
            state = batches.state_after(self.run_dir, newest)
            if (
                newest - self.first > len(self.ends)
                or state.tasks.next_group != self.first_group + self.ends[newest - self.first - 1]
            ):
                raise RunError(
                    f"batch {newest} of {self.run_dir.root} was made of other rollouts; "
                    "start a new run with these: --name NEW"
                )
            if (newest, "orchestrator") not in read_metrics(
                self.run_dir.metrics, last_bytes=NEWEST_BYTES
            ):
                self.metrics.write(newest, state.metrics)
        self.progress.final = min(self.config.max_steps, self.first + len(self.ends))
        self.tell()

    @property
    def first_group(self) -> int:
        return self.recording.groups[0].group_id

    def divide(self) -> list[int]:
        """Returns `ends`. The last batch has the rest, and groups without anything to learn from
        go with those before them. Raises RunError if nothing can be trained."""
        ends, episodes = list[int](), 0
        for at, group in enumerate(self.recording.groups, start=1):
            episodes += group.num_episodes if group.why is None else 0
            if episodes >= self.settings.batch_size:
                ends.append(at)
                episodes = 0
        if episodes:
            ends.append(len(self.recording.groups))
        if ends:
            ends[-1] = len(self.recording.groups)
            return ends
        reasons = ", ".join(
            f"{count} {why}"
            for why, count in Counter(group.why for group in self.recording.groups).most_common()
        )
        single = sum(len(group.rollouts) == 1 for group in self.recording.groups)
        alone = (
            f"; {single} tasks have a single rollout, which there is nothing to compare with"
            if single
            else ""
        )
        lacking = "".join(
            f"; {count} rollouts {what}" for what, count in self.recording.counts.items()
        )
        remedy = (
            "record several rollouts of each task, with different rewards, or choose "
            "orchestrator.credit.type = reinforce_pp"
        )
        nothing = (
            f"{self.recording.size} rollouts of {len(self.recording.groups)} tasks, and nothing "
            "to train"
        )
        raise RunError(f"{nothing}: {reasons}{alone}{lacking}: {remedy}")

    def check_versions(self) -> None:
        """Raises RunError that names the first rollout that was sampled by a version later than
        its batch trains, or too much earlier."""
        start = 0
        for step, end in enumerate(self.ends, start=self.first + 1):
            if step > self.config.max_steps:
                return
            for group in self.recording.groups[start:end]:
                for place, rollout in zip(
                    self.recording.places[group.group_id], group.rollouts, strict=True
                ):
                    if group.why is None and (fault := self.version_fault(step, rollout.versions)):
                        raise RunError(f"{place}: policy_versions: {fault}")
            start = end

    def version_fault(self, step: int, versions: list[int]) -> str:
        """Describes why tokens of these versions cannot be in a batch; empty if they can."""
        trained, limit = step - 1, self.config.max_behind
        if versions and versions[-1] > trained:
            where = (
                f"batch {step} trains version {trained}"
                if trained
                else "the run begins with version 0, model.name"
            )
            remedy = (
                "continue the run that sampled it: rl branch RUN@STEP --name NEW "
                "--recorded.rollouts FILE"
            )
            return f"version {versions[-1]} sampled it, but {where}; {remedy}"
        if versions and trained - versions[0] > limit:
            if (origin := read_origin(self.run_dir)) and not any(
                any(group.versions) for group in self.recording.groups
            ):
                remedy = (
                    f"if version {self.first} did, served as a model of its own, train them in a "
                    "new run"
                )
                new = f"rl train --from FILE --model.name {origin.run}/weights/{self.first}"
                return (
                    "version 0 sampled it and all others, but this branch begins with version "
                    f"{self.first}; {remedy}: {new}"
                )
            key = (
                f"orchestrator.max_off_policy_steps = {limit}"
                if self.config.max_lag
                else "max_lag = 0"
            )
            remedy = (
                "raise it, or orchestrator.batch_size, or end the run before: --max_steps "
                f"{trained}"
            )
            behind = (
                f"version {versions[0]} sampled it, {trained - versions[0]} before version "
                f"{trained}, which batch {step} trains"
            )
            return f"{behind}; {key}: {remedy}"
        return ""

    def tell(self) -> None:
        """Logs what was read, and warns of what the rollouts lack."""
        recording, steps = self.recording, len(self.ends)
        reasons = Counter(group.why for group in recording.groups if group.why)
        left_out = "".join(
            f"; {count} tasks are not trained: {why}" for why, count in reasons.most_common()
        )
        log.info(
            "%d rollouts of %d tasks make %d batches%s",
            recording.size,
            len(recording.groups),
            steps,
            left_out,
        )
        schedule, final = self.config.trainer.optim.schedule, self.progress.final
        if schedule != "constant" and final < self.config.max_steps:
            text = (
                f"trainer.optim.schedule = {schedule} ends at max_steps = "
                f"{self.config.max_steps}, but the recorded rollouts end at step"
            )
            self.status.warn(
                RunWarning("recorded", "", f"{text} {final}: give --max_steps {final}")
            )
        for what, count in recording.counts.items():
            self.status.warn(
                RunWarning("recorded", "", f"{count} of {recording.size} recorded rollouts {what}")
            )

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
        settled, masked = self.recording.groups[start:end], self.settings.mask_truncated
        used = [group for group in settled if group.why is None]
        with spans.span("commit", "batches", step):
            normalise(used, self.rules)
            missing = max(0, self.settings.batch_size - sum(group.num_episodes for group in used))
            state = OrchestratorState(
                tasks=TaskState(next_group=self.first_group + end, issued={}, in_flight=[]),
                settled=[group.group_id for group in settled],
                metrics=batch_metrics(step, settled, masked, self.rules)
                | {"rollouts/missing": missing},
            )
            batch = EncodedBatch(step=step, samples=batches.encoded_samples(used, masked))
            batches.commit(self.run_dir, batch, rollout_lines(settled, step, masked), state)
        self.progress.newest = step
        self.metrics.write(step, state.metrics)
        self.old_files.put_away(step)
        self.status.advance(sum(len(group.rollouts) for group in settled))


def check_same(config: RLConfig) -> dict[str, str]:
    """Returns the checksums of the files, after a comparison with those recorded at the first
    start. Raises RunError."""
    assert config.recorded
    path, found = checksums_of(config.run_dir), digests(files_of(config.recorded.rollouts))
    before = json.loads(path.read_bytes()) if path.exists() else found
    if sorted(before.values()) != sorted(found.values()):
        changed = sorted(
            name for name, digest in found.items() if digest not in before.values()
        ) or sorted(before)
        remedy = (
            "restore the file, or train the new one in a run of its own: --name NEW, or rl branch"
        )
        raise RunError(f"{changed[0]}: has changed since the run began with it: {remedy}")
    if list(before.values()) != list(found.values()):  # whose folder may have changed
        order = ", ".join(Path(name).name for name in before)
        raise RunError(
            f"{config.recorded.rollouts}: in another order than when the run began; name the "
            f"files so that it is again {order}"
        )
    return found


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
        found = await asyncio.to_thread(check_same, config)
        first = first_step(config.run_dir)
        first_group = batches.state_after(config.run_dir, first).tasks.next_group if first else 0
        run = RecordedRun(
            config, await asyncio.to_thread(read, config, model_path, first_group), status
        )
        await in_thread(run.restore)
        # only now, so that a file with a fault can be mended for a resume
        if not (path := checksums_of(config.run_dir)).exists():
            path.parent.mkdir(exist_ok=True)
            write_file(path, json.dumps(found, indent=1).encode())
        return RunEnd(await run.run(server), time.time(), run.progress.end_kind)
    finally:
        server.close()
