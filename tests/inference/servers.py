"""Real servers for tests, and transformers as the judge of what they answer."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM

MAX_MODEL_LEN = 960
TOLERANCE = 1e-3  # nats; fp32 in both, other kernels


@dataclass
class Server:
    process: subprocess.Popen
    weights: list[Path]  # index: policy version; a model, or an adapter of the first
    root: Path
    url: str = ""

    def post(self, route: str, **body) -> httpx.Response:
        return httpx.post(self.url + route, json=body, timeout=120)

    def generate(self, token_ids: list[int], **sampling) -> dict:
        response = self.post("/generate", token_ids=token_ids, sampling=sampling)
        assert response.status_code == 200, response.text
        return response.json()

    def load(self, policy_version: int, path: Path | None = None) -> httpx.Response:
        return self.post("/load_weights", policy_version=policy_version, path=str(path or self.weights[policy_version]))

    def status(self) -> dict:
        return httpx.get(self.url + "/status", timeout=30).json()

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_ready(self) -> None:
        """The address comes from the status file of the run, once the server answers."""
        file = self.root / "out/run/status/inference.json"
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.root / "log").read_text()[-3000:]
            if file.exists() and (address := json.loads(file.read_text()).get("address")):
                self.url = address
                return
            time.sleep(0.1)
        raise TimeoutError((self.root / "log").read_text()[-3000:])


def start_server(root: Path, weights: list[Path], **settings: object) -> Server:
    """A server of `weights[0]` in its own run directory; it is not ready yet."""
    root.mkdir(exist_ok=True)
    flags = {"name": "run", "output_dir": root / "out", "model.name": weights[0], "model.dtype": "float32"}
    flags |= {"model.max_model_len": MAX_MODEL_LEN, "orchestrator.environment.id": "none", "orchestrator.sampling.max_tokens": 64}
    flags |= {key.replace("__", "."): value for key, value in settings.items()}
    command = [sys.executable, "-m", "rl.inference.main", *(part for key, value in flags.items() for part in (f"--{key}", str(value)))]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    return Server(process, weights, root)


@lru_cache(maxsize=8)
def load_policy(path: Path) -> torch.nn.Module:
    """A model, or an adapter on its base, in float32."""
    if not (path / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def rescore(path: Path, prompt: list[int], answer: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprobs [T] of the answer's tokens by one plain forward pass of transformers."""
    model = load_policy(path)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def assert_logprobs(server: Server, prompt: list[int], answer: dict, temperature: float = 1.0, tolerance: float = TOLERANCE) -> None:
    """Every token has the logprob that the version it is stamped with gives it, after that version's reading of all before it."""
    start = 0
    for version, num_tokens in answer["policy_versions"]:
        assert num_tokens > 0
        expected = rescore(server.weights[version], prompt, answer["token_ids"], temperature)[start : start + num_tokens]
        got = torch.tensor(answer["logprobs"][start : start + num_tokens])
        assert (expected - got).abs().max() < tolerance, (version, start, num_tokens)
        start += num_tokens
    assert start == len(answer["token_ids"]) == len(answer["logprobs"])
