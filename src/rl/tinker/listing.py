"""What clients ask about what they have made: runs, checkpoints, sessions."""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rl.tinker.places import EXTERNAL, SAMPLER, TRAINING, Places, Saved, new_saved, tinker_path
from rl.tinker.replies import reply
from rl.tinker.requests import GetWeightsInfo, Part, SetTtl
from rl.tinker.sampling import Sampling
from rl.tinker.training import Model, Training, decode

TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}


def when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def page(
    request: Request, name: str, rows: list[Any], show: Callable[[Any], Any] = lambda row: row
) -> Response:
    """Returns a part of a list, as its request's `limit` and `offset` say. `show` makes what is
    shown of these rows alone."""
    part = msgspec.convert(dict(request.query_params), Part, strict=False)
    cursor = msgspec.to_builtins(part) | {"total_count": len(rows)}
    return reply(
        {
            name: [show(row) for row in rows[part.offset : part.offset + part.limit]],
            "cursor": cursor,
        }
    )


def checkpoint(model_id: str, kind: str, name: str, saved: Saved) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": TYPES[kind],
        "time": when(saved.time),
        "tinker_path": tinker_path(model_id, kind, name),
        "user_metadata": saved.user_metadata,
        "expires_at": saved.expires and when(saved.expires),
    }


class Listing:
    """The endpoints."""

    def __init__(self, training: Training, sampling: Sampling, places: Places):
        self.training, self.sampling, self.places = training, sampling, places

    def _model(self, request: Request) -> Model:
        return self.training.find(request.path_params["model_id"])

    def _run(self, model: Model) -> dict[str, Any]:
        made, saved = model.settings, self._checkpoints(model)
        newest = {
            kind: next((one for one in saved if one["checkpoint_type"] == kind), None)
            for kind in ("training", "sampler")
        }
        return {
            "training_run_id": model.id,
            "base_model": self.training.name,
            "model_owner": "owner",
            "is_lora": True,
            "lora_rank": made.get("lora_rank"),
            "last_request_time": when(model.used),
            "last_checkpoint": newest["training"],
            "last_sampler_checkpoint": newest["sampler"],
            "user_metadata": made.get("user_metadata"),
        }

    def _checkpoints(self, model: Model) -> list[dict[str, Any]]:
        return [checkpoint(model.id, *one) for one in self.places.all_saved(model.id)]

    async def runs(self, request: Request) -> Response:
        return page(
            request,
            "training_runs",
            list(reversed(self.training.models)),
            lambda model_id: self._run(self.training.find(model_id)),
        )

    async def run(self, request: Request) -> Response:
        return reply(self._run(self._model(request)))

    async def checkpoints(self, request: Request) -> Response:
        """Those of one model, or of all, the newest first."""
        models = (
            [self._model(request)]
            if "model_id" in request.path_params
            else self.training.models.values()
        )
        rows = [one for model in models for one in self._checkpoints(model)]
        return page(request, "checkpoints", sorted(rows, key=lambda one: one["time"], reverse=True))

    def _named(self, request: Request) -> tuple[str, str, str, Saved]:
        """Returns what a request names. Raises KeyError."""
        where = tuple(request.path_params[key] for key in ("model_id", "kind", "name"))
        saved = self.places.read_saved(*where) if where[1] in TYPES else None
        if saved is None:
            raise KeyError(f"{tinker_path(*where)} does not exist on this server")
        return *where, saved

    async def delete(self, request: Request) -> Response:
        self.places.delete_saved(*self._named(request)[:3])
        return reply({})

    async def set_ttl(self, request: Request) -> Response:
        *where, saved = self._named(request)
        expires = new_saved(0, decode(await request.body(), SetTtl).ttl_seconds, None).expires
        self.places.write_saved(*where, msgspec.structs.replace(saved, expires=expires))
        return reply({})

    async def weights_info(self, request: Request) -> Response:
        model_id, *_ = self.places.find(decode(await request.body(), GetWeightsInfo).tinker_path)
        rank = self.training.find(model_id).settings.get("lora_rank")
        trained = {"train_unembed": False, "train_mlp": True, "train_attn": True}
        return reply(
            {"base_model": self.training.name, "is_lora": True, "lora_rank": rank, **trained}
        )

    async def sessions(self, request: Request) -> Response:
        files = sorted(
            self.places.sessions.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True
        )
        return page(request, "sessions", [path.stem for path in files])

    async def session(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        path = self.places.session(session_id)
        if not path.is_file():
            raise KeyError(f"session {session_id} does not exist on this server")
        made = json.loads(path.read_bytes())
        models = [
            model_id for model_id in self.training.models if model_id.startswith(f"{session_id}:")
        ]
        samplers = [
            ":sample:".join(one.stem.rsplit("-", 1))
            for one in self.places.sampling.glob(f"{path.stem}-*.log")
        ]
        about = {key: made.get(key) for key in ("user_metadata", "display_name")}
        return reply({"training_run_ids": models, "sampler_ids": samplers, **about})

    async def sampler(self, request: Request) -> Response:
        session = self.sampling.find(request.path_params["sampler_id"])
        target = session.target
        path = (
            f"tinker://{target.model_id}/sampler_weights/{target.policy_version}"
            if target.model_id
            else None
        )
        return reply(
            {
                "sampler_id": session.id,
                "base_model": self.training.config.model.name,
                "model_path": path,
            }
        )

    async def health(self, request: Request) -> Response:
        return reply({"status": "ok", "time": time.time()})
