"""The server of the Tinker API: what its process runs once it has a trainer."""

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.config.run import RLConfig
from rl.config.trainer import ReplayConfig
from rl.run_dir.access_token import is_loopback, page_secret, run_token
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Status
from rl.tinker import replay as replaying
from rl.tinker.app import TinkerApi, make_app
from rl.tinker.requests import KeyGate
from rl.tinker.sampling import SamplingSessions
from rl.tinker.storage import Storage
from rl.tinker.training import Training
from rl.wire.inference_client import InferenceServers
from rl.wire.serving import serve_app
from rl.wire.training_calls import Learner

INFERENCE_S = 900.0
"""How long a request waits for inference to be started again."""
BASE = "base"


def replay(
    config: RLConfig, learner: Learner, of: ReplayConfig, unlike: Callable[[dict[str, Any]], str]
) -> None:
    """Executes the calls of a model again; writes how each version compares into `replay.jsonl`,
    which `rl replay` reads."""
    training = Training(config, Storage(config.run_dir), learner)
    original = RunDir(Path(of.run), Path(of.weights))
    with (config.run_dir.root / "replay.jsonl").open("a") as file:
        for version in replaying.replay(training, original, unlike):
            file.write(json.dumps(version) + "\n")
            file.flush()


async def serve(config: RLConfig, learner: Learner, status: Status, sock: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError and RunError of the trainer."""
    assert config.serve
    run_dir, host = config.run_dir, config.serve.host
    storage = Storage(run_dir)
    storage.restore_replaced()
    if not storage.base.exists():
        # the adapter that changes nothing, by which inference serves the base model again
        learner.create(BASE, 1, 0)
        learner.publish(BASE, storage.base, storage.base.with_suffix(".json"))
        learner.forget(BASE)
    servers = InferenceServers([], run_dir.status("inference"), INFERENCE_S)
    training = Training(config, storage, learner)
    sampling = SamplingSessions(config, storage, servers, training.name, learner.vocab_size)
    training.sampled = sampling.versions
    secret = page_secret(run_dir.status_dir)
    app = make_app(TinkerApi(training, sampling, storage, secret))
    gate = KeyGate(app, run_token(run_dir.status_dir), secret, loopback=is_loopback(host))
    sampling.begin()
    work = asyncio.create_task(training.run())
    await serve_app(gate, host, sock, status, work)
    work.cancel()
    await servers.close()
