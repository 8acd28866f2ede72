"""The orchestrator's side of the wire over a fixed list of batches: the real transport, nothing
else of the orchestrator."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, Self

from rl.run_dir.access_token import run_token
from rl.run_dir.files import HEADER
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, RoleStatus, write_status
from rl.wire.batch_file import encode_batch
from rl.wire.messages import (
    Acknowledged,
    BatchReady,
    GetProbe,
    NotReady,
    Probe,
    Published,
    RunEnded,
    TrainBatch,
)
from rl.wire.transport import TrainerServer


class TransportThread:
    """The orchestrator's end of the wire in a thread, while its context lasts; `answer` makes the
    replies, None is no reply."""

    def __init__(self, status: Path, token: str | None = None):
        self.status, self.token = status, token or run_token(status.parent)
        self.up, self.stopping = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        assert self.up.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.thread.join()

    async def serve(self) -> None:
        self.server = server = TrainerServer("127.0.0.1", 0, self.token)
        about: dict[str, Any] = {"heartbeat": time.time(), "phase": Phase.FILLING_BATCH, "step": 1}
        write_status(self.status, RoleStatus(address=server.address, **about))
        self.up.set()
        while not self.stopping.is_set():
            try:
                peer, request = await asyncio.wait_for(server.receive(), 0.2)
            except TimeoutError:
                continue
            if (reply := self.answer(request)) is not None:
                await server.reply(peer, reply)
        server.close()

    def answer(self, request):
        raise NotImplementedError


class StubOrchestrator(TransportThread):
    """Serves `batches`, then says that the run has ended; `published` lists the versions
    announced."""

    def __init__(self, run_dir: RunDir, batches: list[TrainBatch]):
        super().__init__(run_dir.status("orchestrator"))
        self.run_dir = run_dir
        self.batches = {batch.step: encode_batch(batch, {}) for batch in batches}
        self.lockstep = False
        """A batch is there only when the version before it is published, as with max_lag = 0."""
        self.missing = 0
        """A batch that never comes."""
        self.published: list[tuple[int, str]] = []
        self.asked: list[int] = []

    def answer(self, request):
        if isinstance(request, Published):
            if not request.version.memory:  # it is announced again when its folder is there
                self.published.append((request.version.policy_version, request.version.path))
            return Acknowledged(1_000_000)
        if isinstance(request, GetProbe):
            return Probe([])  # there is no inference to sample from
        self.asked.append(request.step)
        if self.asked.count(request.step) == 1 and request.step == 1:
            return NotReady(RoleStatus(phase=Phase.STARTING))
        if request.step == self.missing:
            return NotReady(RoleStatus(phase=Phase.FILLING_BATCH, step=request.step))
        if self.lockstep and request.step > len(self.published) + 1:
            return NotReady(RoleStatus(phase=Phase.WAITING_FOR_VERSION, step=request.step - 1))
        if not (data := self.batches.get(request.step)):
            return RunEnded("no more batches")
        self.run_dir.batch(request.step).parent.mkdir(exist_ok=True)
        self.run_dir.batch(request.step).write_bytes(data)
        return BatchReady(len(data), HEADER.unpack_from(data)[-1])
