"""`rl doctor --parity` with the real server and the trainer's own scoring."""

import subprocess
import sys

import pytest

from tests.tiny_model import make_tiny_model

DOCTOR = [sys.executable, "-m", "rl.main", "doctor"]


def doctor(*args):
    return subprocess.run([*DOCTOR, *args], capture_output=True, text=True, timeout=280)


def test_parity_of_a_model(tmp_path):
    model = make_tiny_model(tmp_path / "model", tied=False)
    found = doctor("--parity", str(model), "--dtype", "float32", "--tokens", "24", "--model.max_model_len", "256")
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == "float32 (limits: kl 1e-06, max |d| 0.0001)" and lines[-1] == "  trainer and inference agree"
    for line, temperature in zip(lines[2:4], (1.0, 0.7), strict=True):
        cells = [float(cell) for cell in line.split()]
        assert cells[0] == temperature and cells[1] > 50 and cells[2] <= cells[3] < 1e-4 and cells[4] < 1e-8


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "say what to look at: --parity MODEL"),
        (["--parity", "./nowhere"], "no such folder"),
        (["--parity", "x", "--dtype", "int8"], "--dtype int8: give one of float32, bfloat16"),
    ],
)
def test_faults(args, said):
    found = doctor(*args)
    assert found.returncode == 1 and said in found.stderr
