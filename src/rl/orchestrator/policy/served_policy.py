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
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
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
UNSEEN = (
    "; {path} exists on this host: share output_dir with all hosts of servers, and see whether "
    "its file system is slow"
)
Tell = Callable[[ServerSet], Awaitable[None]]


class Failure(NamedTuple):
    """A failed load: its monotonic time, the version, and the error."""

    at: float
    version: int
    error: Exception


def refuses(error: Exception, version: WeightVersion) -> bool:
    """Returns whether a server will not load a version later either. One that does not find its
    folder (404), which exists, may see it later: listings of network file systems can be stale."""
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
        tell: Tell,
    ):
        """base: the folder of version 0. tell: tells the workers which servers there are."""
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
        self.loads: dict[str, asyncio.Task[None]] = {}
        """Server -> the load in progress."""
        self.loading: dict[str, int] = {}
        """Server -> the version it is loading."""
        self.pauses: dict[str, float] = {}
        """Server -> how long its last load paused generation, seconds."""
        self.failures: dict[str, Failure] = {}
        """Server -> its last load, if that failed."""
        self.late: list[str] = []
        """Servers that were late at the last load."""
        self.server_set: ServerSet | None = None
        self.staleness = Staleness()
        """Heartbeats of starting servers."""
        self.scan()

    def scan(self) -> None:
        """Adds the versions on disk to `versions`, and remembers them: the event loop asks for
        them after every rollout, and does not wait for the disk."""
        there = numbers(self.run_dir.weights_dir)
        self.seen = {*there}
        for number in there:
            known = self.versions.get(number)
            self._add_version(
                number, None, known.content if known else content_id(self.run_dir.digests(number))
            )

    def note(self, number: int, memory: Memory | None = None) -> None:
        """Records a version that is complete, in memory or else on disk. Its path follows from
        its number: a path received over the wire is not trusted. A version that was trained
        again may differ; servers that hold the old one then have to load it again."""
        self._add_version(number, memory, content_id(self.run_dir.digests(number)))

    def _add_version(self, number: int, memory: Memory | None, content: str) -> None:
        self.versions[number] = WeightVersion(
            number, str(self.run_dir.weights(number)), memory, content
        )
        self.servers.contents[number] = content

    def forget(self, final: int) -> None:
        """Drops versions before the loaded one that no evaluation waits for: they are never
        loaded again."""
        self.versions = {
            number: version
            for number, version in self.versions.items()
            if number == 0 or number >= self.loaded or self.evaluator.due(number, final)
        }
        self.servers.contents = {
            number: version.content for number, version in self.versions.items()
        }

    async def start(self) -> None:
        """Waits for the first server, and starts with the newest version of this run that a
        server holds. Raises InferenceLostError."""
        held = await self.servers.wait_for_any()
        self.scan()
        sound = [version for version in held.values() if version in self.versions]
        if sound:
            self.loaded = max(sound)
        else:  # the version is of another history of the run, or was deleted meanwhile
            newest = max(self.versions)
            log.warning(
                "inference holds version %d, which does not exist here: it gets version %d",
                min(held.values()),
                newest,
            )
            await self.load(self.versions[newest])
        await self.reconcile()

    def there(self, after: int = -1) -> list[int]:
        """Returns the versions after `after` that are in memory or on disk, ascending."""
        later = (version for number, version in self.versions.items() if number > after)
        return sorted(
            version.policy_version
            for version in later
            if version.memory or self._is_on_disk(version)
        )

    def _is_on_disk(self, version: WeightVersion) -> bool:
        if version.policy_version not in self.seen and Path(version.path).exists():
            self.seen.add(version.policy_version)
        return version.policy_version in self.seen

    def next_version(self, final: int) -> WeightVersion | None:
        """Returns the version to load next: the first newer one that waits for an eval, else the
        newest; None if none is newer."""
        newer = self.there(after=self.loaded)
        number = next(
            (number for number in newer if self.evaluator.due(number, final)),
            max(newer, default=None),
        )
        return None if number is None else self.versions[number]

    def needed(self, final: int) -> tuple[int, list[int]]:
        """Returns the oldest version that is loaded or waits for an eval, and those that must be
        kept even if they are older: an evaluation found them best, or a server reads them."""
        oldest = min(
            [
                self.loaded,
                *(number for number in self.versions if self.evaluator.due(number, final)),
            ]
        )
        return oldest, sorted(
            {version for _, _, version in self.evaluator.best.values()} | self.in_use()
        )

    def in_use(self) -> set[int]:
        """Returns the versions that live servers are reading, to start with or to load; one per
        server."""
        claimed = set()
        for path in server_files(self.run_dir.status_dir):
            status = read_status(path)
            if (
                status
                and status.policy_version
                and not status.address
                and self.staleness.look(path.name, status.heartbeat) < CLAIM_S
            ):
                claimed.add(status.policy_version)
        return claimed | set(self.loading.values())

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
        try:
            return await self._load_everywhere(version)
        except RefusedError as error:
            if not Path(version.path).exists():
                self.seen.discard(version.policy_version)
                log.warning(
                    "version %d is not on disk: it is still being written, or was deleted",
                    version.policy_version,
                )
                await asyncio.sleep(RETRY_S)
                return None
            refusal = f"{version.path}: inference refused version {version.policy_version}: {error}"
            if error.status == 422 and version.policy_version:
                try:
                    await asyncio.to_thread(verify_version, Path(version.path))
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
        number, began, first_s = version.policy_version, time.monotonic(), None
        looked = began
        self.failures.clear()
        await self._announce_servers()  # announces the version as the newest
        while True:
            known = self.servers.known
            failed = {
                url: failure.error
                for url, failure in self.failures.items()
                if failure.version == number
            }
            refused = {
                url: error
                for url, error in failed.items()
                if url in known and refuses(error, version)
            }
            behind = [url for url, held in known.items() if held != number and url not in refused]
            waited_s = time.monotonic() - began
            if number in known.values():
                first_s = waited_s if first_s is None else first_s
                if not behind or waited_s > LATE * first_s + LATE_S:
                    break
            elif refused and not behind:
                raise next(iter(refused.values()))
            elif waited_s > self.servers.timeout_s:
                problem = next(map(str, failed.values()), self.servers.last_seen())
                remedy = (
                    UNSEEN.format(path=version.path)
                    if any(isinstance(error, RefusedError) for error in failed.values())
                    else ""
                )
                raise InferenceLostError(
                    f"waited {waited_s:.0f} s for inference to load version {number}: "
                    f"{problem}{remedy}"
                )
            for url in behind:
                self._start_load(url, version)
            if self.loads:
                await asyncio.wait(
                    self.loads.values(), timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
            else:
                await asyncio.sleep(LOOK_EVERY_S)
            if time.monotonic() - looked > LOOK_EVERY_S:
                await self.servers.poll_versions()
                await self._announce_servers()
                looked = time.monotonic()
        for url, why in refused.items():
            log.warning(
                "inference at %s is excluded because it refused version %d: %s", url, number, why
            )
        if behind and behind != self.late:
            log.warning(
                "version %d is not yet loaded at %s: no requests go there until it is",
                number,
                ", ".join(behind),
            )
        self.late = behind
        return max(
            (
                self.pauses.get(url, 0.0)
                for url, held in self.servers.known.items()
                if held == number
            ),
            default=0.0,
        )

    def _start_load(self, url: str, version: WeightVersion) -> None:
        """Starts loading a version into a server, unless a load is in progress or has just
        failed."""
        failure = self.failures.get(url)
        if url not in self.loads and not (failure and time.monotonic() - failure.at < RETRY_S):
            self.loading[url] = version.policy_version
            self.loads[url] = asyncio.create_task(self._load_into(url, version))

    async def _load_into(self, url: str, version: WeightVersion) -> None:
        try:
            self.pauses[url] = await self.servers.load(url, version)
        except (AwayError, OSError, InferenceLostError, RefusedError) as error:
            before = self.failures.get(url)
            self.failures[url] = Failure(time.monotonic(), version.policy_version, error)
            if before is None or (before.version, str(before.error)) != (
                version.policy_version,
                str(error),
            ):
                log.warning(
                    "inference at %s does not load version %d: %s",
                    url,
                    version.policy_version,
                    error,
                )
            if not isinstance(error, RefusedError):
                self.servers.known.pop(url, None)  # until it is polled again
        finally:
            del self.loads[url], self.loading[url]

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
        if (
            not self.num_pins
            and self.loaded < oldest
            and oldest in self.versions
            and not self._skips_eval(oldest)
        ):
            await self._take_over(oldest)
            log.warning("inference came back with version %d", oldest)
        elif self.loaded not in self.there(after=self.loaded - 1):
            if not any(map(self._may_answer, held)):
                await self._follow(held)
        elif any(map(self._may_answer, held)):
            for url, version in self.servers.known.items():
                if not self._may_answer(version):
                    self._start_load(url, self.versions[self.loaded])
        else:
            what = (
                "a different version with that number"
                if oldest == OTHER_HISTORY
                else f"version {oldest}"
            )
            log.warning("inference holds %s: it gets version %d again", what, self.loaded)
            await self._load(self.versions[self.loaded])

    async def _follow(self, held: Collection[int]) -> None:
        """Continues with the oldest version of this run that a server holds, because the loaded
        one is no longer on disk; if they hold none, with the newest one on disk."""
        if ours := [version for version in held if version in self.versions]:
            return await self._take_over(min(ours))
        newest = max(self.there())
        log.warning(
            "inference holds version %d, but neither it nor %d exists here: it gets version %d",
            min(held),
            self.loaded,
            newest,
        )
        if await self._load(self.versions[newest]) is not None:
            await self._take_over(newest)

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
        server_set = ServerSet(
            urls, closed, self.loaded if loaded is None else loaded, max(self.versions)
        )
        if server_set != self.server_set:
            self.server_set = server_set
            self.servers.follow(server_set)
            await self.tell(server_set)

    def _skips_eval(self, version: int) -> bool:
        """Whether `loaded` or a version between it and `version` waits for an eval."""
        return any(
            number < version and self.evaluator.due(number, final=-1)
            for number in self.there(after=self.loaded - 1)
        )
