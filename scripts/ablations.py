"""What matters: one-digit sums (configs/recipes/sums), trained with one setting changed at a time.

`uv run scripts/ablations.py [--only "learning rate" ...] [--seeds 1 2 3]` trains what is missing, about a minute each, and adds it
to scripts/ablations.json; `--table` only writes the table of docs/recipes.md again. Every run has batches of 512 rollouts together; groups
without a signal are replaced. A run that ends early, because it has solved the task, counts with its last reward for the steps left. A
machine that does not multiply bfloat16 computes in float32, and its seeds are named so.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from recipe_curves import with_range, write_table

from rl.config.command_line import build, parse_args
from rl.run_dir.numbers import Numbers
from rl.system.machine import multiplies_bfloat16

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "ablations.json"
RECIPE = "configs/recipes/sums/run.toml"
HELD_OUT = "eval/single-digit-addition/reward_mean"
STEPS, BATCH = 8, 64
LOSS, CREDIT = "--trainer.loss.type", "--orchestrator.credit.type"


def trained_for(steps: int) -> list[str]:
    """Flags of a run of so many steps that is evaluated before and after."""
    return ["--max_steps", str(steps), "--orchestrator.eval.interval", str(steps)]


KINDS: dict[str, dict[str, list[str]]] = {
    "loss": {name: [LOSS, name] for name in ("clip", "cispo", "gspo", "dppo", "dro")},
    "credit": {name: [CREDIT, name] for name in ("grpo", "rloo", "max_rl", "reinforce_pp")},
    "learning rate": {lr: ["--trainer.optim.lr", lr] for lr in ("2e-6", "5e-6", "1e-5", "4e-5", "1e-4")},
    "max_lag": {lag: ["--max_lag", lag] for lag in ("1", "2", "4")},
    "group size": {size: ["--orchestrator.group_size", size] for size in ("4", "16")},
    "batch size": {size: ["--orchestrator.batch_size", size, *trained_for(STEPS * BATCH // int(size))] for size in ("32", "128")},
    "optimizer steps a batch": {
        f"{name} of {loss}": [LOSS, loss, *flags]
        for loss in ("clip", "policy_gradient")
        for name, flags in {"2 minibatches": ["--trainer.minibatches", "2"], "2 epochs": ["--trainer.epochs", "2"]}.items()
    },
    "mask": {"none": ["--trainer.loss.token_mask", "[0, inf]"], "0.5 to 2": ["--trainer.loss.token_mask", "[0.5, 2.0]"]},
    "KL": {weight: ["--trainer.loss.kl_coefficient", weight] for weight in ("0.01", "0.1")},
    "number format": {"float32": ["--model.dtype", "float32"]},
    "aggregation": {name: ["--trainer.loss.aggregation", name] for name in ("sequence", "constant")},
}
"""The changed settings, by kind and name."""
UNCHANGED = ("unchanged", "loss policy_gradient, credit dr_grpo, learning rate 2e-5, max_lag 0, groups of 8, batch of 64")
HEAD = "| setting | value | runs | training reward, mean | held out at the end |\n|---|---|---|---|---|\n"


def train(flags: list[str], seed: int) -> list[float]:
    """Trains one run; returns the mean reward of its rollouts, and the held-out reward before and after."""
    with tempfile.TemporaryDirectory(prefix="ablation-") as folder:
        settings = [*trained_for(STEPS), "--seed", str(seed), "--output_dir", folder, *flags]
        command = [sys.executable, "-m", "rl.main", "@", RECIPE, *settings]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200)
        if done.returncode:
            sys.exit(f"{' '.join(settings)}: exit code {done.returncode}\n{done.stdout[-3000:]}")
        numbers = Numbers.read(Path(folder) / "sums" / "metrics.jsonl")
        rewards, held_out = (numbers.curve(name)[1].tolist() for name in ("reward/mean", HELD_OUT))
        steps = build(parse_args(["@", RECIPE, *settings])).max_steps
        return [round(x, 4) for x in (fmean(rewards + rewards[-1:] * (steps - len(rewards))), held_out[0], held_out[-1])]


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """The rows of all settings that have been run, with the range of their seeds."""
    rows = []
    for key, seeds in results.items():
        kind, name = key.split(": ")
        columns = list(zip(*seeds.values(), strict=True))
        cells = [with_range(values) for values in (columns[0], columns[2])]
        others = sum("float32" in seed for seed in seeds)
        runs = f"{len(seeds)}{f', {others} on AVX2' * bool(others)}"
        rows.append(f"| {kind} | {name} | {runs} | {' | '.join(cells)} |\n")
    return "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[UNCHANGED[0], *KINDS], default=[UNCHANGED[0], *KINDS], metavar="KIND")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = {": ".join(UNCHANGED): []} | {f"{kind}: {name}": flags for kind, values in KINDS.items() for name, flags in values.items()}
    for seed in [] if args.table else args.seeds:
        for key, flags in wanted.items():
            if key.split(": ")[0] in args.only and not any(name.split()[0] == str(seed) for name in results.get(key, {})):
                found = train(flags, seed)
                print(key, seed, *found, flush=True)
                results.setdefault(key, {})[str(seed) if multiplies_bfloat16() else f"{seed} in float32"] = found
                ordered = {name: dict(sorted(results[name].items())) for name in wanted if name in results}
                RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    write_table(HEAD, table(results))


if __name__ == "__main__":
    main()
