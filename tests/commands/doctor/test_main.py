"""`rl doctor` with real processes: the smoke, a configuration, a run, and `--parity`."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import asynccontextmanager, nullcontext

import pytest

from rl.commands.doctor import configuration, smoke
from rl.commands.doctor.main import main
from rl.commands.doctor.parity import report
from rl.commands.play_session import PlaySession
from rl.config.command_line import to_toml
from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.models.probes import CHAT
from rl.models.tiny import make_tiny_model
from rl.run_dir.files import write_file
from rl.wire.batch_file import write_batch
from rl.wire.messages import TrainBatch
from rl.wire.parity import ScoredToken
from rl.wire.worker_messages import Ready, RenderedChat
from tests.commands.driver import ENVIRONMENTS
from tests.families import UNTIED
from tests.flags import flags, made
from tests.orchestrator.stub_teacher import StubTeacher
from tests.web import serving

pytestmark = pytest.mark.usefixtures("classic_home")  # the doctor makes none
DOCTOR = [sys.executable, "-m", "rl.main", "doctor"]


def doctor(*args, **options):
    return subprocess.run(
        [*DOCTOR, *flags(*args)], capture_output=True, text=True, timeout=280, **options
    )


@pytest.mark.proof
def test_a_configuration_and_the_smoke(tmp_path):
    """All that is asked before a run, at once."""
    model = make_tiny_model(tmp_path / "tiny")
    line = f"--model.name {model} --model.dtype float32 --model.max_model_len 256 --name x"
    played = "--orchestrator.environment.id say-digit --orchestrator.sampling.max_tokens 8"
    found = doctor(line, played, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ENVIRONMENTS)})
    assert found.returncode == 0, found.stdout + found.stderr
    lines = {
        line[6:18].strip(): line[19:]
        for line in found.stdout.splitlines()
        if line.startswith(("ok  ", "warn"))
    }
    assert lines["run"] == f"{tmp_path}/outputs/x is free" and lines["model"] == f"{model}: {model}"
    assert lines["memory"].startswith("0M weights need about ")
    assert lines["disk"].startswith("up to ")
    assert lines["environment"] == "say-digit: 4 training examples, 2 for evaluation"
    assert re.fullmatch(
        r"3 steps on 1 CPU rank, \d+ ms per step; [\d.]+ s including startup", lines["training"]
    )
    sampled = re.fullmatch(
        r"8 answers, (\d+) tokens per second; [\d.]+ s including startup", lines["vLLM"]
    )
    assert sampled and int(sampled[1]) > 0
    assert not (tmp_path / "outputs").exists()


def test_what_a_configuration_lacks(tmp_path, children, monkeypatch):
    config = made(
        "--model.name ./nowhere --orchestrator.environment.id no-such-env --inference.vllm.x 1",
        f"--output_dir {tmp_path} --name x",
    )
    (tmp_path / "check.py").write_text(
        "print('INFO vllm'); print('inference.vllm.x = 1: no such argument'); raise SystemExit(1)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(configuration, "CHECK_ENGINE", "check")
    found = {
        check.name: check
        for check in configuration.config_checks(config, children)
        if check.level == "FAIL"
    }
    assert "/nowhere': no such folder; give an existing one" in found["model"].text
    assert found["vllm"].text == "inference.vllm.x = 1: no such argument"
    assert found["environment"].text.startswith(
        "environment no-such-env is not installed: there is no ./no_such_env.py"
    )
    assert set(found) == {"model", "vllm", "environment"}


def test_what_a_run_refuses_the_doctor_refuses(tmp_path, children, monkeypatch):
    """Prompts that do not fit the context, as a worker of the run measures them; an evaluation
    without held-out tasks."""
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    model = make_tiny_model(tmp_path / "tiny")
    entry = {"id": "say-digit", "args": {"held_out": 0}}
    orchestrator = {
        "environment": [entry],
        "eval": [entry | {"name": "held"}],
        "sampling": {"max_tokens": 8},
    }
    config = RLConfig.model_validate(
        {"model": {"name": str(model), "max_model_len": 24}, "orchestrator": orchestrator}
    )
    (found,) = configuration.environments(config, model, tmp_path / "work", children)
    assert found.level == "FAIL"
    assert "orchestrator.sampling.max_tokens = 8 exceed model.max_model_len = 24" in found.text

    @asynccontextmanager
    async def loaded(*_args, **_options):
        yield PlaySession(None, {"say-digit": Ready(4, 0, template_fault="no end")}, config, None)

    monkeypatch.setattr(configuration, "play_session", loaded)
    found = {
        check.name: check
        for check in configuration.environments(config, None, tmp_path / "work", children)
    }
    levels = {"environment": "ok", "template": "warn", "tasks": "FAIL", "prompts": "warn"}
    assert {name: check.level for name, check in found.items()} == levels
    assert found["template"].text.startswith("no end: give the ")


@pytest.mark.parametrize(
    ("sense", "has_model", "checks"),
    [
        (3.0, True, ["ok    teacher      {} scores text"]),
        (
            0.1,
            True,
            ["FAIL  teacher      teacher {} gives a token of plain text -0.5 nats on average"],
        ),
        (0.1, False, []),  # what to send is not known
        (0.0, True, []),  # the server is down, as `servers` says
    ],
)
def test_a_teacher_that_a_run_refuses_the_doctor_refuses(
    tmp_path, children, monkeypatch, sense, has_model, checks
):
    """Regression: whoever accepted connections passed."""
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    model = make_tiny_model(tmp_path / "tiny") if has_model else None
    chat = RenderedChat(CHAT, [*range(3, 60)], {0, 1, 2}) if has_model else None

    @asynccontextmanager
    async def loaded(*_args, **_options):
        yield PlaySession(None, {"say-digit": Ready(4, 0, chat=chat)}, config, None)

    monkeypatch.setattr(configuration, "play_session", loaded)
    with serving(StubTeacher(sense=sense)) if sense else nullcontext() as stub:
        url = stub.url if stub else "http://127.0.0.1:9/v1"
        config = made(
            f"--orchestrator.environment.id say-digit --orchestrator.teacher.base_url {url}"
        )
        environment, *others = configuration.environments(config, model, tmp_path, children)
    assert environment.level == "ok"
    results = [str(check).split(",")[0] for check in others if check.name == "teacher"]
    assert results == [check.format(url) for check in checks]


def test_a_smoke_that_fails_says_what_the_process_said(tmp_path, children, monkeypatch):
    model = make_tiny_model(tmp_path / "tiny")
    dies = [sys.executable, "-c", "print('libgomp is missing'); raise SystemExit(5)"]
    monkeypatch.setattr("rl.launch.roles.command", lambda *_: dies)
    config = made("--orchestrator.environment.id none")
    found = smoke.trainer_smoke(config, model, tmp_path, children)
    assert (found.level, found.text) == (
        "FAIL",
        "a training step on a tiny model ended with exit code 5; the end of its log:\n       "
        " | libgomp is missing",
    )
    found = smoke.vllm_smoke(model, tmp_path / "more", children)
    assert found.level == "FAIL" and found.text.startswith("libgomp is missing")


def test_a_child_that_does_not_end(tmp_path, children):
    child = children.start(
        "sleeper",
        [sys.executable, "-c", "import time; print('hm', flush=True); time.sleep(60)"],
        dict(os.environ),
        tmp_path,
    )
    while not child.log.read_text():
        time.sleep(0.02)
    assert smoke.fault_of(child, 0.2) == "did not end within 0 s; the end of its log:\n        | hm"
    assert child.wait(5) == -9


def test_a_run_by_directory_and_by_name(tmp_path, capsys, monkeypatch):
    weights = f"--trainer.weights.dir {tmp_path}/shm --orchestrator.environment.id none"
    config = made("--name y --output_dir elsewhere", weights)
    root = tmp_path / "outputs" / "x"  # it was moved there, its weights were not
    (tmp_path / "shm" / "y" / "000003").mkdir(parents=True)
    write_file(root / "config.toml", to_toml(config).encode())
    write_batch(root / "batches" / "000001.batch", TrainBatch(step=1, samples=[]), None)
    monkeypatch.chdir(tmp_path)
    assert main(["x"], Children()) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"run {root}", "  step 0 of 100, batch 1, version 3, checkpoint none"]
    assert said[-1].startswith(
        "note  the run was stopped at step 0 of 100; continue it with `rl @ "
    )
    data = bytearray((root / "batches" / "000001.batch").read_bytes())
    data[-1] ^= 1
    (root / "batches" / "000001.batch").write_bytes(data)
    assert main([str(root), "--verify", "--json"], Children()) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fine"] and "the run was stopped" in found["bottleneck"]
    assert "000001.batch: damaged record at byte 0" in found["problems"][0]


def test_parity_of_a_model(tmp_path):
    model = make_tiny_model(tmp_path / "model", UNTIED)
    found = doctor(f"--parity {model} --dtype float32 --tokens 24 --model.max_model_len 256")
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == "float32 (limits: kl 1e-06, mean |d| 0.0001, max |d| 0.01)"
    assert lines[-1] == "  trainer and inference agree"
    for line, temperature in zip(lines[2:4], (1.0, 0.7), strict=True):
        cells = [float(cell) for cell in line.split()[:5]]
        assert cells[0] == temperature
        assert cells[1] > 50
        assert cells[2] <= cells[3] < 1e-4
        assert cells[4] < 1e-8


def test_a_parity_that_passes_above_its_limit_says_why(capsys):
    """exp(0.1) - 1.1 = 0.00517 on one of two tokens: a mean of 0.00259 whose standard error is
    as large."""
    assert report("bfloat16", [ScoredToken(0, 1.0, 0.1), ScoredToken(1, 0.7, 0.0)], None) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[4].split() == ["both", "2", "0.05", "0.1", "0.00259", "±", "0.003"]
    assert said[5].startswith(
        "  trainer and inference agree: kl 0.00259 is above 0.002 by 0.2 of its standard "
        "errors, which may be chance"
    )
    assert report("bfloat16", [ScoredToken(0, 1.0, 0.05), ScoredToken(1, 0.7, 0.0)], None) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  trainer and inference agree"
    assert (
        report("bfloat16", [ScoredToken(i, 1.0 - 0.3 * (i % 2), 0.1) for i in range(9)], None) == 1
    )
