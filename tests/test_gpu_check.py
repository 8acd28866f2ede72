"""scripts/gpu_check.py on a CPU, so that it does not fail on the day when there is a GPU."""

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

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
    assert len(results) == 9 and cases["replay", "compile False"]["equal"]
    assert cases["gradients", "attention blocks"]["gradient"] <= 1e-5
    assert (
        "passed" in cases["tests", "model/test_logprobs"]["result"]
        and cases["train_0.6B", "256"]["tokens_per_s"] > 0
    )
    assert "[aim: mfu >= 0.45" in printed and "alone over shared" in printed


def test_what_does_not_fit_is_told_and_what_was_found_before_is_kept(tmp_path, monkeypatch, capsys):
    def in_fork(function, log, limit_s):
        raised = '{"case": "b", "raised": "InductorError: no"}\n' if function.func == "bare" else ""
        Path(f"{log}.out").write_text(
            '{"case": "a", "ms": 1.5, "aim": "ms <= 2"}\n' + raised + "x::y PASSED\nx::z "
        )
        Path(f"{log}.err").write_text("it broke")
        ends = {"train_0.6B": None, "tree": 1}  # at its limit, with an error
        limits.append(limit_s)
        monkeypatch.setattr("time.monotonic", lambda: clock + 30.0 * len(limits))
        return ends.get(function.func, 0)

    limits, clock = [], gpu_check.STARTED
    monkeypatch.setattr("time.monotonic", lambda: clock)
    bench = SimpleNamespace(
        Bench=lambda *_: None, in_fork=in_fork, told=gpu_bench.told, last_said=gpu_bench.last_said
    )
    monkeypatch.setitem(sys.modules, "benchmarks.gpu_bench", bench)
    monkeypatch.setitem(
        sys.modules,
        "benchmarks.gpu_parts",
        SimpleNamespace(PARTS={name: name for name in gpu_check.LIMITS}),
    )
    monkeypatch.setattr(gpu_check, "partial", lambda part, _: SimpleNamespace(func=part))

    def run(*parts: str, budget: str = "") -> int:
        flags = f"--tiny {budget} --output {tmp_path}/out.json"
        only = "".join(f" --only {part}" for part in parts)
        monkeypatch.setattr(sys, "argv", f"gpu_check.py {flags}{only}".split())
        return gpu_check.main()

    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert run(
        "gradients", "train_0.6B", "bare", "offload", "tree", budget="--budget 200"
    ) == 1 and limits == [
        gpu_check.LIMITS[name] for name in ("gradients", "train_0.6B", "bare", "tree")
    ]
    results = json.loads((tmp_path / "out.json").read_text())
    found = {part: result["state"] for part, result in results.items()}
    # 110 of 200 s are left after three parts: one of 120 s is not begun, one of 60 s is
    no_time = "skipped: no time"
    expected = {
        "gradients": "done",
        "train_0.6B": "ended after its 150 s, having said: x::z ",
        "bare": "raised errors: b",
        "offload": no_time,
    }
    assert found == expected | {"tree": "failed with exit code 1: it broke"}
    assert results["train_0.6B"]["cases"] == [{"case": "a", "ms": 1.5, "aim": "ms <= 2"}]
    said = capsys.readouterr().out
    assert "ms 1.5   [aim: ms <= 2]" in said and said.endswith(
        "The rest: python scripts/gpu_check.py --only offload\n"
    )
    assert run("offload") == 1
    later = json.loads((tmp_path / "out.json").read_text())
    assert later["offload"]["state"] == "done" and later["gradients"] == results["gradients"]


def test_the_calls_are_all_parts_and_each_fits_into_its_budget():
    calls = [
        re.findall(r"--only (\S+)", line)
        for line in gpu_check.__doc__.splitlines()
        if line.startswith("  python")
    ]
    assert (
        sorted(part for call in calls for part in call) == sorted(gpu_check.LIMITS)
        and len(calls) == 3
    )
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


def test_what_a_command_prints_is_there_before_it_ends(tmp_path):
    """Of tests that were cut at their limit nothing came back."""
    command = [
        sys.executable,
        "-c",
        "import time; print('x::y PASSED'); print('x::z ', end='', flush=True); time.sleep(60)",
    ]
    log = tmp_path / "part"
    began = time.monotonic()
    assert (
        gpu_bench.in_fork(partial(gpu_bench.passed_on, command), log, 3.0) is None
        and time.monotonic() - began < 30
    )
    assert gpu_bench.last_said(log) == "x::z "
