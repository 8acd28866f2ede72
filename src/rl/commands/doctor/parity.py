"""`rl doctor --parity`: samples from a model through inference, scores the same tokens with the
trainer's code, and compares."""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from rl.commands.doctor.machine import output
from rl.commands.play_session import policy_server
from rl.config.command_line import write_config
from rl.config.run import ModelConfig, RLConfig
from rl.launch.children import Children
from rl.launch.role_state import failure
from rl.models.tokenizer import text_ids
from rl.orchestrator.policy.trainer_requests import complete
from rl.system.children import PYTHON
from rl.system.errors import RunError
from rl.system.terminal import say, table
from rl.wire.batch_file import write_batch
from rl.wire.messages import TrainBatch
from rl.wire.parity import LIMITS, Limit, Parity, ScoredToken, likely_cause, parity_of

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a small village by the sea, and in it",
    "def fibonacci(n: int) -> int:\n    ",
    "17 + 25 = 42, 42 * 3 =",
    "Die Würde des Menschen ist unantastbar.",
    "Question: why is the sky blue?\nAnswer:",
)
LONG_TEXT = (
    "A list of words, one a line, in no order at all: apple, river, window, seven, blue, stone, "
    "paper, north. "
)
TEMPERATURES = (1.0, 0.7)
SCORE_TIMEOUT_S = 1800.0


async def examine(config: RLConfig, values: dict[str, Any], children: Children) -> int:
    """Compares trainer and inference in each dtype. Returns the exit code. Raises RunError."""
    dtypes = [values["dtype"]] if values["dtype"] else list(LIMITS)
    num_tokens = values["tokens"] or 64
    if num_tokens >= config.model.max_model_len - 1:
        raise RunError(
            f"--tokens {num_tokens} leaves no room for a prompt in model.max_model_len = "
            f"{config.model.max_model_len}"
        )
    code = 0
    with tempfile.TemporaryDirectory(prefix="rl-doctor-") as folder:
        for dtype in dtypes:
            config = config.model_copy(deep=True)
            config.model.dtype, config.model.name = dtype, values["parity"]
            config.orchestrator.sampling.max_tokens = num_tokens
            scored, window = await parity(config, num_tokens, Path(folder), children)
            code = max(code, report(dtype, scored, window))
    return code


async def parity(
    config: RLConfig, num_tokens: int, work: Path, children: Children
) -> tuple[list[ScoredToken], int | None]:
    """Samples from a server of the model, stops it, and scores the samples with the trainer's
    code. Returns (scored tokens, the model's sliding window in tokens or None)."""
    dtype = config.model.dtype
    say(f"{dtype}: sampling from inference")
    starting = policy_server(config, config.model.name, work, children)
    async with starting as server, server.client() as client:
        write_config(work / f"{dtype}.toml", server.config)
        texts = prompts(server.model, config.model, num_tokens)
        cases = [(ids, temperature) for ids in texts for temperature in TEMPERATURES]
        samples = await asyncio.gather(
            *(complete(client, *case, num_tokens, i) for i, case in enumerate(cases))
        )
    write_batch(work / f"{dtype}.batch", TrainBatch(step=1, samples=samples), None)
    say(
        f"{dtype}: scoring {sum(sample.num_trained for sample in samples)} tokens with the "
        "trainer's code"
    )
    files = str(work / f"{dtype}.toml"), str(work / f"{dtype}.batch")
    command = [*PYTHON, "-m", "rl.trainer.measure.parity", *files]
    child = children.start("parity", command, {}, work / "logs")
    if await child.wait_async(SCORE_TIMEOUT_S) is None:
        raise RunError(
            f"waited {SCORE_TIMEOUT_S:.0f} s for the trainer's code to score the samples; "
            f"see {child.log}"
        )
    if child.exit_code:
        raise failure(child, child.ending())
    answer = json.loads(output(child)[-1])
    return [ScoredToken(*token) for token in answer["tokens"]], answer["sliding_window"]


def prompts(folder: str, model: ModelConfig, num_tokens: int) -> list[list[int]]:
    """Returns token ids of the texts, and of a long text that reveals differences in how
    positions are computed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    room = min(1024, model.max_model_len - num_tokens - 1)
    texts = [*TEXTS, LONG_TEXT * (1 + room // 16)]
    return [text_ids(tokenizer, text)[:room] for text in texts]


def report(dtype: str, scored: list[ScoredToken], sliding_window: int | None) -> int:
    """Prints the table of a dtype. Returns 1 if trainer and inference disagree."""
    limit, whole = LIMITS[dtype], parity_of([token.difference for token in scored])
    results = [("both", whole)]
    for temperature in reversed(TEMPERATURES):
        differences = [token.difference for token in scored if token.temperature == temperature]
        results.insert(0, (str(temperature), parity_of(differences)))
    rows = [
        [
            name,
            str(r.tokens),
            f"{r.mean:.2g}",
            f"{r.largest:.2g}",
            f"{r.kl:.3g}",
            f"± {r.kl_error:.1g}",
        ]
        for name, r in results
    ]
    heads = ["temperature", "tokens", "mean |d|", "max |d|", "kl", "± its error"]
    print(f"{dtype} (limits: {limit})", *table(heads, rows, left=1), sep="\n  ")
    if whole.within(limit):
        print(f"  trainer and inference agree{reservation(whole, limit)}")
        return 0
    print(f"  they DISAGREE: {likely_cause(scored, limit, sliding_window)}")
    return 1


def reservation(measured: Parity, limit: Limit) -> str:
    """Returns why a mean KL above its limit still passes; empty if it is within the limit."""
    if measured.kl <= limit.kl:
        return ""
    excess = (measured.kl - limit.kl) / measured.kl_error
    return (
        f": kl {measured.kl:.3g} is above {limit.kl:g} by {excess:.1f} of its standard errors, "
        "which may be chance with so few "
        "tokens (3 would be too many); use a higher --tokens to decide"
    )
