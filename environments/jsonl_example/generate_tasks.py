"""Writes tasks.jsonl beside this file: which of two numbers is larger. Run it again for the same
file."""

import json
import random
from pathlib import Path

NUM_TASKS = 100


def tasks(seed: int = 0) -> list[dict[str, str]]:
    """Rows with different pairs of different numbers."""
    rng = random.Random(seed)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < NUM_TASKS:
        first, second = rng.sample(range(10, 100), 2)
        pairs[first, second] = None
    return [
        {
            "prompt": f"Which is larger, {first} or {second}? Answer with just the number.",
            "answer": str(max(first, second)),
        }
        for first, second in pairs
    ]


if __name__ == "__main__":
    lines = [json.dumps(task) + "\n" for task in tasks()]
    Path(__file__).with_name("tasks.jsonl").write_text("".join(lines))
