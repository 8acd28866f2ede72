"""A real job on two nodes, on one machine: each node is a network namespace with its own address and host name, joined by a cable (veth).

    uv run -m tests.proofs.two_nodes          # as root; a few minutes on two cores

Node a runs inference, the orchestrator and one trainer rank, node b the other trainer rank: the commands of docs/multi_node.md. Then one
rank on this host trains the same batches, and the final weights of the two are compared.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rl.config.command_line import build, parse_args, to_toml
from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.run_dir.files import write_file
from rl.run_dir.logs import last_lines
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import RunDir, numbered
from rl.system.children import Child

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}
PORT = 29500
"""Of torchrun's rendezvous, on node a: nothing else listens in a new namespace."""
DEADLINE_S = 1800.0
ENTER = 'mount --bind "$0" /etc/hosts; hostname "$1"; shift; exec "$@"'
"""Inside a node: its own hosts file and name."""


class Nodes:
    """Two namespaces, as long as the `with` block lasts. Raises OSError, with what `ip` said, where they cannot be made."""

    def __init__(self, own_name: str = "127.0.1.1"):
        """`own_name`: the address that a node's own name stands for there, on Debian and its kin a loopback one; empty: none."""
        self.own_name = own_name

    def __enter__(self) -> "Nodes":
        self.stack = contextlib.ExitStack()
        with self.stack:
            self.hosts = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            for node in ADDRESSES:
                known = {other: address for other, address in (ADDRESSES | {node: self.own_name}).items() if address}
                (self.hosts / node).write_text("127.0.0.1 localhost\n" + "".join(f"{at} node-{name}\n" for name, at in known.items()))
                ip("netns", "add", namespace(node))
                self.stack.callback(ip, "netns", "delete", namespace(node))
            ip("-n", namespace("a"), "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", namespace("b"))
            for node, address in ADDRESSES.items():
                ip("-n", namespace(node), "address", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    ip("-n", namespace(node), "link", "set", device, "up")
            done = subprocess.run(self.inside("a", ["true"]), capture_output=True, text=True)
            if done.returncode:
                raise OSError(done.stderr.strip())
            self.stack = self.stack.pop_all()
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


def trainer_command(config: Path, rendezvous: Sequence[str] = ()) -> list[str]:
    """One node's part of the trainer. `rendezvous`: more of torchrun's own arguments."""
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"node-a:{PORT}", "--rdzv-id", "run"]
    return [sys.executable, "-m", "torch.distributed.run", *where, *rendezvous, "-m", "rl.trainer.main", "@", str(config)]


def environment() -> dict[str, str]:
    """One thread a process: two ranks, the server and the orchestrator share the cores."""
    unset = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    return {key: value for key, value in os.environ.items() if key not in unset} | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def wait_for(children: Sequence[Child], deadline_s: float, others: Sequence[Child] = ()) -> None:
    """Until all have ended well. Raises RuntimeError with the end of a log when one (or one of the `others`) fails or takes too long."""
    deadline = time.monotonic() + deadline_s
    while any(child.exit_code is None for child in children):
        failed = [child for child in (*children, *others) if child.exit_code]
        if failed or time.monotonic() > deadline:
            late = failed[0] if failed else next(child for child in children if child.exit_code is None)
            what = late.ending() if failed else f"has not ended within {deadline_s:.0f} s"
            raise RuntimeError(f"{late.name} {what}:\n" + "\n".join(last_lines(late.log)))
        time.sleep(0.1)
    if failed := [child for child in children if child.exit_code]:
        raise RuntimeError(f"{failed[0].name} {failed[0].ending()}:\n" + "\n".join(last_lines(failed[0].log)))


def largest_difference(ours: Path, theirs: Path) -> tuple[float, float]:
    """Over the tensors of two policy versions: largest |a - b| / |b|, and the largest single difference."""
    from safetensors.torch import load_file

    a, b = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert a.keys() == b.keys()
    relative = max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)
    return relative, max(float((a[name] - b[name]).abs().max()) for name in b)


def make_config(output: Path, model: str, steps: int) -> RLConfig:
    """The quickstart's task, small, in float32 so that the weights can be compared."""
    flags = f"--name two-nodes --output-dir {output} --model.name {model} --model.dtype float32 --max-steps {steps} --max-lag 1"
    flags += f" --orchestrator.host {ADDRESSES['a']} --inference.host {ADDRESSES['a']} --orchestrator.batch-size 16"
    flags += " --trainer.gpus 0 --inference.gpus 0 --trainer.checkpoint.interval 1000 --orchestrator.environment.id single-digit-addition"
    flags += " --orchestrator.sampling.max-tokens 16 --model.max-model-len 256 --optim.lr 2e-5"
    return build(parse_args(flags.replace("--optim", "--trainer.optim").split()))


def write_config(config: RLConfig) -> Path:
    write_file(config.run_dir.config, to_toml(config).encode())
    return config.run_dir.config


def run_on_two_nodes(config: RLConfig, children: Children) -> None:
    """The four processes, until trainer and orchestrator have ended."""
    path, logs = write_config(config), config.run_dir.logs
    with Nodes() as nodes:
        try:
            start: Callable[[str, str, list[str]], Child] = lambda name, node, command: children.start(  # noqa: E731
                name, nodes.inside(node, command), environment(), logs
            )
            inference = start("inference", "a", [sys.executable, "-m", "rl.inference.main", "@", str(path)])
            ending = [start("orchestrator", "a", [sys.executable, "-m", "rl.orchestrator.main", "@", str(path)])]
            ending += [start(f"trainer-{node}", node, trainer_command(path)) for node in ADDRESSES]
            wait_for(ending, DEADLINE_S, [inference])
        finally:
            children.stop()


def replay_on_one(config: RLConfig, source: RunDir, children: Children) -> None:
    """One rank on this host trains the batches of another run."""
    from rl.wire.batch_file import decode_batch
    from tests.trainer.stub_orchestrator import StubOrchestrator

    batches = [decode_batch(path.read_bytes(), path.name).batch for path in numbered(source.batches, ".batch").values()]
    with StubOrchestrator(config.run_dir, batches):
        command = [sys.executable, "-m", "rl.trainer.main", "@", str(write_config(config))]
        wait_for([children.start("trainer", command, environment(), config.run_dir.logs)], DEADLINE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path, help="where the two runs are kept; default: a temporary directory")
    options = parser.parse_args()
    children = Children()
    children.stop_on_signals()
    with contextlib.ExitStack() as stack:
        from rl.models.folder import resolve_model

        output = (options.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))).absolute()
        config = make_config(output, options.model, options.steps)
        config.model.name = str(resolve_model(config.model))  # the nodes have no way out
        stack.callback(children.stop)
        run_on_two_nodes(config, children)
        for (step, source), line in read_metrics(config.run_dir.metrics).items():
            names = [
                name
                for name in ("reward/mean", "loss/mean", "optim/grad_norm", "mismatch_kl/mean", "lag_kl/mean", "time/step")
                if name in line
            ]
            print(f"step {step} {source}: " + "  ".join(f"{name} {line[name]:.5g}" for name in names))
        alone = config.model_copy(update={"name": "one-rank"})
        replay_on_one(alone, config.run_dir, children)
        relative, largest = largest_difference(*(run.run_dir.weights(options.steps) for run in (config, alone)))
        print(f"weights after {options.steps} steps, two nodes against one rank: relative {relative:.2e}, largest difference {largest:.2e}")
        if relative > 1e-5:
            raise SystemExit("they differ")


if __name__ == "__main__":
    main()
