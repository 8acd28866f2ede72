"""What the trainer gets from the orchestrator: batches, acknowledged versions, probes, and the end of the run."""

import asyncio
import logging
import time
from contextlib import suppress

from rl.orchestrator.probe import probe
from rl.orchestrator.progress import Progress
from rl.orchestrator.served_policy import ServedPolicy
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.status import Beats, Phase, Status, last_seen, read_status
from rl.wire.batch_file import batch_head, batch_part
from rl.wire.messages import (
    Acknowledged,
    BatchPart,
    Coming,
    GetBatch,
    GetBatchPart,
    GetProbe,
    NotReady,
    Probe,
    Published,
    RunEnded,
)
from rl.wire.transport import ANSWER_WITHIN_S, TrainerServer

END_NOTICE_S = 120.0
"""How long the trainer may take to ask for the batch after an early end: it may still write its checkpoint."""
POLL_S = 0.2
DEAD_S = 60.0
"""A trainer whose last checkpoint is there, and whose heartbeat is the same for so long by this process's clock, is not waited for."""
SEND_S = 0.5
"""Time for the last answer to leave."""

log = logging.getLogger(__name__)


class TrainerRequests:
    """Answers the trainer's requests. Each may come any number of times: from a trainer that starts again, for example."""

    def __init__(self, run_dir: RunDir, progress: Progress, policy: ServedPolicy, status: Status, max_model_len: int):
        self.run_dir, self.progress, self.policy, self.status, self.max_model_len = run_dir, progress, policy, status, max_model_len
        self.activity = 0
        """Versions that were announced plus batches that were given: grows while the trainer lives and makes progress."""
        self.end_delivered = asyncio.Event()
        self.has_trainer = False
        """Whether a trainer with a status file was there; others (tests) are not waited for."""
        self.beats = Beats()

    async def serve(self, server: TrainerServer, group: asyncio.TaskGroup) -> None:
        """Loop. Consumes the trainer's requests. Produces answers; one that has to wait is made by a task of its own."""
        while True:
            sender, request = await server.receive()
            self.has_trainer = self.has_trainer or self.run_dir.status("trainer").exists()
            match request:
                case GetBatch(step):
                    group.create_task(self.answer_batch(server, sender, step))
                case GetBatchPart(step, offset):
                    group.create_task(self.answer_part(server, sender, step, offset))
                case GetProbe(version):
                    group.create_task(self.answer_probe(server, sender, version))
                case Coming(version):
                    await server.reply(sender, self.acknowledged())
                    self.policy.prepare(version.policy_version, version.memory)
                case Published(version):
                    self.activity += 1
                    self.policy.note(version.policy_version, version.memory)
                    self.policy.forget(self.progress.final)
                    await server.reply(sender, self.acknowledged())
                    await self.progress.notify()

    def acknowledged(self) -> Acknowledged:
        """Which versions something still waits for."""
        keep = sorted({*self.policy.evaluator.best_versions(), *self.policy.in_use()})
        return Acknowledged(self.policy.oldest_needed(self.progress.final), keep)

    async def answer_batch(self, server: TrainerServer, sender: bytes, step: int) -> None:
        """Answers with the batch, or that there will be none, or within a few seconds that it is not ready. Raises CorruptFileError."""
        progress = self.progress
        if not await progress.wait_until(lambda: step <= progress.newest or step > progress.final, ANSWER_WITHIN_S):
            return await server.reply(sender, NotReady(self.status.current))
        if step > progress.final:
            self.end_delivered.set()
            return await server.reply(sender, RunEnded(progress.end_reason or f"max_steps = {progress.final} reached"))
        self.activity += 1
        return await server.reply(sender, batch_head(self.run_dir.batch(step)))

    async def answer_part(self, server: TrainerServer, sender: bytes, step: int, offset: int) -> None:
        """Answers with bytes of a batch's file, none for a batch that a repair took back. Raises CorruptFileError for one that is lost."""
        self.activity += 1
        data = await asyncio.to_thread(batch_part, self.run_dir.batch(step), offset) if step <= self.progress.newest else b""
        await server.reply(sender, BatchPart(data))

    async def answer_probe(self, server: TrainerServer, sender: bytes, version: int) -> None:
        """Answers with completions by a version once inference holds it, with none if it holds a later one, or that it does not yet."""
        if not await self.progress.wait_until(lambda: self.policy.loaded >= version, ANSWER_WITHIN_S):
            return await server.reply(sender, NotReady(self.status.current))
        prompts = self.progress.prompts.values()
        samples = await probe(self.policy.servers, prompts, self.max_model_len) if self.policy.loaded == version else []
        return await server.reply(sender, Probe(samples))

    async def wait_for_trainer_end(self, timeout_s: float) -> None:
        """Waits until the trainer has ended, as long as it makes progress within `timeout_s` seconds.

        After an early end it asks for one batch more, and one that dies before its last checkpoint asks for batches again.
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
                log.warning("waited %.0f s for the trainer to end. Trainer: %s", timeout_s, last_seen(self.run_dir.status("trainer")))
                return
        await asyncio.sleep(SEND_S)

    def trainer_has_ended(self) -> bool:
        """Whether its last checkpoint is there and its status is gone, or is that of a dead one."""
        final = self.progress.final
        if max(numbers(self.run_dir.checkpoints), default=0) < final:  # later ones: max_steps was lowered
            return False
        status = read_status(self.run_dir.status("trainer"))
        if status is None:
            return True
        return self.beats.silent_s("trainer", status) > DEAD_S
