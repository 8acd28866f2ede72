"""Loads policy versions into vLLM's engine while requests are in flight: staged by every worker,
then swapped in between two steps."""

import asyncio
import contextlib
import itertools
import math
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from rl.inference.weight_files import (
    Tensors,
    WeightsGoneError,
    check_adapter,
    check_weights,
    is_adapter,
    read_adapter,
)
from rl.inference.weights import check_content
from rl.run_dir import spans
from rl.run_dir.checksums import DIGESTS, Mirror, check_version, content_of, is_delta
from rl.run_dir.in_memory import Memory, OverNetwork, opened
from rl.system.errors import RESTART, RunError
from rl.wire.inference_client import LoadedVersion

SLOT_POLL_S = 0.05
"""Seconds between checks whether all requests of some adapter have ended."""
STALLED_S, WRITTEN_POLL_S = 60.0, 0.05
"""How long nothing may be written of an announced version whose trainer's memory cannot be
reached, and the interval between checks."""
ASKED_AGAIN_S = 5.0
"""The same for memory that could not be read over the network: the next order to load it tries
that again."""
STAGING_POLL_S, POLLS_A_WAIT = 0.01, 20
"""Workers that read new weights are polled every STAGING_POLL_S seconds, but at most POLLS_A_WAIT
times in the time waited so far. Each poll interrupts the engine, which waits for all workers."""

T = TypeVar("T")


class LoadingEngine(AsyncLLM):
    """AsyncLLM whose weights can be exchanged."""

    policy_version: int = 0
    content: str
    """The content_id (rl.run_dir.checksums) of the served weights."""
    expected: Tensors
    """The tensors in the files of the served model."""
    load_lock: asyncio.Lock
    adapter_ids: "itertools.count[int]"
    adapter_versions: dict[int, int]
    loaded_adapters: set[int]
    slots: int = 0
    """Number of adapters that can be served side by side; 0: adapters are merged into the base
    model."""
    adapter: LoRARequest | None = None
    """The adapter for new requests; None is the base model."""
    all_here: bool = False
    """Whether all workers are on this host."""
    head_is_tied: bool = False
    """Whether a version may omit the head because it is the embedding."""
    broken: str = ""
    """Why the engine must no longer be used, although its process is alive."""
    read_timeout_s: float = math.inf
    """How long reading a version may take without any progress."""
    progress: object = None
    """Any value that changes whenever writing or reading of the version being loaded advances."""
    mirror: Mirror
    """The version that deltas are applied to, for all workers of this host."""
    swapping: bool = False
    """New weights are being put in place: the engine may take longer than a step to answer."""

    async def load_weights(
        self, policy_version: int, path: str, memory: Memory | None = None, content: str = ""
    ) -> LoadedVersion:
        """Loads a version while requests are running. Raises RunError with the old version still
        served.

        If `memory` can be reached, the version is read from there; otherwise this waits for the
        folder. Memory of this host is not checked; what is read over the network must be `content`.

        Loading the loaded version again does nothing, unless its `content` is known and differs.
        """
        async with self.load_lock:
            if policy_version == self.policy_version and content in ("", self.content):
                return LoadedVersion(policy_version)
            try:
                loaded = await self.load_from(policy_version, Path(path), memory, content)
            except RunError as error:
                # not there yet, or deleted or replaced while it was read
                if not self.broken and not Path(path).is_dir():
                    raise WeightsGoneError(f"{path} does not exist (any more): {error}") from None
                raise
            self.content = content
            return loaded

    async def load_from(
        self, policy_version: int, folder: Path, memory: Memory | None, content: str
    ) -> LoadedVersion:
        """Loads a version from memory that can be reached, or from its folder."""
        patience_s, file = STALLED_S, None
        if isinstance(memory, OverNetwork):
            if await self.stage_over_network(policy_version, memory, content):
                return await self.swap(policy_version)
            patience_s = ASKED_AGAIN_S
        elif self.all_here:
            file = memory
        with opened(file) as image:
            if image:
                loaded = await self.load_files(policy_version, image, "")
                self.mirror.free()  # deltas are not read any more: that memory is a whole version
                return loaded
            if memory:
                await self.in_time(self.until_there(folder, patience_s))
            return await self.load_files(policy_version, folder, content)

    async def stage_over_network(
        self, policy_version: int, memory: OverNetwork, content: str
    ) -> bool:
        """Makes every worker stage its part of a version from the memory of its trainer's ranks,
        while this process reads and hashes all of it. Returns whether it is staged: if it cannot
        be read, or is not `content`, a warning says why."""
        if self.slots:
            return False
        base, encoded = Path(self.model_config.model), msgspec.json.encode(memory).decode()
        try:
            check = partial(check_content, memory, base, self.expected, self.head_is_tied, content)
            await self.stage(policy_version, check, "over the network", encoded)
        except RunError as error:
            if self.broken:
                raise
            print(
                f"inference: WARNING: version {policy_version} cannot be read over the "
                f"network: {error}",
                file=sys.stderr,
                flush=True,
            )
            return False
        return True

    async def stage(
        self, policy_version: int, check: Callable[[], None], path: str, *over_network: str
    ) -> None:
        """Makes every worker prepare the weights while generation continues, and this process
        checks them in a thread. If either fails, the workers forget them, and the error is raised:
        the check's, which says which file is damaged, if both have one."""
        preparing = self.prepared(policy_version, path, *over_network)
        both = asyncio.gather(asyncio.to_thread(check), preparing, return_exceptions=True)
        for error in await self.in_time(both):
            if error is not None:
                await self.on_every_worker("forget_weights")
                raise error

    async def prepared(self, policy_version: int, path: str, *over_network: str) -> None:
        """Waits until every worker has prepared the weights. Raises RunError if one cannot."""
        with spans.span("stage", "weights", policy_version):
            await self.on_every_worker("stage_weights", path, *over_network)
            began, states = time.monotonic(), list[tuple[bool, str, int]]()
            while not states or not all(done for done, *_ in states):
                if states:
                    took = time.monotonic() - began
                    await asyncio.sleep(max(STAGING_POLL_S, took / POLLS_A_WAIT))
                states = await self.on_every_worker("staging_state")
                self.progress = sum(num_read for *_, num_read in states)
        if faults := [fault for _, fault, _ in states if fault]:
            raise RunError(f"{path}: {faults[0]}")

    async def in_time(self, reading: Awaitable[T]) -> T:
        """Waits for a part of reading a version. If it makes no progress, as in a file system
        that hangs, the engine is `broken`, which ends the server: nothing else stops the threads
        that read."""
        task, before = asyncio.ensure_future(reading), object()
        try:
            while not task.done():
                now = (self.progress, self.mirror.num_read)
                if before == now:
                    limit = f"{self.read_timeout_s:.0f} s (ten times inference.engine_timeout_s)"
                    self.broken = (
                        f"nothing of a policy version was read for {limit}: does the file system "
                        "of the weights answer?"
                    )
                    raise RunError(self.broken, RESTART)
                before = now
                await asyncio.wait([task], timeout=self.read_timeout_s)
            return task.result()
        finally:
            task.cancel()

    async def readable(self, folder: Path, content: str) -> Path:
        """Returns where workers can read a version: its folder, or this process's memory for a
        delta and for versions after one.

        Raises RunError if the version cannot be made of its deltas; the next whole version can
        still be loaded. Raises WeightsGoneError if the deltas make a version without the content_id
        `content`."""
        if not is_delta(folder) and not (self.mirror.tensors and (folder / DIGESTS).exists()):
            return folder
        if not self.all_here:
            remedy = (
                "workers on other hosts need whole versions: set trainer.weights.anchor_every = 1"
            )
            raise RunError(f"{folder}: is a delta, made whole in the memory of one host; {remedy}")
        with spans.span("apply_deltas", "weights"):
            file = await self.in_time(asyncio.to_thread(self.mirror.become, folder))
        must_be(content, content_of(self.mirror.tensors or {}), folder)
        return file

    async def load_files(self, policy_version: int, folder: Path, content: str) -> LoadedVersion:
        """Loads a version from files. `content`: the content_id that it must have, unless either
        is not known."""
        files = await self.readable(folder, content)
        check = partial(self.check, files, content)
        if self.slots:
            await self.in_time(asyncio.to_thread(check))
            await self.add_adapter(policy_version, str(folder))
            return LoadedVersion(policy_version)
        await self.stage(policy_version, check, str(files))
        return await self.swap(policy_version)

    def check(self, folder: Path, content: str) -> None:
        """Raises RunError unless the headers of a version's files match the served model,
        CorruptFileError if it is damaged, and WeightsGoneError if its content_id is known and is
        not `content`."""
        base = Path(self.model_config.model)
        if is_adapter(folder):
            check_adapter(read_adapter(folder), base, self.expected)
        elif self.slots:
            raise RunError(
                f"{folder} is a whole model; with inference.adapters = hot only adapters can "
                "be loaded"
            )
        else:
            check_weights(folder, base, self.expected, self.head_is_tied)
        must_be(content, check_version(folder), folder)

    async def add_adapter(self, policy_version: int, path: str) -> None:
        """Loads an adapter between two steps. New requests get it, requests in flight keep theirs,
        and nothing pauses.

        Adapters that no request needs any more are removed. If all slots are in use, this waits
        until the requests of one have ended.
        """
        used = self.adapters_in_use()
        while len(used) >= self.slots:
            await asyncio.sleep(SLOT_POLL_S)
            used = self.adapters_in_use()
        for number in self.loaded_adapters - used:
            await self.remove_lora(number)
        number = next(self.adapter_ids)
        # The name is unique even if a version was trained again, because it is the key of cached
        # prefixes.
        adapter = LoRARequest(f"version-{policy_version}-{number}", number, path)
        await self.add_lora(adapter)
        self.loaded_adapters = self.loaded_adapters & used | {number}
        self.adapter_versions[number] = policy_version
        self.adapter, self.policy_version = adapter, policy_version

    def adapters_in_use(self) -> set[int]:
        """The numbers of the adapters of requests in flight and of new requests."""
        requests = [state.lora_request for state in self.output_processor.request_states.values()]
        return {request.lora_int_id for request in [*requests, self.adapter] if request}

    async def on_every_worker(self, method: str, *args: Any) -> list[Any]:
        """The results of calling `method` on all workers. vLLM's own `collective_rpc` returns
        only those of the first engine."""
        core = self.engine_core
        calls = (
            core._call_utility_async("collective_rpc", method, None, args, None, engine=engine)
            for engine in core.core_engines
        )
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def swap(self, policy_version: int) -> LoadedVersion:
        """Stops between two steps, drops the KV cache (it belongs to the old weights), swaps, and
        resumes the requests in flight.

        Requests keep their tokens; the KV of prompt and tokens is recomputed with the new weights.
        If anything fails here the model may be half new: `broken` then ends the server.
        """
        self.swapping = True
        self.broken = f"loading policy version {policy_version} failed half-way"
        try:
            await self.renderer.clear_mm_cache_async()
            await self.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
            stopped = time.perf_counter()
            with spans.span("pause", "weights", policy_version):
                bytes_read = max(await self.on_every_worker("swap_weights"))
                barrier = asyncio.get_running_loop().create_future()
                self.engine_core.outputs_queue.put_nowait(barrier)
                await barrier
                self.policy_version = policy_version
                for state in self.output_processor.request_states.values():
                    first = state.detokenizer.num_output_tokens()
                    state.queue.version_starts.append((first, policy_version))
                await self.resume_generation()
        finally:
            self.swapping = False
        self.broken = ""
        pause_s = time.perf_counter() - stopped
        return LoadedVersion(policy_version, pause_s, bytes_read)

    async def until_there(self, folder: Path, patience_s: float) -> None:
        """Waits for the folder of a version that its trainer has announced and is still writing.
        Raises WeightsGoneError once nothing more of it is written for `patience_s`."""
        changed = time.monotonic()
        while not await asyncio.to_thread(folder.is_dir):
            so_far = await asyncio.to_thread(written, folder)
            if so_far != self.progress:
                self.progress, changed = so_far, time.monotonic()
            elif time.monotonic() - changed > patience_s:
                raise WeightsGoneError(
                    f"{folder}: announced, but missing: {so_far[0]:,} bytes of it are written, "
                    f"none in the last {patience_s:.0f} s; see its disk and logs/trainer*.log"
                )
            await asyncio.sleep(WRITTEN_POLL_S)


def must_be(content: str, actual: str, folder: Path) -> None:
    """Raises WeightsGoneError unless these content_ids are the same, or one is not known."""
    if content and actual and content != actual:
        raise WeightsGoneError(
            f"{folder}: still holds what was trained there before; its trainer is replacing it"
        )


def written(folder: Path) -> tuple[int, float]:
    """How many bytes `run_dir.files.write_directory` has written of a folder that is not there
    yet, and when it last wrote any."""
    sizes, times = [0], [0.0]
    with contextlib.suppress(FileNotFoundError):  # it has just been renamed
        for file in folder.parent.glob(f".{folder.name}.*.tmp/*"):
            sizes.append(file.stat().st_size)
            times.append(file.stat().st_mtime)
    return sum(sizes), max(times)
