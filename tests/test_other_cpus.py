"""The numbers on other CPUs: the arithmetic of training, with the instructions that CPUs without AVX-512 and AMX have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMERICAL = [
    "tests/trainer/loss",
    "tests/trainer/data",
    "tests/trainer/model",
    "tests/trainer/test_optim.py",
    "tests/orchestrator/groups/test_credit.py",
]
"""Without vLLM, whose library asks the CPU itself and cannot be told to use fewer instructions."""
CPUS = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "no vector instructions": {"ATEN_CPU_CAPABILITY": "default"},
    "four threads": {"OMP_NUM_THREADS": "4"},
}


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cpu", CPUS)
def test_the_numbers_hold_on_another_cpu(cpu):
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--timeout", "600", *NUMERICAL]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | CPUS[cpu], capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-4000:]
