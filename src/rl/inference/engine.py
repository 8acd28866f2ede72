"""vLLM's engine with policy versions: every sampled token has exactly one, even if weights are loaded while requests are in flight."""

import asyncio
import contextlib
import itertools
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from rl.inference.adapter import check_adapter, is_adapter, read_adapter
from rl.inference.draw import carry_seed
from rl.inference.ranks import Ranks
from rl.inference.weight_files import Tensors, WeightsGoneError, check_weights
from rl.run_dir import spans
from rl.run_dir.checksums import check_version
from rl.run_dir.in_memory import InMemory, opened
from rl.system.errors import RunError
from rl.wire.inference_client import Generation, LoadedVersion
from rl.wire.messages import VersionSpan

SLOT_POLL_S = 0.05
"""Seconds between checks whether all requests of some adapter have ended."""
WRITTEN_WITHIN_S, WRITTEN_POLL_S = 60.0, 0.05
"""Wait for an announced version to be on disk if its trainer's memory cannot be reached, and the interval between checks."""
STAGING_POLL_S = 0.01
"""Seconds between checks whether the workers have read the new weights; each costs the engine less than a millisecond."""


class VersionedEngine(AsyncLLM):
    """AsyncLLM that knows which policy version samples.

    Why the stamps are exact: tokens arrive over one ordered path: the engine core's output queue, one ZMQ socket, `outputs_queue`, and
    one handler task that takes a message only after it has processed the previous one. The answer to `pause` travels the same path after
    the last tokens of the old weights, so when it arrives those tokens are processed or in `outputs_queue`. A fence put into that queue is
    therefore reached exactly when all of them, and nothing else, have been counted. No clocks are compared.
    """

    policy_version: int = 0
    loading: int | None = None
    expected: Tensors
    slots: int = 0
    """Number of adapters that can be served side by side; 0: adapters are merged into the base model."""
    adapter: LoRARequest | None = None
    """The adapter for new requests; None is the base model."""
    all_here: bool = False
    """Whether all workers are on this host."""
    head_is_tied: bool = False
    """Whether a version may omit the head because it is the embedding."""
    prepared: InMemory | None = None
    """The version that the workers have staged, to be loaded soon."""
    broken: str = ""
    """Why the engine must no longer be used, although its process is alive."""
    told_of_seeds: bool = False
    swapping: bool = False
    """New weights are being put in place: the engine may take longer than a step to answer."""

    def set_model(self, policy_version: int, content: str, expected: Tensors, on_tokens: Callable[[int], None]) -> None:
        """Names the weights that the engine started with. Called before the first request. `on_tokens` gets the number of new tokens."""
        self.policy_version, self.content, self.expected, self.on_tokens = policy_version, content, expected, on_tokens
        self.vocab_size = self.model_config.get_vocab_size()
        self.slots = self.vllm_config.lora_config.max_loras if self.vllm_config.lora_config else 0
        self.ranks = Ranks(self.vllm_config.parallel_config.data_parallel_size)
        self.sampling = spans.Busy("sampling", "requests")
        self.load_lock = asyncio.Lock()
        self.image = contextlib.ExitStack()
        """Keeps the prepared version open until it is loaded or forgotten: workers may read it until then."""
        self.adapter_ids = itertools.count(1)
        self.adapter_versions: dict[int, int] = {}
        self.loaded_adapters: set[int] = set()

    def _run_output_handler(self) -> None:
        """Lets fences pass through the handler's queue, and counts sampled tokens, from the handler's start."""
        if self.output_handler is None:
            get_output = self.engine_core.get_output_async

            async def get_output_or_fence():
                while isinstance(outputs := await get_output(), asyncio.Future):
                    outputs.set_result(None)
                self.on_tokens(sum(len(output.new_token_ids) for output in outputs.outputs))
                return outputs

            self.engine_core.get_output_async = get_output_or_fence
        super()._run_output_handler()

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **more: Any) -> RequestOutputCollector:
        """Gives every request, whatever route it came by, the newest adapter."""
        if self.adapter:
            more["lora_request"] = self.adapter
        return await super().add_request(request_id, prompt, params, *args, **more)

    async def _add_request(self, request, prompt, parent_req, index, queue) -> None:
        self.refuse_deadly(request)
        self.hand_over_seed(request.sampling_params)
        # Does not suspend before the request is registered inside super(), so the version cannot change in between. With adapters side by
        # side the request has had its own since `add_request`, and keeps it.
        lora = request.lora_request
        version = self.policy_version if not self.slots else self.adapter_versions[lora.lora_int_id] if lora else 0
        queue.version_starts = [(0, version)]
        await super()._add_request(request, prompt, parent_req, index, queue)

    def refuse_deadly(self, request: Any) -> None:
        """Raises ValueError for requests that vLLM accepts although they would kill its engine, whatever route they came by."""
        largest = max(request.prompt_token_ids or [0])
        if largest >= self.vocab_size:
            raise ValueError(f"token id {largest} is not of this model; its vocabulary has {self.vocab_size}")
        params = request.sampling_params
        try:
            self.engine_core.encoder.encode(params)
            if params and params.seed is not None:  # vLLM uses an int64 on GPUs
                params.seed.to_bytes(8, signed=True)
        except OverflowError:
            raise ValueError("a sampling parameter does not fit into a signed 64-bit integer") from None

    def hand_over_seed(self, params: SamplingParams | None) -> None:
        """Makes our own draw on CPUs use the request's seed. With speculative decoding vLLM draws there, and a seed would kill it."""
        if self.vllm_config.device_config.device_type != "cpu" or params is None or params.seed is None:
            return
        if not self.vllm_config.speculative_config:
            carry_seed(params)
        elif not self.told_of_seeds:
            self.told_of_seeds = True
            told = "no seeds with speculative decoding on a CPU: evaluations are drawn differently each time"
            print(f"inference: WARNING: {told}", file=sys.stderr, flush=True)
        params.seed = None

    async def sample(self, token_ids: list[int], params: SamplingParams, session: int | None = None) -> Generation:
        """Answers one prompt. Log-probabilities are in nats, of the distribution that was sampled from. Cancelling aborts the request."""
        request_id, prompt = uuid.uuid4().hex, tokens_input(prompt_token_ids=token_ids)
        with self.sampling(), self.ranks.use(session) as rank:
            try:
                queue = await self.add_request(request_id, prompt, params, data_parallel_rank=rank)
                output = await queue.get()
            except asyncio.CancelledError:
                await self.abort(request_id)
                raise
        answer = output.outputs[0]
        sampled = list(answer.token_ids)
        logprobs = list(answer.logprobs.logprobs) if sampled else []
        assert output.finished and len(logprobs) == len(sampled), "one final output with one logprob for each token"
        return Generation(sampled, logprobs, version_spans(queue.version_starts, len(sampled)), answer.finish_reason)

    async def prepare_weights(self, policy_version: int, memory: InMemory | None) -> bool:
        """Makes every worker stage a version from its trainer's memory, for `load_weights` of the same memory to use. Returns whether it
        is prepared. Raises RunError.

        Nothing may be sampled with it yet: its trainer may die before it has announced the version.
        """
        async with self.load_lock:
            if policy_version == self.policy_version or self.slots or not self.all_here:
                return False
            await self.forget_prepared()
            image = self.image.enter_context(opened(memory))
            if image:
                try:
                    await asyncio.to_thread(self.check_fit, image)
                    await self.stage(policy_version, str(image))
                except RunError:
                    self.image.close()
                    raise
                self.prepared = memory
            return image is not None

    async def forget_prepared(self) -> None:
        """Releases a version that was prepared but not loaded."""
        if self.prepared:
            self.prepared = None
            await self.on_every_worker("forget_weights")
        self.image.close()

    async def load_weights(self, policy_version: int, path: str, memory: InMemory | None = None, content: str = "") -> LoadedVersion:
        """Loads a version while requests are running. Raises RunError with the old version still served.

        If `memory` can be reached, the version is read from there without checks, or not at all if it was prepared; otherwise this waits
        for the folder.

        Loading the loaded version again does nothing, unless its `content` is known and differs.
        """
        async with self.load_lock:
            if policy_version == self.policy_version and content in ("", self.content):
                return LoadedVersion(policy_version)
            self.loading = policy_version
            try:
                if memory and memory == self.prepared:
                    loaded = await self._load_prepared(policy_version)
                else:
                    await self.forget_prepared()
                    with opened(memory if self.all_here else None) as image:
                        if memory and not image:
                            await until_there(Path(path))
                        loaded = await self._load_weights(policy_version, str(image or path))
                self.content = content
                return loaded
            except RunError as error:
                if not Path(path).is_dir():  # deleted or replaced while it was read
                    raise WeightsGoneError(f"{path} does not exist (any more): {error}") from None
                raise
            finally:
                self.loading = None

    async def _load_prepared(self, policy_version: int) -> LoadedVersion:
        """Swaps in the version that every worker has staged."""
        self.prepared = None
        with self.image:
            drain_s, pause_s = await self.swap(policy_version)
        return LoadedVersion(policy_version, drain_s=drain_s, pause_s=pause_s)

    async def _load_weights(self, policy_version: int, path: str) -> LoadedVersion:
        start, folder = time.perf_counter(), Path(path)
        await asyncio.to_thread(self.check_fit, folder)
        if self.slots:
            await asyncio.to_thread(check_version, folder)
            verified = time.perf_counter()
            await self.add_adapter(policy_version, path)
            return LoadedVersion(policy_version, verified - start, time.perf_counter() - verified)
        # The workers read the files while this process verifies their checksums; damaged weights are not swapped in.
        verified_s, staged_s = await asyncio.gather(
            seconds(asyncio.to_thread(check_version, folder)), seconds(self.stage(policy_version, path)), return_exceptions=True
        )
        if isinstance(verified_s, BaseException):  # of the two errors this one says which file is damaged
            await self.on_every_worker("forget_weights")
            raise verified_s
        if isinstance(staged_s, BaseException):
            raise staged_s
        drain_s, pause_s = await self.swap(policy_version)
        return LoadedVersion(policy_version, verified_s, staged_s, drain_s, pause_s)

    def check_fit(self, folder: Path) -> None:
        """Raises RunError unless the headers of a version's files match the served model."""
        if is_adapter(folder):
            check_adapter(read_adapter(folder), Path(self.model_config.model), self.expected)
        elif self.slots:
            raise RunError(f"{folder} is a whole model; with inference.adapters = hot only adapters can be loaded")
        else:
            check_weights(folder, self.expected, self.head_is_tied)

    async def add_adapter(self, policy_version: int, path: str) -> None:
        """Loads an adapter between two steps. New requests get it, requests in flight keep theirs, and nothing pauses.

        Adapters that no request needs any more are removed. If all slots are in use, this waits until the requests of one have ended.
        """
        while len(used := self.adapters_in_use()) >= self.slots:
            await asyncio.sleep(SLOT_POLL_S)
        for number in self.loaded_adapters - used:
            await self.remove_lora(number)
        number = next(self.adapter_ids)
        # The name is unique even if a version was trained again, because it is the key of cached prefixes.
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
        """The results of calling `method` on all workers. vLLM's own `collective_rpc` returns only those of the first engine."""
        core = self.engine_core
        calls = (core._call_utility_async("collective_rpc", method, None, args, None, engine=engine) for engine in core.core_engines)
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def stage(self, policy_version: int, path: str) -> None:
        """Makes every worker prepare the weights while generation continues. Raises RunError if one of them cannot; then none swaps."""
        with spans.span("stage", "weights", policy_version):
            await self.on_every_worker("stage_weights", path)
            states = await self.on_every_worker("staging_state")
            while not all(done for done, _ in states):
                await asyncio.sleep(STAGING_POLL_S)
                states = await self.on_every_worker("staging_state")
        if faults := [fault for _, fault in states if fault]:
            await self.on_every_worker("forget_weights")
            raise RunError(f"{path}: {faults[0]}")

    async def swap(self, policy_version: int) -> tuple[float, float]:
        """Stops between two steps, drops the KV cache (it belongs to the old weights), swaps, and resumes the requests in flight.

        Requests keep their tokens; the KV of prompt and tokens is recomputed with the new weights. If anything fails here the model may be
        half new: `broken` then ends the server. Returns drain_s and pause_s.
        """
        self.broken, self.swapping = f"loading policy version {policy_version} failed half-way", True
        try:
            await self.renderer.clear_mm_cache_async()
            ordered = time.perf_counter()
            await self.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
            stopped = time.perf_counter()
            with spans.span("pause", "weights", policy_version):
                await self.on_every_worker("swap_weights")
                fence = asyncio.get_running_loop().create_future()
                self.engine_core.outputs_queue.put_nowait(fence)
                await fence
                self.policy_version = policy_version
                for state in self.output_processor.request_states.values():
                    state.queue.version_starts.append((state.detokenizer.num_output_tokens(), policy_version))
                await self.resume_generation()
        finally:
            self.swapping = False
        self.broken = ""
        return stopped - ordered, time.perf_counter() - stopped


async def until_there(folder: Path) -> None:
    """Waits for the folder of a version that its trainer has announced and is still writing. Raises WeightsGoneError if that takes too
    long."""
    deadline = time.monotonic() + WRITTEN_WITHIN_S
    while not await asyncio.to_thread(folder.is_dir):
        if time.monotonic() > deadline:
            raise WeightsGoneError(f"{folder}: announced, but missing after {WRITTEN_WITHIN_S:.0f} s; see logs/trainer*.log")
        await asyncio.sleep(WRITTEN_POLL_S)


async def seconds(work: Awaitable[object]) -> float:
    """Does the work and returns how many seconds it took."""
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


def version_spans(starts: list[tuple[int, int]], num_tokens: int) -> list[VersionSpan]:
    """Turns ordered pairs (index of the first token, policy_version) into spans, leaving out empty ones."""
    ends = [start for start, _ in starts[1:]] + [num_tokens]
    return [VersionSpan(version, end - start) for (start, version), end in zip(starts, ends, strict=True) if end > start]
