"""scripts/gpu_check.py on a CPU, so that it does not fail on the day when there is a GPU."""

import json
import os
import subprocess
import sys
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
MISSING = {"vllm", "verifiers", "openai", "renderers", "matplotlib", "mcp", "wandb", "aiohttp", "datasets", "gguf", "peft", "accelerate"}
"""Packages of this project that the trainer does without."""


def check(tmp_path, *flags):
    """Exit code, the results by part, and what was printed."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=MISSING))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "--tiny", "--output", str(tmp_path / "out.json"), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    return done.returncode, json.loads((tmp_path / "out.json").read_text()), done.stdout + done.stderr


@pytest.mark.proof
def test_all_parts_run_with_the_trainers_packages_alone(tmp_path):
    code, results, printed = check(tmp_path)
    assert code == 0 and {result["state"] for result in results.values()} == {"done"}, printed
    cases = {(part, case["case"]): case for part, result in results.items() for case in result["cases"]}
    assert len(results) == 12 and cases["replay", "compile False"]["equal"]
    assert cases["gradients", "attention blocks"]["gradient"] <= 1e-5 and cases["attention", "flex 768"]["output"] < 1e-6
    for special in ("window", "cap", "sinks", "all"):
        blocks = cases["attention", f"blocks 384 {special}"]
        errors = [blocks[name] for name in ("output", "d_query", "d_key", "d_value", *(["d_sinks"] if special in ("sinks", "all") else []))]
        assert max(*errors, cases["attention", f"flex 384 {special}"]["output"]) < 1e-6, special
    assert "passed" in cases["tests", "test_logprobs"]["result"] and cases["train_0.6B", "256"]["tokens_per_s"] > 0
    assert "[aim: mfu >= 0.45" in printed and "alone over shared" in printed


def test_what_does_not_fit_is_told_and_what_was_found_before_is_kept(tmp_path, monkeypatch, capsys):
    def in_fork(function, log, limit_s):
        Path(f"{log}.out").write_text('{"case": "a", "ms": 1.5, "aim": "ms <= 2"}\nnote\n')
        Path(f"{log}.err").write_text("it broke")
        ends = {"head": None, "tree": 1}  # at its limit, with an error
        limits.append(limit_s)
        monkeypatch.setattr("time.monotonic", lambda: clock + 30.0 * len(limits))
        return ends.get(function.func, 0)

    limits, clock = [], gpu_check.STARTED
    monkeypatch.setattr("time.monotonic", lambda: clock)
    bench = SimpleNamespace(Bench=lambda *_: None, in_fork=in_fork, told=gpu_bench.told)
    monkeypatch.setitem(sys.modules, "benchmarks.gpu_bench", bench)
    monkeypatch.setitem(sys.modules, "benchmarks.gpu_parts", SimpleNamespace(PARTS={name: name for name in gpu_check.LIMITS}))
    monkeypatch.setattr(gpu_check, "partial", lambda part, _: SimpleNamespace(func=part))
    parts = [flag for name in ("storage", "head", "bare", "tree", "memory") for flag in ("--only", name)]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--budget", "130", "--output", str(tmp_path / "out.json"), *parts])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert gpu_check.main() == 1 and limits == [50, 40, 60, 40]
    results = json.loads((tmp_path / "out.json").read_text())
    found = {part: result["state"] for part, result in results.items()}
    no_time = "skipped: no time"  # 40 of 130 s are left after three parts: one of 60 s is not begun, one of 40 s is
    assert found == {"storage": "done", "head": "ended after its 40 s", "bare": "done", "tree": no_time, "memory": "done"}
    assert results["head"]["cases"] == [{"case": "a", "ms": 1.5, "aim": "ms <= 2"}]
    said = capsys.readouterr().out
    assert "ms 1.5   [aim: ms <= 2]" in said and said.endswith("The rest: python scripts/gpu_check.py --only tree\n")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--output", str(tmp_path / "out.json"), "--only", "tree"])
    assert gpu_check.main() == 1
    later = json.loads((tmp_path / "out.json").read_text())
    assert later["tree"]["state"] == "failed with exit code 1: it broke" and later["storage"] == results["storage"]
