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
from rl.tinker.app import Api, make_app
from rl.tinker.downloads import Downloads
from rl.tinker.gate import Gate
from rl.tinker.listing import Listing
from rl.tinker.places import Places
from rl.tinker.replay import replay as executed
from rl.tinker.sampling import Sampling
from rl.tinker.training import Training
from rl.wire import serving
from rl.wire.inference_client import InferenceServers
from rl.wire.training_calls import Learner

INFERENCE_S = 900.0
"""How long a request waits for inference to be started again."""
BASE = "base"


def prepare_base(places: Places, learner: Learner) -> None:
    """Writes the adapter that changes nothing, by which inference serves the base model again."""
    if not places.base.exists():
        learner.create(BASE, 1, 0)
        learner.publish(BASE, places.base, places.base.with_suffix(".json"))
        learner.forget(BASE)


def replay(
    config: RLConfig, learner: Learner, of: ReplayConfig, unlike: Callable[[dict[str, Any]], str]
) -> None:
    """Executes the calls of a model again; writes how each version compares into `replay.jsonl`,
    which `rl replay` reads."""
    run_dir = config.run_dir
    with (run_dir.root / "replay.jsonl").open("a") as file:
        for found in executed(
            Training(config, Places(run_dir), learner),
            RunDir(Path(of.run), Path(of.weights)),
            unlike,
        ):
            file.write(json.dumps(found) + "\n")
            file.flush()


def serve(config: RLConfig, learner: Learner, status: Status, sock: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError and RunError of the trainer."""
    asyncio.run(run(config, learner, status, sock))


async def run(config: RLConfig, learner: Learner, status: Status, sock: socket.socket) -> None:
    assert config.serve
    run_dir: RunDir = config.run_dir
    places = Places(run_dir)
    prepare_base(places, learner)
    servers = InferenceServers([], run_dir.status("inference"), INFERENCE_S)
    training = Training(config, places, learner)
    sampling = Sampling(config, places, servers, training.name, learner.vocab_size)
    training.sampled = sampling.versions
    host = config.serve.host
    secret = page_secret(run_dir.status_dir)
    app = make_app(
        Api(training, sampling, places),
        Listing(training, sampling, places),
        Downloads(places, secret),
    )
    app = Gate(app, run_token(run_dir.status_dir), secret, loopback=is_loopback(host))
    sampling.begin()
    work = asyncio.create_task(training.run())
    await serving.serve(app, host, sock, status, work)
    work.cancel()
    await servers.close()
