"""scripts/gpu_check.py on a CPU, so that it does not fail on the day when there is a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
from benchmarks import gpu_bench

SCRIPT = Path("scripts/gpu_check.py").resolve()
BLOCK = """
import importlib.util
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
look = importlib.util.find_spec  # with which others ask whether a package is there
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in {names} else look(name, package)
"""
MISSING = {
    "vllm",
    "verifiers",
    "openai",
    "renderers",
    "matplotlib",
    "mcp",
    "wandb",
    "aiohttp",
    "datasets",
    "gguf",
}
"""Packages of this project that the trainer does without."""


def check(tmp_path, *flags):
    """Exit code, the results by part, and what was printed."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=MISSING))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    output = str(tmp_path / "out.json")
    command = [sys.executable, str(SCRIPT), "--tiny", "--output", output, *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    return (
        done.returncode,
        json.loads((tmp_path / "out.json").read_text()),
        done.stdout + done.stderr,
    )


@pytest.mark.proof
def test_all_parts_run_with_the_trainers_packages_alone(tmp_path):
    code, results, printed = check(tmp_path)
    assert code == 0 and {result["state"] for result in results.values()} == {"done"}, printed
    cases = {
        (part, case["case"]): case for part, result in results.items() for case in result["cases"]
    }
    assert len(results) == 5 and cases["replay", "compile False"]["equal"]
    assert cases["gradients", "attention blocks"]["gradient"] <= 1e-5
    assert cases["train_0.6B", "256"]["tokens_per_s"] > 0
    assert "[aim: mfu >= 0.45" in printed


def test_the_calls_are_all_parts_and_each_fits_into_its_budget():
    calls = [
        re.findall(r"--only (\S+)", line)
        for line in gpu_check.__doc__.splitlines()
        if line.startswith("  python")
    ]
    assert sorted(part for call in calls for part in call) == sorted(gpu_check.LIMITS)
    # the rest for imports
    assert all(sum(gpu_check.LIMITS[part] for part in call) <= 540 - 20 for call in calls)


def test_what_a_case_raises_is_said_and_the_next_one_runs(capsys):
    """The first that did not compile ended its part, and those that need no compilation were
    lost."""
    for name in ("compiled", "eager"):
        with gpu_bench.case(name):
            if name == "compiled":
                raise NotImplementedError("no such kernel")
            gpu_bench.say(name, ms=1.0)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said == [
        {"case": "compiled", "raised": "NotImplementedError: no such kernel"},
        {"case": "eager", "ms": 1.0},
    ]
