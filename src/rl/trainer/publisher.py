"""Policy versions are written, announced and cleared away in a thread, while the next step trains."""

import time
from collections.abc import Callable
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path

from rl.messages import Acknowledged, WeightVersion
from rl.run_dir import RunDir
from rl.trainer.config import WeightsConfig
from rl.trainer.weights import delete_old_versions
from rl.transport import OrchestratorClient, Wait


class Publisher:
    """At most one version is on its way. Rank 0's does the work, the others' do nothing. Errors of the thread come with the next call."""

    def __init__(self, run_dir: RunDir, config: WeightsConfig, client: OrchestratorClient | None, wait: Wait):
        """Without a client nothing is announced, and no version is kept for one who waits for it."""
        self.run_dir, self.config, self.client, self.wait = run_dir, config, client, wait
        self.pool = ThreadPool(1)
        self.coming: AsyncResult | None = None
        self.latency_s: float | None = None
        """Of the version published last: from `start` until the orchestrator knew of it."""

    def start(self, version: int, write: Callable[[Path], None] | None, checkpoint_step: int) -> None:
        """Publishes `version` in the background: `write` makes its folder (None: it is there), then it is announced.

        `checkpoint_step`: of the newest checkpoint, whose version is kept. Waits for the version before, see `finish`.
        """
        self.finish()
        self.coming = self.pool.apply_async(self._publish, (version, write, checkpoint_step, time.monotonic()))

    def _publish(self, version: int, write: Callable[[Path], None] | None, checkpoint_step: int, since: float) -> None:
        path = self.run_dir.weights(version).absolute()
        if write:
            self.wait.about(f"publishing version {version}: writing it")
            write(path)
        needed = Acknowledged(version)
        if self.client:
            needed = self.client.published(WeightVersion(version, str(path)), self.wait)
        self.latency_s = time.monotonic() - since
        delete_old_versions(self.run_dir.weights_dir, self.config, needed, checkpoint_step)

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
                coming.get()
