"""The numbers on other CPUs: the arithmetic of training without AVX-512 and AMX, without torch's
vector instructions, in four threads."""

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
OTHER = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "4"}
"""All at once: which of them a failure is from is seen with each alone."""


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_the_numbers_hold_on_another_cpu():
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--timeout", "600", *NUMERICAL]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | OTHER, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stdout[-4000:]
