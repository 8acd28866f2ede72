"""A real run on three machines that run nothing but `rl node`, two to train and one to serve, on
one machine (tests/machines.py). Then one rank on this host trains the same batches, and what both
made is compared. Needs root.
"""

import contextlib
import os
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl.config.command_line import build, parse_args, write_config
from rl.config.run import RLConfig
from rl.run_dir.logs import last_lines
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import numbered
from rl.wire.batch_file import decode_batch
from tests.machines import Machines, node_command
from tests.trainer.stub_orchestrator import StubOrchestrator
from tests.waiting import until

STEPS, DEADLINE_S = 3, 200.0


def environment():
    """One thread a process: two ranks, the server and the orchestrator share the cores."""
    unset = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    more = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).parent / "environments"),
    }
    return {key: value for key, value in os.environ.items() if key not in unset} | more


def wait_for(children):
    """Until all have ended well. Fails with the end of a log when one fails or takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while running := [child for child in children if child.exit_code != 0]:
        child = next((child for child in running if child.exit_code), running[0])
        late = time.monotonic() >= deadline
        assert child.exit_code is None and not late, (
            f"{child.name} {child.ending()}:\n" + "\n".join(last_lines(child.log))
        )
        time.sleep(0.1)


def make_config(root, name, model):
    flags = (
        f"--name {name} --output_dir {root} --max_steps {STEPS} --model.name {model} "
        "--model.dtype float32 --model.max_model_len 128 --trainer.optim.lr 1e-3 "
        "--trainer.micro_batch_tokens 128 --trainer.checkpoint.interval 100 "
        "--trainer.weights.keep_last 10 --trainer.gpus 0 --inference.gpus 0 "
        "--orchestrator.environment.id first-half --orchestrator.batch_size 16 "
        "--orchestrator.sampling.max_tokens 16"
    )
    config = build(parse_args(flags.split()))
    write_config(config.run_dir.config, config)
    return config


@pytest.mark.proof
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("classic_home")
def test_three_machines_equal_one_rank(children, tmp_path, model):
    near = make_config(tmp_path, "near", model)
    cluster = RLConfig.model_validate({"cluster": {"nodes": 3, "trainer_nodes": 2}}).cluster
    far = near.model_copy(update={"name": "far", "cluster": cluster})
    write_config(tmp_path / "run.toml", far)
    with contextlib.ExitStack() as stack:
        try:
            machines = stack.enter_context(Machines(3))
        except OSError as error:
            pytest.skip(f"machines cannot be made here: {error}")
        stack.callback(children.stop)
        commands = [
            machines.inside(index, node_command(tmp_path / "run.toml", index)) for index in range(3)
        ]
        wait_for(
            [
                children.start(f"node-{index}", command, environment(), tmp_path)
                for index, command in enumerate(commands)
            ]
        )
        until(lambda: not any(map(machines.processes, range(3))))
    batches = [
        decode_batch(path.read_bytes(), path.name).batch
        for path in numbered(far.run_dir.batches, ".batch").values()
    ]
    with StubOrchestrator(near.run_dir, batches):
        python = node_command(near.run_dir.config, 0)[0]
        command = [python, "-m", "rl.trainer.main", "@", str(near.run_dir.config)]
        wait_for([children.start("trainer", command, environment(), near.run_dir.logs)])
    ours, theirs = (read_metrics(config.run_dir.metrics, "trainer") for config in (far, near))
    assert ours.keys() == theirs.keys() and len(ours) == STEPS
    for key, line in theirs.items():
        assert ours[key]["optim/grad_norm"] == pytest.approx(line["optim/grad_norm"], rel=1e-4)
        # Terms of size 1 cancel, each rounded to 6e-8 in float32.
        assert ours[key]["loss/mean"] == pytest.approx(line["loss/mean"], rel=1e-5, abs=1e-6)
    a, b = (
        load_file(config.run_dir.weights(STEPS) / "model.safetensors") for config in (far, near)
    )
    assert a.keys() == b.keys()
    assert all((a[name] - b[name]).norm() <= 1e-5 * b[name].norm() for name in b)
