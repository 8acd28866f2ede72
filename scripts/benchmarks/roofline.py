"""What every phase of the loop takes, over what this machine's arithmetic and memory allow, and who owns the difference.

`uv run scripts/bench.py roofline` measures server and trainer alone on the shapes of the quickstart; with `--run outputs/x` today's times
are those of a run. Prints a table, then JSON.

The floor of a phase is its matrix products alone, in the model's shapes and number format, as torch.nn.functional.linear does them here, on
weights as many as the model's, so that they come from memory as in the model. Attention's products count at the rate of these. A phase that
has none is bound by memory: the bytes that it must read and write over this machine's bytes a second. Of nothing the floor is 0.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "src"))

WARM_UP = 3
"""Steps at a run's start that are not counted."""
BATCHES = 16
"""Batches that are read of a run, spread over its steps."""
IDLE_AT_REST = ("sampling", "forward_backward", "optimizer", "old_logprobs")
"""Spans of a run in which somebody computes."""


@dataclass(frozen=True)
class Load:
    """What is sampled and trained between two versions."""

    rollouts: int
    group: int
    prompt: int
    """Tokens of a prompt, which a group shares."""
    new: int
    """Tokens of an answer."""

    @property
    def prompts(self) -> int:
        return self.rollouts // self.group

    @property
    def trained(self) -> int:
        """Tokens of a batch in which every prompt is computed once."""
        return self.prompts * self.prompt + self.rollouts * self.new


@dataclass(frozen=True)
class Phase:
    """A line of the table; seconds."""

    name: str
    floor: float
    today: float
    owners: dict[str, float]
    """Who owns the difference: what -> seconds."""

    def line(self) -> str:
        owners = ", ".join(f"{name} {format_s(seconds)}" for name, seconds in sorted(self.owners.items(), key=lambda item: -item[1]))
        ratio = f"{self.floor / self.today:.2f}" if self.today > 0 else "-"
        return f"{self.name:<34}{format_s(self.floor):>10}{format_s(self.today):>10}{ratio:>8}  {owners}"


def format_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.1f} ms"


# The engine alone -----------------------------------------------------------------------------------------------------


class Laps:
    """Seconds of calls by name, of one step of the engine after another."""

    def __init__(self, gpu: bool):
        self.gpu = gpu
        self.steps: list[dict[str, float]] = []
        self.inside = 0.0
        """Seconds of the calls that are watched within the one that runs, which are not counted to that."""

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Counts the calls of `owner.method` to the step that runs."""
        call = getattr(owner, method)

        def timed(*args: Any, **more: Any) -> Any:
            outside, self.inside = self.inside, 0.0
            began = self.now()
            result = call(*args, **more)
            took = self.now() - began
            self.steps[-1][name] = self.steps[-1].get(name, 0.0) + took - self.inside
            self.inside = outside + took
            return result

        setattr(owner, method, timed)

    def now(self) -> float:
        if self.gpu:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()


def engine_alone(folder: str, load: Load, dtype: str, gpu: bool, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of the server's engine in this process, by kind of step (`prefill`, `decode step`) and part. For a process of its own."""
    from rl.inference.main import prepare

    prepare(not gpu, None)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from rl.config.run import ModelConfig, RLConfig
    from rl.inference.routes import to_sampling_params
    from rl.inference.server import suit_cpu, vllm_arguments
    from rl.wire.inference_requests import Sampling

    settings = RLConfig(model=ModelConfig(name=folder, dtype=dtype, max_model_len=load.prompt + load.new + 1))
    config = EngineArgs.from_cli_args(vllm_arguments(settings, folder, not gpu)).create_engine_config()
    if not gpu:
        suit_cpu(config)
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    engine.collective_rpc("begin", args=(0, ""))
    core = engine.engine_core.engine_core
    runner, laps, sizes = core.model_executor.driver_worker.worker.model_runner, Laps(gpu), list[int]()
    forward, sample = ("_model_forward", "_sample") if hasattr(runner, "_sample") else ("execute_model", "sample")  # that of GPUs
    for owner, method, name in ((runner, forward, "model"), (runner.model, "compute_logits", "model"), (runner, sample, "sampler")):
        laps.watch(owner, method, name)
    schedule = core.scheduler.schedule

    def noted(*args: Any, **more: Any) -> Any:
        result = schedule(*args, **more)
        sizes.append(result.total_num_scheduled_tokens)
        return result

    core.scheduler.schedule = noted
    params = to_sampling_params(Sampling(max_tokens=load.new))
    params.ignore_eos = True
    vocabulary, found = config.model_config.get_vocab_size(), list[dict[str, Any]]()
    for number in range(rounds + 1):
        laps.steps.clear()
        sizes.clear()
        for rollout in range(load.rollouts):
            generator = torch.Generator().manual_seed(number * load.rollouts + rollout // load.group)
            ids = torch.randint(vocabulary, (load.prompt,), generator=generator).tolist()
            engine.add_request(f"{number}-{rollout}", {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            laps.steps.append({})
            began = laps.now()
            engine.step()
            laps.steps[-1]["all"] = laps.now() - began
        found.append(by_kind(laps.steps, sizes, load))
    return {kind: {part: median(one[kind][part] for one in found[1:]) for part in found[0][kind]} for kind in found[0]}


def by_kind(steps: list[dict[str, float]], sizes: list[int], load: Load) -> dict[str, dict[str, float]]:
    """Sums over the steps that computed prompts, and medians of those that sampled one token for every rollout."""
    first = next(number for number, size in enumerate(sizes) if size == load.rollouts)
    parts = ("all", "model", "sampler")
    return {
        "prefill": {part: sum(step.get(part, 0.0) for step in steps[:first]) for part in parts},
        "decode step": {part: median(step.get(part, 0.0) for step in steps[first:]) for part in parts},
    }


# Server, trainer and runs ---------------------------------------------------------------------------------------------


async def ask(url: str, headers: dict[str, str], load: Load, rounds: int) -> list[float]:
    """Seconds in which a server answers a batch's requests, sent at once; the first, which warms up, is left out."""
    from rl.wire.http import HttpClient

    client, took = HttpClient(), []
    for number in range(rounds + 1):
        prompts = [
            [1000 + (7919 * (number * load.prompts + group) + 31 * place) % 20000 for place in range(load.prompt)]
            for group in range(load.prompts)
        ]
        bodies = [{"token_ids": prompt, "sampling": {"max_tokens": load.new}} for prompt in prompts for _ in range(load.group)]
        began = time.perf_counter()
        responses = await asyncio.gather(*(client.request("POST", f"{url}/generate", body, headers) for body in bodies))
        took.append(time.perf_counter() - began)
        if wrong := [content for status, content in responses if status != 200]:
            raise SystemExit(f"{url} refuses: {wrong[0][:300]!r}")
    await client.close()
    return took[1:]


def server_alone(folder: str, load: Load, dtype: str, rounds: int, checkouts: dict[str, Path]) -> dict[str, float]:
    """Median seconds of a batch by checkout. Their servers take turns, so that all see the same machine."""
    from scripts.benchmarks.pause import OPEN, start_server

    found: dict[str, list[float]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory(prefix="rl-bench-") as work:
        servers = {name: start_server(checkout, Path(folder), Path(work) / name, dtype, 1) for name, checkout in checkouts.items()}
        try:
            for _ in range(rounds):
                for name, (_, url) in servers.items():
                    found[name] += asyncio.run(ask(url, OPEN, load, 1))
        finally:
            for process, _ in servers.values():
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    return {name: median(took) for name, took in found.items()}


def trainer_alone(folder: str, load: Load, gpu: bool, rounds: int) -> dict[str, Any]:
    """What `bench.py trainer` measures of such a batch."""
    sizes = {
        "samples": load.rollouts,
        "group-size": load.group,
        "prompt-tokens": load.prompt,
        "completion-tokens": load.new,
        "rounds": rounds,
    }
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))] + (["--gpu"] if gpu else [])
    return own_process([str(Path(__file__).with_name("trainer.py")), "--model", folder, *flags])


def own_process(command: list[str]) -> dict[str, Any]:
    """The JSON object that a Python script prints at its end, whatever libraries print before."""
    done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout[f"\n{done.stdout}".rindex("\n{") :])


def of_run(root: Path) -> tuple[Path, str, Load, int, dict[str, float]]:
    """A run's model and its number format, and medians over its steps: its batch, the tokens that are computed of it, seconds, and the
    number of rollouts that were played."""
    from rl.config.stored import stored_config
    from rl.models.folder import resolve_model
    from rl.records.run import Run
    from rl.run_dir.metrics import read_metrics
    from rl.run_dir.paths import numbered
    from rl.wire.batch_file import decode_batch

    config = stored_config(root)
    run_dir, lines = config.run_dir, read_metrics(config.run_dir.metrics)
    steps = sorted({step for step, source in lines if source == "trainer" and (step, "orchestrator") in lines})[WARM_UP:]
    if len(steps) < 3:
        raise SystemExit(f"{root} has {len(steps)} steps after the first {WARM_UP}; give a longer run")
    trainer, batches = ([lines[step, source] for step in steps[1:]] for source in ("trainer", "orchestrator"))
    files = {step: path for step, path in numbered(run_dir.batches, ".batch").items() if step in steps[1:]}
    prompts, computed = list[int](), list[float]()
    for step, path in list(files.items())[:: max(1, len(files) // BATCHES)]:
        samples = decode_batch(path.read_bytes(), path.name).batch.samples
        prompts += [sample.loss_mask.index(True) for sample in samples]
        shared = lines[step, "trainer"]["perf/shared_token_fraction"]
        computed.append(sum(len(sample.token_ids) for sample in samples) * (1 - shared))
    length = median(line["rollouts/length_mean"] for line in batches)
    load = Load(config.orchestrator.batch_size, config.orchestrator.group_size, round(median(prompts)), round(length))
    spans = [done for done in Run(root).timeline().spans if done.name in IDLE_AT_REST]
    ends = [lines[step, "trainer"]["time"] for step in steps]
    between = list(itertools.pairwise(ends))
    times = {name: median(line[f"time/{name}"] for line in trainer) for name in ("forward_backward", "optimizer", "publish_latency")}
    times["sampling"] = median(covered([span for span in spans if span.name == "sampling"], *edges) for edges in between)
    times["idle"] = median(end - begin - covered(spans, begin, end) for begin, end in between)
    times["step"] = median(end - begin for begin, end in between)
    times["finished"] = median(line["rollouts/finished"] for line in batches)
    return Path(resolve_model(config.model)), config.model.dtype, load, round(median(computed)), times


def covered(spans: list[Any], begin: float, end: float) -> float:
    """Seconds between two moments in which at least one of the spans goes on."""
    total, reached = 0.0, begin
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, min(span.end, end) - max(span.begin, reached))
        reached = max(reached, min(span.end, end))
    return total


# The table ------------------------------------------------------------------------------------------------------------


def alone(folder: str, args: argparse.Namespace) -> tuple[list[Phase], dict[str, Any]]:
    """Server and trainer, each without the other, on the batch that the flags describe; and all that was measured."""
    load = Load(args.rollouts, args.group, args.prompt, args.new)
    floors = part("floors", folder, load, load.trained, args.dtype, args)
    engine = part("engine", folder, load, load.trained, args.dtype, args)
    checkouts = {"this": ROOT} | ({"against": args.against.resolve()} if args.against else {})
    server = server_alone(folder, load, args.dtype, args.rounds, checkouts)
    trainer = trainer_alone(folder, load, args.gpu, args.rounds)
    phases = []
    for name in ("prefill", "decode step"):
        times = engine[name]
        owners = {"model beside products": times["model"] - floors[name], "sampler": times["sampler"]}
        phases.append(Phase(name, floors[name], times["all"], owners | {"scheduler": times["all"] - times["model"] - times["sampler"]}))
    steps = load.new - 1
    inside = engine["prefill"]["all"] + steps * engine["decode step"]["all"]
    floor = floors["prefill"] + steps * floors["decode step"]
    owners = {"engine": inside - floor, "HTTP and processes": server["this"] - inside}
    phases.append(Phase(f"sampling: prefill, {steps} decode steps", floor, server["this"], owners))
    ours, bare, floor = trainer["ours"], trainer["bare"], floors["forward and backward"]
    owners = {"PyTorch beside products": bare["forward_backward"] - floor, "trainer": ours["forward_backward"] - bare["forward_backward"]}
    phases.append(Phase("forward and backward", floor, ours["forward_backward"], owners))
    owners = {"PyTorch": bare["optimizer"] - floors["optimizer"], "trainer": ours["optimizer"] - bare["optimizer"]}
    phases.append(Phase("optimizer", floors["optimizer"], ours["optimizer"], owners))
    return phases, {"batch": asdict(load), "floors": floors, "engine": engine, "server": server, "trainer": trainer}


def in_run(args: argparse.Namespace) -> tuple[list[Phase], dict[str, Any]]:
    """The phases of a run's steps; and all that was measured."""
    folder, dtype, load, computed, times = of_run(args.run)
    floors = part("floors", str(folder), load, computed, dtype, args)
    one_batch = floors["prefill"] + max(0, load.new - 1) * floors["decode step"]
    waves = max(1.0, times["finished"] / load.rollouts)
    owners = {"engine and processes": times["sampling"] - waves * one_batch, "rollouts beyond a batch": (waves - 1) * one_batch}
    floor = floors["forward and backward"]
    trained, stepped, published = times["forward_backward"], times["optimizer"], times["publish_latency"]
    phases = [
        Phase("sampling", one_batch, times["sampling"], owners),
        Phase("forward and backward", floor, trained, {"trainer": trained - floor}),
        Phase("optimizer", floors["optimizer"], stepped, {"trainer": stepped - floors["optimizer"]}),
        Phase("idle between", 0.0, times["idle"], {"publishing, loading, waiting": times["idle"]}),
    ]
    lost = {phase.name: phase.today - phase.floor for phase in phases}
    phases.append(Phase("step", one_batch + floor + floors["optimizer"], times["step"], lost))
    phases.append(Phase("publish until it is known", floors["publish"], published, {"publisher": published - floors["publish"]}))
    return phases, {"batch": asdict(load), "computed_tokens": computed, "floors": floors, "run": times}


def part(name: str, folder: str, load: Load, computed: int, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """A measurement in a process of its own."""
    task = {"folder": folder, "load": asdict(load), "computed": computed, "dtype": dtype, "gpu": args.gpu, "rounds": args.rounds}
    return own_process([__file__, "--part", name, json.dumps(task)])


def measure_part(name: str, task: dict[str, Any]) -> dict[str, Any]:
    load, computed = Load(**task.pop("load")), task.pop("computed")
    if name == "engine":
        return engine_alone(load=load, **task)
    from scripts.benchmarks.floors import measure_floors

    return measure_floors(load=load, computed=computed, **task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run directory, whose model, batch and times are taken")
    parser.add_argument("--model", help="a folder, or a name that rl resolves; default: rl's default model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=44, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout, whose server is measured in turn with this one's")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(measure_part(args.part[0], json.loads(args.part[1]))))
        return
    from rl.config.run import ModelConfig
    from rl.models.folder import resolve_model

    folder = None if args.run else resolve_model(ModelConfig(name=args.model) if args.model else ModelConfig())
    phases, measured = in_run(args) if folder is None else alone(folder, args)
    print(f"{'phase':<34}{'floor':>10}{'today':>10}{'ratio':>8}  who owns the difference")
    print(*(phase.line() for phase in phases), sep="\n")
    print(
        json.dumps(
            {"cores": os.cpu_count(), "load": os.getloadavg()[0], "phases": [asdict(phase) for phase in phases], **measured}, indent=1
        )
    )


if __name__ == "__main__":
    main()
