"""Trains two tasks with `rl` and with TRL's GRPOTrainer, and draws the reward over samples and over
seconds.

`uv run scripts/compare_with_trl.py [--seeds 1 2 3]` trains what scripts/trl_curves.json lacks, one
and a half to three minutes each here and seven to thirteen in TRL, draws docs/trl.png, and writes
the table of docs/recipes.md; `--plot` trains nothing. Both have the same model, prompts, samples a
step, learning rate, optimizer, on-policy loss and number formats (float32 masters, bfloat16
products; only ours begin with dither), and ask the same tasks in the same order. With `--dtype
float32`, and on machines that do not multiply bfloat16, products are float32. Nothing is replaced:
a group whose rewards are all equal keeps its place, as in TRL. Seconds count from the command, so
they have both programs' starts in them. TRL runs in an environment of its own, which `uv` makes
first.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

from recipe_curves import with_range, write_table

from rl.config.run import ModelConfig
from rl.models.folder import resolve_model
from rl.run_dir.numbers import Numbers
from rl.system.machine import multiplies_bfloat16

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURE = ROOT / "scripts" / "trl_curves.json", ROOT / "docs" / "trl.png"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGES = ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0", "accelerate==1.15.0")
TRL = [
    "uv",
    "run",
    "--no-project",
    "--python",
    "3.11",
    *(word for package in PACKAGES for word in ("--with", package)),
    "python",
]
TASKS = {"single-digit-addition": ("last_number", "16"), "pick-word-v1": ("one_word", "8")}
"""The reward's name in trl_grpo.py, and new tokens, by environment."""
STEPS, BATCH, GROUP = 15, 64, 8
HEAD = (
    "| task | system | seeds | mean reward of all samples | of the last five steps | seconds a "
    "step |\n|---|---|---|---|---|---|\n"
)
Curve = dict[str, list[float]]
"""`reward`: the mean of each step's samples; `seconds`: since the command, at the end of each
step."""


def train_here(task: str, seed: int, dtype: str, folder: Path) -> Curve:
    """Trains with `rl`."""
    settings = {
        "name": "run",
        "output_dir": folder,
        "seed": seed,
        "max_steps": STEPS,
        "max_lag": 0,
        "model.name": MODEL,
        "model.dtype": dtype,
        "model.max_model_len": 256,
        "orchestrator.environment.id": task,
        "orchestrator.batch_size": BATCH,
        "orchestrator.group_size": GROUP,
        "orchestrator.replace_no_signal": "false",
        "orchestrator.sampling.max_tokens": TASKS[task][1],
        "trainer.optim.lr": 2e-5,
    }
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    began = time.time()
    subprocess.run(
        [sys.executable, "-m", "rl.main", *flags],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=1200,
    )
    trained = [
        json.loads(line)
        for line in (folder / "run" / "metrics" / "trainer.jsonl").read_text().splitlines()
    ]
    rewards = Numbers.read(folder / "run" / "metrics.jsonl").curve("reward/mean")[1].tolist()
    return checked({"reward": rewards, "seconds": [line["time"] - began for line in trained]})


def train_there(task: str, seed: int, dtype: str, folder: Path) -> Curve:
    """Trains with TRL."""
    tasks, (reward, tokens) = folder / "tasks.jsonl", TASKS[task]
    export = [sys.executable, "-m", "rl.main", "env", task, "--export", str(tasks)]
    subprocess.run(export, cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=300)
    write_in_our_order(tasks, task, seed)
    script = str(ROOT / "scripts" / "benchmarks" / "trl_grpo.py")
    settings = {
        "reward": reward,
        "steps": STEPS,
        "max-tokens": tokens,
        "seed": seed,
        "micro-batch": 16,
        "products": dtype,
    }
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    began, command = (
        time.time(),
        [*TRL, script, resolve_model(ModelConfig(name=MODEL)), str(tasks), *flags],
    )
    output = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=3600
    ).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    return checked(
        {
            "reward": [line["reward"] for line in lines],
            "seconds": [line["time"] - began for line in lines],
        }
    )


def write_in_our_order(tasks: Path, task: str, seed: int) -> None:
    """Orders the rows as a run of `rl` asks them (rl.orchestrator.tasks.task_source), for as
    many epochs as the steps need: at first, which questions a batch asks decides more of its
    reward than the batches before do."""
    rows, found = tasks.read_text().splitlines(keepends=True), list[str]()
    for epoch in range(-(-STEPS * BATCH // GROUP // len(rows))):
        order = list(rows)
        random.Random(f"{seed}/{task}/{epoch}").shuffle(order)
        found += order
    tasks.write_text("".join(found))


def checked(curve: Curve) -> Curve:
    """Returns the curve. Ends the process if a step is missing, or was made again after a
    restart."""
    if any(len(values) != STEPS for values in curve.values()):
        sys.exit(
            f"{len(curve['reward'])} rewards at {len(curve['seconds'])} times in place of "
            f"{STEPS} steps: run it again"
        )
    return {key: [round(value, 4) for value in values] for key, values in curve.items()}


TRAINED = {"rl": train_here, "TRL 1.16": train_there}


def draw(results: dict[str, dict[str, dict[str, Curve]]]) -> None:
    """Draws each seed as a thin line and their mean, a row of panels for each task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 2, squeeze=False, sharey="row")
    for row, (task, systems) in zip(panels, results.items(), strict=True):
        for color, (system, seeds) in zip(("C0", "C1", "C2", "C3"), systems.items(), strict=False):
            samples = [BATCH * step for step in range(1, STEPS + 1)]
            for curve in seeds.values():
                row[0].plot(samples, curve["reward"], color=color, alpha=0.35, linewidth=0.8)
                row[1].plot(
                    curve["seconds"], curve["reward"], color=color, alpha=0.35, linewidth=0.8
                )
            mean = {
                key: [
                    fmean(values)
                    for values in zip(*(curve[key] for curve in seeds.values()), strict=True)
                ]
                for key in ("reward", "seconds")
            }
            row[0].plot(
                samples,
                mean["reward"],
                color=color,
                label=f"{system}, {len(seeds)} seed{'s' * (len(seeds) > 1)}",
            )
            row[1].plot(mean["seconds"], mean["reward"], color=color)
        row[0].set_title(task, fontsize=10)
        row[0].set_ylabel("reward")
        row[0].set_xlabel("samples")
        row[1].set_xlabel("seconds since the command")
        row[0].legend()
        for panel in row:
            panel.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=100)


def table(results: dict[str, dict[str, dict[str, Curve]]]) -> str:
    """The rows of all tasks and systems: the mean reward of all samples and of the last five
    steps, and seconds a step."""
    rows = []
    for task, systems in results.items():
        for system, seeds in systems.items():
            curves = list(seeds.values())
            cells = [
                with_range([fmean(curve["reward"][since:]) for curve in curves])
                for since in (0, STEPS - 5)
            ]
            step_s = median(
                (curve["seconds"][-1] - curve["seconds"][2]) / (STEPS - 3) for curve in curves
            )
            rows.append(
                f"| {task} | {system} | {len(curves)} | {' | '.join(cells)} | {step_s:.1f} |\n"
            )
    return "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="number format of products; default: bfloat16 if this machine has it",
    )
    parser.add_argument("--plot", action="store_true", help="train nothing")
    args = parser.parse_args()
    dtype = args.dtype or ("bfloat16" if multiplies_bfloat16() else "float32")
    results: dict[str, dict[str, dict[str, Curve]]] = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    )
    if not args.plot:
        # its installation does not count
        subprocess.run([*TRL, "-c", "import trl"], check=True, timeout=1200)
    for seed in [] if args.plot else args.seeds:
        for task in args.only:
            for system, train in TRAINED.items():
                name = f"{system} in float32" if dtype == "float32" else system
                seeds = results.setdefault(task, {}).setdefault(name, {})
                if str(seed) not in seeds:
                    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
                        seeds[str(seed)] = train(task, seed, dtype, Path(folder))
                    print(task, name, seed, seeds[str(seed)], flush=True)
                    RESULTS.write_text(json.dumps(results) + "\n")
    if not results:
        sys.exit(f"{RESULTS} has no curve yet: run it without --plot")
    draw(results)
    write_table(HEAD, table(results))


if __name__ == "__main__":
    main()
