"""What browsers that look on cost a training step: `uv run scripts/bench.py watched --model FOLDER` prints JSON.

A server of `rl view` and `--clients` that ask it what the page of a live run asks, as often as that, run beside every second step, and are
stopped by SIGSTOP meanwhile. So both kinds of steps meet whatever else the machine does. The run that they look at gets a line of metrics a
step. The clients take processor time of this machine, at the lowest priority, which browsers elsewhere would not.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx
import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from records import make
from trainer import our_step

from rl.config.run import ModelConfig, RLConfig
from rl.config.trainer import FakeDataConfig
from rl.launch.devices import MALLOC
from rl.run_dir.metrics import MetricsLog
from rl.trainer.fake import FakeBatches
from rl.trainer.parallel.world import start_world
from rl.trainer.prefetch import prepare

POLL_S = 2.0
QUESTIONS = ("runs", "metrics?run=x", "curves?run=x&name=reward/mean&name=loss/mean", "rollouts?run=x", "health?run=x", "timeline?run=x")


def look_on(address: str, clients: int) -> None:
    """Asks what the pages of so many browsers ask, for ever."""
    os.nice(19)
    base = address.split("/?")[0]
    browsers = [httpx.Client(base_url=base, timeout=60) for _ in range(clients)]
    for browser in browsers:
        browser.get(address).raise_for_status()
    tags: dict[tuple[int, str], str] = {}
    while True:
        began = time.monotonic()
        for i, browser in enumerate(browsers):
            for question in ("runs", QUESTIONS[i % len(QUESTIONS)]):
                answer = browser.get(f"/api/{question}", headers={"if-none-match": tags.get((i, question), "")})
                tags[i, question] = answer.headers.get("etag", "")
        time.sleep(max(0.0, POLL_S - (time.monotonic() - began)))


def measure(model: str, clients: int, rounds: int, data: FakeDataConfig, folder: Path) -> dict[str, object]:
    run_dir = make(folder / "x", 1000, 8, 500)
    log = MetricsLog(run_dir.metrics, "trainer")
    command = [sys.executable, "-m", "rl.main", "view", str(run_dir.root), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"XDG_CACHE_HOME": str(folder)})
    assert server.stdout
    address = re.search(r"http\S+", server.stdout.readline())[0]  # type: ignore[index]
    browsers = subprocess.Popen([sys.executable, __file__, "--model", model, "--clients", str(clients), "--look-on", address])
    try:
        config = RLConfig(model=ModelConfig(name=model), trainer={"micro_batch_tokens": 1 << 16})
        world = start_world(False, 600.0)
        step, shape = our_step(model, config, world), AutoConfig.from_pretrained(model).get_text_config()
        batches, times = FakeBatches(data, shape.vocab_size, seed=0), dict[str, list[float]](alone=[], watched=[])
        for number in range(1, rounds + 2):
            packed = prepare(batches.receive(number), config, world, shape.hidden_size)
            log.write(number, {"loss/mean": 1.0 / number, "reward/mean": 0.1})
            for name in sorted(times, reverse=number % 2 == 1):
                for process in (server, browsers):
                    process.send_signal(signal.SIGCONT if name == "watched" else signal.SIGSTOP)
                times[name].append(step(packed)["step"])
        torch.distributed.destroy_process_group()
        ratios = [a / b for a, b in zip(times["watched"][1:], times["alone"][1:], strict=True)]
        return {
            "clients": clients,
            "rounds": rounds,
            **{f"{name}_s": round(median(values[1:]), 4) for name, values in times.items()},
            "ratio": round(median(ratios), 4),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    finally:
        for process in (browsers, server):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder; `python -m rl.models.folder` prints that of the default model")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--look-on", metavar="ADDRESS", help="be the browsers, which the benchmark starts")
    args = parser.parse_args()
    if args.look_on:
        return look_on(args.look_on, args.clients)
    if not MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    data = FakeDataConfig(samples=args.samples, group_size=8, prompt_tokens=64, completion_tokens=64)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"load": os.getloadavg()[0], **measure(args.model, args.clients, args.rounds, data, Path(folder))}, indent=2))


if __name__ == "__main__":
    main()
