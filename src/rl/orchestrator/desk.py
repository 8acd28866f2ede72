"""What the trainer gets from the orchestrator: batches, word that a version was noted, probes, and that the run is over."""

import asyncio
import logging
import time
from contextlib import suppress

from rl.batch_log import decode_batch, sound_batch
from rl.diagnosis import peer
from rl.messages import Acknowledged, BatchBytes, GetBatch, GetProbe, NotReady, Probe, Published, RunEnded, WeightVersion
from rl.orchestrator.probe import probe
from rl.orchestrator.progress import Progress
from rl.orchestrator.served import ServedPolicy
from rl.run_dir import RunDir, numbered
from rl.status import Status, read_status
from rl.transport import ANSWER_WITHIN_S, TrainerServer

LAST_WORD_S = 120.0
"""How long the trainer may take to hear that the run ended early: it may still write its checkpoint."""
LOOK_S = 0.2
DEAD_S = 60.0
"""Without a heartbeat for so long, a trainer whose last checkpoint is there is not waited for."""

log = logging.getLogger(__name__)


class TrainerDesk:
    """Answers the trainer's requests. Each may come any number of times: from a trainer that starts again, for example."""

    def __init__(self, run_dir: RunDir, progress: Progress, policy: ServedPolicy, status: Status, max_model_len: int):
        self.run_dir, self.progress, self.policy, self.status, self.max_model_len = run_dir, progress, policy, status, max_model_len
        self.heard = 0
        """Versions that were announced, and batches that were given: the trainer lives, and gets on."""
        self.told_end = asyncio.Event()
        self.knows_trainer = False
        """A trainer with a status file was there; others (tests) are not waited for."""

    async def serve(self, server: TrainerServer, group: asyncio.TaskGroup) -> None:
        """Loop. Consumes the trainer's requests, produces answers; a request for a batch that is not there waits in a task of its own."""
        while True:
            sender, request = await server.receive()
            self.knows_trainer = self.knows_trainer or self.run_dir.status("trainer").exists()
            match request:
                case GetBatch(step):
                    group.create_task(self.answer_batch(server, sender, step))
                case GetProbe(version):
                    group.create_task(self.answer_probe(server, sender, version))
                case Published(version):
                    self.heard += 1
                    number = version.policy_version
                    # Its place is known: a path that comes over the wire is not followed.
                    self.policy.versions[number] = WeightVersion(number, str(self.run_dir.weights(number)))
                    needed = self.policy.oldest_needed(self.progress.final)
                    await server.reply(sender, Acknowledged(needed, self.policy.evaluator.best_versions()))
                    await self.progress.wake()

    async def answer_batch(self, server: TrainerServer, sender: bytes, step: int) -> None:
        """Answers with the batch, or that there will be none, or within a few seconds that it is not ready. Raises CorruptFileError."""
        progress = self.progress
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S), progress.changed:
                await progress.changed.wait_for(lambda: step <= progress.newest or step > progress.final)
        except TimeoutError:
            return await server.reply(sender, NotReady(self.status.fields["doing"]))
        if step > progress.final:
            self.told_end.set()
            return await server.reply(sender, RunEnded(progress.end_reason or f"max_steps = {progress.final} reached"))
        self.heard += 1
        return await server.reply(sender, BatchBytes(sound_batch(self.run_dir.batch(step))))

    async def answer_probe(self, server: TrainerServer, sender: bytes, version: int) -> None:
        """Answers with completions by a version once inference holds it, with none if it holds a later one, or that it does not yet."""
        changed = self.progress.changed
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S), changed:
                await changed.wait_for(lambda: self.policy.loaded >= version)
        except TimeoutError:
            return await server.reply(sender, NotReady(self.status.fields["doing"]))
        content = decode_batch(sound_batch(self.run_dir.batch(self.progress.newest)), f"batch {self.progress.newest}")
        samples = await probe(self.policy.servers, content.batch, self.max_model_len) if self.policy.loaded == version else []
        return await server.reply(sender, Probe(samples))

    async def see_off(self, timeout_s: float) -> None:
        """Stays until the trainer has ended: after an early end it asks for one batch more, and one that dies before its last checkpoint
        asks for batches again. Waits for it as long as it gets on within `timeout_s`."""
        if self.progress.end_reason:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await self.told_end.wait()
        heard, since = self.heard, time.monotonic()
        while self.knows_trainer and not self._trainer_has_ended():
            self.status.doing("waiting for the trainer to end")
            await asyncio.sleep(LOOK_S)
            if heard != self.heard:
                heard, since = self.heard, time.monotonic()
            if time.monotonic() - since > timeout_s:
                log.warning("waited %.0f s for the trainer to end. Trainer: %s", timeout_s, peer(self.run_dir, "trainer"))
                return
        await asyncio.sleep(0.5)  # lets the answer leave

    def _trainer_has_ended(self) -> bool:
        """Its last checkpoint is there and its status is gone, or is that of a dead one."""
        final = self.progress.final
        if max(numbered(self.run_dir.checkpoints), default=0) < final:  # later ones: max_steps was lowered
            return False
        status = read_status(self.run_dir.status("trainer"))
        return status is None or time.time() - status.get("heartbeat", 0.0) > DEAD_S
