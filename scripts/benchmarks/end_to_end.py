"""What the whole loop makes of the machine, against its parts alone.

`together`: the quickstart's task with trainer and inference on the same cores; then, on the same cores, generation alone (the same
environment, a batch's worth of rollouts always in flight, the run's last weights, nobody training) and training alone (the run's own
batches, nobody generating). With g and t the seconds that each alone takes for one batch, the ideal is g + t a batch; the efficiency is
(g + t) / seconds a batch of the whole loop, between two batches in its middle.

`apart`: one half of the cores for inference, the other for the trainer; asynchronous (max_lag 1) against synchronous (max_lag 0). The
ceiling of what asynchrony can give is (g + t) / max(g, t), with g and t measured alone on these halves.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rl.config.command_line import build, from_toml, parse_args, to_toml
from rl.config.run import RLConfig
from rl.launch import devices
from rl.run_dir.files import write_file
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import RunDir, numbered
from rl.system.machine import machine
from rl.wire.batch_file import decode_batch
from rl.wire.transport import OrchestratorClient, Wait

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SKIPPED = 2
"""Batches at the start that are not counted: servers warm up."""
PATIENCE_S = 1200.0


@dataclass(frozen=True)
class Place:
    """Cores of the two, as lists in TOML; None: all."""

    inference: str | None = None
    trainer: str | None = None

    @property
    def flags(self) -> list[str]:
        flags = ["--inference-cpus", self.inference] if self.inference else []
        return flags + (["--trainer-cpus", self.trainer] if self.trainer else [])


def rl(*args: str) -> None:
    """Runs `rl` to its end."""
    subprocess.run([sys.executable, "-m", "rl.main", *args], check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)


def whole_loop(flags: list[str], steps: int, place: Place, name: str, folder: Path) -> tuple[RunDir, float]:
    """A run without evaluations. Returns its directory and the seconds a batch in its middle."""
    own = ["--name", name, "--output_dir", str(folder), "--max_steps", str(steps), "--orchestrator.eval", "[]"]
    rl(*flags, *own, *place.flags, "--trainer.checkpoint.interval", str(10 * steps), "--orchestrator.show_rollout_every", "0")
    run_dir = from_toml(folder / name / "config.toml").run_dir
    return run_dir, seconds_a_batch(run_dir, steps)


def seconds_a_batch(run_dir: RunDir, steps: int) -> float:
    """Of the trainer's batches after the skipped ones, without the checkpoint that the last step writes."""
    lines = [read_metrics(run_dir.metrics)[step, "trainer"] for step in range(1, steps + 1)]
    took = lines[-1]["time"] - lines[SKIPPED - 1]["time"] - sum(line.get("time/checkpoint", 0.0) for line in lines[SKIPPED:])
    return took / (steps - SKIPPED)


def pauses(run_dir: RunDir, steps: int) -> float:
    """Median pause of generation for new weights, seconds."""
    lines = read_metrics(run_dir.metrics)
    found = [lines[step, "orchestrator"].get("time/pause_inference") for step in range(SKIPPED + 1, steps + 1)]
    return median([pause for pause in found if pause is not None] or [0.0])


def generated_per_batch(run_dir: RunDir, steps: int) -> float:
    """Tokens that the run sampled for a batch, those of dropped groups included."""
    lines = read_metrics(run_dir.metrics)
    counts = [
        lines[step, "orchestrator"]["rollouts/finished"] * lines[step, "orchestrator"]["rollouts/length_mean"]
        for step in range(SKIPPED + 1, steps + 1)
    ]
    return sum(counts) / len(counts)


def generation_alone(flags: list[str], model: Path, place: Place, folder: Path, batches: int) -> float:
    """Sampled tokens a second of inference and orchestrator, a batch's worth of rollouts always in flight, and nobody training."""
    shutil.rmtree(folder / "alone", ignore_errors=True)
    own = (
        f"--name alone --output_dir {folder} --max_steps {batches} --orchestrator.eval [] --model.name {model} --max_lag {batches} "
        f"--orchestrator.max_off_policy_steps {batches}".split()
    )
    config = build(parse_args([*flags, *own, *place.flags]))
    config.orchestrator.environment[0].max_generating = config.orchestrator.batch_size
    write_file(config.run_dir.config, to_toml(config).encode())
    share = devices.split(config, machine()).inference
    environment = {**os.environ, **share.env, "RL_PARENT_PID": str(os.getpid())}
    cores = ",".join(map(str, share.cores))
    commands = [
        ["taskset", "-c", cores, sys.executable, "-m", "rl.inference.main", "@", str(config.run_dir.config)],
        [sys.executable, "-m", "rl.orchestrator.main", "@", str(config.run_dir.config)],
    ]
    children = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for command in commands]
    try:
        follow(config, batches)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait(60)
    lines = read_metrics(config.run_dir.metrics)
    seen = [lines[step, "orchestrator"] for step in range(1, batches + 1)]
    tokens = sum(line["rollouts/finished"] * line["rollouts/length_mean"] for line in seen[SKIPPED:])
    return tokens / (seen[-1]["time"] - seen[SKIPPED - 1]["time"])


def follow(config: RLConfig, batches: int) -> None:
    """A trainer that only takes batches: with so large a max_lag nobody waits for a version."""
    client, wait = OrchestratorClient(config.run_dir), Wait(PATIENCE_S, lambda *_: None)
    for step in range(1, batches + 1):
        with wait:
            client.get_batch(step, wait)


def training_alone(run_dir: RunDir, place: Place, folder: Path) -> float:
    """Seconds a batch of the trainer on the run's own batches, publishing included, and nobody generating."""
    from tests.trainer.stub_orchestrator import StubOrchestrator

    config = from_toml(run_dir.config).model_copy(deep=True)
    config.name, config.output_dir = "trained", str(folder)
    shutil.rmtree(config.run_dir.root, ignore_errors=True)
    write_file(config.run_dir.config, to_toml(config).encode())
    batches = [decode_batch(path.read_bytes(), path.name).batch for path in numbered(run_dir.batches, ".batch").values()]
    command = [sys.executable, "-m", "rl.trainer.main", "@", str(config.run_dir.config)]
    if place.trainer:
        command = ["taskset", "-c", place.trainer.strip("[]").replace(" ", ""), *command]
    environment = {**os.environ, **devices.split(config, machine()).trainer.env}
    with StubOrchestrator(config.run_dir, batches):
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
    return seconds_a_batch(config.run_dir, len(batches))


def parts(flags: list[str], run_dir: RunDir, place: Place, folder: Path, steps: int) -> tuple[float, float]:
    """(g, t): seconds a batch of generation alone and of training alone."""
    model = run_dir.newest_weights()[1]
    rate = generation_alone(flags, model, place, folder, steps)
    return generated_per_batch(run_dir, steps) / rate, training_alone(run_dir, place, folder)


def together(flags: list[str], steps: int) -> dict[str, float]:
    """The whole loop against its parts, all on the same cores."""
    with tempfile.TemporaryDirectory(prefix="rl-bench-") as name:
        folder, place = Path(name), Place()
        run_dir, seconds = whole_loop(flags, steps, place, "together", folder)
        g, t = parts(flags, run_dir, place, folder, steps)
        pause = pauses(run_dir, steps)
    return {
        "seconds_a_batch": round(seconds, 2),
        "generation_alone_s": round(g, 2),
        "training_alone_s": round(t, 2),
        "efficiency": round((g + t) / seconds, 3),
        "pause_s_median": round(pause, 3),
    }


def apart(flags: list[str], steps: int) -> dict[str, float]:
    """Asynchronous against synchronous, each of the two on its own half of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    place = Place(json.dumps(cores[:half]), json.dumps(cores[half:]))
    with tempfile.TemporaryDirectory(prefix="rl-bench-") as name:
        folder = Path(name)
        _, synchronous = whole_loop([*flags, "--max_lag", "0"], steps, place, "sync", folder)
        run_dir, asynchronous = whole_loop([*flags, "--max_lag", "1"], steps, place, "async", folder)
        g, t = parts(flags, run_dir, place, folder, steps)
    ceiling = (g + t) / max(g, t)
    return {
        "synchronous_s_a_batch": round(synchronous, 2),
        "asynchronous_s_a_batch": round(asynchronous, 2),
        "generation_alone_s": round(g, 2),
        "training_alone_s": round(t, 2),
        "speedup": round(synchronous / asynchronous, 3),
        "ceiling": round(ceiling, 3),
        "of_ceiling": round(synchronous / asynchronous / ceiling, 3),
    }


def main(kind: str, flags: list[str], steps: int) -> None:
    """Prints one JSON object."""
    started = time.time()
    found = {"together": together, "apart": apart}[kind](flags, steps)
    print(
        json.dumps(
            {"benchmark": kind, "cores": os.cpu_count(), "steps": steps, "flags": flags, **found, "took_s": round(time.time() - started)}
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["together", "apart"])
    parser.add_argument("--steps", type=int, default=12)
    arguments, rest = parser.parse_known_args()
    main(arguments.kind, rest or ["@", str(ROOT / "configs" / "quickstart.toml")], arguments.steps)
