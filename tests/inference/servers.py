"""Real servers for tests, and transformers as the judge of what they answer."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl.run_dir.checksums import DELTA, DIGESTS
from rl.run_dir.in_memory import InMemory, Memory
from rl.run_dir.safetensors import HASH, digest_of_file, tensor_digests
from rl.trainer.store.image import Image, LastVersion
from rl.wire.inference_client import read
from rl.wire.turns import Turn, unpack_logprobs
from tests.trainer.store.images import fill, image_like
from tests.zygote import Forked, inference_zygote

MAX_MODEL_LEN = 960
HELD = {"pause_s": 0.0, "bytes_read": 0}
"""What a load of a version costs that is held."""
TOLERANCE = 1e-3  # nats; fp32 in both, other kernels


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """The answer of `/generate`, with lists in place of bytes."""
    turn = read(response.content, Turn)
    return turn.as_record() | {
        "token_ids": turn.completion_ids,
        "policy_versions": msgspec.to_builtins(turn.policy_versions),
        "prompt_logprobs": unpack_logprobs(turn.packed_prompt_logprobs),
    }


@dataclass
class Server:
    process: Forked
    weights: list[Path]  # index: policy version; a model, or an adapter of the first
    root: Path
    url: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {TOKEN}"}

    def post(self, route: str, **body) -> httpx.Response:
        return httpx.post(self.url + route, json=body, timeout=120, headers=self.headers)

    def generate(self, token_ids: list[int], **sampling) -> dict:
        response = self.post("/generate", token_ids=token_ids, sampling=sampling)
        assert response.status_code == 200, response.text
        return answer_of(response)

    def load(
        self,
        policy_version: int,
        path: Path | None = None,
        memory: Memory | None = None,
        content: str = "",
    ) -> httpx.Response:
        where = {
            "path": str(path or self.weights[policy_version]),
            "memory": msgspec.to_builtins(memory),
            "content": content,
        }
        return self.post("/load_weights", policy_version=policy_version, **where)

    def status(self) -> dict:
        return httpx.get(self.url + "/status", timeout=30, headers=self.headers).json()

    def engine_pid(self) -> int | None:
        """The engine's process, once it is there."""
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if "EngineCore" in " ".join([*child.cmdline(), child.name()]):
                    return child.pid
        return None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Its engine stands still, so that no request of the body ends before all are running,
        however busy the machine is."""
        engine = self.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(engine, signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def reported(self) -> dict:
        """Its status file; it was not started by `rl`."""
        files = (self.root / "out/run/status").glob("inference-*.json")
        return next((json.loads(file.read_text()) for file in files), {})

    def wait_ready(self) -> None:
        """The address comes from the status file of the run, once the server answers."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.root / "log").read_text()[-3000:]
            if address := self.reported().get("address"):
                self.url = address
                return
            time.sleep(0.1)
        raise TimeoutError((self.root / "log").read_text()[-3000:])


@contextmanager
def in_memory(version: Path) -> Iterator[InMemory]:
    """The weights of a version as its trainer has them in memory."""
    image = image_of(version)
    assert image.file
    yield image.file
    del image


def image_of(version: Path) -> Image:
    """The memory of a trainer that has cast a version into it."""
    tensors = load_file(version / "model.safetensors")
    return fill(image_like(tensors), tensors)


def write_digests(folder: Path) -> None:
    """As the trainer does beside a version's weights."""
    (folder / DIGESTS).write_text(
        json.dumps({"hash": HASH, "tensors": tensor_digests(folder / "model.safetensors")})
    )


def as_deltas(versions: list[Path], folder: Path) -> list[Path]:
    """The same versions as a trainer publishes them with deltas: the first is whole, the others
    hold what differs from the one before."""
    published, last = [shutil.copytree(versions[0], folder / "000001")], LastVersion()
    write_digests(published[0])
    last.keep(1, image_of(versions[0]))
    for number, version in enumerate(versions[1:], 2):
        published.append(folder / f"{number:06d}")
        published[-1].mkdir()
        (published[-1] / DELTA).write_text(
            json.dumps(dict([last.write(image_of(version), published[-1])]))
        )
        files = {file.name: digest_of_file(file) for file in published[-1].iterdir()}
        content = {
            "hash": HASH,
            "tensors": tensor_digests(version / "model.safetensors"),
            "files": files,
        }
        (published[-1] / DIGESTS).write_text(json.dumps(content))
    return published


def damaged_copy(version: Path, folder: Path) -> Path:
    """A version with checksums, and one bit of its last tensor's last byte turned over."""
    shutil.copytree(version, folder)
    write_digests(folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return folder


TOKEN = "0123456789abcdef-of-a-test"


def start_server(root: Path, weights: list[Path], **settings: object) -> Server:
    """A server of `weights[0]` in its own run directory; it is not ready yet."""
    root.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"RL_TOKEN": TOKEN, "XDG_CACHE_HOME": str(root / "cache")}
    flags = {
        "name": "run",
        "output_dir": root / "out",
        "model.name": weights[0],
        "model.dtype": "float32",
    }
    flags |= {
        "model.max_model_len": MAX_MODEL_LEN,
        "orchestrator.environment.id": "none",
        "orchestrator.sampling.max_tokens": 64,
    }
    flags |= {key.replace("__", "."): value for key, value in settings.items()}
    arguments = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    process = inference_zygote().fork("inference", *arguments, log=root / "log", env=env)
    return Server(process, weights, root)


def until_ended(started: dict[str, Server]) -> Iterator[dict[str, Server]]:
    """The body of a fixture: servers that are ready, and ended after the tests."""
    try:
        for server in started.values():
            server.wait_ready()
        yield started
    finally:
        for server in started.values():
            server.end()


@lru_cache(maxsize=8)
def load_policy(path: Path) -> torch.nn.Module:
    """A model, or an adapter on its base, in float32."""
    if not (path / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def rescore(
    path: Path, prompt: list[int], answer: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Logprobs [T] of the answer's tokens by one plain forward pass of transformers."""
    model = load_policy(path)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(answer)[:, None])[
        :, 0
    ]


def assert_logprobs(
    server: Server,
    prompt: list[int],
    answer: dict,
    temperature: float = 1.0,
    tolerance: float = TOLERANCE,
) -> None:
    """Every token has the logprob that the version it is stamped with gives it, after that
    version's reading of all before it."""
    start = 0
    for version, num_tokens in answer["policy_versions"]:
        assert num_tokens > 0
        expected = rescore(server.weights[version], prompt, answer["token_ids"], temperature)[
            start : start + num_tokens
        ]
        got = torch.tensor(answer["logprobs"][start : start + num_tokens])
        assert (expected - got).abs().max() < tolerance, (version, start, num_tokens)
        start += num_tokens
    assert start == len(answer["token_ids"]) == len(answer["logprobs"])
