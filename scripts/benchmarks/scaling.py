"""The trainer alone on random samples (`trainer --trainer.data.fake`), a process for each size: tokens a second and peak memory against the
number of samples in a batch, and against their length at a constant number of tokens. Prints JSON.

`uv run scripts/bench.py scaling`. The model is random: --layers and --hidden say how large; the default is small enough for two CPU cores
to train 4,096 samples in a minute.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
STEPS = 3
"""The first is not counted."""


def make_model(folder: Path, hidden: int, layers: int, max_len: int) -> Path:
    from rl.models.tiny import make_tiny_model

    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "max_position_embeddings": 2 * max_len}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 192)}
    return make_tiny_model(folder, {"model_type": "llama", "vocab_size": 8192, "tie_word_embeddings": False, **sizes, **heads})


def run(model: Path, samples: int, length: int, gpu: bool, extra: list[str], folder: Path) -> dict[str, Any]:
    """Medians of one size: `length` is of a sample, an eighth of it prompt that a group of eight shares."""
    from rl.launch.devices import MALLOC
    from rl.run_dir.metrics import read_metrics

    name = f"{samples}x{length}"
    prompt = length // 8
    flags = ["--name", name, "--output_dir", str(folder), "--model.name", str(model), "--model.max_model_len", str(2 * length)]
    flags += ["--max_steps", str(STEPS), "--trainer.data.fake.samples", str(samples), "--trainer.data.fake.prompt_tokens", str(prompt)]
    flags += ["--trainer.data.fake.completion_tokens", str(length - prompt), *([] if gpu else ["--trainer.gpus", "0"]), *extra]
    environment = os.environ | ({} if gpu else MALLOC)
    subprocess.run([sys.executable, "-m", "rl.trainer.main", *flags], check=True, env=environment, stdout=sys.stderr)
    lines = read_metrics(folder / name / "metrics.jsonl")
    steps = [lines[step, "trainer"] for step in range(2, STEPS + 1)]
    found = {key: median(step[key] for step in steps) for key in ("perf/tokens_per_s", "time/forward_backward", "perf/peak_memory_gib")}
    computed = samples * length * (1 - steps[0]["perf/shared_token_fraction"])
    return {
        "samples": samples,
        "length": length,
        "tokens_per_s": round(found["perf/tokens_per_s"]),
        "us_per_computed_token": round(1e6 * found["time/forward_backward"] / computed, 1),
        "wait_for_batch_s": round(median(step["time/wait_for_batch"] for step in steps), 2),
        "peak_memory_gib": round(found["perf/peak_memory_gib"], 2),
        **({"mfu": round(median(step["perf/mfu"] for step in steps), 3)} if "perf/mfu" in steps[0] else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="*", default=[64, 256, 1024, 4096], help="at --length tokens each")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 1024, 4096, 8192], help="at --tokens a batch")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--model", type=Path, help="a folder instead of the random model")
    parser.add_argument("--gpu", action="store_true")
    args, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="rl-bench-") as name:
        folder = Path(name)
        longest = max([args.length, *args.lengths])
        model = args.model or make_model(folder / "model", args.hidden, args.layers, longest)
        cases = [(samples, args.length) for samples in args.samples] + [(args.tokens // length, length) for length in args.lengths]
        results = [run(model, samples, length, args.gpu, extra, folder) for samples, length in cases]
    print(json.dumps({"cores": os.cpu_count(), "hidden": args.hidden, "layers": args.layers, "sizes": results}, indent=2))


if __name__ == "__main__":
    main()
