"""Samples from a model through inference, scores the same tokens as the trainer does, and compares: `rl doctor --parity`."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rl.batch_log import write_batch
from rl.cli import to_toml
from rl.commands.playing import PlayError, say, start_server
from rl.config import RLConfig
from rl.files import write_file
from rl.lives import failure
from rl.messages import TrainBatch, TrainingSample
from rl.orchestrator.inference_client import InferenceServers
from rl.orchestrator.probe import complete
from rl.parity import LIMITS, Scored, agreement, likely_cause
from rl.processes import Children

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a small village by the sea, and in it",
    "def fibonacci(n: int) -> int:\n    ",
    "17 + 25 = 42, 42 * 3 =",
    "Die Würde des Menschen ist unantastbar.",
    "Question: why is the sky blue?\nAnswer:",
)
LONG_TEXT = "A list of words, one a line, in no order at all: apple, river, window, seven, blue, stone, paper, north. "
TEMPERATURES = (1.0, 0.7)
SCORE_TIMEOUT_S = 1800.0
POLL_S = 0.2


async def examine(config: RLConfig, values: dict[str, Any], children: Children) -> int:
    """The comparison for each dtype. Returns the exit code."""
    dtypes = [values["dtype"]] if values["dtype"] else list(LIMITS)
    if unknown := set(dtypes) - set(LIMITS):
        raise PlayError(f"--dtype {unknown.pop()}: give one of {', '.join(LIMITS)}")
    num_tokens = values["tokens"] or 64
    if num_tokens >= config.model.max_model_len - 1:
        raise PlayError(f"--tokens {num_tokens} leaves no room for a prompt in model.max_model_len = {config.model.max_model_len}")
    code = 0
    with tempfile.TemporaryDirectory(prefix="rl-doctor-") as folder:
        for dtype in dtypes:
            config = config.model_copy(deep=True)
            config.model.dtype, config.model.name = dtype, values["parity"]
            config.orchestrator.sampling.max_tokens = num_tokens
            scored, window = await parity(config, num_tokens, Path(folder), children)
            code = max(code, report(dtype, scored, window))
    return code


async def parity(config: RLConfig, num_tokens: int, work: Path, children: Children) -> tuple[list[Scored], int | None]:
    """Samples from a server of the model, ends it, and has the trainer's code score the samples. Returns its sliding window, too."""
    dtype = config.model.dtype
    say(f"{dtype}: sampling from inference")
    server, model = await start_server(config, config.model.name, work, children)
    write_file(work / f"{dtype}.toml", to_toml(server.config).encode())
    servers = InferenceServers([], server.config.run_dir.status("inference"), config.orchestrator.inference_timeout_s)
    try:
        await server.ready()
        samples = await sample(servers, prompts(model, config.model.max_model_len, num_tokens), num_tokens)
    finally:
        await servers.close()
        await server.end()
    write_batch(work / f"{dtype}.batch", TrainBatch(step=1, samples=samples), None)
    say(f"{dtype}: scoring {sum(sum(s.loss_mask) for s in samples)} tokens as the trainer does")
    command = [sys.executable, "-m", "rl.trainer.parity", str(work / f"{dtype}.toml"), str(work / f"{dtype}.batch")]
    child = children.start("parity", command, dict(os.environ), work / "logs")
    try:
        async with asyncio.timeout(SCORE_TIMEOUT_S):
            while child.exit_code is None:
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise PlayError(f"waited {SCORE_TIMEOUT_S:.0f} s for the trainer's code to score the samples; see {child.log}") from None
    if child.exit_code:
        raise failure(child, child.ending())
    found = json.loads(child.log.read_text().splitlines()[-1])
    return [Scored(*token) for token in found["tokens"]], found["sliding_window"]


def prompts(model: str, max_model_len: int, num_tokens: int) -> list[list[int]]:
    """Token ids of the texts, and of a long one, which shows positions that are computed differently."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    room = min(1024, max_model_len - num_tokens - 1)
    texts = [*TEXTS, LONG_TEXT * (1 + room // 16)]
    return [tokenizer.encode(text, add_special_tokens=False)[:room] for text in texts]


async def sample(servers: InferenceServers, prompts: list[list[int]], num_tokens: int) -> list[TrainingSample]:
    """One completion of each prompt at each temperature."""
    cases = [(prompt, temperature) for prompt in prompts for temperature in TEMPERATURES]
    return await asyncio.gather(*(complete(servers, prompt, temperature, num_tokens, i) for i, (prompt, temperature) in enumerate(cases)))


def report(dtype: str, scored: list[Scored], sliding_window: int | None) -> int:
    """Prints the table of a dtype. Returns 1 when trainer and inference disagree."""
    limit = LIMITS[dtype]
    print(f"{dtype} (limits: {limit})\n  {'temperature':<12} {'tokens':>6} {'mean |d|':>10} {'max |d|':>10} {'kl':>10}")
    for temperature in TEMPERATURES:
        found = agreement([token.difference for token in scored if token.temperature == temperature])
        print(f"  {temperature:<12} {found.tokens:>6} {found.mean:>10.2g} {found.largest:>10.2g} {found.kl:>10.2g}")
    if agreement([token.difference for token in scored]).within(limit):
        print("  trainer and inference agree", flush=True)
        return 0
    print(f"  they DISAGREE: {likely_cause(scored, limit, sliding_window)}", flush=True)
    return 1
