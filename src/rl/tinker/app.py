"""The routes of the Tinker API, as the SDK 0.38 and the cookbook 0.6.1 call them: sessions,
training, sampling, and addresses of files. What has been made: listing.py."""

import secrets
import time
from collections.abc import Awaitable, Callable
from inspect import signature as signature_of
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from google.protobuf.message import DecodeError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from rl.run_dir.checksums import DIGESTS
from rl.run_dir.files import UNREADABLE, CorruptFileError
from rl.tinker.codec import MESSAGE
from rl.tinker.listing import Listing, when
from rl.tinker.requests import (
    DOWNLOADS,
    JSON,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    GetInfo,
    LoadWeights,
    Retrieve,
    Sample,
    WithSeq,
    decode,
    problem,
    reply,
    signature,
)
from rl.tinker.sampling import MOST_WAITING, OpenAi, SamplingSessions
from rl.tinker.storage import (
    EXTERNAL,
    MODEL_ID,
    NOT_FOUND,
    CallAnswer,
    Storage,
    tinker_path,
    write_json,
)
from rl.tinker.training import Training
from rl.wire.training_calls import CallError

POLL_S = 30.0
"""How long a question for an answer waits; the SDK gives up after 45 s."""
SIGNED_S = 3600
"""How long an address of a file can be used."""
HEAD_GAP = "its adapters are of all linear layers but the head (train_unembed has no effect)"
PROTOBUF = "application/x-protobuf"
NOT_HERE = {
    "audit": "audit log",
    "billing": "billing",
    "auth": "tokens beside its key",
    "copy_weights": "copies of weights",
    "create_custom_loss": "losses of clients: leave custom_loss_server_side off",
    "publish": "publication: all that have its key read everything",
    "project": "projects",
    "trace_export": "traces",
    "search": "search",
}
"""The last part of a path that belongs to the public service alone, or the first after /api/v1
-> what this server does not have."""
CONSTANT: dict[str, Any] = {
    "client/config": dict.fromkeys(
        ("pjwt_auth_enabled", "proto_compress_fwdbwd", "use_pyqwest_transport"), False
    ),
    "session_heartbeat": {"type": "session_heartbeat"},
    "telemetry": {"status": "accepted"},
}
"""What is answered to any request. Of telemetry, what the SDK tells its makers, nothing is kept."""
TRAINING_CALLS = (
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
)
"""Their bodies are read when they are executed, and then refused if they are wrong: the calls after
them must not wait for a number that never comes."""


class TinkerApi:
    """The calls of a client: each gets what its parameters name, the request, what its body asks
    (`asked`), or a part of its path, and returns what is answered."""

    def __init__(
        self, training: Training, sampling: SamplingSessions, storage: Storage, secret: str
    ):
        """`secret`: what addresses of files are signed with."""
        self.training, self.sampling, self.storage = training, sampling, storage
        self.name, self.model, self.secret = training.name, training.config.model, secret

    # Sessions -------------------------------------------------------------------------------------

    async def capabilities(self) -> Any:
        model = {"model_name": self.name, "max_context_length": self.model.max_model_len}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    async def create_session(self, asked: CreateSession) -> Any:
        session_id = secrets.token_hex(8)
        content = {"time": time.time(), **msgspec.to_builtins(asked)}
        write_json(self.storage.session(session_id), content)
        return {
            "session_id": session_id,
            "type": "create_session",
            "info_message": f"rl serves {self.name}; {HEAD_GAP}",
        }

    async def finish(self, session_id: str) -> Any:
        """Frees the memory of a session's models. They are loaded again if they are asked for
        after all."""
        await self.training.unload(f"{session_id}:")
        return {}

    # Training -------------------------------------------------------------------------------------

    async def create_model(self, request: Request, asked: CreateModel) -> Any:
        return await self._new(request, "create_model", asked.session_id, asked.model_seq_id)

    async def load_weights(self, request: Request, asked: LoadWeights) -> Any:
        if asked.session_id is not None and asked.model_seq_id is not None:
            return await self._new(request, "load_weights", asked.session_id, asked.model_seq_id)
        if asked.model_id is None or asked.seq_id is None:
            raise CallError(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id"
            )
        return await self._add(request, "load_weights", asked.model_id, asked.seq_id)

    async def _new(self, request: Request, kind: str, session_id: str, number: int) -> Any:
        if not self.storage.session(session_id).is_file():
            raise KeyError(f"session {session_id} does not exist on this server")
        return await self._add(request, kind, f"{session_id}:train:{number}", 0)

    async def _add(self, request: Request, kind: str, model_id: str, number: int) -> Any:
        await self.training.add(model_id, number, kind, await request.body())
        return {"request_id": f"{model_id}/{number}", "model_id": model_id}

    async def training_call(self, request: Request) -> Any:
        kind, body = request.url.path.rpartition("/")[2], await request.body()
        if kind == "forward_backward":
            asked = MESSAGE["ForwardBackwardRequest"].FromString(body)
        else:
            asked = decode(body, WithSeq)
        if asked.seq_id < 1:
            raise CallError(f"seq_id = {asked.seq_id}: the calls of a model are numbered from 1")
        return await self._add(request, kind, asked.model_id, asked.seq_id)

    async def get_info(self, asked: GetInfo) -> Any:
        model, name = self.training.find(asked.model_id), self.model.name
        return {
            "type": "get_info",
            # by which the SDK loads the tokenizer
            "model_data": {"arch": "lora", "model_name": name, "tokenizer_id": name},
            "model_id": model.id,
            "is_lora": True,
            "lora_rank": model.settings.get("lora_rank"),
            "model_name": self.name,
        }

    # Sampling -------------------------------------------------------------------------------------

    async def create_sampling_session(self, asked: CreateSamplingSession) -> Any:
        sampling_id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        await self.sampling.create(sampling_id, self.sampling.asked(asked))
        return {"type": "create_sampling_session", "sampling_session_id": sampling_id}

    async def asample(self, request: Request, asked: Sample) -> Any:
        if self.sampling.waiting > MOST_WAITING:
            return problem(429, f"more than {MOST_WAITING} requests are waiting")
        await self.sampling.add(asked, await request.body())
        request_id = f"{asked.sampling_session_id}/{asked.seq_id + 1}"
        ids = [f"{request_id}/{index}" for index in range(asked.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def retrieve(self, asked: Retrieve) -> Any:
        """Returns the answer to a call; that of a failed one becomes the SDK's
        RequestFailedError."""
        owner, _, number = asked.request_id.partition("/")
        if not number.isdecimal():
            raise KeyError(f"request {asked.request_id} does not exist on this server")
        if MODEL_ID.fullmatch(owner):
            answer = await self.training.answer(owner, int(number), POLL_S)
        else:
            try:
                answer = await self.sampling.answer(owner, int(number), POLL_S)
            except KeyError as error:
                return problem(410, str(error.args[0]))  # the SDK sends the request again
        if answer is None:
            waiting = {"type": "try_again", "queue_state": "active"}
            return reply(waiting | {"request_id": asked.request_id}, 408)
        await self._make_session(owner, answer)
        return Response(answer.body, media_type=JSON if answer.is_json else PROTOBUF)

    async def _make_session(self, model_id: str, answer: CallAnswer) -> None:
        """Makes the sampling session that an answer names, before the client gets it."""
        fields = msgspec.json.decode(answer.body) if answer.is_json else {}
        if fields.get("type") == "save_weights_for_sampler" and "sampling_session_id" in fields:
            target = self.sampling.target(model_id, fields["policy_version"])
            await self.sampling.create(fields["sampling_session_id"], target)

    # Files ----------------------------------------------------------------------------------------

    def _files(self, model_id: str, name: str) -> dict[str, Path]:
        """Returns the files of a named adapter, which are read at addresses that are signed for a
        while. Raises KeyError."""
        adapter = (model_id, EXTERNAL, name)
        if self.storage.read_saved(adapter) is None:
            raise KeyError(f"{tinker_path(adapter)} {NOT_FOUND}")
        paths = sorted(self.storage.saved(adapter).iterdir())
        return {path.name: path for path in paths if path.name != DIGESTS}

    async def addresses(self, request: Request, model_id: str, name: str) -> Any:
        expires, base = int(time.time()) + SIGNED_S, str(request.base_url).rstrip("/")
        urls = {}
        for file in self._files(model_id, name):
            path = f"{DOWNLOADS}{model_id}/{name}/{file}"
            signed = signature(self.secret, path, expires)
            urls[file] = f"{base}{quote(path)}?expires={expires}&signature={signed}"
        return {"urls": urls, "expires": when(expires)}

    async def file(self, model_id: str, name: str, file: str) -> Any:
        files = self._files(model_id, name)
        if file not in files:
            raise KeyError(f"there is no file {file}, only {', '.join(files)}")
        return FileResponse(files[file])


async def constant(request: Request) -> Any:
    return CONSTANT[request.url.path.removeprefix("/api/v1/")]


async def missing(request: Request) -> Response:
    """What is not here: the public service has it, or it does not exist."""
    words = request.url.path.strip("/").split("/")
    feature = NOT_HERE.get(words[-1]) or NOT_HERE.get("".join(words[2:3]))
    if feature:
        return problem(403, f"this server has no {feature}")
    return problem(404, f"{request.method} {request.url.path}: no such request")


def endpoint(call: Callable[..., Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint of a call, with its errors as answers."""
    parameters = signature_of(call).parameters

    async def answering(request: Request) -> Response:
        try:
            values = {"request": request, **request.path_params}
            if "asked" in parameters:
                values["asked"] = decode(await request.body(), parameters["asked"].annotation)
            content = await call(**{name: values[name] for name in parameters})
        except KeyError as error:
            return problem(404, str(error.args[0]))
        except (CallError, CorruptFileError, DecodeError, *UNREADABLE) as error:
            return problem(400, str(error))
        except ClientDisconnect:
            return problem(400, "the client has gone")
        return content if isinstance(content, Response) else reply(content)

    return answering


def make_app(api: TinkerApi) -> Starlette:
    listing, openai = Listing(api.training, api.sampling, api.storage), OpenAi(api.sampling)
    calls: dict[str, Any] = {
        "POST create_session": api.create_session,
        "POST sessions/{session_id}/finish": api.finish,
        "POST create_model": api.create_model,
        "POST load_weights": api.load_weights,
        "POST get_info": api.get_info,
        "POST create_sampling_session": api.create_sampling_session,
        "POST asample": api.asample,
        "POST retrieve_future": api.retrieve,
        "POST weights_info": listing.weights_info,
        "GET get_server_capabilities": api.capabilities,
        "GET healthz": listing.health,
        "GET training_runs": listing.runs,
        "GET checkpoints": listing.all_checkpoints,
        "GET sessions": listing.sessions,
        "GET sessions/{session_id}": listing.session,
        "GET samplers/{sampler_id}": listing.sampler,
        "GET training_runs/{model_id}": listing.run,
        "GET training_runs/{model_id}/checkpoints": listing.checkpoints,
        "DELETE training_runs/{model_id}/checkpoints/{kind}/{name}": listing.delete,
        "PUT training_runs/{model_id}/checkpoints/{kind}/{name}/ttl": listing.set_ttl,
        f"GET training_runs/{{model_id}}/checkpoints/{EXTERNAL}/{{name}}/external_weights_urls": (
            api.addresses
        ),
        f"GET {DOWNLOADS}{{model_id}}/{{name}}/{{file}}": api.file,
        "POST /v1/chat/completions": openai.complete,
        "POST /v1/completions": openai.complete,
        "GET /v1/models": openai.models,
    }
    calls |= {f"POST {kind}": api.training_call for kind in TRAINING_CALLS}
    calls |= {f"POST {path}": constant for path in CONSTANT}
    routes = []
    for key, call in calls.items():
        method, path = key.split()
        path = path if path.startswith("/") else f"/api/v1/{path}"
        routes.append(Route(path, endpoint(call), methods=[method]))
    every = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return Starlette(routes=[*routes, Route("/{rest:path}", missing, methods=every)])
