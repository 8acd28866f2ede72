"""The benchmarks: `uv run scripts/bench.py NAME [flags]`, or `NAME --help`. Each prints JSON;
what they showed is in docs/benchmarks.md."""

import os
import sys
from pathlib import Path

BENCHMARKS = {
    "trainer": "a training step over a bare PyTorch one",
    "quickstart": "the command to the first trained step, and to 0.95 of the held-out pairs",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        sys.exit(
            "\n".join(
                [__doc__ or "", *(f"  {name:<14}{what}" for name, what in BENCHMARKS.items())]
            )
        )
    script = Path(__file__).parent / "benchmarks" / f"{name}.py"
    os.execv(sys.executable, [sys.executable, str(script), *sys.argv[2:]])


if __name__ == "__main__":
    main()
