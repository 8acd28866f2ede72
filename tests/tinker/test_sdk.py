"""The SDK itself, in an environment of its own, against `rl serve`: it trains, samples, and
survives kills of the server's processes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl.run_dir.status import read_status
from tests.waiting import until

SDK = f"uv run --no-project --isolated --python {sys.executable} --with tinker==0.38.0 python"
STEPS = 5


def in_table():
    """The names that the table of docs/tinker.md has for each client."""
    rows = re.findall(
        r"^\| `(\w+Client)` \|(.*)$", Path("docs/tinker.md").read_text(), re.MULTILINE
    )
    return {client: set(re.findall(r"`(\w+)`", names)) for client, names in rows}


def client(served, kills):
    """Runs the client and returns what it told. `kills`: process to kill after a step."""
    env, root = served
    program = subprocess.Popen(
        [*f"{SDK} -W ignore {Path(__file__).with_name('sdk_client.py')} {STEPS}".split()],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        text=True,
    )
    told = []
    for line in program.stdout or ():
        told.append(json.loads(line))
        if name := kills.get(told[-1].get("step")):
            status = read_status(root / "status" / f"{name}.json")
            assert status and status.pid
            os.kill(status.pid, signal.SIGKILL)
    assert program.wait(60) == 0
    return told


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_the_sdk_trains_samples_and_survives_kills(model, tmp_path):
    flags = (
        f"--model.name {model} --model.max_model_len 128 --model.dtype float32 --serve.alias tiny "
        f"--serve.port 0 --name s --output_dir {tmp_path} --serve.checkpoint_s 0.1"
    )
    command = [sys.executable, "-m", "rl.main", "serve", *flags.split()]
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        server = subprocess.Popen(command, stdout=out, stderr=err)
        try:
            until(
                lambda: (
                    (tmp_path / "out").read_text().count("\n") == 2 or server.poll() is not None
                ),
                300,
            )
            lines = (tmp_path / "out").read_text().splitlines()
            served = (
                dict(line.removeprefix("export ").split("=", 1) for line in lines),
                tmp_path / "s",
            )
            undisturbed = client(served, {})
            killed = client(served, {0: "tinker", 1: "inference", 3: "tinker"})
            # the export of a state begins a model of its own, which trains nothing
            trained = (tmp_path / "s/models").glob(f"*-0/digests/{STEPS:06d}.json")
            (*_, model) = sorted(
                (path.parents[1] for path in trained), key=lambda path: path.stat().st_ctime
            )
            replayed = subprocess.run(
                [sys.executable, "-m", "rl.main", "replay", str(model)],
                capture_output=True,
                text=True,
            )
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    steps = [[one for one in told if "step" in one] for told in (undisturbed, killed)]
    assert [one["loss"] for one in steps[0]] == [one["loss"] for one in steps[1]]
    assert steps[0][-1]["loss"] < steps[0][0]["loss"]
    assert [one["norm"] for one in steps[0]] == [one["norm"] for one in steps[1]]
    # drawn with a seed
    assert [one["tokens"] for one in steps[0]] == [one["tokens"] for one in steps[1]]
    assert replayed.returncode == 0 and f"EQUAL: versions 1-{STEPS}, " in replayed.stdout, (
        replayed.stdout + replayed.stderr
    )
    facts = {key: value for one in undisturbed if "step" not in one for key, value in one.items()}
    refused = {"path": "BadRequestError", "key": "AuthenticationError"}
    assert facts.pop("mismatch") < 1e-4 and facts.pop("prompt_mismatch") < 1e-4
    assert facts.pop("downloaded") == ["adapter_config.json", "adapter_model.safetensors"]
    assert facts.pop("names") == {client: sorted(names) for client, names in in_table().items()}
    assert facts == {"same": True, "listed": True, "refused": refused}
