"""vLLM's engine with a policy version: every sampled token has exactly one, also when weights are loaded while requests are in flight."""

import asyncio
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from rl.inference.weight_files import Tensors, WeightsError, check_weights

STAGING_POLL_S = 0.01
"""How often workers are asked whether they have read the new weights; each question costs the engine less than a millisecond."""


@dataclass
class Sampled:
    """One answer; the three lists describe the same tokens, in the order they were sampled."""

    token_ids: list[int]
    logprobs: list[float]  # nats, under the distribution that was sampled from
    policy_versions: list[tuple[int, int]]  # runs of (policy_version, num_tokens)
    finish_reason: str


class VersionedEngine(AsyncLLM):
    """AsyncLLM that knows which policy version samples.

    Why the stamps are exact. Tokens reach us over one ordered road: the engine core's output queue, one ZMQ socket, `outputs_queue`, and
    one handler task that takes a message only after it has processed the one before. The answer to `pause` travels the same road behind
    the last tokens of the old weights, so when it is here those tokens are processed or in `outputs_queue`. A fence put into that queue is
    therefore reached exactly when all of them, and nothing else, have been counted. No clocks are compared.
    """

    policy_version: int = 0
    loading: int | None = None
    expected: Tensors
    broken: str = ""
    """Why the engine must not be used any more, although its process lives."""

    def set_model(self, policy_version: int, expected: Tensors) -> None:
        """Says which weights the engine started with; comes before the first request."""
        self.policy_version, self.expected = policy_version, expected
        self.load_lock = asyncio.Lock()

    def _run_output_handler(self) -> None:
        """Before the handler starts: lets fences pass through its queue."""
        if self.output_handler is None:
            get_output = self.engine_core.get_output_async

            async def get_output_or_fence():
                while isinstance(outputs := await get_output(), asyncio.Future):
                    outputs.set_result(None)
                return outputs

            self.engine_core.get_output_async = get_output_or_fence
        super()._run_output_handler()

    async def _add_request(self, request, prompt, parent_req, index, queue) -> None:
        # Runs without a break up to the registration of the request inside super(), so no version can change in between.
        queue.version_starts = [(0, self.policy_version)]
        await super()._add_request(request, prompt, parent_req, index, queue)

    async def sample(self, token_ids: list[int], params: SamplingParams) -> Sampled:
        """Answers one prompt. Cancelling aborts the request."""
        request_id = uuid.uuid4().hex
        try:
            queue = await self.add_request(request_id, tokens_input(prompt_token_ids=token_ids), params)
            output = await queue.get()
        except asyncio.CancelledError:
            await self.abort(request_id)
            raise
        answer = output.outputs[0]
        sampled = list(answer.token_ids)
        logprobs = list(answer.logprobs.logprobs) if sampled else []
        assert output.finished and len(logprobs) == len(sampled), "one final output with one logprob for each token"
        return Sampled(sampled, logprobs, version_spans(queue.version_starts, len(sampled)), answer.finish_reason)

    async def load_weights(self, policy_version: int, path: str) -> tuple[float, float]:
        """Loads a version under running requests; returns (seconds generation stood still, seconds of staging before that).

        Raises WeightsError with the old version still served. Loading what is loaded does nothing.
        """
        async with self.load_lock:
            if policy_version == self.policy_version:
                return 0.0, 0.0
            self.loading = policy_version
            try:
                start = time.perf_counter()
                await self.stage(path)
                staged = time.perf_counter()
                await self.swap(policy_version)
                return time.perf_counter() - staged, staged - start
            finally:
                self.loading = None

    async def stage(self, path: str) -> None:
        """Checks the files and has every worker read them into memory while generation goes on."""
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        await asyncio.to_thread(check_weights, Path(path), self.expected, tied)
        await self.collective_rpc("stage_weights", args=(path,))
        while True:
            states = await self.collective_rpc("staging_state")
            if faults := [fault for done, fault in states if done and fault]:
                raise WeightsError(f"{path}: {faults[0]}")
            if all(done for done, _ in states):
                return
            await asyncio.sleep(STAGING_POLL_S)

    async def swap(self, policy_version: int) -> None:
        """Stops between two steps, drops all KV (it belongs to the old weights), swaps, and lets the requests in flight go on.

        Requests keep their tokens; the KV of prompt and tokens is computed again by the new weights. If anything fails in here the model
        may be half new: `broken` then ends the server.
        """
        self.broken = f"loading policy version {policy_version} failed half-way"
        await self.renderer.clear_mm_cache_async()
        await self.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        await self.collective_rpc("swap_weights")
        fence = asyncio.get_running_loop().create_future()
        self.engine_core.outputs_queue.put_nowait(fence)
        await fence
        self.policy_version = policy_version
        for state in self.output_processor.request_states.values():
            state.queue.version_starts.append((state.detokenizer.num_output_tokens(), policy_version))
        await self.resume_generation()
        self.broken = ""


def version_spans(starts: list[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    """From (index of the first token, policy_version) in order to runs of (policy_version, num_tokens), empty ones left out."""
    ends = [start for start, _ in starts[1:]] + [num_tokens]
    return [(version, end - start) for (start, version), end in zip(starts, ends, strict=True) if end > start]
