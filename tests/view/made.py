"""Two small runs as the processes write them, whose rollouts try to be more than text."""

import json
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rl.run_dir.metrics import MetricsLog
from rl.run_dir.nodes import Nodes, NodeStatus, TrainerWorld
from rl.run_dir.numbers import CLIPPED, write_token_log
from rl.run_dir.paths import RunDir
from rl.run_dir.spans import Span
from tests.records.made import (
    clock,
    group,
    make_run,
    note,
    sample,
    write_eval_of,
    write_lines,
    write_samples,
    write_step,
)

HOSTILE = (
    "<script>window.hacked = 1</script>",
    '</script><img src=x onerror="window.hacked = 1"><svg onload="window.hacked = 1">',
    "[click](javascript:window.hacked=1) javascript:window.hacked=1",
    "\x1b[2J\x07\x00 clears a terminal",
    "\u202egnp.exe\u202c turns around",
    "${window.hacked = 1} {{window.hacked = 1}} `window.hacked = 1`",
)
LONG = "x" * 300_000
STEPS = 4


def make_runs(place: Path) -> Path:
    """`place/first` and `place/second`, which has another learning rate; first has everything
    that a page shows."""
    first = make_run(place / "first")
    write_numbers(first, [0.1, 0.3, 0.4, 0.7])
    write_rollouts(first)
    write_tokens(first)
    write_times(first)
    second = make_run(place / "second", trainer={"optim": {"lr": 5e-6}})
    write_numbers(second, [0.1, 0.2, 0.25, 0.3])
    (second.status_dir).mkdir(exist_ok=True)
    return place


def make_cluster_run(root: Path) -> RunDir:
    """A run whose machines are lost, two of three: their names are markup."""
    run_dir = make_run(root, cluster={"nodes": 3})
    write_numbers(run_dir, [0.1, 0.2])
    nodes, now = Nodes(run_dir), time.time()
    about = dict.fromkeys(("address", "software", "config"), "") | {"port": 0, "gpus": 8}
    about |= {"lease": 1, "pid": 1, "started": now - 7200, "heartbeat": now - 600}
    for index, roles, ranks in ((0, ["trainer", "leader"], 8), (1, ["inference"], 0)):
        names = {"host": f"<b>host{index}", "place": f"elsewhere-{index}"}
        status = NodeStatus(index=index, roles=roles, ranks=ranks, **names, **about)
        nodes.write(nodes.status_path(index), status)
    nodes.write(nodes.world_path, TrainerWorld(generation=0, nodes=[0], leases=[1], ranks=[8]))
    run_dir.logs.mkdir(exist_ok=True)
    for name in ("rl-1", "trainer-node0-1", "trainer-node1-1"):
        (run_dir.logs / f"{name}.log").write_text(f"of {name}\n")
    return run_dir


def write_numbers(run_dir: RunDir, rewards: list[float]) -> None:
    """Metrics of each step, one of them with a name that is markup."""
    run_dir.status_dir.mkdir(parents=True, exist_ok=True)
    orchestrator, trainer = (
        MetricsLog(run_dir.metrics, name) for name in ("orchestrator", "trainer")
    )
    hostile = "<img src=x onerror=window.hacked=1>"
    times = {"time/step": 2.0, "time/forward_backward": 1.0, "perf/tokens_per_s": 100.0}
    for step, reward in enumerate(rewards, start=1):
        counts = {"rollouts/finished": 8, "lag/mean": 0.5, hostile: 1.0}
        orchestrator.write(step, {"reward/mean": reward} | counts)
        trainer.write(step, {"loss/mean": -reward} | times)


def write_rollouts(run_dir: RunDir) -> None:
    """Each step a group that is trained, one without signal, and one whose answer is hostile."""
    for step in range(1, STEPS + 1):
        hostile = group(10 * step + 2, [0.0, 1.0], task=7, version=step - 1)
        for rollout, text in zip(
            hostile.rollouts, (HOSTILE[step % len(HOSTILE)], "\n".join(HOSTILE)), strict=True
        ):
            function = {"name": "<b>tool</b>", "arguments": json.dumps({"code": text})}
            thought = f"<think>let me see {text}</think>calling"
            image = {"type": "image_url", "image_url": {"url": "javascript:1"}}
            calls = [{"id": "c", "function": function}]
            rollout.text = [
                {"role": "system", "content": "<style>*{display:none}</style>"},
                {"role": "user", "content": [{"type": "text", "text": text}, image]},
                {"role": "assistant", "content": thought, "tool_calls": calls},
                {"role": "tool", "content": f"Error: no such file {text}", "tool_call_id": "c"},
                {"role": "<i>odd</i>", "content": LONG if step == 1 else text},
            ]
        said = f"the answer is {step} and no more"
        trained = group(10 * step, [0.0, 1.0], task=step % 2, version=step - 1, text=said)
        equal = group(10 * step + 1, [1.0, 1.0], task=2, version=step - 1)
        write_step(run_dir, step, [trained, equal, hostile])
    write_eval_of(run_dir, 0, [0.0, 1.0, 0.0])
    write_eval_of(run_dir, STEPS, [1.0, 1.0, 0.0])


def write_tokens(run_dir: RunDir) -> None:
    """The batches, the trainer's side of them, and a tokenizer whose words are markup."""
    words = {word: i for i, word in enumerate(["<unk>", "2", "+", "<script>", "four", "</span>"])}
    folder = run_dir.weights(STEPS)
    folder.mkdir(parents=True)
    Tokenizer(WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    for step in range(1, STEPS + 1):
        samples = [sample(10 * step, i, version=step - 1) for i in range(2)]
        write_samples(run_dir, step, samples)
        columns = {
            "trainer_logprobs": np.array([-0.5, -0.25, -1.5, -0.5, -0.5, -0.5], np.float32),
            "entropies": np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], np.float16),
            "flags": np.array([0, 0, CLIPPED, 0, 0, 0], np.uint8),
        }
        write_token_log(run_dir.tokens(step), columns)


def write_times(run_dir: RunDir) -> None:
    """Spans of two processes, a death, a log."""
    now = time.time() - 60
    for process in ("trainer", "orchestrator"):
        spans = [
            Span(name="forward_backward", begin=begin, end=begin + 3, lane="step", step=i)
            for i, begin in enumerate(np.arange(100.0, 130.0, 5.0).tolist())
        ]
        write_lines(run_dir.spans / f"{process}.jsonl", clock(process, now, 100.0), *spans)
    note(run_dir, now, "start")
    note(run_dir, now + 12, "death", "trainer", step=3, reason="<b>killed</b>")
    run_dir.logs.mkdir(exist_ok=True)
    (run_dir.logs / "trainer-1.log").write_text(
        "<script>window.hacked = 1</script>\nValueError: \x1b[31mred\n"
    )
