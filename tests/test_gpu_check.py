"""scripts/gpu_check.py on a CPU, so that it does not fail on the day when there is a GPU."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gpu_check
import pytest
from benchmarks import gpu_bench, gpu_parts

from tests.proofs import gpu_loop
from tests.raised import run_error

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


def check(folder, *flags, limit_s=280.0, **environment):
    """The cases by part and name, and what was printed; all parts must end well."""
    command = [sys.executable, str(SCRIPT), "--tiny", "--output", "out.json", *flags]
    environment = os.environ | environment
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s
    )
    results, printed = json.loads((folder / "out.json").read_text()), done.stdout + done.stderr
    assert {result["state"] for result in results.values()} == {"done"}, printed
    assert done.returncode == 0, printed
    cases = {
        (part, case["case"]): case for part, result in results.items() for case in result["cases"]
    }
    return cases, printed


@pytest.mark.proof
def test_all_parts_run_with_the_trainers_packages_alone(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=MISSING))
    where = str(tmp_path)
    cases, printed = check(tmp_path, PYTHONPATH=where, XDG_CACHE_HOME=where)
    assert {part for part, _ in cases} == gpu_parts.PARTS.keys() and cases[
        "replay", "compile False"
    ]["equal"]
    assert cases["gradients", "attention blocks"]["gradient"] <= 1e-5
    assert cases["train_0.6B", "256"]["tokens_per_s"] > 0
    assert "[aim: mfu >= 0.45" in printed


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_servers_and_runs_start_and_weights_are_exchanged_while_answers_are_sampled(tmp_path):
    flags = ["--only", "serve", "--only", "swap"]
    cases, _ = check(tmp_path, *flags, limit_s=580.0, TMPDIR=str(tmp_path))
    server, swap = cases["serve", "server"], cases["swap", "swap"]
    assert server["finite"] and server["tokens_per_s"] > 0
    assert swap["steps"] == 4 and swap["of_two_versions"] > 0
    assert max(swap["mismatch_kl/mean"]) < min(swap["lag_kl/mean"]) / 10
    assert "== " in (tmp_path / "out.log").read_text()


def test_a_run_that_fails_or_is_late_is_told_with_its_logs(tmp_path, monkeypatch):
    """There is no second look at the machine that it ran on."""
    bench = gpu_bench.Bench(tmp_path, "cpu", True, time.monotonic() + 60, tmp_path / "logs")
    with (
        run_error(r"wrong ended with exit code 2\n(.*\n)*.*no_such_setting"),
        gpu_loop.running(bench, "wrong", "rl.main", "--no_such_setting=1") as run,
    ):
        run.until(run.ended)
    assert "no_such_setting" in bench.logs.read_text()
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bench = replace(bench, ends=time.monotonic())
    with (
        run_error("slow is late\n== .*slow.log"),
        gpu_loop.running(bench, "slow", "sleeper") as run,
    ):
        run.until(lambda: False)


def test_the_calls_are_all_parts_and_each_fits_into_its_budget():
    calls = [
        re.findall(r"--only (\S+)", line)
        for line in gpu_check.__doc__.splitlines()
        if line.startswith("  python")
    ]
    parts = gpu_parts.PARTS | gpu_loop.PARTS
    assert sorted(part for call in calls for part in call) == sorted(parts)
    assert gpu_check.LIMITS.keys() == parts.keys() >= {*gpu_check.STACK}
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
