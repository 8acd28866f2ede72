"""Policy versions are written, announced and cleared away in a thread, while the next step trains."""

import sys
import time
from collections.abc import Collection
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path

from rl.digests import first_difference, read_digests, verify_version
from rl.files import CorruptFileError
from rl.messages import Acknowledged, WeightVersion
from rl.run_dir import RunDir
from rl.trainer.config import WeightsConfig
from rl.trainer.determinism import unlike
from rl.trainer.threads import result_within
from rl.trainer.weights import Version, delete_old_versions
from rl.transport import OrchestratorClient, Wait

DISK_S = 60.0
"""For a version to be written, beyond what the orchestrator may take."""


class Publisher:
    """At most one version is on its way. Rank 0's does the work, the others' do nothing. Errors of the thread come with the next call."""

    def __init__(self, run_dir: RunDir, config: WeightsConfig, client: OrchestratorClient | None, wait: Wait):
        """Without a client nothing is announced, and no version is kept for one who waits for it."""
        self.run_dir, self.config, self.client, self.wait = run_dir, config, client, wait
        self.pool = ThreadPool(1)
        self.coming: AsyncResult | None = None
        self.latency_s: float | None = None
        """Of the version published last: from `start` until the orchestrator knew of it."""

    def start(self, number: int, version: Version | None, checkpoints: Collection[int]) -> None:
        """Publishes version `number` in the background: it is written and announced. Rank 0 alone has its content.

        `checkpoints`: the newest one, and the one on its way; their versions are kept. Waits for the version before, see `finish`.
        """
        self.finish()
        if version:
            self.coming = self.pool.apply_async(self._publish, (number, version, checkpoints, time.monotonic()))

    def _publish(self, number: int, version: Version, checkpoints: Collection[int], since: float) -> None:
        path = self.run_dir.weights(number).absolute()
        self.wait.about(f"publishing version {number}: writing it")
        if not self._is_there(number, path, version):
            version.write(path, self.run_dir.digests(number))
        needed = Acknowledged(number)
        if self.client:
            needed = self.client.published(WeightVersion(number, str(path)), self.wait)
        self.latency_s = time.monotonic() - since
        delete_old_versions(self.run_dir.weights_dir, self.config, needed, checkpoints)

    def _is_there(self, number: int, path: Path, version: Version) -> bool:
        """Whether the same version is on disk already, sound: after a kill it is trained again, and need not be written again.

        A loud word if it was another one: then the run is not exact, and what is trained now counts.
        """
        record = self.run_dir.digests(number)
        if not record.exists():
            return False
        try:
            before = read_digests(record)
            tensor = first_difference(before["tensors"], version.digests)
            if tensor is None:
                return path.exists() and verify_version(path)["tensors"] == version.digests
        except CorruptFileError as error:
            print(f"WARNING: {error}; version {number} is written anew", file=sys.stderr, flush=True)
            return False
        made_by, now = before.get("made_by", {}), version.made_by
        if made_by.get("deterministic") and now.get("deterministic"):
            why = unlike(made_by, now) or "on the same machine with the same settings: please report this"
            message = f"trained again, version {number} is another than before, first in {tensor} ({why}). The new one counts"
            print(f"WARNING: {message}", file=sys.stderr, flush=True)
        return False

    def metrics(self) -> dict[str, float]:
        """Of the newest version that is published by now, mostly the one before the step's."""
        return {} if self.latency_s is None else {"time/publish_latency": self.latency_s}

    def look(self) -> None:
        """Raises the thread's error, if it has ended with one."""
        if self.coming and self.coming.ready():
            self.finish()

    def finish(self) -> None:
        """Waits until the version on its way is published, and raises the thread's error.

        Waits for: the thread, and so for the disk and for the orchestrator, up to the deadline of `wait`.
        """
        if self.coming:
            coming, self.coming = self.coming, None
            with self.wait:
                # What the thread asks the orchestrator has an earlier deadline.
                result_within(coming, self.wait.timeout_s + DISK_S, f"a version to be written to {self.run_dir.weights_dir}")
