"""Answers to the trainer's requests: batches, acknowledged versions, probes, and the end of the
run.

Probes are completions without a reward, on which the trainer compares its log-probabilities with
inference's.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rl.orchestrator.batches.contents import rollout_samples
from rl.orchestrator.policy.served_policy import ServedPolicy
from rl.orchestrator.progress import Progress
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.status import Phase, Staleness, Status, last_seen, read_status
from rl.system.errors import RunError
from rl.wire.batch_file import batch_head, decode_batch, sound_batch
from rl.wire.inference_client import InferenceLostError, InferenceServers, PromptTooLongError
from rl.wire.messages import (
    Acknowledged,
    GetBatch,
    GetProbe,
    NotReady,
    Probe,
    Published,
    RunEnded,
    TrainingSample,
    WeightVersion,
)
from rl.wire.rollouts import Group, Rollout
from rl.wire.transport import ANSWER_WITHIN_S, TrainerServer
from rl.wire.turns import Turns

PROMPTS, TOKENS = 4, 32


def first_of_groups(batch: Path) -> list[TrainingSample]:
    """Returns the first sample of each of the first PROMPTS groups in a batch file."""
    first: dict[int, TrainingSample] = {}
    for sample in decode_batch(sound_batch(batch), str(batch)).batch.samples:
        first.setdefault(sample.group_id, sample)
        if len(first) == PROMPTS:
            break
    return [*first.values()]


async def probe(
    servers: InferenceServers, samples: list[TrainingSample], max_model_len: int
) -> list[TrainingSample]:
    """Returns completions by the loaded version of the samples' prompts. Prompts that fill the
    context are cut from the left. Raises what InferenceServers.generate raises."""
    room = max(1, max_model_len - TOKENS)

    async def one(sample: TrainingSample) -> TrainingSample:
        prompt = sample.token_ids[: sample.spans[0].start][-room:].tolist()
        return await complete(
            servers, prompt, sample.temperature, TOKENS, sample.group_id, sample.routes is not None
        )

    return await asyncio.gather(*map(one, samples))


async def complete(
    servers: InferenceServers,
    prompt: list[int],
    temperature: float,
    num_tokens: int,
    group_id: int,
    routes: bool = False,
) -> TrainingSample:
    """Returns one completion of a prompt as a sample, with all sampled tokens in the loss mask,
    and with its routes if so wanted."""
    sampling = {"max_tokens": num_tokens, "temperature": temperature, "routes": routes}
    turn = await servers.generate(0, prompt, sampling)
    group = Group(
        group_id=group_id,
        env="probe",
        task=0,
        rollouts=[Rollout(turns=Turns.of([turn]))],
        advantages=[0.0],
        temperature=temperature,
    )
    return next(rollout_samples(group, 0))


END_NOTICE_S = 120.0
"""How long the trainer may take to ask for the next batch after an early end: it may still be
writing its checkpoint."""
POLL_S = 0.2
DEAD_S = 60.0
"""A trainer counts as dead if its last checkpoint exists and its heartbeat has not changed for
this long by this process's clock."""
PROBE_S = 60.0
"""Longest wait for the completions of a probe, which a server that hangs would hold up; the
trainer has long trained on by then."""
SEND_S = 0.5
"""Time for the last answer to be sent."""

log = logging.getLogger(__name__)


class TrainerRequests:
    """Answers the trainer's requests. Each may be repeated, for example by a restarted trainer."""

    def __init__(
        self,
        run_dir: RunDir,
        progress: Progress,
        policy: ServedPolicy | None,
        status: Status,
        max_model_len: int,
    ):
        """policy: None if nobody samples from it; then only its newest version is kept, and no
        probe answered."""
        self.run_dir, self.progress, self.policy = run_dir, progress, policy
        self.status, self.max_model_len = status, max_model_len
        status.writes_at_once = False  # from here on the event loop says what it does
        self.activity = 0
        """Number of versions announced plus batches served: grows while the trainer makes
        progress."""
        self.asked = 0
        """The newest batch that the trainer has asked for."""
        self.published = 0
        """The newest version that it has announced."""
        self.end_delivered = asyncio.Event()
        self.has_trainer = False
        """Whether a trainer with a status file has asked; trainers without one (tests) are not
        waited for."""
        self.staleness = Staleness()

    async def serve(self, server: TrainerServer, group: asyncio.TaskGroup) -> None:
        """Loop. Consumes the trainer's requests. Produces answers, in separate tasks if they may
        have to wait."""
        while True:
            sender, request = await server.receive()
            self.has_trainer = self.has_trainer or self.run_dir.status("trainer").exists()
            match request:
                case GetBatch(step):
                    if step > self.asked:
                        self.asked = step
                        await self.progress.notify()
                    group.create_task(self.answer_batch(server, sender, step))
                case GetProbe(version):
                    group.create_task(self.answer_probe(server, sender, version))
                case Published(version):
                    self.activity += 1
                    self.published = max(self.published, version.policy_version)
                    await server.reply(sender, self.acknowledge(version))
                    await self.progress.notify()

    def acknowledge(self, version: WeightVersion) -> Acknowledged:
        """Notes a version that is complete, and returns which ones are still needed."""
        if self.policy is None:
            return Acknowledged(self.published)
        self.policy.note(version.policy_version, version.memory)
        self.policy.forget(self.progress.final)
        return Acknowledged(*self.policy.needed(self.progress.final))

    async def answer_batch(self, server: TrainerServer, sender: bytes, step: int) -> None:
        """Answers BatchReady, RunEnded, or within a few seconds NotReady. Raises
        CorruptFileError for a damaged batch."""
        progress = self.progress
        if not await progress.wait_until(
            lambda: step <= progress.newest or step > progress.final, ANSWER_WITHIN_S
        ):
            return await server.reply(sender, NotReady(self.status.current))
        if step > progress.final:
            self.end_delivered.set()
            return await server.reply(
                sender, RunEnded(progress.end_reason or f"max_steps = {progress.final} reached")
            )
        self.activity += 1
        return await server.reply(sender, batch_head(self.run_dir.batch(step)))

    async def answer_probe(self, server: TrainerServer, sender: bytes, version: int) -> None:
        """Answers with completions by a version once inference holds it, with none if it holds a
        later one, is slow or fails, or NotReady if it holds neither. Raises CorruptFileError for
        a damaged batch."""
        policy = self.policy
        if policy is None:
            return await server.reply(sender, Probe([]))
        if not await self.progress.wait_until(lambda: policy.loaded >= version, ANSWER_WITHIN_S):
            return await server.reply(sender, NotReady(self.status.current))
        samples, newest = [], self.progress.newest
        if policy.loaded == version and newest:
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    first = await asyncio.to_thread(first_of_groups, self.run_dir.batch(newest))
                    try:
                        samples = await probe(policy.servers, first, self.max_model_len)
                    except (InferenceLostError, PromptTooLongError, ValueError) as error:
                        log.warning("inference did not answer a probe: %s", error)
        return await server.reply(sender, Probe(samples))

    async def wait_for_trainer(
        self, holds: Callable[[], bool], what: str, deadline_s: float
    ) -> None:
        """Waits until `holds()`, after what the trainer does. Raises RunError after `deadline_s`
        seconds without progress: a finished group (of which there are no more than the window
        has) or a new batch, for which the trainer itself waits, an announced version, or a batch
        served to the trainer (which may train steps again after a restart)."""

        def state() -> tuple[int, int, int]:
            return self.status.progress, self.progress.newest, self.activity

        while not holds():
            before = state()
            if not await self.progress.wait_until(
                lambda before=before: holds() or state() != before, deadline_s
            ):
                raise RunError(
                    f"waited {deadline_s:.0f} s for {what}; if a step just takes long, raise "
                    "orchestrator.trainer_timeout_s. Trainer: "
                    f"{last_seen(self.run_dir.status('trainer'))}"
                )

    async def wait_for_trainer_end(self, timeout_s: float) -> None:
        """Waits until the trainer has ended; gives up after `timeout_s` seconds without progress.

        After an early end the trainer asks for one more batch; a trainer that died before its last
        checkpoint asks for batches again.
        """
        if self.progress.end_reason:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_NOTICE_S):
                    await self.end_delivered.wait()
        activity, since = self.activity, time.monotonic()
        while self.has_trainer and not self.trainer_has_ended():
            self.status.enter(Phase.WAITING_FOR_TRAINER_END)
            await asyncio.sleep(POLL_S)
            if activity != self.activity:
                activity, since = self.activity, time.monotonic()
            if time.monotonic() - since > timeout_s:
                log.warning(
                    "waited %.0f s for the trainer to end. Trainer: %s",
                    timeout_s,
                    last_seen(self.run_dir.status("trainer")),
                )
                return
        await asyncio.sleep(SEND_S)

    def trainer_has_ended(self) -> bool:
        """Whether the trainer's last checkpoint exists and its status file is gone, or is that
        of a dead process."""
        final = self.progress.final
        # a later one exists if max_steps was lowered
        if max(numbers(self.run_dir.checkpoints), default=0) < final:
            return False
        status = read_status(self.run_dir.status("trainer"))
        return status is None or self.staleness.look("trainer", status.heartbeat) > DEAD_S
