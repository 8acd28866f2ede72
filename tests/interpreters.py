"""Interpreters with verifiers, which our own environment has not: homes as environments have
them, with what plays tests in them."""

import os
import re
import subprocess
from pathlib import Path

from rl.config.environment_id import Source
from rl.homes.make import ensure
from rl.homes.request import Request

ROOT = Path(__file__).parents[1]
EXAMPLES = (
    "box_trail",
    "calculator",
    "gsm8k",
    "guess_number",
    "jsonl_example",
    "judged_review",
    "pick_word_v1",
    "reasoning_tasks",
    "reverse_text",
    "sort_words",
    "write_function",
)
IN_A_HOME = (
    "envs/test_classic.py",
    "envs/test_rewards.py",
    "envs/test_rows.py",
    "envs/test_v1.py",
    "envs/test_conversation.py",
    "envs/test_nemo_gym_serving.py",
    *(f"environments/test_{name}.py" for name in EXAMPLES),
)
"""Tests that import verifiers; `tests/envs/test_in_a_home.py` runs them."""
TOOLS = (
    "hypothesis>=6.130",
    "psutil",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "reasoning-gym>=0.1.25",
)


def interpreter(verifiers: str) -> Path:
    """The Python of a home with this version of verifiers. It is in the user's cache, so it is
    made once on a machine."""
    bundled = Source("bundled", "textarena", "textarena")
    request = Request(
        f"tests with {verifiers}", bundled, requirements=(f"verifiers=={verifiers}", *TOOLS)
    )
    return ensure(request, print).interpreter


def worker_python() -> str:
    """The Python in which single modules of the classic API are played."""
    return str(ensure(Request("tests", None), print).interpreter)


def run_tests(verifiers: str, *arguments: str) -> int:
    """How many tests pass in a home with a version of verifiers; all that are run have to."""
    flags = f"-q --noconftest -c {os.devnull} --rootdir={ROOT} -p no:cacheprovider --timeout=120"
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    # compiling what they import takes as long as the tests
    for name in ("PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    done = subprocess.run(
        [interpreter(verifiers), "-m", "pytest", *flags.split(), *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    return int(found[1]) if found else 0
