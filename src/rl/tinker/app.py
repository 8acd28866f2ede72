"""The routes of the Tinker API, as the SDK 0.38 and the cookbook 0.6.1 call them."""

import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
from google.protobuf.message import DecodeError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rl.run_dir.files import UNREADABLE, CorruptFileError
from rl.tinker.downloads import Downloads
from rl.tinker.gate import DOWNLOADS
from rl.tinker.listing import Listing
from rl.tinker.log import Answer
from rl.tinker.openai import OpenAi
from rl.tinker.places import EXTERNAL, MODEL_ID, Places, write_json
from rl.tinker.proto import MESSAGE
from rl.tinker.replies import answered, future, problem, reply, try_again
from rl.tinker.requests import (
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    GetInfo,
    LoadWeights,
    Retrieve,
    Sample,
    WithSeq,
)
from rl.tinker.sampling import MOST_WAITING, Sampling
from rl.tinker.training import Training, decode
from rl.wire.training_calls import CallError

POLL_S = 30.0
"""How long a question for an answer waits; the SDK gives up after 45 s."""
HEAD_GAP = "its adapters are of all linear layers but the head (train_unembed has no effect)"
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


class Api:
    """The endpoints."""

    def __init__(self, training: Training, sampling: Sampling, places: Places):
        self.training, self.sampling, self.places = training, sampling, places
        self.name, self.model = training.name, training.config.model

    # Sessions -------------------------------------------------------------------------------------

    async def client_config(self, request: Request) -> Response:
        return reply(
            {
                "pjwt_auth_enabled": False,
                "proto_compress_fwdbwd": False,
                "use_pyqwest_transport": False,
            }
        )

    async def capabilities(self, request: Request) -> Response:
        known = {
            "model_name": self.name,
            "max_context_length": self.model.max_model_len,
            "trainable": True,
            "sampleable": True,
        }
        return reply({"supported_models": [known]})

    async def create_session(self, request: Request) -> Response:
        asked = decode(await request.body(), CreateSession)
        session_id = secrets.token_hex(8)
        write_json(
            self.places.session(session_id), {"time": time.time(), **msgspec.to_builtins(asked)}
        )
        return reply(
            {
                "session_id": session_id,
                "type": "create_session",
                "info_message": f"rl serves {self.name}; {HEAD_GAP}",
            }
        )

    async def heartbeat(self, request: Request) -> Response:
        return reply({"type": "session_heartbeat"})

    async def telemetry(self, request: Request) -> Response:
        """Takes what the SDK tells its makers, and keeps nothing."""
        return reply({"status": "accepted"})

    async def finish(self, request: Request) -> Response:
        """Frees the memory of a session's models. They are loaded again if they are asked for
        after all."""
        await self.training.unload(f"{request.path_params['session_id']}:")
        return reply({})

    # Training -------------------------------------------------------------------------------------

    async def create_model(self, request: Request) -> Response:
        body = await request.body()
        asked = decode(body, CreateModel)
        return await self._new(asked.session_id, asked.model_seq_id, "create_model", body)

    async def load_weights(self, request: Request) -> Response:
        body = await request.body()
        asked = decode(body, LoadWeights)
        if asked.session_id is not None and asked.model_seq_id is not None:
            return await self._new(asked.session_id, asked.model_seq_id, "load_weights", body)
        if asked.model_id is None or asked.seq_id is None:
            raise CallError(
                "load_weights needs model_id and seq_id, or session_id and model_seq_id"
            )
        return await self._add(asked.model_id, asked.seq_id, "load_weights", body)

    async def _new(self, session_id: str, number: int, kind: str, body: bytes) -> Response:
        if not self.places.session(session_id).is_file():
            raise KeyError(f"session {session_id} does not exist on this server")
        return await self._add(f"{session_id}:train:{number}", 0, kind, body)

    async def _add(self, model_id: str, number: int, kind: str, body: bytes) -> Response:
        await self.training.add(model_id, number, kind, body)
        return future(f"{model_id}/{number}", model_id=model_id)

    def training_call(self, kind: str) -> Callable[[Request], Awaitable[Response]]:
        """Returns the endpoint of a call whose body is read when it is executed, and then
        refused if it is wrong: the calls after it must not wait for a number that never comes."""

        async def endpoint(request: Request) -> Response:
            body = await request.body()
            where = (
                MESSAGE["ForwardBackwardRequest"].FromString(body)
                if kind == "forward_backward"
                else decode(body, WithSeq)
            )
            if where.seq_id < 1:
                raise CallError(
                    f"seq_id = {where.seq_id}: the calls of a model are numbered from 1"
                )
            return await self._add(where.model_id, where.seq_id, kind, body)

        return endpoint

    async def get_info(self, request: Request) -> Response:
        model = self.training.find(decode(await request.body(), GetInfo).model_id)
        rank = model.settings.get("lora_rank")
        # by which the SDK loads the tokenizer
        data = {"arch": "lora", "model_name": self.model.name, "tokenizer_id": self.model.name}
        return reply(
            {
                "type": "get_info",
                "model_data": data,
                "model_id": model.id,
                "is_lora": True,
                "lora_rank": rank,
                "model_name": self.name,
            }
        )

    # Sampling -------------------------------------------------------------------------------------

    async def create_sampling_session(self, request: Request) -> Response:
        asked = decode(await request.body(), CreateSamplingSession)
        sampling_id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        await self.sampling.create(sampling_id, self.sampling.asked(asked))
        return reply({"type": "create_sampling_session", "sampling_session_id": sampling_id})

    async def asample(self, request: Request) -> Response:
        body = await request.body()
        asked = decode(body, Sample)
        if self.sampling.waiting > MOST_WAITING:
            return problem(429, f"more than {MOST_WAITING} requests are waiting")
        await self.sampling.add(asked, body)
        request_id = f"{asked.sampling_session_id}/{asked.seq_id + 1}"
        return future(
            request_id,
            sample_sequence_ids=[f"{request_id}/{index}" for index in range(asked.num_samples)],
        )

    async def retrieve(self, request: Request) -> Response:
        asked = decode(await request.body(), Retrieve)
        owner, _, number = asked.request_id.partition("/")
        if not number.isdecimal():
            raise KeyError(f"request {asked.request_id} does not exist on this server")
        if not MODEL_ID.fullmatch(owner):
            try:
                answer = await self.sampling.answer(owner, int(number), POLL_S)
            except KeyError as error:
                return problem(410, str(error.args[0]))  # the SDK sends the request again
            return answered(answer) if answer else try_again(asked.request_id)
        answer = await self.training.answer(owner, int(number), POLL_S)
        if answer is None:
            return try_again(asked.request_id)
        await self._make_session(owner, answer)
        return answered(answer)

    async def _make_session(self, model_id: str, answer: Answer) -> None:
        """Makes the sampling session that an answer names, before the client gets it."""
        fields = msgspec.json.decode(answer.body) if answer.is_json else {}
        if fields.get("type") == "save_weights_for_sampler" and "sampling_session_id" in fields:
            await self.sampling.create(
                fields["sampling_session_id"],
                self.sampling.target(model_id, fields["policy_version"]),
            )

    async def missing(self, request: Request) -> Response:
        """What is not here: the public service has it, or it does not exist."""
        parts = request.url.path.strip("/").split("/")
        what = NOT_HERE.get(parts[-1]) or (NOT_HERE.get(parts[2]) if len(parts) > 2 else None)
        return (
            problem(403, f"this server has no {what}")
            if what
            else problem(404, f"{request.method} {request.url.path}: no such request")
        )


def guarded(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint with its errors as answers."""

    async def answering(request: Request) -> Response:
        try:
            return await endpoint(request)
        except KeyError as error:
            return problem(404, str(error.args[0]))
        except (CallError, CorruptFileError, DecodeError, *UNREADABLE) as error:
            return problem(400, str(error))
        except ClientDisconnect:
            return problem(400, "the client has gone")

    return answering


def make_app(api: Api, listing: Listing, downloads: Downloads) -> Starlette:
    calls = (
        "forward_backward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
    )
    posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "client/config": api.client_config,
        "create_session": api.create_session,
        "session_heartbeat": api.heartbeat,
        "telemetry": api.telemetry,
        "sessions/{session_id}/finish": api.finish,
        "create_model": api.create_model,
        "load_weights": api.load_weights,
        "get_info": api.get_info,
        "create_sampling_session": api.create_sampling_session,
        "asample": api.asample,
        "retrieve_future": api.retrieve,
        "weights_info": listing.weights_info,
        **{kind: api.training_call(kind) for kind in calls},
    }
    gets = {
        "get_server_capabilities": api.capabilities,
        "healthz": listing.health,
        "training_runs": listing.runs,
        "training_runs/{model_id}": listing.run,
        "training_runs/{model_id}/checkpoints": listing.checkpoints,
        "checkpoints": listing.checkpoints,
        "sessions": listing.sessions,
        "sessions/{session_id}": listing.session,
        "samplers/{sampler_id}": listing.sampler,
    }
    named = "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}"
    routes = [
        Route(f"/api/v1/{path}", guarded(endpoint), methods=["POST"])
        for path, endpoint in posts.items()
    ]
    routes += [Route(f"/api/v1/{path}", guarded(endpoint)) for path, endpoint in gets.items()]
    files = {
        f"/api/v1/training_runs/{{model_id}}/checkpoints/{EXTERNAL}"
        "/{name}/external_weights_urls": downloads.addresses
    }
    files[f"{DOWNLOADS}{{model_id}}/{{name}}/{{file}}"] = downloads.file
    routes += [Route(path, guarded(endpoint)) for path, endpoint in files.items()]
    plain = OpenAi(api.sampling)
    routes += [
        Route(f"/v1/{path}", guarded(plain.complete), methods=["POST"])
        for path in ("chat/completions", "completions")
    ]
    routes += [Route("/v1/models", guarded(plain.models))]
    routes += [
        Route(named, guarded(listing.delete), methods=["DELETE"]),
        Route(f"{named}/ttl", guarded(listing.set_ttl), methods=["PUT"]),
    ]
    every = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return Starlette(routes=[*routes, Route("/{rest:path}", api.missing, methods=every)])
