"""Sampling sessions: each asks one policy version, exactly. Inference holds one version at a time,
so the sessions of others wait for it.

Requests of the version that inference holds run together. If others wait, no more are let in; when
the last one has its answer, the version that was asked for first is loaded. Every answer carries
the version that sampled each token: where inference was started again meanwhile, and has the base
model, the version is loaded once more and the request repeated.

OpenAI's clients ask at `/v1/chat/completions` and `/v1/completions`, each request with the version
that its `model` names.
"""

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rl.config.run import RLConfig
from rl.run_dir.checksums import content_id
from rl.run_dir.files import CorruptFileError
from rl.system.errors import RunError
from rl.tinker.codec import STABLE_REINFORCE, sample_message
from rl.tinker.requests import JSON, CreateSamplingSession, Sample, SamplingParams
from rl.tinker.storage import MODEL_ID, SAMPLER, CallAnswer, CallLog, ClientCall, Storage
from rl.tinker.training import encoded, wrong_base
from rl.wire.http import RETRY_S, AwayError
from rl.wire.inference_client import (
    HeldVersion,
    InferenceLostError,
    InferenceServers,
    PromptTooLongError,
    read,
)
from rl.wire.messages import ITEM_BYTES, WeightVersion
from rl.wire.training_calls import CallError
from rl.wire.turns import Turn, pack_logprobs

EXPIRES_S = 24 * 3600.0
"""Seconds without a request after which a sampling session is deleted."""
IN_USE_S = 3600.0
"""Seconds after a session's last request for which its version is kept."""
DEFAULT_TOKENS = 1024
"""Most tokens of an answer whose request sets no limit: one went on to the end of the context,
for minutes."""
MOST_WAITING = 4096
"""Requests that may wait or run; a client is asked to slow down beyond that."""


@dataclass(frozen=True)
class Target:
    """What a session samples from."""

    model_id: str
    """Empty for the base model."""
    policy_version: int
    path: str
    content: str


class VersionTurns:
    """Which version inference holds, and whose turn it is."""

    def __init__(self, servers: InferenceServers):
        self.servers = servers
        self.held: Target | None = None
        self.running: set[asyncio.Future[None]] = set()
        self.waiting: dict[Target, list[asyncio.Future[None]]] = {}
        self.loading: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def of(self, target: Target) -> AsyncIterator[None]:
        """Context in which inference holds the target. Raises what loading it raises."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            if target == self.held and not self.waiting and not self.loading:
                self.running.add(turn)
            else:
                self.waiting.setdefault(target, []).append(turn)
                self._advance()
                await turn
            yield
        finally:  # also if it is cancelled between its turn and its next step
            self.running.discard(turn)
            self._advance()

    def lost(self, target: Target) -> None:
        """Notes that inference has answered with another version than the target, which it held."""
        if self.held == target:
            self.held = None

    def _advance(self) -> None:
        if not (self.running or self.loading) and self.waiting:
            target = next(iter(self.waiting))
            self.loading = asyncio.create_task(self._load(target))
            self.loading.add_done_callback(partial(self._loaded, target))

    async def _load(self, target: Target) -> None:
        """Makes every server load the target. Waits for servers that are started again, until
        the servers' deadline. Raises RunError."""
        since = time.monotonic()
        version = WeightVersion(target.policy_version, target.path, content=target.content)
        while target != self.held:
            self.held = None
            try:
                for url in await self.servers.wait_for_any():
                    await self.servers.load(url, version)
                self.held = target
            except (AwayError, OSError) as error:
                limit_s = self.servers.timeout_s
                if time.monotonic() - since > limit_s:
                    raise InferenceLostError(
                        f"waited {limit_s:.0f} s for inference to load a version: {error}"
                    ) from None
                await asyncio.sleep(RETRY_S)

    def _loaded(self, target: Target, loading: asyncio.Task[None]) -> None:
        """Lets the requests of the target run, or fail as its load did."""
        if loading.cancelled():  # by the end of the process
            return
        self.loading, error = None, loading.exception()
        for turn in self.waiting.pop(target):
            if turn.done():
                continue
            if error:
                turn.set_exception(error)
            else:
                self.running.add(turn)
                turn.set_result(None)
        self._advance()


class Session:
    """A sampling session: its target, and its requests."""

    def __init__(self, sampling_id: str, log: CallLog, target: Target):
        self.id, self.log, self.target = sampling_id, log, target
        self.tasks: dict[int, asyncio.Task[None]] = {}


class SamplingSessions:
    """The sampling sessions of a server."""

    def __init__(
        self,
        config: RLConfig,
        storage: Storage,
        servers: InferenceServers,
        name: str,
        vocab_size: int,
    ):
        self.config, self.storage, self.servers = config, storage, servers
        self.name, self.vocab_size = name, vocab_size
        self.turns = VersionTurns(servers)
        self.sessions: dict[str, Session] = {}
        self.used: dict[Target, float] = {}
        """When each target was last asked for."""
        self.base = Target("", 0, str(storage.base), "")
        self.expire_at = -math.inf
        self.told_of_truncation = False

    def versions(self, model_id: str) -> set[int]:
        """Returns the versions of a model that were lately sampled from."""
        used, since = list(self.used.items()), time.time() - IN_USE_S
        targets = [target for target, last in used if last > since]
        return {target.policy_version for target in targets if target.model_id == model_id}

    @property
    def waiting(self) -> int:
        return sum(len(session.tasks) for session in self.sessions.values())

    def begin(self) -> None:
        """Deletes the sessions that nobody has used for long, and notes which versions are in
        use. Requests without an answer are sampled again when their clients, who may be gone,
        ask for it."""
        self._expire()
        for sampling_id, path in self.storage.sampling_logs().items():
            if time.time() - path.stat().st_mtime > IN_USE_S:
                continue
            try:
                self.find(sampling_id)
            except KeyError:  # its client was never told that it exists
                path.unlink()
            except CorruptFileError:  # its client is told when it asks
                continue

    def _expire(self) -> None:
        """Deletes the sessions that nobody has used for long, and forgets what is in memory of
        idle ones. Looks once an hour."""
        if time.monotonic() < self.expire_at:
            return
        self.expire_at = time.monotonic() + IN_USE_S
        for sampling_id, path in self.storage.sampling_logs().items():
            idle_s = time.time() - path.stat().st_mtime
            session = self.sessions.get(sampling_id)
            if idle_s > IN_USE_S and session and not session.tasks:
                del self.sessions[sampling_id]
            if idle_s > EXPIRES_S:
                path.unlink()

    def find(self, sampling_id: str) -> Session:
        """Returns a session. Raises KeyError if there is none."""
        path = self.storage.sampling_log(sampling_id)
        if not path.is_file():
            raise KeyError(
                f"sampling session {sampling_id} does not exist on this server, or has expired"
            )
        if sampling_id not in self.sessions:
            log = CallLog(path)
            if 0 not in log.calls:
                raise KeyError(f"sampling session {sampling_id} was never completely made")
            target = msgspec.json.decode(log.call_of(0).body, type=Target)
            self.sessions[sampling_id] = Session(sampling_id, log, target)
        session = self.sessions[sampling_id]
        self.used[session.target] = time.time()
        return session

    async def create(self, sampling_id: str, target: Target) -> None:
        """Makes a session, unless it exists."""
        with suppress(KeyError):
            self.find(sampling_id)
            return
        self._expire()
        log = CallLog(self.storage.sampling_log(sampling_id))
        await log.add(ClientCall(0, "create_sampling_session", msgspec.json.encode(target)))
        self.find(sampling_id)

    def target(self, model_id: str, version: int) -> Target:
        """Returns a version of a model; its version 0, which no step has changed, is the base
        model. Raises CallError."""
        if not version:
            return self.base
        run_dir = self.storage.model(model_id)
        folder = run_dir.weights(version)
        if not folder.is_dir():
            raise CallError(f"version {version} of {model_id} does not exist on this server")
        return Target(model_id, version, str(folder), content_id(run_dir.digests(version)))

    def asked(self, request: CreateSamplingSession) -> Target:
        """Returns what a new session is to sample from. Raises CallError."""
        if request.model_path:
            (model_id, *_), saved = self.storage.find(request.model_path, SAMPLER)
            return self.target(model_id, saved.policy_version)
        if request.base_model not in (self.name, self.config.model.name):
            raise wrong_base(request.base_model, self.name)
        return self.base

    async def add(self, request: Sample, body: bytes) -> None:
        """Writes a request and begins to answer it, unless that has been done. Raises KeyError
        and CallError."""
        session, number = self.find(request.sampling_session_id), request.seq_id + 1
        if fault := self._fault(request):
            raise CallError(fault)
        await session.log.add(ClientCall(number, "asample", body))
        self._start(session, number)

    def _fault(self, request: Sample) -> str:
        """Returns what is wrong with a request; empty if nothing. Raises CallError."""
        prompt, last = prompt_ids(request), request.prompt_logprobs_last_n
        limit = self.config.model.max_model_len
        if last is not None and not (request.prompt_logprobs and 1 <= last < len(prompt)):
            return (
                "prompt_logprobs_last_n needs prompt_logprobs, and a number from 1 to the "
                "prompt's length - 1"
            )
        if request.record_stability_info:
            return STABLE_REINFORCE
        if not prompt:
            return "the prompt is empty: send at least one token"
        if max(prompt) >= self.vocab_size:
            return (
                f"the prompt has token id {max(prompt)}; the vocabulary has "
                f"{self.vocab_size} tokens"
            )
        if len(prompt) >= limit:
            return (
                f"the prompt has {len(prompt)} tokens; model.max_model_len of the server is {limit}"
            )
        return ""

    def _start(self, session: Session, number: int) -> None:
        """Begins to answer a request, unless that has been done."""
        if number not in session.log.answers and number not in session.tasks:
            session.tasks[number] = asyncio.create_task(self._answer(session, number))

    async def _answer(self, session: Session, number: int) -> None:
        try:
            request = msgspec.json.decode(session.log.call_of(number).body, type=Sample)
            answer = CallAnswer(number, await self._sample(session, request), is_json=False)
        except (PromptTooLongError, RunError, ValueError) as error:
            is_user = isinstance(error, CallError) or not isinstance(error, RunError)
            content = {"error": str(error), "category": "user" if is_user else "server"}
            answer = CallAnswer(number, encoded(content))
        finally:
            del session.tasks[number]
        session.log.answer(answer)

    def tell_of_truncation(self, params: SamplingParams) -> None:
        """Warns once: the API has no place for the tokens that truncation kept."""
        if (params.top_p < 1 or params.top_k > 0) and not self.told_of_truncation:
            self.told_of_truncation = True
            print(
                "rl serve: WARNING: a client samples with top_p or top_k: the log-probabilities of "
                "its answers are over the kept tokens alone, and training computes with all. Leave "
                "them out where answers are trained",
                file=sys.stderr,
                flush=True,
            )

    async def _sample(self, session: Session, request: Sample) -> bytes:
        prompt, params, target = prompt_ids(request), request.sampling_params, session.target
        self.tell_of_truncation(params)
        room = self.config.model.max_model_len - len(prompt)
        sampling: dict[str, Any] = {
            "max_tokens": min(params.max_tokens or DEFAULT_TOKENS, room),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(params.top_k, 0),
        } | stopping(params.stop)
        affinity = hash((session.id, request.seq_id)) % 2**31

        async def sample(index: int) -> Turn:
            settings = dict(sampling)
            if params.seed is not None:  # or all samples of a request would be the same
                settings["seed"] = (params.seed + index) % 2**63
            if request.prompt_logprobs and not index:
                settings["prompt_logprobs"] = True
            while True:
                async with self.turns.of(target):
                    answer = await self.servers.generate(affinity, prompt, settings)
                    versions = {span.policy_version for span in answer.policy_versions}
                    if versions <= {target.policy_version}:
                        return answer
                    self.turns.lost(target)

        samples = [asyncio.create_task(sample(index)) for index in range(request.num_samples)]
        try:
            answers = await asyncio.gather(*samples)
        finally:  # after an error the others are not sampled on
            for task in samples:
                task.cancel()
        of_prompt = answers[0].packed_prompt_logprobs
        if last := request.prompt_logprobs_last_n:
            unknown = len(of_prompt) // ITEM_BYTES - last
            of_prompt = pack_logprobs([None] * unknown) + of_prompt[unknown * ITEM_BYTES :]
        return sample_message(answers, of_prompt)

    async def answer(self, sampling_id: str, number: int, wait_s: float) -> CallAnswer | None:
        """Returns the answer to a request; None if it does not come in time. Raises KeyError for
        an unknown one."""
        session = self.find(sampling_id)
        if number not in session.log.calls:
            raise KeyError(f"sampling session {sampling_id} has no request {number - 1}")
        # it could not be written, or the server was started again
        self._start(session, number)
        if task := session.tasks.get(number):
            await asyncio.wait([task], timeout=wait_s)
            if number not in session.log.answers and task.done():
                await asyncio.sleep(min(wait_s, RETRY_S))
        return session.log.answer_of(number) if number in session.log.answers else None


def prompt_ids(request: Sample) -> list[int]:
    """Returns the tokens of a prompt. Raises CallError for other chunks."""
    if other := [chunk.type for chunk in request.prompt.chunks if chunk.type != "encoded_text"]:
        raise CallError(f"the prompt has a chunk of {other[0]}; this server takes text alone")
    return [token for chunk in request.prompt.chunks for token in chunk.tokens]


def stopping(stop: str | list[str | int] | None) -> dict[str, Any]:
    """Returns our settings for where an answer ends: the end-of-text token, and texts or tokens;
    with an empty list nowhere."""
    if stop is None:
        return {}
    if stop == []:
        return {"ignore_eos": True}
    is_tokens = isinstance(stop, list) and isinstance(stop[0], int)
    return {"stop_token_ids" if is_tokens else "stop": stop}


class OpenAi:
    """The endpoints. `model` of a request is the name of the base model, the path of something
    named, or the id of a model: its newest sampled version."""

    def __init__(self, sampling: SamplingSessions):
        self.sampling, self.model = sampling, sampling.config.model

    def _target(self, model: str) -> Target:
        """Returns what a request's `model` means. Raises KeyError and CallError."""
        sampling = self.sampling
        if model in (sampling.name, self.model.name):
            return sampling.base
        if not MODEL_ID.fullmatch(model):
            (model_id, *_), saved = sampling.storage.find(model, SAMPLER)
            return sampling.target(model_id, saved.policy_version)
        if model not in sampling.storage.model_ids():
            raise KeyError(f"model {model} does not exist on this server")
        newest = sampling.storage.model(model).newest_weights()
        if not newest:
            raise CallError(
                f"{model} has no sampled version yet: save_weights_for_sampler makes one"
            )
        return sampling.target(model, newest[0])

    async def models(self) -> Any:
        names = [self.sampling.name, *self.sampling.storage.model_ids()]
        models = [{"id": name, "object": "model", "owned_by": "rl"} for name in names]
        return {"object": "list", "data": models}

    async def complete(self, request: Request) -> Any:
        body: Any = msgspec.json.decode(await request.body())
        name = body.get("model") if isinstance(body, dict) else None
        if not isinstance(name, str):
            raise CallError("give the name of a model")
        if body.get("stream"):
            raise CallError("stream: this server answers in one piece")
        target, path = self._target(name), request.url.path
        limits = (body.get("max_tokens"), body.get("max_completion_tokens"))
        # a completion that is no chat has OpenAI's own default, 16
        if "chat" in path and limits == (None, None):
            body["max_tokens"] = min(DEFAULT_TOKENS, self.model.max_model_len)
        status, content = await self._ask(target, path, body | {"model": self.model.name})
        if status != 200:
            return Response(content, status, media_type=JSON)
        version = {"policy_version": target.policy_version}
        return msgspec.json.decode(content) | {"model": name} | version

    async def _ask(self, target: Target, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Returns the answer of inference by exactly the target. A server that is started again
        holds the base model, so one that holds the target afterwards has answered with it."""
        servers, turns, since = self.sampling.servers, self.sampling.turns, time.monotonic()
        while time.monotonic() - since < servers.timeout_s:
            async with turns.of(target):
                try:
                    url = next(iter(await servers.wait_for_any()))
                    answer = await servers.send("POST", url, path, body)
                    held = read((await servers.send("GET", url, "/status"))[1], HeldVersion)
                    if held.policy_version == target.policy_version:
                        return answer
                except (AwayError, OSError):
                    pass
                turns.lost(target)
            await asyncio.sleep(RETRY_S)
        return 503, b'{"detail": "inference does not answer"}'
