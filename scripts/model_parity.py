"""Tiny models against vLLM: it samples from each in a process of its own, and the trainer scores
the same tokens under the same weights."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from sample_families import SAMPLED

from rl.config.run import ModelConfig, RLConfig
from rl.config.trainer import TrainerConfig
from rl.trainer.measure.parity import compare
from rl.trainer.model.modes import Mode
from rl.trainer.model.policy import load_policy
from rl.trainer.parallel.world import World
from rl.wire.batch_file import decode_batch
from rl.wire.parity import Parity, parity_of

LIMIT_S = 400.0
"""The most seconds from one model to the next, imports among them."""
POLL_S = 0.2
SAMPLER = Path(__file__).with_name("sample_families.py")


def sample_all(folders: Sequence[Path], max_model_len: int) -> Iterator[tuple[Path, str]]:
    """Each folder of a model, in their order, and why vLLM has not sampled from it; an empty text
    where SAMPLED is in it.

    One process takes them one after another. Where it dies or is silent for LIMIT_S, another one
    goes on behind that model.
    """
    left = list(folders)
    while left:
        log = left[0].with_suffix(".log")
        process = start(left, max_model_len, log)
        try:
            while left and (fault := wait_for(process, left[0], log)) is not None:
                yield left.pop(0), fault
                if fault:
                    break
        finally:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start(folders: Sequence[Path], max_model_len: int, log: Path) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, str(SAMPLER), str(max_model_len), *map(str, folders)]
    with log.open("wb") as file:
        return subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )


def wait_for(process: "subprocess.Popen[bytes]", folder: Path, log: Path) -> str:
    """Waits until the process has sampled from the model of `folder`: an empty text, or why it
    has not."""
    until = time.monotonic() + LIMIT_S
    while not (folder / SAMPLED).exists():
        if process.poll() is not None and not (folder / SAMPLED).exists():
            return why(log) or f"ended with exit code {process.returncode}"
        if time.monotonic() > until:
            return f"nothing within {LIMIT_S:.0f} s"
        time.sleep(POLL_S)
    return ""


def why(log: Path) -> str:
    """The last error that a log names, on one line, with what was asserted; none that is a
    warning."""
    text = re.sub(r"^(?:.* WARNING .*|[ ~^]+)\n", "", log.read_text(errors="replace"), flags=re.M)
    error = r"^(?:\S+ )*?((?:\w+\.)*\w+(?:Error|Exception|Interrupt)\b:? ?.*(?:\n {2,}.*)*)"
    found = re.findall(rf"(?:^ +(assert .*)\n)?{error}", text, re.M)
    return " ".join(" ".join(reversed(found[-1])).split()) if found else ""


def parity(folder: Path, max_model_len: int, world: World) -> tuple[Mode, Parity]:
    """How the trainer computes the model of a folder DTYPE/NAME, and how far from vLLM at the
    tokens that it has sampled."""
    config = RLConfig(
        model=ModelConfig(name=str(folder), dtype=folder.parent.name, max_model_len=max_model_len),
        trainer=TrainerConfig(micro_batch_tokens=64),
    )
    model = load_policy(str(folder), config.model, config.trainer, world)
    batch = decode_batch((folder / SAMPLED).read_bytes(), folder.name).batch
    found = parity_of([difference for *_, difference in compare(model, config, batch, world)])
    return model.get_output_embeddings().forward.mode, found
