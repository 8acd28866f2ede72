"""The parts of scripts/gpu_check.py --stack: servers and whole runs on one card, started as users
start them.

They need vLLM and the packages of environments beside the trainer's. Where a process fails or is
late, the last lines of all logs of its run are told; more of them is kept beside the results.
"""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench import Bench, say

from rl.config.run import ModelConfig
from rl.inference.engine_args import prepare
from rl.models.folder import resolve_model
from rl.models.tiny import make_tiny_model
from rl.models.tokenizer import load_tokenizer
from rl.run_dir.logs import last_lines
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import RunDir, numbered
from rl.run_dir.spans import read_events
from rl.run_dir.status import read_status, server_files
from rl.system.errors import RunError
from rl.wire.batch_file import decode_batch
from rl.wire.inference_client import InferenceServers
from rl.wire.turns import Turn, unpack_kept
from tests.proofs import promises

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests/environments", "environments/single_digit_addition")
"""What the processes import from."""
LETTERS = """--orchestrator.environment.id=first-half --orchestrator.batch_size=32
    --orchestrator.group_size=8 --orchestrator.sampling.max_tokens=100 --model.max_model_len=512
    --trainer.optim.lr=3e-4 --max_steps=4 --max_lag=0"""
"""A run whose answers are long, and from which even a random model learns: to say the letters a to
m."""
EXPERTS = {"model_type": "qwen3_moe", "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
EXPERTS |= {"num_key_value_heads": 2, "num_hidden_layers": 4, "moe_intermediate_size": 128}
EXPERTS |= {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
LONG = ["--max_lag=1", "--orchestrator.sampling.max_tokens=400"]
"""Whose answers are being sampled while weights are exchanged."""
MASKS = ["--orchestrator.sampling.top_p=0.8", "--orchestrator.sampling.top_k=20"]
ADAPTERS = ["--trainer.lora.rank=16", "--inference.adapters=hot", "--trainer.optim.lr=1e-3"]
METRICS = """mismatch_kl/mean mismatch_kl/max lag_kl/mean ratio/mean parity/agrees optim/grad_norm
    time/pause_inference rollouts/errored rollouts/route_bytes tokens/kept_mean reward/mean
    perf/peak_memory_gib perf/generated_tokens_per_s eval/single-digit-addition/reward_mean"""
"""Those that are told, step by step."""
AIM = "mismatch_kl/mean <= 6e-3"
"""Nats between sampler and trainer, in bfloat16."""
POLL_S, STOP_S, PATIENCE_S = 0.2, 25.0, 60.0
NUM_LINES, NUM_KEPT = 25, 400
"""Lines of each log that are told, and kept."""


class Running:
    """A process of `rl`, and its run."""

    def __init__(self, bench: Bench, name: str, module: str, flags: list[str]):
        root, self.bench = bench.folder / name, bench
        self.run_dir, self.output = RunDir(root, root / "weights"), root.with_suffix(".log")
        self.began, self.used_gib = time.monotonic(), 0.0
        os.environ.pop("PYTORCH_ALLOC_CONF", None)  # `rl` gives it to the trainer alone
        if bench.tiny and "--model.name" not in " ".join(flags):
            flags.append(f"--model.name={model_of(bench)}")
        if find_spec("verifiers"):  # else `rl` makes a home, for which it needs the network
            flags.append(f"--orchestrator.environment.python={sys.executable}")
        command = [sys.executable, "-P", "-m", module, *flags, f"--name={name}"]
        path = [*(str(ROOT / folder) for folder in FOLDERS), os.environ.get("PYTHONPATH", "")]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, f"--output_dir={bench.folder}"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                stdout=output,
                stderr=output,
                cwd=ROOT,
            )

    def until(self, reached: Callable[[], bool]) -> float:
        """Waits; returns the seconds since the start. Raises RunError with the logs if the process
        ends before, or at the deadline."""
        while not reached():
            code = self.process.poll()
            if code is not None or time.monotonic() > self.bench.ends:
                state = "is late" if code is None else f"ended with exit code {code}"
                raise RunError(f"{self.run_dir.root.name} {state}\n{self.logs(NUM_LINES)}")
            if self.bench.on_gpu:
                self.used_gib = max(self.used_gib, used_gib())
            time.sleep(POLL_S)
        return round(time.monotonic() - self.began, 1)

    def logs(self, count: int) -> str:
        logs = [*sorted(self.run_dir.logs.glob("*.log")), self.output]
        return "\n".join(line for log in logs for line in [f"== {log}", *last_lines(log, count)])

    def serves(self) -> bool:
        statuses = map(read_status, server_files(self.run_dir.status_dir))
        return any(status and status.address for status in statuses)

    def ended(self) -> bool:
        return self.process.poll() == 0

    def steps(self) -> int:
        return sum(source == "trainer" for _, source in read_metrics(self.run_dir.metrics))

    def ask(self, prompts: list[list[int]], **sampling: object) -> list[Turn]:
        """The server's answers, all asked for at once."""

        async def answers() -> list[Turn]:
            servers = InferenceServers([], self.run_dir.status("inference"), PATIENCE_S)
            try:
                await servers.wait_for_any()
                asked = [servers.generate(i, ids, sampling) for i, ids in enumerate(prompts)]
                return await asyncio.gather(*asked)
            finally:
                await servers.close()

        return asyncio.run(answers())

    def say(self, seconds: float, aim: str, **figures: object) -> None:
        """Tells the metrics of all steps, how many samples are of two versions, and how many tokens
        truncation has left out of what it kept."""
        lines = read_metrics(self.run_dir.metrics).values()
        for name in METRICS.split():
            if values := [line[name] for line in lines if line.get(name) is not None]:
                figures[name] = [float(f"{value:.3g}") for value in values]
        mixed, outside = 0, 0
        for path in numbered(self.run_dir.batches, ".batch").values():
            for sample in decode_batch(path.read_bytes(), path.name).batch.samples:
                mixed += len({span.policy_version for span in sample.spans}) > 1
                kept = unpack_kept(sample.kept) if sample.kept else []
                pairs = zip(sample.token_ids[sample.trained], kept, strict=False)
                outside += sum(bool(ids) and token not in ids for token, ids in pairs)
        figures |= {"of_two_versions": mixed, "not_kept": outside, "steps": self.steps()}
        say(self.run_dir.root.name, seconds=seconds, used_gib=self.used_gib, **figures, aim=aim)


@contextmanager
def running(bench: Bench, name: str, module: str, *flags: str) -> Iterator[Running]:
    """Ends the process behind it, and keeps the ends of its logs."""
    run = Running(bench, name, module, [*flags])
    try:
        yield run
    finally:
        run.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(STOP_S)
        run.process.kill()
        with bench.logs.open("a") as file:
            file.write(run.logs(NUM_KEPT) + "\n")


def used_gib() -> float:
    """Memory of the card that is in use."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return round(float(subprocess.check_output(query, timeout=STOP_S).split()[0]) / 1024, 1)


def model_of(bench: Bench) -> str:
    folder = bench.folder / "tiny"
    return str(make_tiny_model(folder)) if bench.tiny else resolve_model(ModelConfig())


# Runs ---------------------------------------------------------------------------------------------


def play(bench: Bench, name: str, aim: str, *flags: str) -> None:
    """A run to its end, with these settings."""
    with running(bench, name, "rl.main", *flags) as run:
        served_s = run.until(run.serves)
        figures = {"served_s": served_s, "inference_gib": run.used_gib}
        run.say(run.until(run.ended), aim, **figures)


def letters(bench: Bench, name: str, aim: str, *flags: str) -> None:
    play(bench, name, f"{aim}{AIM}", *LETTERS.split(), *flags)


def quickstart(bench: Bench) -> None:
    few = ["--max_steps=2", "--orchestrator.replace_no_signal=false"] if bench.tiny else []
    aim = f"reward 0.95, {AIM}, inference_gib <= 0.36 of the card"
    play(bench, "quickstart", aim, "@", "configs/quickstart.toml", *few)


def experts(bench: Bench) -> None:
    """Routes in training are those of sampling."""
    model = make_tiny_model(bench.folder / "experts", EXPERTS)
    replayed = f"--trainer.router_replay={'engine' if bench.on_gpu else 'trainer'}"
    letters(bench, "moe", "", f"--model.name={model}", replayed)


def kills(bench: Bench) -> None:
    """Each process of a run is killed once."""
    seen = set[int]()
    with running(bench, "kills", "rl.main", *LETTERS.split(), "--max_steps=12") as run:
        for role in ("inference", "orchestrator", "trainer"):
            last = run.steps() + 2
            run.until(lambda last=last: run.steps() >= last)
            seen |= promises.pending_groups(run.run_dir.pending)
            os.kill(read_status(run.run_dir.status(role)).pid, signal.SIGKILL)
        seconds = run.until(run.ended)
        broken = promises.exactly_once(run.run_dir, seen)[0]
        broken += promises.every_step_trained(run.run_dir) + promises.numbers_once(run.run_dir)
        events = [event for event in read_events(run.run_dir.events) if event.event == "ready"]
        ready_s = [(event.process, event.seconds) for event in events]
        run.say(seconds, "12 steps, none broken", broken=broken, ready_s=ready_s)


# Servers ------------------------------------------------------------------------------------------


def sizes(bench: Bench) -> tuple[int, int]:
    """Numbers of prompts, and of tokens of an answer, where speed is measured."""
    return (8, 16) if bench.tiny else (256, 128)


def prompts_of(bench: Bench, tokenizer: Any) -> list[list[int]]:
    numbers = range(1, sizes(bench)[0])
    texts = ["What is the capital of France?", *(f"What is {n} + 1?" for n in numbers)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)


def rate(bench: Bench, answer: Callable[[], Any]) -> int:
    """Tokens a second, after a round to warm up."""
    answer()
    since = time.monotonic()
    answer()
    return round(math.prod(sizes(bench)) / (time.monotonic() - since))


def serve(bench: Bench, *kinds: str) -> int:
    """Servers of one model: their answers, and tokens a second. Returns the first one's."""
    tokenizer, rates = load_tokenizer(model_of(bench)), []
    prompts, length = prompts_of(bench, tokenizer), sizes(bench)[1]
    for kind in kinds:
        eager = bench.tiny or kind == "eager"
        flags = ["--model.max_model_len=512", f"--inference.vllm.enforce_eager={eager}".lower()]
        with running(bench, kind, "rl.inference.main", *flags) as run:
            start_s = run.until(run.serves)
            greedy = run.ask(prompts[:8], max_tokens=24, temperature=0.0)
            rates += [rate(bench, lambda: run.ask(prompts, max_tokens=length, ignore_eos=True))]
        say(
            kind,
            start_s=start_s,
            says=tokenizer.decode(greedy[0].completion_ids),
            finite=all(math.isfinite(value) for turn in greedy for value in turn.logprobs),
            first_ids=[turn.completion_ids[0] for turn in greedy],
            logprobs=[round(turn.logprobs[0], 4) for turn in greedy],
            tokens_per_s=rates[-1],
            aim="says Paris, finite, the same with graphs and eager",
        )
    return rates[0]


def speed(bench: Bench) -> None:
    """Servers with CUDA graphs and without, and vLLM alone in this process."""
    ours = serve(bench, "graphs", "eager")
    prepare(not bench.on_gpu, None)  # before vLLM is imported
    from vllm import LLM, SamplingParams

    model = model_of(bench)
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(bench, load_tokenizer(model))]
    params = SamplingParams(max_tokens=sizes(bench)[1], ignore_eos=True, logprobs=0)
    given = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28} if bench.tiny else {}
    engine = LLM(model, logprobs_mode="processed_logprobs", max_model_len=512, **given)
    alone = rate(bench, lambda: engine.generate(prompts, params, use_tqdm=False))
    say("vLLM alone", tokens_per_s=alone, ours=round(ours / alone, 2), aim="ours >= 0.9")
    engine.llm_engine.engine_core.shutdown()


PARTS: dict[str, Callable[[Bench], object]] = {
    "serve": lambda bench: serve(bench, "server"),
    "quickstart": quickstart,
    "swap": lambda bench: letters(bench, "swap", "of_two_versions > 0, ", *LONG),
    "masks": lambda bench: letters(bench, "masks", "ratio 1, not_kept 0, ", *MASKS),
    "lora": lambda bench: letters(bench, "lora", "", *ADAPTERS),
    "moe": experts,
    "kills": kills,
    "speed": speed,
}
