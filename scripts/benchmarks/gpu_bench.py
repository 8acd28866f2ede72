"""What the parts of scripts/gpu_check.py share: random models, measuring, and processes of their
own."""

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from rl.system.errors import RunError
from rl.trainer.measure.performance import peak_memory_gib
from rl.trainer.parallel.world import World, start_world

SHAPES = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "30B-A3B": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "small experts": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
}
"""Shapes of Qwen3, of four layers of the one with experts, and of two with which a CPU computes
in float32."""
COMMON = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1 << 17,
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
LITTLE = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
FEW = {"num_experts": 16, "num_experts_per_tok": 4}
TINY = LITTLE | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass(frozen=True)
class Bench:
    """Where and how large the parts are run."""

    folder: Path
    place: str
    """The type of the device."""
    tiny: bool
    ends: float
    """When a part should have told why it is late, by time.monotonic."""
    logs: Path
    """The file for the logs of processes."""

    @property
    def device(self) -> torch.device:
        return torch.device(self.place)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def world(self) -> World:
        return start_world(self.on_gpu, 300.0)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def peak_gib(self, reset: bool = False) -> float:
        """The most memory since the last reset; of the whole process without a GPU."""
        peak = peak_memory_gib(self.device)
        if reset and self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        return round(peak, 2)

    def clear(self) -> None:
        """Frees what a case has left."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def model(self, name: str) -> Path:
        """The folder of a random model of this shape, made once, on the device."""
        path = self.folder / name
        if not path.exists():
            is_small, has_experts = (
                name.startswith("small"),
                "moe_intermediate_size" in SHAPES[name],
            )
            shape = (
                COMMON | SHAPES[name] | (LITTLE if is_small else {}) | (TINY if self.tiny else {})
            )
            experts = EXPERTS | (FEW if is_small or self.tiny else {})
            config = Qwen3MoeConfig(**shape | experts) if has_experts else Qwen3Config(**shape)
            torch.manual_seed(0)
            with self.device:
                model = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32 if is_small else torch.bfloat16
                )
            model.save_pretrained(path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
        return path


def say(case: str, **figures: object) -> None:
    """A result: a line of JSON."""
    print(json.dumps({"case": case, **figures}), flush=True)


@contextmanager
def case(name: str) -> Iterator[None]:
    """Says what a case has raised (`raised`), after which its part goes on with the next one."""
    try:
        yield
    except Exception as error:
        say(name, raised=f"{type(error).__name__}: {error}"[:4000])


def compilations() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def apart(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, of that of what is expected."""
    return float(
        f"{float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)):.2g}"
    )


def in_process(bench: Bench, function: Callable[[], None], name: str) -> dict[str, Any]:
    """What a function says last, run in a process of its own. Raises RunError if it fails."""
    log = bench.folder / f"{name}-{time.monotonic_ns()}"
    if in_fork(function, log, None, session=False):
        raise RunError(f"{name}: {Path(f'{log}.err').read_text().strip()[-600:]}")
    return told(log)[-1]


def told(log: Path) -> list[dict[str, Any]]:
    """The JSON objects that a process printed."""
    found = []
    for text in Path(f"{log}.out").read_text().splitlines():
        with suppress(json.JSONDecodeError):
            found += [json.loads(text)] if text.startswith("{") and text.endswith("}") else []
    return found


def in_fork(
    function: Callable[[], None], log: Path, limit_s: float | None, session: bool = True
) -> int | None:
    """Runs a function in a fork of this process, which has imported what takes long and has
    touched no GPU; what it prints is in `log`.out and `log`.err. Returns its exit code; None if
    it was ended at the limit, with all processes of its `session`."""

    def live() -> None:
        if session:
            os.setsid()
        for stream, suffix in ((sys.stdout, ".out"), (sys.stderr, ".err")):
            os.dup2(
                os.open(f"{log}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
                stream.fileno(),
            )
        function()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    process = multiprocessing.get_context("fork").Process(target=live)
    process.start()
    process.join(limit_s)
    code = process.exitcode
    if session:
        with suppress(ProcessLookupError):  # what it has left, too
            os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return code
