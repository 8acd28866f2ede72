"""vLLM's engine with policy versions: every sampled token has exactly one, even if weights are
loaded while requests are in flight."""

import asyncio
import itertools
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from rl.inference.draw import bounded, carry_seed, max_kept
from rl.inference.loading import LoadingEngine
from rl.inference.weight_files import Tensors
from rl.run_dir import spans
from rl.wire.inference_client import Balancer
from rl.wire.messages import TOO_MANY, KeptTokens, VersionSpan
from rl.wire.turns import Turn, pack_ids, pack_kept, pack_logprobs

QUEUES: ContextVar[list[Any]] = ContextVar("QUEUES")
"""The queues of the requests that a task has made; their `version_starts` tell which version
sampled from which token on."""


class CutOffError(Exception):
    """The engine was stopped before it had finished an answer."""


def finished(answer: Any) -> Any:
    """Returns an answer that is whole. Raises CutOffError for the first half of one, which vLLM
    returns when its engine is stopped."""
    if answer.finish_reason in ("abort", "error"):
        raise CutOffError(
            f"the server is stopping ({answer.finish_reason}); repeat the request elsewhere "
            "or later"
        )
    return answer


class VersionedEngine(LoadingEngine):
    """An engine that knows which policy version samples.

    Why the stamps are exact: all tokens take one path in order. It is the engine core's output
    queue, one ZMQ socket, `outputs_queue`, and one handler task that processes one message at a
    time. The answer to `pause` takes the same path after the last tokens of the old weights. When
    it arrives, those tokens are processed or in `outputs_queue`. A barrier put into that queue is
    therefore reached exactly when all of them, and nothing else, have been counted. No clocks are
    compared.
    """

    told_of_seeds: bool = False

    def set_model(
        self, policy_version: int, content: str, expected: Tensors, on_tokens: Callable[[int], None]
    ) -> None:
        """Names the weights that the engine started with. Called before the first request.
        `on_tokens` gets the number of new tokens."""
        self.policy_version, self.content, self.expected = policy_version, content, expected
        lora, self.on_tokens = self.vllm_config.lora_config, on_tokens
        self.slots = lora.max_loras if lora else 0
        self.load_lock, self.adapter_ids = asyncio.Lock(), itertools.count(1)
        self.adapter_versions, self.loaded_adapters = {}, set()
        self.vocab_size = self.model_config.get_vocab_size()
        self.ranks = Balancer()
        self.ranks.update(map(str, range(self.vllm_config.parallel_config.data_parallel_size)))
        self.sampling = spans.Busy("sampling", "requests")
        self.output_processor.add_request = partial(
            self.register, self.output_processor.add_request
        )

    def _run_output_handler(self) -> None:
        """Lets barriers pass through the handler's queue, and counts sampled tokens, from the
        handler's start."""
        if self.output_handler is None:
            get_output = self.engine_core.get_output_async

            async def get_output_or_barrier():
                while isinstance(outputs := await get_output(), asyncio.Future):
                    outputs.set_result(None)
                for output in outputs.outputs:
                    self.bound_kept(output)
                self.on_tokens(sum(len(output.new_token_ids) for output in outputs.outputs))
                return outputs

            self.engine_core.get_output_async = get_output_or_barrier
        super()._run_output_handler()

    def bound_kept(self, output: Any) -> None:
        """Leaves of the kept ids in a step's output of a request what it wants. vLLM would hold
        them until the answer ends."""
        mask, output.new_sampling_mask = output.new_sampling_mask, None
        state = self.output_processor.request_states.get(output.request_id)
        if mask and state and (limit := state.queue.max_kept):
            cuts = [] if mask.offsets is None else mask.offsets[1:-1]
            rows = np.split(mask.token_ids, cuts)
            output.new_sampling_mask = bounded(rows, [limit] * len(rows))

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> RequestOutputCollector:
        """Gives every request, whatever route it came by, the newest adapter."""
        if self.model_config.return_sampling_mask:
            bound_top_k(params, self.vocab_size)
        if self.adapter:
            options["lora_request"] = self.adapter
        queue = await super().add_request(request_id, prompt, params, *args, **options)
        QUEUES.get([]).append(queue)
        return queue

    def register(
        self,
        add: Callable[..., None],
        request: Any,
        prompt: Any,
        parent: Any,
        index: int,
        queue: Any,
    ) -> None:
        """Registers a request by `add`, vLLM's own way; each of several answers to a prompt
        (`n`) is a request. As nothing is awaited, the version cannot change in between. With
        adapters side by side the request has had its own since `add_request`, and keeps it."""
        self.refuse_fatal(request)
        self.hand_over_seed(request.sampling_params)
        lora, version = request.lora_request, self.policy_version
        if self.slots:
            version = self.adapter_versions[lora.lora_int_id] if lora else 0
        # This is correct for one answer only. Several answers (`n`) share a queue, and nobody reads
        # their versions.
        queue.version_starts = [(0, version)]
        queue.max_kept = max_kept(request.sampling_params)
        add(request, prompt, parent, index, queue)

    def refuse_fatal(self, request: Any) -> None:
        """Raises ValueError for a request that vLLM accepts although it would kill its engine,
        whatever route the request came by."""
        largest = max(request.prompt_token_ids or [0])
        if largest >= self.vocab_size:
            raise ValueError(
                f"token id {largest} is not of this model; its vocabulary has {self.vocab_size}"
            )
        params = request.sampling_params
        try:
            self.engine_core.encoder.encode(params)
            if params and params.seed is not None:  # vLLM uses an int64 on GPUs
                params.seed.to_bytes(8, signed=True)
        except OverflowError:
            message = "a sampling parameter does not fit into a signed 64-bit integer"
            raise ValueError(message) from None

    def hand_over_seed(self, params: SamplingParams | None) -> None:
        """Makes our own draw on CPUs use the request's seed. With speculative decoding vLLM
        draws there, and a seed would kill it."""
        on_cpu = self.vllm_config.device_config.device_type == "cpu"
        if not on_cpu or params is None or params.seed is None:
            return
        if not self.vllm_config.speculative_config:
            carry_seed(params)
        elif not self.told_of_seeds:
            self.told_of_seeds = True
            print(
                "inference: WARNING: no seeds with speculative decoding on a CPU: evaluations are "
                "drawn differently each time",
                file=sys.stderr,
                flush=True,
            )
        params.seed = None

    async def sample(
        self,
        token_ids: list[int],
        params: SamplingParams,
        session: int | None = None,
        routes: bool = False,
    ) -> Turn:
        """Answers one prompt, which the returned turn leaves out. Log-probabilities are of the
        distribution that was sampled from. Cancelling aborts the request. Raises CutOffError, and
        ValueError if vLLM does not give the `routes` or kept ids that are wanted.
        """
        request_id, prompt = uuid.uuid4().hex, tokens_input(prompt_token_ids=token_ids)
        with self.sampling(), engine_of(self.ranks, session) as rank:
            try:
                queue = await self.add_request(request_id, prompt, params, data_parallel_rank=rank)
                output = await queue.get()
            except asyncio.CancelledError:
                await self.abort(request_id)
                raise
        answer = finished(output.outputs[0])
        logprobs = answer.logprobs.logprobs if answer.token_ids else ()
        assert output.finished and len(logprobs) == len(answer.token_ids), (
            "one final output with one logprob for each token"
        )
        return Turn(
            packed_ids=pack_ids(answer.token_ids),
            packed_logprobs=pack_logprobs(logprobs),
            policy_versions=version_spans(queue.version_starts, len(logprobs)),
            finish_reason=answer.finish_reason,
            num_cached=output.num_cached_tokens,
            routes=routes_of(answer, len(token_ids) + len(logprobs) - 1) if routes else b"",
            kept=kept_of(answer) if max_kept(params) else None,
            packed_prompt_logprobs=of_prompt(output.prompt_logprobs, token_ids),
        )


@contextmanager
def engine_of(engines: Balancer, session: int | None) -> Iterator[int | None]:
    """Yields which of a server's engines (`data_parallel_size`) answers this task's request, which
    counts as in flight inside the block. Each has its own prefix cache, so a session stays with
    one. None (one engine, or no session) leaves the choice to vLLM."""
    engine = None
    if len(engines.servers) > 1 and session is not None:
        engine = engines.choose(session)
    if engine is None:
        yield None
        return
    flight = asyncio.current_task()
    engine.flights.add(flight)
    try:
        yield int(engine.url)
    finally:
        engine.flights.remove(flight)


def routes_of(answer: Any, count: int) -> bytes:
    """Returns the routes of `count` tokens, [tokens, layers, experts of a token] uint8 or uint16.
    Raises ValueError if they are not there."""
    routes = answer.routed_experts
    if routes is None or len(routes) != count:
        raise ValueError(
            f"vLLM gave {'none' if routes is None else f'those of {len(routes)}'} of {count} "
            "tokens' routes; set trainer.router_replay to trainer or off"
        )
    return routes.tobytes()


def kept_of(answer: Any) -> KeptTokens | None:
    """Returns the ids that truncation kept at each token of an answer. Raises ValueError if vLLM
    does not give them."""
    sets = answer.sampling_mask.token_ids if answer.sampling_mask else []
    if len(sets) != len(answer.token_ids):
        raise ValueError(
            "this server's vLLM does not tell which tokens top_p, top_k or min_p keep; leave "
            "them out, or set trainer.max_kept = 0"
        )
    return pack_kept([None if ids == [TOO_MANY] else ids for ids in sets])


def of_prompt(entries: Any, token_ids: list[int]) -> bytes:
    """Returns the log-probability of each token of a prompt, nan for the first; nothing if vLLM
    was not asked for them."""
    if entries is None:
        return b""
    pairs = zip(list(entries)[1:], token_ids[1:], strict=True)
    return pack_logprobs([None, *(entry[token].logprob for entry, token in pairs)])


def bound_top_k(params: SamplingParams, vocab_size: int) -> None:
    """Gives a request the top_k that vLLM's GPU runner wants of each while it returns kept ids.
    What is sampled stays the same: of equal logits its top_k keeps the first, as greedy does."""
    if not params.temperature:
        params.temperature, params.top_k = 1.0, 1
    elif params.top_k <= 0:
        params.top_k = vocab_size


def version_spans(starts: list[tuple[int, int]], num_tokens: int) -> list[VersionSpan]:
    """Turns ordered pairs (index of the first token, policy_version) into spans, leaving out
    empty ones."""
    ends = [start for start, _ in starts[1:]] + [num_tokens]
    return [
        VersionSpan(version, end - start)
        for (start, version), end in zip(starts, ends, strict=True)
        if end > start
    ]
