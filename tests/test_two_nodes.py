"""A real job on two nodes, on one machine: each node is a network namespace with its own address and host name, joined by a cable (veth).

Node a runs inference, the orchestrator and one trainer rank, node b the other trainer rank: the commands of docs/multi_node.md. Then one
rank on this host trains the same batches, and what both made is compared. Needs root.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.run_dir.logs import last_lines
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import numbered
from rl.system.children import Child
from rl.wire.batch_file import decode_batch
from tests.trainer.stub_orchestrator import StubOrchestrator

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}
PORT = 29500
"""Of torchrun's rendezvous, on node a: nothing else listens in a new namespace."""
STEPS, DEADLINE_S = 3, 200.0
ENTER = 'mount --bind "$0" /etc/hosts; hostname "$1"; shift; exec "$@"'
"""Inside a node: its own hosts file and name."""


class Nodes:
    """Two namespaces, as long as the `with` block lasts. Raises OSError, with what `ip` said, where they cannot be made."""

    def __enter__(self) -> "Nodes":
        with contextlib.ExitStack() as stack:
            self.hosts = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for node in ADDRESSES:
                known = ADDRESSES | {node: "127.0.1.1"}  # a node's own name, as on Debian and its kin
                (self.hosts / node).write_text("127.0.0.1 localhost\n" + "".join(f"{at} node-{name}\n" for name, at in known.items()))
                ip("netns", "add", namespace(node))
                stack.callback(ip, "netns", "delete", namespace(node))
            ip("-n", namespace("a"), "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", namespace("b"))
            for node, address in ADDRESSES.items():
                ip("-n", namespace(node), "address", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    ip("-n", namespace(node), "link", "set", device, "up")
            done = subprocess.run(self.inside("a", ["true"]), capture_output=True, text=True)
            if done.returncode:
                raise OSError(done.stderr.strip())
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def inside(self, node: str, command: Sequence[str]) -> list[str]:
        """The command, run in a node. It becomes that command: its process id is the command's."""
        enter = ["unshare", "--uts", "sh", "-ec", ENTER, str(self.hosts / node), f"node-{node}"]
        return ["ip", "netns", "exec", namespace(node), *enter, *command]


def namespace(node: str) -> str:
    return f"rl-{os.getpid()}-{node}"


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def module(name: str, config: Path) -> list[str]:
    return [sys.executable, "-m", f"rl.{name}.main", "@", str(config)]


def trainer_command(config: Path) -> list[str]:
    """One node's part of the trainer."""
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"node-a:{PORT}", "--rdzv-id", "run"]
    return [sys.executable, "-m", "torch.distributed.run", *where, "-m", "rl.trainer.main", "@", str(config)]


def environment() -> dict[str, str]:
    """One thread a process: two ranks, the server and the orchestrator share the cores."""
    unset = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parent / "environments")}
    return {key: value for key, value in os.environ.items() if key not in unset} | more


def wait_for(children: Sequence[Child], others: Sequence[Child] = ()) -> None:
    """Until all have ended well. Fails with the end of a log when one (or one of the `others`) fails or takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while any(child.exit_code is None for child in children) or any(child.exit_code for child in children):
        failed = [child for child in (*children, *others) if child.exit_code]
        late = [child for child in children if child.exit_code is None]
        assert not failed, f"{failed[0].name} {failed[0].ending()}:\n" + "\n".join(last_lines(failed[0].log))
        assert time.monotonic() < deadline, f"{late[0].name} goes on:\n" + "\n".join(last_lines(late[0].log))
        time.sleep(0.1)


def make_config(root: Path, name: str, model: Path) -> RLConfig:
    trainer = {"optim": {"lr": 1e-3}, "micro_batch_tokens": 128, "checkpoint": {"interval": 100}, "weights": {"keep_last": 10}, "gpus": 0}
    orchestrator = {"environment": [{"id": "first-half"}], "batch_size": 16, "sampling": {"max_tokens": 16}, "host": ADDRESSES["a"]}
    tables = {"trainer": trainer, "orchestrator": orchestrator, "inference": {"host": ADDRESSES["a"], "gpus": 0}}
    place = {"name": name, "output_dir": str(root), "max_steps": STEPS}
    config = RLConfig.model_validate(tables | place | {"model": {"name": str(model), "dtype": "float32", "max_model_len": 128}})
    write_config(config.run_dir.config, config)
    return config


@pytest.mark.proof
@pytest.mark.timeout(500)
@pytest.mark.usefixtures("classic_home")
def test_two_nodes_equal_one_rank(children, tmp_path, model):
    far, near = (make_config(tmp_path, name, model) for name in ("far", "near"))
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(Nodes())
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        stack.callback(children.stop)

        def start(name: str, node: str, command: list[str]) -> Child:
            return children.start(name, nodes.inside(node, command), environment(), far.run_dir.logs)

        inference = start("inference", "a", module("inference", far.run_dir.config))
        ending = [start(f"trainer-{node}", node, trainer_command(far.run_dir.config)) for node in ADDRESSES]
        wait_for([start("orchestrator", "a", module("orchestrator", far.run_dir.config)), *ending], [inference])
    batches = [decode_batch(path.read_bytes(), path.name).batch for path in numbered(far.run_dir.batches, ".batch").values()]
    with StubOrchestrator(near.run_dir, batches):
        wait_for([children.start("trainer", module("trainer", near.run_dir.config), environment(), near.run_dir.logs)])
    ours, theirs = (read_metrics(config.run_dir.metrics, "trainer") for config in (far, near))
    assert ours.keys() == theirs.keys() and len(ours) == STEPS
    for key, line in theirs.items():
        assert ours[key]["optim/grad_norm"] == pytest.approx(line["optim/grad_norm"], rel=1e-4)
        assert ours[key]["loss/mean"] == pytest.approx(line["loss/mean"], rel=1e-5, abs=1e-7)
    a, b = (load_file(config.run_dir.weights(STEPS) / "model.safetensors") for config in (far, near))
    assert a.keys() == b.keys() and all((a[name] - b[name]).norm() <= 1e-5 * b[name].norm() for name in b)
