"""A run of ours at a real `rl serve`, through the real SDK: both are killed in the middle, and
each batch is trained once."""

import json
import os
import signal
import subprocess
import sys

import pytest

from rl.config.stored import stored_config
from rl.run_dir.status import Status
from rl.tinker.client.service import read_remote
from rl.tinker.client.trainer import RemoteTrainer
from rl.wire.batch_file import decode_batch
from tests.ports import free_ports
from tests.trainer.stub_orchestrator import StubOrchestrator
from tests.waiting import until

STEPS = 8
PATIENCE_S = 300.0
"""A bound that only a hang exceeds."""
REWARD = """
def reward(completion, answer):
    text = completion[-1]["content"]
    return sum(letter.isascii() and letter.isalpha() for letter in text) / max(1, len(text))
"""


class Programs:
    """Starts `rl`, and ends what is left of it."""

    def __init__(self, root):
        self.root, self.started = root, list[subprocess.Popen]()

    def start(self, name, command, **env):
        """`name`: of the file with its output."""
        with (self.root / name).open("w") as out:
            command = [sys.executable, "-m", "rl.main", *command]
            self.started.append(
                subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | env
                )
            )
        return self.started[-1]

    def serve(self, model, port):
        """Starts the server, and returns what it prints for its clients once it is up."""
        words = (
            f"serve --model.name {model} --model.max_model_len 128 --model.dtype float32 "
            f"--serve.alias tiny --serve.port {port} --name s --output_dir {self.root}"
        )
        server = self.start("serve.out", words.split())

        def told():
            lines = [
                line[7:]
                for line in (self.root / "serve.out").read_text().splitlines()
                if line.startswith("export ")
            ]
            return dict(line.split("=", 1) for line in lines) if len(lines) == 2 else {}

        until(lambda: told() or server.poll() is not None, PATIENCE_S)
        return server, told()

    def close(self):
        for process in self.started:
            process.terminate()
            process.wait(60)


def weights_of(served, model_id):
    """The newest adapters of a model of the server."""
    folders = (served / "models" / model_id.replace(":train:", "-") / "weights").iterdir()
    return (
        max(folders, key=lambda folder: int(folder.name)) / "adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_a_killed_server_and_a_resumed_run_train_each_batch_once(model, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": letter, "answer": letter}) + "\n" for letter in "abc")
    )
    (tmp_path / "rewards.py").write_text(REWARD)
    flags = (
        f"--model.name {model} --model.max_model_len 128 --tinker.base_model tiny "
        f"--trainer.backend tinker --orchestrator.environment.dataset {tmp_path}/rows.jsonl "
        f"--orchestrator.environment.reward {tmp_path}/rewards.py:reward "
        "--orchestrator.sampling.max_tokens 8 --orchestrator.batch_size 16 "
        "--orchestrator.group_size 8 --trainer.optim.lr 1e-3 --trainer.checkpoint.interval 2 "
        f"--max_steps {STEPS} --name r --output_dir {tmp_path}"
    )
    command = flags.split()
    lines = tmp_path / "r" / "metrics" / "trainer.jsonl"

    def trained(step):
        return run.poll() is not None or (
            lines.exists() and f'{{"step": {step},' in lines.read_text()
        )

    port = free_ports(1)[0]
    programs = Programs(tmp_path)
    try:
        server, env = programs.serve(model, port)
        run = programs.start("run.out", command, **env)
        until(lambda: trained(3), PATIENCE_S)
        server.kill()
        server.wait()
        server, env = programs.serve(model, port)
        until(lambda: trained(5), PATIENCE_S)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130, (tmp_path / "run.out").read_text()
        run = programs.start("run.out", [*command, "--resume"], **env)
        assert run.wait(PATIENCE_S) == 0, (tmp_path / "run.out").read_text()
        # The logged batches once more, in one undisturbed model with the same seed: equal bits are
        # the same steps in the same order.
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        config = stored_config(tmp_path / "r")
        batches = [
            decode_batch(config.run_dir.batch(step).read_bytes(), str(step)).batch
            for step in range(1, STEPS + 1)
        ]
        again = config.model_copy(update={"name": "again", "output_dir": str(tmp_path)})
        with StubOrchestrator(again.run_dir, batches):
            RemoteTrainer(again, Status(again.run_dir.status("trainer"), "trainer")).train()
        places = [read_remote(one.run_dir.weights(STEPS)) for one in (config, again)]
        assert places[0].model_id != places[1].model_id
        assert places[0].step == places[1].step == STEPS
        assert weights_of(tmp_path / "s", places[0].model_id) == weights_of(
            tmp_path / "s", places[1].model_id
        )
    finally:
        programs.close()
