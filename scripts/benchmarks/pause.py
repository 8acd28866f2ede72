"""Measures what a weight update costs generation: `uv run scripts/bench.py pause` prints JSON. Seconds are medians over all updates.

A real server, requests in flight all the time, and versions that differ by small noise. `--against DIR` measures the code in another
checkout as well, in turn with this one, so that both see the same machine.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300.0
TOKEN = secrets.token_hex(16)
OPEN = {"Authorization": f"Bearer {TOKEN}"}
QUIET_S = 4.0
"""Between two updates; its tokens a second are what an update is compared with."""
PROMPT_TOKENS, ANSWER_TOKENS = 64, 192


def make_versions(base: Path, folder: Path, count: int) -> tuple[list[Path], list[float]]:
    """Copies of `base` with small noise, written as the trainer publishes; and the seconds that writing each took."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    from rl.run_dir.files import write_directory

    tensors = {name: tensor for file in base.glob("*.safetensors") for name, tensor in load_file(file).items()}
    paths, seconds = [], []
    for version in range(1, count + 1):
        generator = torch.Generator().manual_seed(version)
        new = {}
        for name, tensor in tensors.items():
            noise = 1 + 0.01 * torch.randn(tensor.shape, generator=generator)
            new[name] = (tensor * noise).to(tensor.dtype)

        def fill(target: Path, new: dict[str, Any] = new) -> None:
            save_file(new, target / "model.safetensors", metadata={"format": "pt"})
            for file in base.iterdir():
                if file.suffix in (".json", ".txt", ".jinja"):
                    shutil.copyfile(file, target / file.name)

        start = time.perf_counter()
        write_directory(folder / f"{version:06d}", fill)
        paths.append(folder / f"{version:06d}")
        seconds.append(time.perf_counter() - start)
    return paths, seconds


@dataclass
class Server:
    """One server and the requests that keep it busy; `arrivals` are (time, tokens) of all of them together."""

    url: str
    process: subprocess.Popen
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    async def keep_busy(self, client: httpx.AsyncClient, model: str, seed: int) -> None:
        """Asks again and again. Tokens are seen as they are sampled."""
        prompt = [1000 + 7 * seed + i for i in range(PROMPT_TOKENS)]
        body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
        while True:
            async with client.stream("POST", self.url + "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        self.arrivals.append((time.perf_counter(), len(choice["token_ids"] or [])))

    def tokens(self, start: float, end: float) -> int:
        return sum(count for at, count in self.arrivals if start < at <= end)

    def longest_gap(self, start: float, end: float) -> float:
        """The longest time without any token, ending in the interval."""
        times = [at for at, _ in self.arrivals if at <= end]
        return max((after - before for before, after in pairwise(times) if after > start), default=0.0)

    async def update(self, client: httpx.AsyncClient, version: int, path: Path) -> dict[str, float]:
        """Loads a version under the requests. `lost_s`: how long generation would have taken for the tokens that are missing."""
        quiet = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        start = time.perf_counter()
        rate = max(1, self.tokens(quiet, start)) / (start - quiet)
        response = await client.post(self.url + "/load_weights", json={"policy_version": version, "path": str(path)})
        response.raise_for_status()
        loaded = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        end = time.perf_counter()
        gap = self.longest_gap(start, end)
        print(f"version {version} of {self.url}: {response.json()}", file=sys.stderr, flush=True)
        times = {key: value for key, value in response.json().items() if key.endswith("_s")}
        stop = times["pause_s"] + times.get("drain_s", 0.0)
        return {
            **times,
            "stop_s": stop,
            "load_s": loaded - start,
            "gap_s": gap,
            "first_token_s": max(0.0, gap - times["pause_s"]),
            "lost_s": (end - start) - self.tokens(start, end) / rate,
            "lost_tokens": (end - start) * rate - self.tokens(start, end),
            "read_mib": response.json().get("bytes_read", 0) / 2**20,
            "tokens_per_s": rate,
        }


async def measure(url: str, process: subprocess.Popen, model: str, paths: list[Path], requests: int) -> list[dict[str, float]]:
    """One result an update; the first update warms up and is left out."""
    server = Server(url, process)
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), headers=OPEN) as client:
        busy = [asyncio.create_task(server.keep_busy(client, model, seed)) for seed in range(requests)]
        async with asyncio.timeout(START_TIMEOUT_S):
            while not server.arrivals and not any(task.done() for task in busy):
                await asyncio.sleep(0.1)
        results = [await server.update(client, version, path) for version, path in enumerate(paths, 1)]
        failed = [task for task in busy if task.done()]
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        if failed:
            failed[0].result()
    return results[1:]


def start_server(checkout: Path, model: Path, work: Path, dtype: str, workers: int) -> tuple[subprocess.Popen, str]:
    """The server of a checkout with this many workers, ready; its address."""
    flags = {"name": "run", "output_dir": work, "model.name": model, "model.dtype": dtype, "model.max_model_len": 512}
    flags |= {"orchestrator.environment.id": "none", "orchestrator.sampling.max_tokens": ANSWER_TOKENS}
    flags |= {"inference.vllm": f"{{tensor_parallel_size = {workers}}}"} if workers > 1 else {}
    command = [sys.executable, "-m", "rl.inference.main", *(part for key, value in flags.items() for part in (f"--{key}", str(value)))]
    work.mkdir(parents=True)
    with (work / "log").open("wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "RL_TOKEN": TOKEN}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        for status in (work / "run/status").glob("inference*.json"):
            if address := json.loads(status.read_text()).get("address"):
                return process, address
        time.sleep(0.2)
    raise SystemExit(f"the server of {checkout} did not start:\n{(work / 'log').read_text()[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a name that rl resolves; default: rl's default model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workers", type=int, default=1, help="of a server, each with its part of the weights")
    parser.add_argument("--requests", type=int, default=16, help="in flight all the time")
    parser.add_argument("--versions", type=int, default=4, help="updates a round; the first is left out")
    parser.add_argument("--rounds", type=int, default=1, help="servers started, of each checkout in turn")
    parser.add_argument("--against", type=Path, help="another checkout to measure in turn with this one")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that the server and the versions go as well
    from rl.config.run import ModelConfig
    from rl.models.folder import resolve_model

    model = Path(resolve_model(ModelConfig(name=args.model) if args.model else ModelConfig()))
    checkouts = {"this": ROOT} | ({"against": args.against.resolve()} if args.against else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        paths, publish_s = make_versions(model, Path(folder), args.versions)
        for turn in range(args.rounds):
            for name, checkout in checkouts.items():
                process, url = start_server(checkout, model, Path(folder) / f"{name}-{turn}", args.dtype, args.workers)
                try:
                    found[name] += asyncio.run(measure(url, process, str(model), paths, args.requests))
                finally:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait()
    said: dict[str, Any] = {"model": model.name, "requests": args.requests, "updates": len(found["this"]), "publish_s": median(publish_s)}
    for name, results in found.items():
        said[name] = {key: round(median(result[key] for result in results), 4) for key in results[0]}
        said[name]["pause_s_all"] = [round(result["pause_s"], 4) for result in results]
    print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
