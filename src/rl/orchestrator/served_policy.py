"""The policy version of inference: loaded in order into each server, and kept although servers die, join, or come back with another.

Who may answer is decided here alone, and told to all workers (`Fleet`): a server that holds an older version than `loaded` gets no new
request until it has caught up, and during an evaluation one with any other version gets none. So tokens of a group are of the version that
was loaded when it began or of newer ones, whichever servers play it, and lag is bounded as admission.py says.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from rl.orchestrator.evaluator import Evaluator
from rl.run_dir.checksums import verify_version
from rl.run_dir.files import CorruptFileError
from rl.run_dir.in_memory import InMemory
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.status import Beats, read_status, server_files
from rl.wire.http import AwayError, RefusedError
from rl.wire.inference_client import InferenceLostError, InferenceServers
from rl.wire.messages import WeightVersion
from rl.wire.worker_messages import Fleet

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after a version's folder went away while inference read it, and before a server that did not load one is asked again."""
LATE = 2.0
LATE_S = 1.0
"""A server is late when it has needed LATE times as long as the first one that held the version, and LATE_S seconds more: the run goes on
with the others, and it joins them when it has caught up."""
LOOK_EVERY_S = 0.5
"""So often servers are looked at while a version is loaded."""
CLAIM_S = 60.0
"""A starting server whose heartbeat has been the same for so long is taken for dead: reading a large model delays one by half of it."""
Tell = Callable[[Fleet], Awaitable[None]]


async def tell_nobody(fleet: Fleet) -> None:
    """Where nobody but the orchestrator asks the servers."""


class Failure(NamedTuple):
    """A load that came to nothing: when, by the monotonic clock, of which version, and why."""

    at: float
    version: int
    error: Exception


class ServedPolicy:
    """The version that inference holds (`loaded`), as the orchestrator counts with it; `settle` makes it true after servers came or went.

    A server that died starts at the newest version that it finds, so it may be ahead of `loaded`. Tokens of a newer version harm nothing:
    their lag is less than was allowed for. An evaluation wants exactly its version, which it holds by `pin`.
    """

    def __init__(self, servers: InferenceServers, run_dir: RunDir, base: str, evaluator: Evaluator, tell: Tell = tell_nobody):
        """`base`: the folder of version 0. `tell` tells the workers which servers there are."""
        self.servers = servers
        self.run_dir = run_dir
        self.evaluator = evaluator
        self.tell = tell
        self.versions = {0: WeightVersion(0, base)}
        """The base model, and the versions that may be loaded yet: however many there were, they are few."""
        self.loaded = 0
        self.num_pins = 0
        self.load_lock = asyncio.Lock()
        self.loads: dict[str, asyncio.Task[None]] = {}
        """Server -> the load that is under way."""
        self.loading: dict[str, int] = {}
        """Server -> the version that it is loading."""
        self.preparing: dict[str, asyncio.Task[None]] = {}
        """Server -> what it was last told to prepare, if it may be at it."""
        self.pauses: dict[str, float] = {}
        """Server -> for how long its last load paused generation, seconds."""
        self.failures: dict[str, Failure] = {}
        """Server -> its last load, if that failed."""
        self.late: list[str] = []
        """The servers that were late at the last load."""
        self.fleet: Fleet | None = None
        self.beats = Beats()
        """Of the servers that start."""
        self.scan()

    def scan(self) -> None:
        """Adds the versions that are on disk to `versions`."""
        for number in numbers(self.run_dir.weights_dir):
            self.note(number)

    def note(self, number: int, memory: InMemory | None = None) -> None:
        """Takes notice of a version that is complete, in memory or else on disk, whose place is known: a path that comes over the wire is
        not followed."""
        self.versions[number] = WeightVersion(number, str(self.run_dir.weights(number)), memory)

    def prepare(self, number: int, memory: InMemory | None) -> None:
        """Has the servers read a version that must not be used yet, so that loading it is a matter of milliseconds once it may be.

        Not one that is trained again, behind the loaded one. Not while it would have to wait for another load, or for an evaluation:
        it would be held for long, and perhaps in vain.
        """
        if number <= self.loaded or self.num_pins or self.load_lock.locked():
            return
        version = WeightVersion(number, str(self.run_dir.weights(number)), memory)
        for url in self.servers.known:
            if url not in self.preparing:
                self.preparing[url] = asyncio.create_task(self._prepare(url, version))

    async def _prepare(self, url: str, version: WeightVersion) -> None:
        try:
            await self.servers.prepare(url, version)
        except (AwayError, OSError, InferenceLostError) as error:  # it is loaded whole, or that says what is wrong
            log.info("inference at %s did not prepare version %d: %s", url, version.policy_version, error)
        finally:
            del self.preparing[url]

    def forget(self, final: int) -> None:
        """Drops versions before the loaded one that wait for no evaluation: none of them is loaded again."""
        self.versions = {
            number: version
            for number, version in self.versions.items()
            if number == 0 or number >= self.loaded or self.evaluator.due(number, final)
        }

    async def start(self) -> None:
        """Waits for the first server, and begins with the newest version of this run that one holds. Raises InferenceLostError."""
        held = await self.servers.wait_for_any()
        self.scan()
        sound = [version for version in held.values() if version in self.versions]
        if sound:
            self.loaded = max(sound)
        else:  # of another history of the run, or deleted meanwhile
            newest = max(self.versions)
            log.warning("inference holds version %d, which is not there: it gets version %d", min(held.values()), newest)
            await self.load(self.versions[newest])
        await self.settle()

    def there(self, after: int = -1) -> list[int]:
        """The versions after `after` that are in memory or on disk, ascending."""
        later = (version for number, version in self.versions.items() if number > after)
        return sorted(version.policy_version for version in later if version.memory or Path(version.path).exists())

    def next_version(self, final: int) -> WeightVersion | None:
        """The version to load next: first every newer version that waits for an eval, in order, else the newest; None for none newer."""
        newer = self.there(after=self.loaded)
        number = next((number for number in newer if self.evaluator.due(number, final)), max(newer, default=None))
        return None if number is None else self.versions[number]

    def oldest_needed(self, final: int) -> int:
        """The oldest version that is loaded, may be loaded again, or waits for its eval."""
        return min([self.loaded, *(number for number in self.versions if self.evaluator.due(number, final))])

    def in_use(self) -> set[int]:
        """The versions that a live server is reading, to start from or to load: one for each server."""
        claimed = set()
        for path in server_files(self.run_dir.status_dir):
            status = read_status(path)
            if status and status.policy_version and not status.address and self.beats.silent_s(path.name, status) < CLAIM_S:
                claimed.add(status.policy_version)
        return claimed | set(self.loading.values())

    async def load(self, version: WeightVersion) -> float:
        """Loads a version into all servers but late ones. Returns the longest pause of generation, seconds. `loaded` stays if the version's
        folder went away.

        Raises CorruptFileError for damaged weights, RefusedError for what inference refuses otherwise, InferenceLostError.
        """
        async with self.load_lock:
            pause_s = await self._load(version)
            if pause_s is None:
                return 0.0
            await self._take_over(version.policy_version)
            return pause_s

    async def _load(self, version: WeightVersion) -> float | None:
        """Does what `load` does, but for `loaded`; None if the version's folder went away."""
        try:
            return await self._level(version)
        except RefusedError as error:
            if not Path(version.path).exists():
                log.warning("version %d was taken away while inference read it", version.policy_version)
                await asyncio.sleep(RETRY_S)
                return None
            refusal = f"{version.path}: inference refused version {version.policy_version}: {error}"
            if error.status == 422 and version.policy_version:
                try:
                    await asyncio.to_thread(verify_version, Path(version.path))
                except CorruptFileError as damage:  # a sound version just does not fit that server
                    raise CorruptFileError(f"{damage}; {refusal}") from None
            raise RefusedError(error.status, refusal) from None

    async def _level(self, version: WeightVersion) -> float:
        """Brings every server to a version, each on its own, until all that are there hold it, or only late ones do not.

        Returns the longest pause, seconds. Raises RefusedError if all refuse it, InferenceLostError if none holds it in time.
        """
        number, began, first_s = version.policy_version, time.monotonic(), None
        looked = began
        self.failures.clear()
        await self._offer()  # that there is this version
        while True:
            known = self.servers.known
            failed = {url: failure.error for url, failure in self.failures.items() if failure.version == number}
            refused = {url: error for url, error in failed.items() if url in known and isinstance(error, RefusedError)}
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
                raise InferenceLostError(f"waited {waited_s:.0f} s for inference to load version {number}: {problem}")
            for url in behind:
                self._order(url, version)
            if self.loads:
                await asyncio.wait(self.loads.values(), timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(LOOK_EVERY_S)
            if time.monotonic() - looked > LOOK_EVERY_S:
                await self.servers.held()
                await self._offer()
                looked = time.monotonic()
        for url, why in refused.items():
            log.warning("inference at %s is left out, for it refused version %d: %s", url, number, why)
        if behind and behind != self.late:
            log.warning("version %d is not yet at %s: no requests go there until it is", number, ", ".join(behind))
        self.late = behind
        return max((self.pauses.get(url, 0.0) for url, held in self.servers.known.items() if held == number), default=0.0)

    def _order(self, url: str, version: WeightVersion) -> None:
        """Has a server load a version, unless it is loading one, or has just failed to."""
        failure = self.failures.get(url)
        if url not in self.loads and not (failure and time.monotonic() - failure.at < RETRY_S):
            self.loading[url] = version.policy_version
            self.loads[url] = asyncio.create_task(self._bring(url, version))

    async def _bring(self, url: str, version: WeightVersion) -> None:
        try:
            self.pauses[url] = await self.servers.load(url, version)
        except (AwayError, OSError, InferenceLostError, RefusedError) as error:
            before = self.failures.get(url)
            self.failures[url] = Failure(time.monotonic(), version.policy_version, error)
            if before is None or (before.version, str(before.error)) != (version.policy_version, str(error)):
                log.warning("inference at %s does not load version %d: %s", url, version.policy_version, error)
            if not isinstance(error, RefusedError):
                self.servers.known.pop(url, None)  # until it is looked at
        finally:
            del self.loads[url], self.loading[url]

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[None]:
        """Keeps the loaded version inside the block: only servers that hold exactly this one answer, and all others are given it."""
        self.num_pins += 1
        await self._offer()
        try:
            yield
        finally:
            self.num_pins -= 1
            await self._offer()

    async def settle(self) -> bool:
        """Asks what the servers hold, and makes `loaded` true if it is not, by loading it again or by following the servers.

        Returns whether `loaded` is another version now. A server that is away is left alone: the next call after its return sees it.
        """
        await self.servers.held()
        await self._offer()
        if self.load_lock.locked():
            return False  # a load looks after all servers
        async with self.load_lock:
            before = self.loaded
            await self._settle()
            await self._offer()
            return self.loaded != before

    async def _settle(self) -> None:
        held = self.servers.known.values()
        if all(version == self.loaded for version in held):
            return
        self.scan()
        oldest = min(held)
        if not self.num_pins and self.loaded < oldest and oldest in self.versions and not self._skips_eval(oldest):
            await self._take_over(oldest)
            log.warning("inference came back with version %d", oldest)
        elif self.loaded not in self.there(after=self.loaded - 1):
            if not any(map(self._may_answer, held)):
                await self._follow(held)
        elif any(map(self._may_answer, held)):
            for url, version in self.servers.known.items():
                if not self._may_answer(version):
                    self._order(url, self.versions[self.loaded])
        else:
            log.warning("inference came back with version %d: it gets version %d again", oldest, self.loaded)
            await self._load(self.versions[self.loaded])

    async def _follow(self, held: Collection[int]) -> None:
        """Goes on with the oldest version that a server holds, now that the loaded one is not on disk any more; where they hold
        none of this run's, with the newest on disk."""
        if ours := [version for version in held if version in self.versions]:
            return await self._take_over(min(ours))
        newest = max(self.there())
        log.warning("inference holds version %d, which is not there, as version %d: it gets version %d", min(held), self.loaded, newest)
        if await self._load(self.versions[newest]) is not None:
            await self._take_over(newest)

    async def _take_over(self, version: int) -> None:
        """Makes a version the loaded one; no group counts on it before all workers know who holds it."""
        await self._offer(version)
        self.loaded = version

    def _may_answer(self, held: int, loaded: int | None = None) -> bool:
        """Whether a server that holds a version gets requests, now or with another one loaded."""
        loaded = self.loaded if loaded is None else loaded
        return held == loaded if self.num_pins else held >= loaded and held in self.versions

    async def _offer(self, loaded: int | None = None) -> None:
        """Tells everybody which servers get requests, if that has changed."""
        known = self.servers.known
        urls = [url for url, version in known.items() if self._may_answer(version, loaded)]
        closed = [url for url in (*known, *sorted(self.servers.silent)) if url not in urls]
        fleet = Fleet(urls, closed, self.loaded if loaded is None else loaded, max(self.versions))
        if fleet != self.fleet:
            self.fleet = fleet
            self.servers.follow(fleet)
            await self.tell(fleet)

    def _skips_eval(self, version: int) -> bool:
        """Whether `loaded` or a version between that and this one waits for its eval."""
        return any(number < version and self.evaluator.due(number, final=-1) for number in self.there(after=self.loaded - 1))
