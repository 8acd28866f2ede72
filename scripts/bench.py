"""The benchmarks: `uv run scripts/bench.py NAME [flags]`, or `NAME --help`. Each prints JSON; what they showed is in docs/benchmarks.md."""

import os
import sys
from pathlib import Path

BENCHMARKS = {
    "roofline": "what every phase of the loop takes over what the machine allows, and who owns the difference",
    "trainer": "a training step over a bare PyTorch one",
    "publish": "what a policy version costs the ranks: seconds that training stands, memory, bytes between ranks",
    "resume": "how long ranks take to check and load a checkpoint",
    "deltas": "the bytes of delta versions over those of a whole one, after real optimizer steps",
    "pause": "what a weight update costs generation",
    "slices": "how one worker of several loads a version: bytes, time, pause",
    "transport": "how fast a worker reads a version over the network (NIXL), over a file",
    "start": "the command to the first trained step, and an optimizer step to the next sampled token",
    "trl_grpo": "TRL on a task of ours, in an environment of its own",
    "orchestrator": "rollouts a CPU second of orchestrator and workers",
    "records": "what a long run costs whoever reads it: a first look, a filter, memory",
    "page": "what the page of `rl view` costs in a browser: a first look, a filter, a rollout of 100,000 tokens",
    "long_run": "what the number of steps behind costs: a resume, a finished group, a look",
    "scale": "what servers, workers and machines cost the orchestrator and the run directory",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        sys.exit("\n".join([__doc__ or "", *(f"  {name:<14}{what}" for name, what in BENCHMARKS.items())]))
    script = Path(__file__).parent / "benchmarks" / f"{name}.py"
    os.execv(sys.executable, [sys.executable, str(script), *sys.argv[2:]])


if __name__ == "__main__":
    main()
