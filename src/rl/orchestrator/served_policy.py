"""The policy version that inference holds: loaded in order, and kept although servers die and come back with another one."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rl.orchestrator.evaluator import Evaluator
from rl.run_dir.checksums import verify_version
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir, numbers
from rl.wire.http import RefusedError
from rl.wire.inference_client import InferenceServers
from rl.wire.messages import WeightVersion

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after a version's folder went away while inference read it."""


class ServedPolicy:
    """The version that inference holds (`loaded`), as the orchestrator counts with it; `settle` makes it true after a server came back.

    A server that died starts at the newest version that it finds, so it may be ahead of `loaded`. Tokens of a newer version harm nothing:
    their lag is less than was allowed for. An evaluation wants exactly its version, which it holds by `pin`.
    """

    def __init__(self, servers: InferenceServers, run_dir: RunDir, base: str, evaluator: Evaluator):
        """`base`: the folder of version 0."""
        self.servers = servers
        self.run_dir = run_dir
        self.evaluator = evaluator
        self.versions = {0: WeightVersion(0, base)}
        """The base model, and the versions that may be loaded yet: however many there were, they are few."""
        self.loaded = 0
        self.num_pins = 0
        self.load_lock = asyncio.Lock()
        self.scan()

    def scan(self) -> None:
        """Adds the versions that are on disk to `versions`."""
        for number in numbers(self.run_dir.weights_dir):
            self.note(number)

    def note(self, number: int) -> None:
        """Takes notice of a version that is complete on disk. Its place is known: a path that comes over the wire is not followed."""
        self.versions[number] = WeightVersion(number, str(self.run_dir.weights(number)))

    def forget(self, final: int) -> None:
        """Drops versions before the loaded one that wait for no evaluation: none of them is loaded again."""
        self.versions = {
            number: version
            for number, version in self.versions.items()
            if number == 0 or number >= self.loaded or self.evaluator.due(number, final)
        }

    async def start(self) -> None:
        """Waits for the servers, and has all of them hold one version that this run knows. Raises InferenceLostError."""
        self.loaded = await self.servers.loaded_version()
        self.scan()
        if self.loaded not in self.versions:  # of another history of the run, or deleted meanwhile
            newest = max(self.versions)
            log.warning("inference holds version %d, which is not there: it gets version %d", self.loaded, newest)
            await self.load(self.versions[newest])
        await self.settle()

    def on_disk(self, after: int = -1) -> list[int]:
        """The versions after `after` whose folder exists, ascending."""
        return sorted(number for number, version in self.versions.items() if number > after and Path(version.path).exists())

    def next_version(self, final: int) -> WeightVersion | None:
        """The version to load next: first every newer version that waits for an eval, in order, else the newest; None for none newer."""
        newer = self.on_disk(after=self.loaded)
        number = next((number for number in newer if self.evaluator.due(number, final)), max(newer, default=None))
        return None if number is None else self.versions[number]

    def oldest_needed(self, final: int) -> int:
        """The oldest version that is loaded, may be loaded again, or waits for its eval."""
        return min([self.loaded, *(number for number in self.versions if self.evaluator.due(number, final))])

    async def load(self, version: WeightVersion) -> float:
        """Loads a version into inference. Returns the pause of generation, seconds. `loaded` stays if the version's folder went away.

        Raises CorruptFileError for damaged weights, RefusedError for what inference refuses otherwise, InferenceLostError.
        """
        async with self.load_lock:
            return await self._load(version)

    async def _load(self, version: WeightVersion) -> float:
        try:
            pause_s = await self.servers.load(version)
        except RefusedError as error:
            if not Path(version.path).exists():
                log.warning("version %d was taken away while inference read it", version.policy_version)
                await asyncio.sleep(RETRY_S)
                return 0.0
            refusal = f"{version.path}: inference refused version {version.policy_version}: {error}"
            if error.status == 422 and version.policy_version:
                try:
                    await asyncio.to_thread(verify_version, Path(version.path))
                except CorruptFileError as damage:  # a sound version just does not fit that server
                    raise CorruptFileError(f"{damage}; {refusal}") from None
            raise RefusedError(error.status, refusal) from None
        self.loaded = version.policy_version
        return pause_s

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[None]:
        """Keeps the loaded version inside the block: servers that come back with any other one are given it."""
        self.num_pins += 1
        try:
            yield
        finally:
            self.num_pins -= 1

    async def settle(self) -> bool:
        """Asks what the servers hold, and makes `loaded` true if it is not, by loading it again or by following the servers.

        Returns whether `loaded` is another version now. A server that is away is left alone: the next call after its return sees it.
        """
        if not self._deviates(await self.servers.held()):
            return False
        async with self.load_lock:  # a load that was under way may have been all
            held, before = await self.servers.held(), self.loaded
            if not self._deviates(held):
                return False
            self.scan()
            oldest = min(version for version in held if version is not None)
            if not self.num_pins and self.loaded < oldest and oldest in self.versions and not self._skips_eval(oldest):
                self.loaded = oldest
                log.warning("inference came back with version %d", oldest)
            elif self.loaded in self.on_disk(after=self.loaded - 1):
                log.warning("inference came back with version %d: it gets version %d again", oldest, self.loaded)
                await self._load(self.versions[self.loaded])
            else:
                self.loaded = oldest
            return self.loaded != before

    def _deviates(self, held: list[int | None]) -> bool:
        """Whether a server holds an older version than `loaded`, or all a newer one; pinned, any other one."""
        others = [version for version in held if version is not None]
        if self.num_pins:
            return any(version != self.loaded for version in others)
        return bool(others) and min(others) != self.loaded

    def _skips_eval(self, version: int) -> bool:
        """Whether a version between `loaded` and this one waits for its eval."""
        return any(number < version and self.evaluator.due(number, final=-1) for number in self.on_disk(after=self.loaded))
