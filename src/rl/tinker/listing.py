"""What clients ask about what they have made: runs, checkpoints, sessions."""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request

from rl.tinker.requests import GetWeightsInfo, RowRange, SetTtl
from rl.tinker.sampling import SamplingSessions
from rl.tinker.storage import (
    EXTERNAL,
    SAMPLER,
    TRAINING,
    Name,
    Saved,
    Storage,
    new_saved,
    tinker_path,
)
from rl.tinker.training import Model, Training

TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}


def when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def page(
    request: Request, name: str, rows: list[Any], show: Callable[[Any], Any] = lambda row: row
) -> dict[str, Any]:
    """Returns a part of a list, as its request's `limit` and `offset` say. `show` makes what is
    shown of these rows alone."""
    asked = msgspec.convert(dict(request.query_params), RowRange, strict=False)
    shown = [show(row) for row in rows[asked.offset : asked.offset + asked.limit]]
    return {name: shown, "cursor": msgspec.to_builtins(asked) | {"total_count": len(rows)}}


def checkpoint(name: Name, saved: Saved) -> dict[str, Any]:
    return {
        "checkpoint_id": "/".join(name[1:]),
        "checkpoint_type": TYPES[name[1]],
        "time": when(saved.time),
        "tinker_path": tinker_path(name),
        "user_metadata": saved.user_metadata,
        "expires_at": saved.expires and when(saved.expires),
    }


class Listing:
    """The endpoints."""

    def __init__(self, training: Training, sampling: SamplingSessions, storage: Storage):
        self.training, self.sampling, self.storage = training, sampling, storage

    def _run(self, model: Model) -> dict[str, Any]:
        settings, newest = model.settings, dict[str, Any]()
        for saved in self._checkpoints(model):
            newest.setdefault(saved["checkpoint_type"], saved)
        return {
            "training_run_id": model.id,
            "base_model": self.training.name,
            "model_owner": "owner",
            "is_lora": True,
            "lora_rank": settings.get("lora_rank"),
            "last_request_time": when(model.used),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": settings.get("user_metadata"),
        }

    def _checkpoints(self, model: Model) -> list[dict[str, Any]]:
        return [checkpoint(*pair) for pair in self.storage.all_saved(model.id)]

    async def runs(self, request: Request) -> Any:
        models = list(reversed(self.training.models))
        return page(request, "training_runs", models, lambda name: self._run(self._model(name)))

    def _model(self, model_id: str) -> Model:
        return self.training.find(model_id)

    async def run(self, model_id: str) -> Any:
        return self._run(self._model(model_id))

    async def checkpoints(self, request: Request, model_id: str) -> Any:
        return page(request, "checkpoints", self._checkpoints(self._model(model_id)))

    async def all_checkpoints(self, request: Request) -> Any:
        """The newest first."""
        models = list(self.training.models.values())
        rows = [saved for model in models for saved in self._checkpoints(model)]
        rows.sort(key=lambda saved: saved["time"], reverse=True)
        return page(request, "checkpoints", rows)

    def _named(self, *name: str) -> Saved:
        """Returns the record of something named. Raises KeyError."""
        model_id, kind, word = name
        saved = self.storage.read_saved((model_id, kind, word)) if kind in TYPES else None
        if saved is None:
            path = tinker_path((model_id, kind, word))
            raise KeyError(f"{path} does not exist on this server")
        return saved

    async def delete(self, model_id: str, kind: str, name: str) -> Any:
        self._named(model_id, kind, name)
        self.storage.delete_saved((model_id, kind, name))
        return {}

    async def set_ttl(self, model_id: str, kind: str, name: str, asked: SetTtl) -> Any:
        saved = self._named(model_id, kind, name)
        saved.expires = new_saved(0, asked.ttl_seconds).expires
        self.storage.write_saved((model_id, kind, name), saved)
        return {}

    async def weights_info(self, asked: GetWeightsInfo) -> Any:
        (model_id, *_), _ = self.storage.find(asked.tinker_path)
        return {
            "base_model": self.training.name,
            "is_lora": True,
            "lora_rank": self._model(model_id).settings.get("lora_rank"),
            "train_unembed": False,
            "train_mlp": True,
            "train_attn": True,
        }

    async def sessions(self, request: Request) -> Any:
        files = list(self.storage.sessions.glob("*.json"))
        files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        return page(request, "sessions", [path.stem for path in files])

    async def session(self, session_id: str) -> Any:
        path = self.storage.session(session_id)
        if not path.is_file():
            raise KeyError(f"session {session_id} does not exist on this server")
        created = json.loads(path.read_bytes())
        models = [name for name in self.training.models if name.startswith(f"{session_id}:")]
        return {
            "training_run_ids": models,
            "sampler_ids": [*self.storage.sampling_logs(path.stem)],
            "user_metadata": created.get("user_metadata"),
            "display_name": created.get("display_name"),
        }

    async def sampler(self, sampler_id: str) -> Any:
        target = self.sampling.find(sampler_id).target
        name = (target.model_id, SAMPLER, str(target.policy_version))
        return {
            "sampler_id": sampler_id,
            "base_model": self.training.config.model.name,
            "model_path": tinker_path(name) if target.model_id else None,
        }

    async def health(self) -> Any:
        return {"status": "ok", "time": time.time()}
