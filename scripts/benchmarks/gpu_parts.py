"""The parts of scripts/gpu_check.py, each run in a process of its own.

Each prints one JSON object a line, as soon as it knows it: `case`, what was measured, and `aim`
where there is one. Only the trainer is imported, and what it needs.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from benchmarks.gpu_bench import Bench, apart, case, compilations, in_process, say
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl.config.run import RLConfig
from rl.config.trainer import FakeDataConfig
from rl.trainer import determinism
from rl.trainer.data.batch_sources import FakeBatches, prepare
from rl.trainer.data.packing import Packed
from rl.trainer.measure.performance import Timer, peak_flops, work_of
from rl.trainer.model.policy import load_policy
from rl.trainer.optim import make_optimizer
from rl.trainer.parallel.world import World
from rl.trainer.store import checkpoint
from rl.trainer.train import TrainContext, train_step

SAMPLE = 4096
"""Tokens of a sample where rows are measured: a prompt of a quarter, and an answer."""


def ready(
    bench: Bench, name: str, world: World, dtype: str = "bfloat16", **trainer: Any
) -> tuple[RLConfig, TrainContext]:
    """A model that can be trained, and its configuration."""
    model = {
        "name": str(bench.model(name)),
        "dtype": dtype,
        "max_model_len": 257 if bench.tiny else SAMPLE + 1,
    }
    config = RLConfig.model_validate({"model": model, "trainer": trainer})
    policy = load_policy(str(bench.model(name)), config.model, config.trainer, world)
    return config, TrainContext(
        policy, make_optimizer(policy, config.trainer.optim), config.trainer, world
    )


def batch_for(
    config: RLConfig,
    context: TrainContext,
    data: FakeDataConfig,
    step: int = 1,
) -> Packed:
    """Random samples in rows."""
    text = context.model.config.get_text_config()
    batch = FakeBatches(data, text.vocab_size, seed=0).receive(step)
    return prepare(batch, config, context.world, text.hidden_size)


def train(bench: Bench, context: TrainContext, packed: Packed) -> float:
    """One step; its seconds."""
    bench.synchronize()
    since = time.monotonic()
    train_step(context, packed, 1e-6, Timer())
    bench.synchronize()
    return time.monotonic() - since


def gradients(bench: Bench) -> None:
    """Loss and gradients of one batch in float32 on the device, and on the CPU."""
    for kind in ("blocks", "auto"):
        with case(f"attention {kind}"):
            compare_with_cpu(bench, f"attention {kind}", attention=kind)


def compare_with_cpu(bench: Bench, title: str, name: str = "small", **settings: Any) -> None:
    # Each in a process of its own: a fork of one that has computed hangs in its first parallel
    # operation on the CPU.
    places = (bench, replace(bench, place="cpu"))
    found, expected = (
        in_process(bench, partial(gradients_once, place, name, **settings), "gradients")
        for place in places
    )
    say(
        title,
        **in_process(bench, partial(compare_gradients, found, expected), "compare"),
        aim="loss and gradient <= 1e-5",
    )


def compare_gradients(found: dict[str, Any], expected: dict[str, Any]) -> None:
    tensors, there = load_file(found["file"]), load_file(expected["file"])
    worst = max((apart(tensor, there[name]), name) for name, tensor in tensors.items())
    loss = abs(found["loss"] - expected["loss"]) / abs(expected["loss"])
    whole = apart(
        *(torch.cat([x[name].flatten() for name in sorted(there)]) for x in (tensors, there))
    )
    print(json.dumps({"loss": float(f"{loss:.1e}"), "gradient": whole, "worst": worst}), flush=True)


def gradients_once(bench: Bench, name: str, **settings: Any) -> None:
    config, context = ready(bench, name, bench.world(), "float32", **settings)
    packed = batch_for(
        config,
        context,
        FakeDataConfig(samples=8, group_size=4, prompt_tokens=100, completion_tokens=60),
    )
    kept: dict[str, Tensor] = {}
    context.optimizer.step = lambda *_: kept.update(  # type: ignore[method-assign]
        {name: p.grad.cpu() for name, p in context.model.named_parameters() if p.requires_grad}
    )
    context.settings.optim.max_grad_norm = float("inf")
    metrics = train_step(context, packed, 0.0, Timer())
    file = bench.folder / f"gradients-{os.getpid()}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in kept.items()}, file)
    print(json.dumps({"loss": metrics["loss/mean"], "file": str(file)}), flush=True)


def experts(bench: Bench) -> None:
    """A mixture of experts: gradients in float32 against the CPU's, with adapters on its experts
    too, and steps of two rows."""
    for title, settings in {
        "gradients": {},
        "gradients of adapters": {"lora": {"rank": 8, "targets": "all-linear,experts"}},
    }.items():
        with case(title):
            compare_with_cpu(bench, title, "small experts", **settings)
    training(bench, "30B-A3B")


def two_rows(tokens: int, sample: int) -> FakeDataConfig:
    """Samples of so many tokens, a quarter of them the prompt, that fill two rows."""
    return FakeDataConfig(
        samples=2 * tokens // sample,
        group_size=1,
        prompt_tokens=sample // 4,
        completion_tokens=sample - sample // 4,
    )


def training(bench: Bench, name: str) -> None:
    """Steps of two rows of samples of 4,096 tokens."""
    aim = {
        "0.6B": "mfu >= 0.45 and state_gib <= 12.5 at 16k",
        "4B": "mfu >= 0.5",
        "30B-A3B": "mfu >= 0.3",
    }[name]
    full = {"activation_checkpointing": "full"}
    cases = [
        (16384, full, True),
        (65536, full | {"optim": {"offload": True}}, True),
        (16384, full, False),
    ]
    if name == "0.6B":
        cases = [(16384, {}, True), (65536, full, True), (16384, {}, False)]
    if name == "30B-A3B":
        cases = [
            (16384, full, True),
            (16384, full | {"lora": {"rank": 32, "targets": "all-linear,experts"}}, True),
            (16384, full, False),
        ]
    sample = 64 if bench.tiny else SAMPLE
    world = bench.world()
    for tokens, settings, compile_layers in [(256, cases[0][1], False)] if bench.tiny else cases:
        size = str(tokens) if bench.tiny else f"{tokens // 1024}k"
        title = " ".join([size, *map(str, settings.values())] + ["compiled"] * compile_layers)
        data = two_rows(tokens, sample)
        with case(title):
            figures = train_rows(
                bench,
                name,
                world,
                data,
                micro_batch_tokens=tokens,
                compile=compile_layers,
                **settings,
            )
            say(title, **figures, aim=aim)
        bench.clear()


def train_rows(
    bench: Bench, name: str, world: World, data: FakeDataConfig, **settings: Any
) -> dict[str, Any]:
    """What a step on such samples takes, after one to warm up."""
    since = time.monotonic()
    config, context = ready(bench, name, world, **settings)
    packed = batch_for(config, context, data)
    train(bench, context, packed)
    warm, state = (
        time.monotonic() - since,
        round(torch.cuda.memory_allocated() / 2**30, 2) if bench.on_gpu else None,
    )
    bench.peak_gib(reset=True)
    seconds = median(train(bench, context, packed) for _ in range(3))
    work, peak = (
        work_of(context.model),
        peak_flops(torch.cuda.get_device_name()) if bench.on_gpu else None,
    )
    done, real = (
        sum(map(work.of, packed.micro_batches)),
        sum(sample.num_tokens for sample in packed.batch.samples),
    )
    figures = {
        "tokens_per_s": round(real / seconds),
        "mfu": round(done / seconds / peak, 3) if peak else None,
        "state_gib": state,
    }
    return figures | {
        "peak_gib": bench.peak_gib(),
        "start_s": round(warm, 1),
        "compilations": compilations(),
    }


def digest(context: TrainContext) -> str:
    """Of all weights."""
    found = hashlib.blake2b()
    for parameter in context.model.parameters():
        found.update(
            checkpoint.local(parameter.detach())
            .cpu()
            .contiguous()
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
    return found.hexdigest()


def replay(bench: Bench) -> None:
    """Two steps of a deterministic run in each of two processes."""
    for compiled in (False, True) if bench.on_gpu else (False,):
        with case(f"compile {compiled}"):
            first, second = (
                in_process(bench, partial(replay_once, bench, compiled), "replay") for _ in range(2)
            )
            say(f"compile {compiled}", equal=first == second, aim="true")


def replay_once(bench: Bench, compiled: bool) -> None:
    tokens = 128 if bench.tiny else 8192
    settings = {
        "deterministic": True,
        "micro_batch_tokens": tokens,
        "compile": compiled,
        "optim": {"lr": 1e-3},
    }
    world = bench.world()
    determinism.apply(RLConfig.model_validate({"trainer": settings}).trainer, bench.device)
    config, context = ready(bench, "0.6B", world, **settings)
    for step in (1, 2):
        data = FakeDataConfig(
            samples=8, group_size=4, prompt_tokens=tokens // 8, completion_tokens=tokens // 8
        )
        train(bench, context, batch_for(config, context, data, step))
    print(json.dumps({"weights": digest(context)}), flush=True)


PARTS: dict[str, Callable[..., None]] = {
    "gradients": gradients,
    "replay": replay,
    "experts": experts,
    "train_0.6B": partial(training, name="0.6B"),
    "train_4B": partial(training, name="4B"),
}
