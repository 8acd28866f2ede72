"""The policy version that inference holds: loaded in order, and kept although servers die and come back with another one."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rl.digests import verify_version
from rl.files import CorruptFileError
from rl.messages import WeightVersion
from rl.orchestrator.errors import RunError
from rl.orchestrator.evaluation import Evaluator
from rl.orchestrator.inference_client import InferenceServers, RefusedError
from rl.run_dir import RunDir, numbered

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at what the servers hold."""


class ServedPolicy:
    """`loaded` is what the orchestrator counts with; `settle` makes it true again after a server came back.

    A server that died starts at the newest version that it finds, so it may be ahead of `loaded`. Tokens of a newer version harm nothing:
    their lag is less than was allowed for. An evaluation wants exactly its version, which it holds by `pin`.
    """

    def __init__(self, servers: InferenceServers, run_dir: RunDir, base: str, evaluator: Evaluator):
        """`base`: the folder of version 0."""
        self.servers = servers
        self.run_dir = run_dir
        self.evaluator = evaluator
        self.versions = {0: WeightVersion(0, base)}
        self.loaded = 0
        self.pins = 0
        self.changing = asyncio.Lock()
        self.look()

    def look(self) -> None:
        """Takes note of the versions on disk."""
        self.versions |= {number: WeightVersion(number, str(path)) for number, path in numbered(self.run_dir.weights_dir).items()}

    async def start(self) -> None:
        """Waits for the servers, and has all of them hold one version that this run knows. Raises InferenceLostError."""
        self.loaded = await self.servers.loaded_version()
        self.look()
        if self.loaded not in self.versions:  # of another history of the run, or deleted meanwhile
            log.warning("inference holds version %d, which is not there: it gets version %d", self.loaded, max(self.versions))
            await self.load(self.versions[max(self.versions)])
        await self.settle()

    def there(self) -> set[int]:
        """The versions whose folder exists."""
        return {number for number, version in self.versions.items() if Path(version.path).exists()}

    def next_version(self, final: int) -> WeightVersion | None:
        """What inference should hold next: first every newer version that waits for an eval, in order, else the newest."""
        there = self.there()
        waiting = [number for number in sorted(there) if number > self.loaded and self.evaluator.due(number, final)]
        number = waiting[0] if waiting else max(there, default=0)
        return self.versions[number] if number > self.loaded else None

    def oldest_needed(self, final: int) -> int:
        """The oldest version that is loaded, may be loaded again, or waits for its eval."""
        return min([self.loaded, *(number for number in self.versions if self.evaluator.due(number, final))])

    async def load(self, version: WeightVersion) -> float:
        """Has inference hold a version. Returns the pause of generation, seconds; `loaded` is as before if the version's folder went away.

        Raises CorruptFileError for damaged weights, RunError for what inference refuses otherwise, InferenceLostError.
        """
        async with self.changing:
            return await self._load(version)

    async def _load(self, version: WeightVersion) -> float:
        try:
            pause_s = await self.servers.load(version)
        except RefusedError as error:
            if not Path(version.path).exists():
                log.warning("version %d was taken away while inference read it", version.policy_version)
                await asyncio.sleep(LOOK_S)
                return 0.0
            said = f"{version.path}: inference refused version {version.policy_version}: {error}"
            if error.status == 422 and version.policy_version:
                await asyncio.to_thread(blame_file, Path(version.path), said)
            raise RunError(said) from None
        self.loaded = version.policy_version
        return pause_s

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[None]:
        """Inside, servers that come back are given the loaded version, whatever they hold."""
        self.pins += 1
        try:
            yield
        finally:
            self.pins -= 1

    async def settle(self) -> bool:
        """Looks what the servers hold, and mends it if that is not `loaded`. Returns whether `loaded` is another one now.

        A server that is away is left alone: it will be looked at when it is back.
        """
        if not self._astray(await self.servers.held()):
            return False
        async with self.changing:  # a load that was under way may have been all
            held, before = await self.servers.held(), self.loaded
            if not self._astray(held):
                return False
            self.look()
            oldest = min(version for version in held if version is not None)
            if not self.pins and self.loaded < oldest and oldest in self.versions and not self._skips_eval(oldest):
                self.loaded = oldest
                log.warning("inference came back with version %d", oldest)
            elif self.loaded in self.there():
                log.warning("inference came back with version %d: it gets version %d again", oldest, self.loaded)
                await self._load(self.versions[self.loaded])
            else:
                self.loaded = oldest
            return self.loaded != before

    def _astray(self, held: list[int | None]) -> bool:
        """Whether a server holds an older version than `loaded`, or all a newer one; pinned, any other one."""
        others = [version for version in held if version is not None]
        if self.pins:
            return any(version != self.loaded for version in others)
        return bool(others) and min(others) != self.loaded

    def _skips_eval(self, version: int) -> bool:
        """Whether a version between `loaded` and this one waits for its eval."""
        between = (number for number in self.there() if self.loaded < number < version)
        return any(self.evaluator.due(number, final=-1) for number in between)


def blame_file(path: Path, said: str) -> None:
    """Raises CorruptFileError if a version that inference refused is damaged; returns if it is sound, and does not fit that server."""
    try:
        verify_version(path)
    except CorruptFileError as error:
        raise CorruptFileError(f"{error}; {said}") from None
