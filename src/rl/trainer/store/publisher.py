"""The thread that announces, writes and deletes policy versions while the next step trains.

A hint (`PrepareHint`) makes servers on this host read a version from this process's memory and prepare it while it is being hashed. The
version is announced (`Published`) as soon as its digests are known, so that it can be used, and again when its files are complete. They are
made durable after that, because no resume depends on them. Until then older versions are kept, and the next version waits.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Literal

from rl.config.trainer import WeightsConfig
from rl.run_dir import spans
from rl.run_dir.checksums import check_record, first_difference, read_digests, verify_version
from rl.run_dir.files import CorruptFileError, make_durable
from rl.run_dir.lease import check_fence
from rl.run_dir.paths import RunDir
from rl.run_dir.retention import Retention
from rl.run_dir.status import Phase, RunWarning
from rl.system import faults
from rl.trainer.determinism import differing_conditions
from rl.trainer.store.single_task_thread import SingleTaskThread
from rl.trainer.store.versions import PublishedVersion
from rl.wire.messages import Acknowledged, WeightVersion
from rl.wire.transport import OrchestratorClient, Wait

DISK_S = 60.0
"""Seconds allowed for writing a version, in addition to the orchestrator's timeout."""


class Publisher:
    """Publishes at most one version at a time. Only rank 0's publisher does any work."""

    def __init__(
        self,
        run_dir: RunDir,
        config: WeightsConfig,
        client: OrchestratorClient | None,
        wait: Wait,
        warn: Callable[[RunWarning], None] | None = None,
    ):
        """Without a client nothing is announced, and no version is kept for evaluations. `warn`: see Status.warn."""
        self.warn = warn
        self.run_dir, self.config, self.client, self.wait = run_dir, config, client, wait
        self.retention = Retention(run_dir.weights_dir, ("",), config.keep_last, config.keep_every)
        self.thread = SingleTaskThread()
        self.began = 0
        """The version whose publication began last."""
        self.latency_s: float | None = None
        """Seconds from `start` until the orchestrator acknowledged the version that was announced last."""
        self.announced = -1
        """The version that `latency_s` belongs to."""

    def start(self, number: int, version: PublishedVersion | None, checkpoints: Collection[int]) -> None:
        """Waits until the version before is published (see `finish`), then starts to write and announce version `number`.

        `version` is None on all ranks but 0. `checkpoints`: the newest one, and the one in progress; their versions are kept.
        """
        self.finish()
        self.began = number
        if version:
            self.thread.start(self._publish, number, version, checkpoints, time.monotonic())

    def _publish(self, number: int, version: PublishedVersion, checkpoints: Collection[int], since: float) -> None:
        path = self.run_dir.weights(number).absolute()
        self.wait.about(Phase.PUBLISHING, number, "writing it")
        is_new = not path.exists()
        if self.client and is_new and version.in_memory:
            coming = WeightVersion(number, str(path), version.in_memory)
            threading.Thread(target=self.client.coming, args=(coming,), name="coming", daemon=True).start()
        if not self._is_there(number, path, version):
            fence = partial(check_fence, self.run_dir.lock("trainer"))
            with spans.span("digest_version", "publisher", number):
                version.write_record(self.run_dir.digests(number), fence)
            if is_new and version.in_memory:
                self._announce(WeightVersion(number, str(path), version.in_memory), since)
                faults.point("weights.in_memory")
            with spans.span("write_version", "publisher", number):
                # This process, which holds the role, has rejected an existing folder. It may have readers: replace it atomically.
                version.write(path, new=is_new, fence=fence)
        needed = self._announce(WeightVersion(number, str(path)), since)
        # Durable only now: after a power cut the version is trained again from the checkpoint and the batches, which are durable.
        with spans.span("make_durable", "publisher", number):
            for made in (self.run_dir.digests(number), path):
                make_durable(made)
        keep = {*needed.keep, *checkpoints}  # the best versions of evaluations, and the start of a resume
        self.retention.delete_old(number, keep, needed.oldest_needed)

    def _announce(self, version: WeightVersion, since: float) -> Acknowledged:
        """Announces a version, whose publication began at `since`, to the orchestrator. Returns the versions that it still needs."""
        number = version.policy_version
        needed = Acknowledged(number)
        if self.client:
            with spans.span("announce_version", "publisher", number):
                needed = self.client.published(version, self.wait)
        if self.announced < number:
            self.announced, self.latency_s = number, time.monotonic() - since
        return needed

    def _is_there(self, number: int, path: Path, version: PublishedVersion) -> bool:
        """Whether the same version is already on disk and intact. It is after a kill, when a resumed run trains it again.

        Warns if the version on disk differs: then the run is not reproducible, and the new version counts. If only the record differs,
        and the folder has the new version's weights, then the record is damaged.
        """
        record = self.run_dir.digests(number)
        if not record.exists():
            return False
        try:
            before = read_digests(record)
            tensor = first_difference(before["tensors"], version.digests)
            if tensor is None:
                return path.exists() and verify_version(path)["tensors"] == before["tensors"]
            if self._fits(path, version):
                check_record(record, path)
        except CorruptFileError as error:
            self._warn("damaged", f"{error}; version {number} is written again")
            return False
        made_by, now = before.get("made_by", {}), version.made_by
        if made_by.get("deterministic") and now.get("deterministic"):
            why = differing_conditions(made_by, now) or "on the same machine with the same settings: please report this"
            message = f"version {number} was trained again and differs from before, first in {tensor} ({why}). The new one counts"
            self._warn("inexact", message)
        return False

    def _fits(self, path: Path, version: PublishedVersion) -> bool:
        """Whether a folder matches its own digests and holds this version."""
        try:
            content = verify_version(path)
        except CorruptFileError:
            return False
        return first_difference(content["tensors"], version.digests) is None

    def _warn(self, about: Literal["damaged", "inexact"], text: str) -> None:
        print(f"WARNING: {text}", file=sys.stderr, flush=True)
        if self.warn:
            self.warn(RunWarning(about, "", text))

    def metrics(self) -> dict[str, float]:
        """Returns the latency of the newest announced version, which is usually the previous step's."""
        return {} if self.latency_s is None else {"time/publish_latency": self.latency_s}

    def finish(self) -> None:
        """Waits until the version in progress is published, and raises the thread's error.

        Waits for: the thread, and through it the disk and the orchestrator, up to the deadline of `wait`.
        """
        what = f"a version to be written to {self.run_dir.weights_dir}: does that disk answer?"
        if self.thread.busy:
            with self.wait:  # the thread's requests to the orchestrator time out earlier
                self.thread.result(what, self.wait.timeout_s + DISK_S)
