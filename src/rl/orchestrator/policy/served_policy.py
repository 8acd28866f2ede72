"""The policy version of inference: loads versions into all servers in order, and keeps them there
as servers die, join and return.

Only this module decides which servers may answer, and tells all workers (`ServerSet`): a server
with an older version than `loaded` gets no new requests until it has caught up; during an
evaluation a server with any other version gets none. So all tokens of a group are of the version
loaded when the group started or of newer ones, whichever servers play it, and lag is bounded as
explained in tasks/admission.py.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from rl.orchestrator.evals.evaluator import Evaluator
from rl.run_dir.checksums import content_id, verify_version
from rl.run_dir.files import CorruptFileError
from rl.run_dir.in_memory import Memory
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.status import Staleness, read_status, server_files
from rl.wire.http import AwayError, RefusedError
from rl.wire.inference_client import OTHER_HISTORY, InferenceLostError, InferenceServers
from rl.wire.messages import WeightVersion
from rl.wire.worker_messages import ServerSet

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after inference did not find a version's folder, and before a server that failed to load
is asked again."""
LATE = 2.0
LATE_S = 1.0
"""A server is late once loading takes it longer than LATE times the time of the fastest server
plus LATE_S seconds: the run continues with the others, and the server rejoins when it has caught
up."""
LOOK_EVERY_S = 0.5
"""Interval at which servers are polled while a version is loaded."""
CLAIM_S = 60.0
"""A starting server whose heartbeat has not changed for this long counts as dead: reading a
large model can delay one by half of it."""
AnnounceServers = Callable[[ServerSet], Awaitable[None]]
"""Tells the workers which servers there are."""


class Failure(NamedTuple):
    """A failed load: its monotonic time, the version, and the error."""

    at: float
    version: int
    error: Exception

    def is_final(self, version: WeightVersion) -> bool:
        """Whether the server will not load the version later either. One that does not find its
        folder (404), which exists, may see it later: listings of network file systems can be
        stale."""
        error = self.error
        return isinstance(error, RefusedError) and not (
            error.status == 404 and Path(version.path).exists()
        )


class ServedPolicy:
    """The version that inference holds (`loaded`) as the orchestrator assumes it; `reconcile`
    corrects it after servers came or went.

    A restarted server begins with the newest version it finds, so it may be ahead of `loaded`.
    Tokens of a newer version do no harm: they lag less than is allowed. An evaluation needs exactly
    its version, and keeps it with `pin`.
    """

    def __init__(
        self,
        servers: InferenceServers,
        run_dir: RunDir,
        base: str,
        evaluator: Evaluator,
        tell: AnnounceServers,
    ):
        """base: the folder of version 0."""
        self.servers = servers
        self.run_dir = run_dir
        self.evaluator = evaluator
        self.tell = tell
        self.versions = {0: WeightVersion(0, base)}
        """The base model and the versions that may still be loaded; old ones are dropped by
        `forget`."""
        self.loaded = 0
        self.num_pins = 0
        self.load_lock = asyncio.Lock()
        self.loads: dict[str, tuple[int, asyncio.Task[None]]] = {}
        """Server -> the version that it is loading, and the task of that."""
        self.pauses: dict[str, float] = {}
        """Server -> how long its last load paused generation, seconds."""
        self.failures: dict[str, Failure] = {}
        """Server -> its last load, if that failed."""
        self.server_set: ServerSet | None = None
        self.staleness = Staleness()
        """Heartbeats of starting servers."""
        self.scan()

    def scan(self) -> None:
        """Adds the versions on disk to `versions`, and remembers them: the event loop asks for
        them after every rollout, and does not wait for the disk."""
        self.seen = set(numbers(self.run_dir.weights_dir))
        for number in self.seen:
            if known := self.versions.get(number):
                self._add_version(number, None, known.content)
            else:
                self.note(number)

    def note(self, number: int, memory: Memory | None = None) -> None:
        """Records a version that is complete, in memory or else on disk. Its path follows from
        its number: a path received over the wire is not trusted. A version that was trained
        again may differ; servers that hold the old one then have to load it again."""
        self._add_version(number, memory, content_id(self.run_dir.digests(number)))

    def _add_version(self, number: int, memory: Memory | None, content: str) -> None:
        path = str(self.run_dir.weights(number))
        self.versions[number] = WeightVersion(number, path, memory, content)
        self.servers.contents[number] = content

    def forget(self, final: int) -> None:
        """Drops versions before the loaded one that no evaluation waits for: they are never
        loaded again."""
        for number in [*self.versions]:
            if 0 < number < self.loaded and not self.evaluator.due(number, final):
                del self.versions[number]
        self.servers.contents = {
            number: version.content for number, version in self.versions.items()
        }

    async def start(self) -> None:
        """Waits for the first server, and starts with the newest version of this run that a
        server holds. Raises InferenceLostError."""
        held = await self.servers.wait_for_any()
        self.scan()
        # if they hold none: of another history of the run, or deleted meanwhile
        sound = [version for version in held.values() if version in self.versions]
        self.loaded = max(sound or self.versions)
        await self.reconcile()

    def available(self, after: int = -1) -> list[int]:
        """Returns the versions after `after` that are in memory or on disk, ascending."""
        return sorted(
            number
            for number, version in self.versions.items()
            if number > after and (version.memory or self._is_on_disk(version))
        )

    def _is_on_disk(self, version: WeightVersion) -> bool:
        if version.policy_version not in self.seen and Path(version.path).exists():
            self.seen.add(version.policy_version)
        return version.policy_version in self.seen

    def next_version(self, final: int) -> WeightVersion | None:
        """Returns the version to load next: the first newer one that waits for an eval, else the
        newest; None if none is newer."""
        newer = self.available(after=self.loaded)
        waiting = [number for number in newer if self.evaluator.due(number, final)]
        return self.versions[(waiting or newer[-1:])[0]] if newer else None

    def needed(self, final: int) -> tuple[int, list[int]]:
        """Returns the oldest version that is loaded or waits for an eval, and those that must be
        kept even if they are older: an evaluation found them best, or a server reads them."""
        waiting = [number for number in self.versions if self.evaluator.due(number, final)]
        best = {version for _, _, version in self.evaluator.best.values()}
        return min([self.loaded, *waiting]), sorted(best | self.in_use())

    def in_use(self) -> set[int]:
        """Returns the versions that live servers are reading, to start with or to load; one per
        server."""
        claimed = {number for number, _ in self.loads.values()}
        for path in server_files(self.run_dir.status_dir):
            status = read_status(path)
            if not status or not status.policy_version or status.address:
                continue
            if self.staleness.look(path.name, status.heartbeat) < CLAIM_S:
                claimed.add(status.policy_version)
        return claimed

    async def load(self, version: WeightVersion) -> float:
        """Loads a version into all servers except late ones. Returns the longest pause of
        generation, seconds. `loaded` is unchanged if the version's folder disappeared.

        Raises CorruptFileError for damaged weights, RefusedError if inference refuses them for
        another reason, and InferenceLostError.
        """
        async with self.load_lock:
            pause_s = await self._load(version)
            if pause_s is None:
                return 0.0
            await self._take_over(version.policy_version)
            return pause_s

    async def _load(self, version: WeightVersion) -> float | None:
        """Does what `load` does except for setting `loaded`; returns None if the version's
        folder does not exist."""
        number, path = version.policy_version, Path(version.path)
        try:
            return await self._load_everywhere(version)
        except RefusedError as error:
            if not path.exists():
                self.seen.discard(number)
                log.warning(
                    "version %d is not on disk: it is still being written, or was deleted", number
                )
                await asyncio.sleep(RETRY_S)
                return None
            refusal = f"{path}: inference refused version {number}: {error}"
            if error.status == 422 and number:
                try:
                    await asyncio.to_thread(verify_version, path)
                # an intact version just does not fit that server
                except CorruptFileError as damage:
                    raise CorruptFileError(f"{damage}; {refusal}") from None
            raise RefusedError(error.status, refusal) from None

    async def _load_everywhere(self, version: WeightVersion) -> float:
        """Loads a version into every server independently, until all servers hold it except late
        ones and those that refuse it.

        Returns the longest pause, seconds. Raises RefusedError if all refuse it, InferenceLostError
        if none holds it in time.
        """
        number, began, first_s, known = version.policy_version, time.monotonic(), 0.0, {}
        polled = began
        self.failures.clear()
        await self._announce_servers()  # announces the version as the newest
        while True:
            known = self.servers.known
            refused = {
                url: failure.error
                for url, failure in self.failures.items()
                if url in known and failure.version == number and failure.is_final(version)
            }
            behind = [url for url, held in known.items() if held != number and url not in refused]
            waited_s = time.monotonic() - began
            if number in known.values():
                first_s = first_s or waited_s
                if not behind or waited_s > LATE * first_s + LATE_S:
                    break
            elif refused and not behind:
                raise next(iter(refused.values()))
            elif waited_s > self.servers.timeout_s:
                raise InferenceLostError(
                    f"waited {waited_s:.0f} s for inference to load version {number}: "
                    f"{self._last_problem(version)}"
                )
            for url in behind:
                self._start_load(url, version)
            if self.loads:
                tasks = [task for _, task in self.loads.values()]
                await asyncio.wait(tasks, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(LOOK_EVERY_S)
            if time.monotonic() - polled > LOOK_EVERY_S:
                await self.servers.poll_versions()
                await self._announce_servers()
                polled = time.monotonic()
        for url, error in refused.items():
            log.warning(
                "inference at %s is excluded because it refused version %d: %s", url, number, error
            )
        if behind:
            log.info(
                "version %d is not yet loaded at %s: no requests go there until it is",
                number,
                ", ".join(behind),
            )
        holders = [url for url, held in self.servers.known.items() if held == number]
        return max((self.pauses.get(url, 0.0) for url in holders), default=0.0)

    def _last_problem(self, version: WeightVersion) -> str:
        """Describes why no server holds a version."""
        errors = [
            failure.error
            for failure in self.failures.values()
            if failure.version == version.policy_version
        ]
        problem = str(errors[0]) if errors else self.servers.last_seen()
        if not any(isinstance(error, RefusedError) for error in errors):
            return problem
        return (
            f"{problem}; {version.path} exists on this host: share output_dir with all hosts of "
            "servers, and see whether its file system is slow"
        )

    def _start_load(self, url: str, version: WeightVersion) -> None:
        """Starts loading a version into a server, unless a load is in progress or has just
        failed."""
        failure = self.failures.get(url)
        if url not in self.loads and not (failure and time.monotonic() - failure.at < RETRY_S):
            task = asyncio.create_task(self._load_into(url, version))
            self.loads[url] = version.policy_version, task

    async def _load_into(self, url: str, version: WeightVersion) -> None:
        number, before = version.policy_version, self.failures.get(url)
        try:
            self.pauses[url] = await self.servers.load(url, version)
        except (AwayError, OSError, InferenceLostError, RefusedError) as error:
            self.failures[url] = Failure(time.monotonic(), number, error)
            if not before or (before.version, str(before.error)) != (number, str(error)):
                log.warning("inference at %s does not load version %d: %s", url, number, error)
            if not isinstance(error, RefusedError):
                self.servers.known.pop(url, None)  # until it is polled again
        finally:
            del self.loads[url]

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[None]:
        """Keeps the loaded version within the block: only servers that hold exactly this one
        answer, and the others have to load it."""
        self.num_pins += 1
        await self._announce_servers()
        try:
            yield
        finally:
            self.num_pins -= 1
            await self._announce_servers()

    async def reconcile(self) -> bool:
        """Polls the servers, and if `loaded` is not what they hold, corrects this by loading it
        again or by following the servers.

        Returns whether `loaded` has changed. Servers that are away are ignored until the next call
        after their return.
        """
        await self.servers.poll_versions()
        await self._announce_servers()
        if self.load_lock.locked():
            return False  # the load takes care of all servers
        async with self.load_lock:
            before = self.loaded
            await self._reconcile()
            await self._announce_servers()
            return self.loaded != before

    async def _reconcile(self) -> None:
        held = self.servers.known.values()
        if all(version == self.loaded for version in held):
            return
        self.scan()
        oldest = min(held)
        is_ahead = not self.num_pins and self.loaded < oldest and oldest in self.versions
        answers = any(map(self._may_answer, held))
        if is_ahead and not self._skips_eval(oldest):
            await self._take_over(oldest)
            log.warning("inference came back with version %d", oldest)
            return
        if self.loaded not in self.available(after=self.loaded - 1):
            if answers:
                return
            # it is no longer on disk: continues with the oldest version of this run that a server
            # holds, else with the newest one on disk
            known = [version for version in held if version in self.versions]
            await self._take_over(min(known) if known else max(self.available()))
            if known:
                return
        if answers:
            for url, version in self.servers.known.items():
                if not self._may_answer(version):
                    self._start_load(url, self.versions[self.loaded])
            return
        version = f"version {oldest}"
        if oldest == OTHER_HISTORY:
            version = "a different version with that number"
        log.warning("inference holds %s: it gets version %d", version, self.loaded)
        await self._load(self.versions[self.loaded])

    async def _take_over(self, version: int) -> None:
        """Makes a version the loaded one; no group relies on it before all workers know which
        servers hold it."""
        await self._announce_servers(version)
        self.loaded = version

    def _may_answer(self, held: int, loaded: int | None = None) -> bool:
        """Whether a server that holds version `held` gets requests, if `loaded` is the loaded
        version (default: the current one)."""
        loaded = self.loaded if loaded is None else loaded
        return held == loaded if self.num_pins else held >= loaded and held in self.versions

    async def _announce_servers(self, loaded: int | None = None) -> None:
        """Announces which servers get requests, if that has changed."""
        known = self.servers.known
        urls = [url for url, version in known.items() if self._may_answer(version, loaded)]
        closed = [url for url in (*known, *sorted(self.servers.silent)) if url not in urls]
        oldest = self.loaded if loaded is None else loaded
        server_set = ServerSet(urls, closed, oldest, max(self.versions))
        if server_set != self.server_set:
            self.server_set = server_set
            self.servers.follow(server_set)
            await self.tell(server_set)

    def _skips_eval(self, version: int) -> bool:
        """Whether `loaded` or a version between it and `version` waits for an eval."""
        return any(
            number < version and self.evaluator.due(number, final=-1)
            for number in self.available(after=self.loaded - 1)
        )
