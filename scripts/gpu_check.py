"""What the first minutes on a GPU should tell: is everything exact there, and how fast is it?
`python scripts/gpu_check.py`.

Needs the trainer's packages alone (`scripts/gpu_stack.py pack --trainer` collects what a machine
with torch, peft and pyarrow lacks) and no network. --stack runs the whole loop, servers and runs,
which needs all that `scripts/gpu_stack.py pack` collects. Each part runs in a process of its own
with a limit, the most telling first. A part whose limit no longer fits into the --budget is
skipped: a call with --only runs it, and adds it to the results, which go into one JSON file as soon
as a part ends, and as a table to the console. What a case raises is said, and its part goes on.
--tiny runs all of it on a CPU, to see that it works.

On a machine that has compiled nothing yet the parts of the trainer take three calls of at most nine
minutes,

  python scripts/gpu_check.py --only gradients --only replay
  python scripts/gpu_check.py --only experts --only train_0.6B
  python scripts/gpu_check.py --only train_4B

and those of the whole loop four:

  python scripts/gpu_check.py --only serve --only swap
  python scripts/gpu_check.py --only quickstart --only masks
  python scripts/gpu_check.py --only lora --only moe
  python scripts/gpu_check.py --only kills --only speed
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
LIMITS = {
    "gradients": 150,
    "replay": 240,
    "experts": 240,
    "train_0.6B": 150,
    "train_4B": 150,
    "serve": 300,
    "quickstart": 240,
    "swap": 150,
    "masks": 150,
    "lora": 150,
    "moe": 150,
    "kills": 240,
    "speed": 270,
}
"""The parts in their order, first whether all is right, then how fast it is, and the most
seconds of each: enough for a machine that has everything yet to compile."""
STACK = (*list(LIMITS)[5:], "train_0.6B")
"""The parts of the whole loop, for which the machine needs vLLM, and those of --stack."""
MARGIN_S = 30
"""So long before its limit a part tells why it is late."""
NUM_CHARACTERS = 6000
"""Of what a part that failed has said last."""
NO_TIME = "skipped: no time"


@dataclass
class Report:
    """All results, in a file that is whole at any time."""

    path: Path
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, part: str, state: str, cases: list[dict[str, Any]], seconds: float = 0.0) -> None:
        """`state`: "done", NO_TIME, or what went wrong."""
        self.results[part] = {"state": state, "seconds": round(seconds, 1), "cases": cases}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.results, indent=1))
        temporary.replace(self.path)
        print(f"\n{part}: {state} ({seconds:.0f} s)", flush=True)
        for case in cases:
            print(f"  {line(case)}", flush=True)


def line(case: dict[str, Any]) -> str:
    """A case as a row of the table: its name, its figures, its aim."""
    figures = "  ".join(
        f"{name} {value}"
        for name, value in case.items()
        if name not in ("case", "aim") and value is not None
    )
    return f"{case.get('case', ''):<28}{figures}" + (
        f"   [aim: {case['aim']}]" if "aim" in case else ""
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models on the CPU: does the script itself work?"
    )
    parser.add_argument("--stack", action="store_true", help=f"the whole loop: {', '.join(STACK)}")
    parser.add_argument(
        "--only",
        action="append",
        choices=LIMITS,
        metavar="PART",
        help=f"one of {', '.join(LIMITS)}; may be repeated",
    )
    parser.add_argument(
        "--budget", type=float, default=540.0, help="seconds for all of it, imports too"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    args = parser.parse_args()
    report = Report(
        args.output,
        json.loads(args.output.read_text()) if args.only and args.output.exists() else {},
    )
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"} | (
        {"OMP_NUM_THREADS": "1"} if args.tiny else {}
    )
    # as the trainer's process has it
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from benchmarks.gpu_bench import Bench, in_fork, told
    from benchmarks.gpu_parts import PARTS  # seconds, once for all of them

    parts, wanted = {**PARTS}, args.only or (STACK if args.stack else PARTS)
    if not parts.keys() >= {*wanted}:
        from tests.proofs import gpu_loop

        parts |= gpu_loop.PARTS
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        for part in wanted:
            since, limit_s = time.monotonic(), LIMITS[part]
            if since + limit_s > STARTED + args.budget:
                report.add(part, NO_TIME, [])
                continue
            place, log = "cpu" if args.tiny else "cuda", Path(name) / part
            ends, logs = since + limit_s - MARGIN_S, args.output.with_suffix(".log").absolute()
            bench = Bench(Path(name), place, args.tiny, ends, logs)
            code = in_fork(partial(parts[part], bench), log, limit_s)
            state = (
                "done"
                if code == 0
                else f"ended after its {limit_s} s"
                if code is None
                else f"failed with exit code {code}"
            )
            cases = told(log)
            if code != 0:
                text = Path(f"{log}.err").read_text() or Path(f"{log}.out").read_text()
                state += f": {text.strip()[-NUM_CHARACTERS:]}"
            elif raised := [case["case"] for case in cases if "raised" in case]:
                state = f"raised errors: {', '.join(raised)}"
            report.add(part, state, cases, time.monotonic() - since)
    if skipped := [part for part, result in report.results.items() if result["state"] == NO_TIME]:
        print(
            "\nThe rest: python scripts/gpu_check.py "
            + " ".join(f"--only {part}" for part in skipped),
            flush=True,
        )
    return int(any(result["state"] != "done" for result in report.results.values()))


if __name__ == "__main__":
    sys.exit(main())
