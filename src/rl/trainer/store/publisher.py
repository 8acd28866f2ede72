"""The thread that announces, writes and deletes policy versions while the next step trains.

Servers of this host read a version from this process's memory and prepare it while it is hashed. As soon as its digests are known it is
announced, so that it may be used, and once more when its files are whole. They are made durable behind that: nothing that a resume begins
with depends on it. Older versions stay, and the next one waits, until it is.
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
from rl.trainer.store.background import Background
from rl.trainer.store.versions import Version
from rl.wire.messages import Acknowledged, WeightVersion
from rl.wire.transport import OrchestratorClient, Wait

DISK_S = 60.0
"""For a version to be written, beyond what the orchestrator may take."""


class Publisher:
    """Publishes at most one version at a time. Rank 0's does the work, the others' do nothing."""

    def __init__(
        self,
        run_dir: RunDir,
        config: WeightsConfig,
        client: OrchestratorClient | None,
        wait: Wait,
        warn: Callable[[RunWarning], None] | None = None,
    ):
        """Without a client nothing is announced, and no version is kept because an evaluation still needs it. `warn`: see Status.warn."""
        self.warn = warn
        self.run_dir, self.config, self.client, self.wait = run_dir, config, client, wait
        self.retention = Retention(run_dir.weights_dir, ("",), config.keep_last, config.keep_every)
        self.background = Background()
        self.began = 0
        """The version that was begun last."""
        self.latency_s: float | None = None
        """Seconds from `start` until the orchestrator knew of the version that was published last."""
        self.announced = -1
        """The version that `latency_s` is of."""

    def start(self, number: int, version: Version | None, checkpoints: Collection[int]) -> None:
        """Begins to write version `number`, and then to announce it. `version` is None on all ranks but 0.

        `checkpoints`: the newest one, and the one in progress; their versions are kept. Waits for the version before, see `finish`.
        """
        self.finish()
        self.began = number
        if version:
            self.background.start(self._publish, number, version, checkpoints, time.monotonic())

    def _publish(self, number: int, version: Version, checkpoints: Collection[int], since: float) -> None:
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
                # One that is there was judged by this process, which holds the role: it is replaced, in one step, as readers may be at it.
                version.write(path, new=is_new, fence=fence)
        needed = self._announce(WeightVersion(number, str(path)), since)
        # Behind, and before the next version: after a power cut the checkpoint and the batches, which are durable, make it again.
        with spans.span("make_durable", "publisher", number):
            for made in (self.run_dir.digests(number), path):
                make_durable(made)
        keep = {*needed.keep, *checkpoints}  # an evaluation's best, and where a resume starts
        self.retention.delete_old(number, keep, needed.oldest_needed)

    def _announce(self, version: WeightVersion, since: float) -> Acknowledged:
        """Tells the orchestrator of a version that was begun to be published at `since`. Returns what it still needs."""
        number = version.policy_version
        needed = Acknowledged(number)
        if self.client:
            with spans.span("announce_version", "publisher", number):
                needed = self.client.published(version, self.wait)
        if self.announced < number:
            self.announced, self.latency_s = number, time.monotonic() - since
        return needed

    def _is_there(self, number: int, path: Path, version: Version) -> bool:
        """Whether the same version is on disk already, sound: after a kill it is trained again, and need not be written again.

        Warns if the one there is another: then the run is not exact, and what is trained now counts. Not so if the folder beside the record
        has what was trained: then the record is damaged.
        """
        record = self.run_dir.digests(number)
        if not record.exists():
            return False
        try:
            before = read_digests(record)
            tensor = first_difference(before["tensors"], version.digests_by(before["hash"]))
            if tensor is None:
                return path.exists() and verify_version(path)["tensors"] == before["tensors"]
            if self._fits(path, version):
                check_record(record, path)
        except CorruptFileError as error:
            self._warn("damaged", f"{error}; version {number} is written anew")
            return False
        made_by, now = before.get("made_by", {}), version.made_by
        if made_by.get("deterministic") and now.get("deterministic"):
            why = differing_conditions(made_by, now) or "on the same machine with the same settings: please report this"
            message = f"trained again, version {number} is another than before, first in {tensor} ({why}). The new one counts"
            self._warn("inexact", message)
        return False

    def _fits(self, path: Path, version: Version) -> bool:
        """Whether a folder is sound by its own digests, and has this version."""
        try:
            content = verify_version(path)
        except CorruptFileError:
            return False
        return first_difference(content["tensors"], version.digests_by(content["hash"])) is None

    def _warn(self, about: Literal["damaged", "inexact"], text: str) -> None:
        print(f"WARNING: {text}", file=sys.stderr, flush=True)
        if self.warn:
            self.warn(RunWarning(about, "", text))

    def metrics(self) -> dict[str, float]:
        """The latency of the newest version that is published by now, mostly the one before the step's."""
        return {} if self.latency_s is None else {"time/publish_latency": self.latency_s}

    def finish(self) -> None:
        """Waits until the version in progress is published, and raises the thread's error.

        Waits for: the thread, and so for the disk and for the orchestrator, up to the deadline of `wait`.
        """
        what = f"a version to be written to {self.run_dir.weights_dir}: does that disk answer?"
        if self.background.busy:
            with self.wait:  # what the thread asks the orchestrator has an earlier deadline
                self.background.result(what, self.wait.timeout_s + DISK_S)
