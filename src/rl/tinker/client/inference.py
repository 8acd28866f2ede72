"""`inference` with `trainer.backend = "tinker"`: answers the run's requests with samples of a
service, each of one version.

Requests with the same prompt that come together, as those of a group do, are one request there.
"""

import asyncio
import socket
import sys
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import tinker
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rl.config.run import RLConfig
from rl.run_dir.access_token import is_loopback, run_token
from rl.run_dir.checksums import content_id
from rl.run_dir.files import UNREADABLE, CorruptFileError
from rl.run_dir.paths import numbered
from rl.run_dir.status import Phase, RunWarning, Status
from rl.system.errors import RunError
from rl.system.linux import bind
from rl.tinker.client.service import (
    ERRORS,
    answered,
    asking,
    base_model,
    is_refusal,
    main,
    sound_version,
    url_of,
    wait_for_service,
)
from rl.wire.inference_client import PROTOCOL, HeldVersion
from rl.wire.messages import GenerateRequest, LoadWeightsRequest, Sampling, VersionSpan
from rl.wire.serving import Gate, refusal, serve_app
from rl.wire.turns import Turn, pack_ids, pack_logprobs

TOGETHER_S = 0.02
"""How long a request waits for others with the same prompt."""
WARN_S = 600.0
"""The least time between two warnings that the service does not sample."""
MAX_SEED = 2**31 - 1
"""skyrl-tx, for one, takes no larger seeds, and answers none of the requests that it has put
together with such a one."""


@dataclass(frozen=True, eq=False)
class Held:
    """The version that is sampled from."""

    number: int
    content: str
    path: str | None
    """None: the base model."""
    client: tinker.SamplingClient


class BadRequestError(Exception):
    """A request that the service refuses."""


class Sampler:
    """Samples from one version after another. An answer is of the version that was held when its
    request came."""

    def __init__(self, config: RLConfig, status: Status):
        self.config, self.status = config, status
        self.timeout_s = config.tinker.answer_timeout_s
        self.service: tinker.ServiceClient | None = None
        self.together: dict[tuple, list[asyncio.Future[Turn]]] = {}
        """Answers that requests wait for which are not sent yet, by the content of the requests."""
        self.tasks = set[asyncio.Task[None]]()
        self.opening = asyncio.Lock()
        self.num_running = 0
        self.warned_at = -inf
        """When the user was last told that the service does not sample."""

    def open(self, number: int, content: str, path: str | None) -> Held:
        """Makes a session at the service for a version. Raises RunError. Waits for: the service."""
        name, url = base_model(self.config), url_of(self.config)
        try:
            with asking(self.config, f"sample from {path or name}"):
                self.service = self.service or tinker.ServiceClient(
                    {"run": self.config.name}, base_url=url
                )
                request = self.service.create_sampling_client(path, None if path else name)
                return Held(number, content, path, answered(request, self.timeout_s))
        except RunError:
            self.service = None  # its session may be at fault
            raise

    def begin(self) -> None:
        """Holds the newest version that is whole, here and at the service, or the base model.
        Raises RunError."""
        run_dir = self.config.run_dir
        for number, folder in reversed(numbered(run_dir.weights_dir).items()):
            self.status.enter(Phase.LOADING_MODEL, policy_version=number)
            try:
                content = content_id(run_dir.digests(number))
                self.held = self.open(number, content, sound_version(folder).path)
                return
            except RunError as error:
                text = f"inference: WARNING: skipping policy version {number}: {error}"
                print(text, file=sys.stderr, flush=True)
        self.held = self.open(0, "", None)

    async def load(self, asked: LoadWeightsRequest) -> None:
        """Samples from a version on disk from now on. Raises RunError."""
        path = sound_version(Path(asked.path)).path
        async with self.opening:
            self.held = await self._opened(asked.policy_version, asked.content, path)

    async def generate(self, asked: GenerateRequest) -> Turn:
        """Waits for: the service. Raises BadRequestError, and RunError if there is no answer."""
        answer: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        # the second answer to a seed is another one
        alone = None if asked.sampling.seed is None else answer
        key = (self.held, tuple(asked.token_ids), msgspec.json.encode(asked.sampling), alone)
        answers = self.together.setdefault(key, [])
        answers.append(answer)
        if len(answers) == 1:
            task = asyncio.create_task(self._send(key, self.held, asked))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return await answer

    async def wait_for_others(self, key: tuple) -> None:
        await asyncio.sleep(TOGETHER_S)

    async def _send(self, key: tuple, held: Held, asked: GenerateRequest) -> None:
        """Sends one request for all that have come together, and distributes the answers."""
        await self.wait_for_others(key)
        answers = self.together.pop(key)
        self.num_running += len(answers)
        try:
            turns = await self._sample(held, asked, len(answers))
            for answer, turn in zip(answers, turns, strict=True):
                answer.set_result(turn)
        except (BadRequestError, RunError) as error:
            for answer in answers:
                answer.set_exception(error)
        finally:
            self.num_running -= len(answers)
            for answer in answers:
                answer.cancel()  # those without one, which then ask again

    async def _sample(self, held: Held, asked: GenerateRequest, count: int) -> list[Turn]:
        prompt = tinker.ModelInput.from_ints(asked.token_ids)
        params = sampling_params(asked.sampling)
        try:
            with asking(self.config, "sample"):
                try:
                    async with asyncio.timeout(self.timeout_s):
                        request: Any = held.client.sample(prompt, count, params)
                        if not hasattr(request, "__await__"):  # an older SDK's
                            request = asyncio.wrap_future(request)
                        answer = await request
                except ERRORS as error:
                    if is_refusal(error):
                        url = url_of(self.config)
                        raise BadRequestError(f"{url} refuses to sample: {error}") from None
                    raise
        except RunError as error:
            if time.monotonic() - self.warned_at > WARN_S:
                self.warned_at = time.monotonic()
                text = f"{error}; it is asked again until it does"
                self.status.warn(RunWarning("service", "", text))
            async with self.opening:
                if self.held is held:  # it gets a new session, unless it has one
                    self.service = None
                    self.held = await self._opened(held.number, held.content, held.path)
            raise
        self.status.advance(sum(len(sequence.tokens) for sequence in answer.sequences))
        return [turn_of(sequence, held.number) for sequence in answer.sequences]

    async def _opened(self, number: int, content: str, path: str | None) -> Held:
        """Returns `open` of a version. Raises RunError, also after `timeout_s`: an older SDK has
        no deadline of its own."""
        with asking(self.config, f"sample from {path or base_model(self.config)}"):
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.to_thread(self.open, number, content, path)


def sampling_params(sampling: Sampling) -> tinker.SamplingParams:
    """Returns the API's parameters. Raises BadRequestError for what it does not have."""
    if sampling.stop and sampling.stop_token_ids:
        raise BadRequestError(
            "the Tinker API ends answers at texts or at tokens, not both: leave sampling.stop out"
        )
    if sampling.min_p or sampling.ignore_eos or sampling.prompt_logprobs or sampling.routes:
        raise BadRequestError(
            "this run's inference has no min_p, ignore_eos, prompt_logprobs and routes: "
            "leave them out"
        )
    return tinker.SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=None if sampling.seed is None else sampling.seed & MAX_SEED,
        stop=sampling.stop or sampling.stop_token_ids or None,
        temperature=sampling.temperature,
        top_k=sampling.top_k or -1,
        top_p=sampling.top_p,
    )


def turn_of(sampled: tinker.SampledSequence, version: int) -> Turn:
    """Returns a sampled sequence as an answer. Raises RunError for one that is none."""
    try:
        return Turn(
            packed_ids=pack_ids(sampled.tokens),
            packed_logprobs=pack_logprobs(sampled.logprobs or ()),
            policy_versions=[VersionSpan(version, len(sampled.tokens))],
            finish_reason=sampled.stop_reason,
        )
    except ValueError as error:
        raise RunError(f"the service's answer cannot be trained: {error}") from error


def make_app(sampler: Sampler, config: RLConfig, token: str) -> Gate:
    """Returns the endpoints that the orchestrator and its workers ask, as those of our own
    inference."""
    limit = config.model.max_model_len

    async def generate(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=GenerateRequest)
            if (size := len(body.token_ids)) >= limit:
                message = (
                    f"the prompt has {size} tokens; model.max_model_len = {limit} must hold "
                    "prompt and answer together"
                )
                return refusal(400, "prompt_too_long", message)
            answer = await sampler.generate(body)
            return Response(msgspec.msgpack.encode(answer), media_type="application/msgpack")
        except (*UNREADABLE, BadRequestError) as error:
            return refusal(400, "bad_request", str(error))
        except RunError as error:
            return refusal(503, "away", str(error))

    async def load_weights(request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=LoadWeightsRequest)
            await sampler.load(asked)
        except UNREADABLE as error:
            return refusal(400, "bad_request", str(error))
        except CorruptFileError as error:
            code, version = 422 if Path(asked.path).exists() else 404, sampler.held.number
            return refusal(code, "bad_weights", str(error), policy_version=version)
        except RunError as error:
            return refusal(503, "away", str(error))
        return await status(request)

    async def status(request: Request) -> Response:
        held = HeldVersion(
            sampler.held.number,
            content=sampler.held.content,
            served_model=config.model.name,
            max_model_len=limit,
            protocol=PROTOCOL,
        )
        return Response(msgspec.json.encode(held), media_type="application/json")

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/load_weights", load_weights, methods=["POST"]),
        Route("/status", status),
    ]
    return Gate(Starlette(routes=routes), token, loopback=is_loopback(config.inference.host))


async def serve(config: RLConfig, status: Status, sock: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT. Raises RunError."""
    sampler = Sampler(config, status)
    await asyncio.to_thread(sampler.begin)
    status.follow("requests", lambda: sampler.num_running)
    app = make_app(sampler, config, run_token(config.run_dir.status_dir))
    await serve_app(app, config.inference.host, sock, status)


def run(config: RLConfig, status: Status) -> None:
    sock = bind(config.inference.host, config.inference.port, "inference.port")
    wait_for_service(config, status)
    asyncio.run(serve(config, status, sock))


if __name__ == "__main__":
    main("inference", run)
