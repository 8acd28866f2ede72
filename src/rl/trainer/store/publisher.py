"""Publishes policy versions while the next step trains. A thread on each rank writes the rank's
slices; rank 0 announces versions and deletes old ones.

A version is announced (`Published`) as soon as its digests are known, so that servers can read it
from the trainer's memory, and again when its files are complete. They are made durable after that,
by a thread of rank 0's, because no resume depends on them. Until then older versions are kept;
meanwhile the next version may be announced and written.

Servers of other hosts may read a version over the network, each rank's slices out of that rank's
memory (`Registered`). An index in rank 0's memory says where. It has the name of the content, which
is overwritten before any rank changes a byte, and a JSON object: the header of the version's file,
and for each rank its agent, the address of the first byte of the first tensor, and its slices.
"""

import base64
import json
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl.config.trainer import DISK_S, WeightsConfig
from rl.run_dir import spans
from rl.run_dir.checksums import first_difference, is_delta, read_digests
from rl.run_dir.files import CorruptFileError, make_durable, remove_directory
from rl.run_dir.in_memory import Memory, OverNetwork, new_name
from rl.run_dir.lease import check_fence
from rl.run_dir.paths import Retention, RunDir
from rl.run_dir.status import Phase, RunWarning
from rl.system import faults, nixl
from rl.system.errors import RunError
from rl.system.linux import pid_scope
from rl.trainer.determinism import differing_conditions
from rl.trainer.model import lora
from rl.trainer.parallel.world import World
from rl.trainer.store.image import Image, LastVersion, header, ranges
from rl.trainer.store.threads import RankThreads, SingleTaskThread
from rl.trainer.store.versions import PublishedVersion
from rl.wire.messages import Acknowledged, WeightVersion
from rl.wire.transport import OrchestratorClient, Wait


class Registered:
    """The slices of an image's ranks. Every rank makes it together with the others, and calls
    every method."""

    def __init__(self, image: Image):
        """Raises RunError if NIXL cannot be used on any rank."""
        self.image, self.memory = image, image.memory
        self.index = torch.empty(0, dtype=torch.uint8)
        self.name = new_name()
        ranks = image.ranks.share(self._register)
        image.ranks.of_main(lambda: self._write_index(ranks))

    def _register(self) -> dict[str, Any]:
        """Returns what a server needs to read this rank's slices."""
        assert self.memory is not None
        start, self.agent = self.memory.data_ptr() + self.image.start, nixl.make_agent(serves=True)
        with nixl.blamed("the weights cannot be registered"):
            if pieces := [
                (start + first, end - first, 0, "") for first, end in ranges(self.image.slices)
            ]:
                self.agent.register_memory(pieces, nixl.DRAM)
            agent = base64.b64encode(self.agent.get_agent_metadata()).decode()
        numbers = {tensor.name: number for number, tensor in enumerate(self.image.tensors)}
        slices = [(numbers[part.tensor.name], part.first, part.end) for part in self.image.slices]
        return {"agent": agent, "start": start, "slices": slices}

    def _write_index(self, ranks: list[dict[str, Any]]) -> None:
        content = json.dumps(
            {"header": header(self.image.tensors)[8:].decode(), "ranks": ranks}
        ).encode()
        self.index = torch.frombuffer(bytearray(self.name.encode() + content), dtype=torch.uint8)
        with nixl.blamed("the index of the weights cannot be registered"):
            registered = self.agent.register_memory(
                [(self.index.data_ptr(), len(self.index), 0, "")], nixl.DRAM
            )
            self.metadata = self.agent.get_partial_agent_metadata(registered, True, ["UCX"])

    def announce(self) -> OverNetwork | None:
        """Returns where the content is, once all ranks have filled their slices; None on ranks
        other than 0."""
        self.image.ranks.share(lambda: None)
        if not self.image.ranks.is_main:
            return None
        self.name = new_name()
        self._mark(self.name.encode())
        scope = pid_scope() if nixl.is_local() else ""
        return OverNetwork(scope, self.metadata, self.index.data_ptr(), len(self.index), self.name)

    def withdraw(self) -> None:
        """Tells readers, which look at the mark after they have read, that the content is about
        to change."""
        self._mark(bytes(len(self.name)))

    def _mark(self, mark: bytes) -> None:
        if len(self.index):
            self.index[: len(mark)] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)


MORE_S = 60.0
"""Seconds allowed for a version in addition to its disk's DISK_S and the orchestrator's timeout,
so that theirs end first and name them."""
DISK = "does that disk answer?"


class Publisher:
    """Publishes at most one version at a time. Every rank's publisher writes the rank's slices,
    rank 0's does everything else."""

    def __init__(
        self,
        run_dir: RunDir,
        config: WeightsConfig,
        client: OrchestratorClient | None,
        wait: Wait,
        warn: Callable[[RunWarning], None] | None = None,
        world: World | None = None,
    ):
        """Without a client nothing is announced, and no version is kept for evaluations. `warn`:
        see Status.warn. Every rank calls this."""
        self.warn, self.deadline_s = warn, wait.timeout_s + DISK_S + MORE_S
        self.ranks = RankThreads(
            world, self.deadline_s
        )  # rank 0 waits for the orchestrator meanwhile
        self.run_dir, self.config, self.client, self.wait = run_dir, config, client, wait
        self.retention = Retention(run_dir.weights_dir, ("",), config.keep_last, config.keep_every)
        self.retention.continues = lambda number: is_delta(run_dir.weights(number))
        self.last = LastVersion()
        self.registered: Registered | None = None
        """The memory of the versions, if servers read it over the network."""
        self.over_network = config.transport == "nixl" and self.ranks.of_main(
            lambda: client is not None
        )
        """Whether servers read the versions so: not in a replay or supervised fine-tuning, which
        have none."""
        if self.over_network:
            if nixl.is_local() and not self.ranks.all_here:
                raise RunError(f"trainer.weights.transport = nixl: {nixl.SEVERAL_HOSTS}")
            nixl.make_agent(serves=True)  # raises now what would end the first step
        self.newest_started = 0
        """The newest version whose publication was started."""
        self.thread, self.disk = SingleTaskThread(), SingleTaskThread()
        for thread in (self.thread, self.disk):
            # the last status must not say "training": readers would blame the batch
            thread.on_error = lambda: wait.on_wait(Phase.PUBLISHING, self.newest_started, "")
        self.latency_s: float | None = None
        """Seconds from `start` until the orchestrator acknowledged the version that was
        announced last."""
        self.announced = -1
        """The version that `latency_s` belongs to."""

    def start(self, number: int, version: PublishedVersion, checkpoints: Collection[int]) -> None:
        """Waits until the version before is written (see `free`), then starts to write and announce
        version `number`.

        `checkpoints`: the newest one, and the one in progress; their versions are kept. Every rank
        calls this.
        """
        self.free()
        self.newest_started = number
        self.thread.start(self._publish, number, version, checkpoints, time.monotonic())

    def _publish(
        self, number: int, version: PublishedVersion, checkpoints: Collection[int], since: float
    ) -> None:
        path, ranks = self.run_dir.weights(number).absolute(), self.ranks
        self.wait.about(Phase.PUBLISHING, number, "writing it")
        is_new = ranks.of_main(lambda: not path.exists())
        memory = self._in_memory(version)
        self._compare(number, version)
        fence = partial(check_fence, self.run_dir.lock("trainer"))
        with spans.span("digest_version", "publisher", number):
            version.write_record(self.run_dir.digests(number), fence)
        if is_new and memory:
            self._announce(WeightVersion(number, str(path), memory), since)
            faults.point("weights.in_memory")
        with spans.span("write_version", "publisher", number):
            # An existing folder, of a version that is trained again, may have readers: replace it
            # atomically.
            last = self.last if self._is_delta(number) else None
            # which servers read first
            version.write(path, new=is_new, fence=fence, last=last, past_cache=bool(memory))
        if self.config.anchor_every > 1 and self.last.number != number:
            self.last.keep(number, version.image)
        needed = self._announce(WeightVersion(number, str(path)), since)
        if ranks.is_main:
            self.disk.result(f"version {number - 1} to be durable: {DISK}", self.deadline_s)
            self.disk.start(self._make_durable, number, path, needed, checkpoints)

    def _is_delta(self, number: int) -> bool:
        """Whether a version is written as what differs from the one before, which must be the
        one published last."""
        is_anchor = number % self.config.anchor_every == 0 or (
            self.config.keep_every and number % self.config.keep_every == 0
        )
        return not is_anchor and self.last.number == number - 1

    def _in_memory(self, version: PublishedVersion) -> Memory | None:
        """Where servers can read a version from now on, until the next one takes its place."""
        if self.config.transport == "memory":
            return version.in_memory
        if not self.over_network or lora.has_adapters(version.model):
            return None
        memory = version.image.memory
        if not all(self.ranks.share(lambda: self.registered and self.registered.memory is memory)):
            self.registered = Registered(version.image)
            version.image.before_change = self.registered.withdraw
        return self.registered.announce() if self.registered else None

    def _make_durable(
        self, number: int, path: Path, needed: Acknowledged | None, checkpoints: Collection[int]
    ) -> None:
        """Makes a version durable, then deletes the versions that nobody needs. A version lost in a
        power cut is trained again from the durable checkpoint and batches."""
        with spans.span("make_durable", "publisher", number):
            make_durable(self.run_dir.digests(number))
            make_durable(path)
        if needed is None:  # the trainer leaves; its next start announces this version again
            return
        # The next one may become a delta of this version; the best versions of evaluations; and the
        # start of a resume.
        keep = {number, *needed.keep, *checkpoints}
        self.retention.delete_old(number, keep, needed.oldest_needed)

    def _announce(self, version: WeightVersion, since: float) -> Acknowledged | None:
        """Announces a version, whose publication began at `since`, to the orchestrator. Returns
        the versions that it still needs, or None if it does not answer before the trainer
        leaves."""
        number = version.policy_version
        needed: Acknowledged | None = Acknowledged(number)
        if self.client:
            with spans.span("announce_version", "publisher", number):
                needed = self.client.published(version, self.wait)
        if needed and self.announced < number:
            self.announced, self.latency_s = number, time.monotonic() - since
        return needed

    def _compare(self, number: int, version: PublishedVersion) -> None:
        """Compares a version with its record if a resumed run, after a kill, trains it again. If
        they differ the new one counts; deltas that follow the old one, and cannot be applied to
        another, are deleted. Warns if equal conditions should have given the same bits."""
        record = self.ranks.of_main(lambda: record_of(self.run_dir.digests(number)))
        if record is None:
            return
        tensor = first_difference(record["tensors"], version.digests_like(record["tensors"]))
        if tensor is not None:
            before, now = record.get("made_by", {}), version.made_by
            self.ranks.of_main(lambda: self._replace(number, tensor, before, now))

    def _replace(
        self, number: int, tensor: str, before: dict[str, Any], now: dict[str, Any]
    ) -> None:
        """Deletes the deltas that follow a version. Warns of `tensor`, the first that differs, if
        the conditions `before` and `now` should give the same bits."""
        later = number + 1
        while is_delta(path := self.run_dir.weights(later)):
            remove_directory(path)
            later += 1
        if before.get("deterministic") and now.get("deterministic"):
            why = (
                differing_conditions(before, now)
                or "on the same machine with the same settings: please report this"
            )
            text = (
                f"version {number} was trained again and differs from before, first in {tensor} "
                f"({why}). The new one counts"
            )
            print(f"WARNING: {text}", file=sys.stderr, flush=True)
            if self.warn:
                self.warn(RunWarning("inexact", "", text))

    def metrics(self) -> dict[str, float]:
        """Returns the latency of the newest announced version, which is usually the previous
        step's."""
        return {} if self.latency_s is None else {"time/publish_latency": self.latency_s}

    def free(self) -> None:
        """Waits until the version in progress is written, so that its memory may change, and raises
        the thread's error.

        Waits for: the thread, and through it the other ranks, the disk and the orchestrator, up to
        the deadline of `wait`.
        """
        self._wait_for(self.thread)

    def finish(self) -> None:
        """Waits until all versions are written and durable, and raises the threads' errors.
        Waits for: the same as `free`."""
        self.free()
        self._wait_for(self.disk)

    def _wait_for(self, thread: SingleTaskThread) -> None:
        what = f"a version to be written to {self.run_dir.weights_dir}: {DISK}"
        if thread.busy:
            with self.wait:  # the thread's requests to the orchestrator time out earlier
                thread.result(what, self.deadline_s)


def record_of(path: Path) -> dict[str, Any] | None:
    """Returns a version's record; None if it is missing or damaged."""
    try:
        return read_digests(path)
    except CorruptFileError:
        return None
