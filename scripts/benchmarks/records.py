"""What a long run costs whoever reads it: `uv run scripts/bench.py records --steps 100000 --rollouts 10` prints JSON."""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.records.run import Run
from rl.run_dir.paths import RunDir
from rl.wire.batch_file import write_rollouts

WHY = (None, "no_signal", "stale", "truncated")


def make(root: Path, steps: int, rollouts: int, characters: int) -> RunDir:
    """A run's rollouts, without checksums and fsync, which a hundred thousand steps would wait for."""
    settings = {"name": root.name, "output_dir": str(root.parent), "model": {"name": "none"}, "max_steps": steps}
    config = RLConfig.model_validate(settings | {"orchestrator": {"environment": [{"id": "sums"}]}})
    write_config(config.run_dir.config, config)
    for folder in (config.run_dir.rollouts_dir, config.run_dir.status_dir):
        folder.mkdir()
    answer = "four and four are eight; " * (characters // 25)
    for step in range(1, steps + 1):
        config.run_dir.rollouts(step).write_bytes(b"".join(line(step, i, rollouts, answer) for i in range(rollouts)))
    return config.run_dir


def line(step: int, i: int, rollouts: int, answer: str) -> bytes:
    why = WHY[(step + i) % 4]
    row = {
        "step": step, "env": f"env-{step % 3}", "task": (step * 7 + i) % 1000, "group_id": step * rollouts + i // 4, "rollout_id": i % 4,
        "episode": i % 4, "advantage": 0.5, "retries": 0, "trained": why is None, "why": why, "agent": "agent",
        "messages": [{"role": "user", "content": "4 + 4"}, {"role": "assistant", "content": answer}], "reward": i / rollouts,
        "metrics": {"exact": 1.0, "length": i}, "outcome": "finished", "stop": "stop", "truncated": False,
        "num_tokens": 100 + i, "num_turns": 1, "versions": [step - 1],
    }  # fmt: skip
    return json.dumps(row).encode() + b"\n"


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return round(time.perf_counter() - began, 3)


def resident_mib() -> float:
    """Of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(folder: Path, steps: int, rollouts: int, characters: int) -> dict[str, float]:
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    run_dir = make(folder / "x", steps, rollouts, characters)
    before, run = resident_mib(), Run(run_dir.root)
    found = {"rollouts": steps * rollouts, "first_look_s": timed(run.rollouts)}
    found["index_mib"] = round(resident_mib() - before, 1)
    found["look_again_s"] = timed(run.rollouts)
    found["filter_s"] = timed(lambda: run.rollouts(why="no_signal", env="env-1", reward=(0.5, None), step=range(10, steps)))
    found["task_s"] = timed(lambda: run.task("env-1", 7))
    found["sort_s"] = timed(lambda: run.rollouts().sorted("num_tokens", descending=True)[:50])
    found["count_s"] = timed(lambda: run.rollouts().counts("why"))
    found["text_s"] = timed(lambda: run.rollouts()[steps * rollouts // 2].text)
    found["from_cache_s"] = timed(Run(run_dir.root).rollouts)

    def one_step_more() -> None:
        write_rollouts(run_dir.rollouts(steps + 1), line(steps + 1, 0, rollouts, "new"))
        assert len(run.rollouts()) == steps * rollouts + 1

    found["new_step_s"] = timed(one_step_more)
    found["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--characters", type=int, default=1000, help="of an answer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"load": os.getloadavg()[0], **measure(Path(folder), args.steps, args.rollouts, args.characters)}, indent=2))


if __name__ == "__main__":
    main()
