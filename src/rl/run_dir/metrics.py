"""A run's metrics: `metrics/<source>.jsonl`, to which one process appends, and `metrics.jsonl`,
into which one process merges them all.

Console, W&B, curves and people read `metrics.jsonl`. Its writer is `rl`; without `rl`, the
orchestrator, which outlives the trainer; without an orchestrator, the trainer. A shared file system
does not keep appends of two hosts apart, so no file has two writers. A merge appends the lines that
the sources have and `metrics.jsonl` lacks, by checksums of whole lines: a kill between any two
system calls neither loses nor duplicates a line.

The descriptions of all metrics are at the end; `uv run scripts/reference.py` makes docs/metrics.md
from them.
"""

import contextlib
import heapq
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl.run_dir.files import (
    PIECE_BYTES,
    UNREADABLE,
    LineReader,
    blake2b,
    end_of_last_line,
    files_in,
    with_path,
    write_all,
    write_file,
)
from rl.run_dir.spans import is_time
from rl.system import faults
from rl.system.errors import RunError

T = TypeVar("T")
Lines = dict[tuple[int, str], dict[str, Any]]
"""The lines of metrics.jsonl by (step, source): see read_metrics."""
ALWAYS = ("step", "time", "source")
"""Fields of every line."""
NEWEST_BYTES = 1 << 22
"""Size of the end of a metrics file that surely has the newest steps: a line has some kilobytes."""
MERGE_S = 1.0
LIMIT = 1 << 63
"""Integers from here on do not fit into 64 bits."""


def sources_dir(path: Path) -> Path:
    """Returns the folder of the sources that are merged into the file `path`."""
    return path.with_suffix("")


def source_files(path: Path) -> list[Path]:
    """Returns the sources that are merged into the file `path`. Raises PermissionError."""
    return files_in(sources_dir(path), ".jsonl")


def open_lines(path: Path) -> int:
    """Opens a file for its only writer to append lines, and returns the file descriptor. Cuts
    off an incomplete last line, which a killed writer has left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    if (size := os.fstat(descriptor).st_size) and os.pread(descriptor, 1, size - 1) != b"\n":
        with path.open("rb") as file:
            os.ftruncate(descriptor, end_of_last_line(file))
    return descriptor


def append(descriptor: int, path: Path, data: bytes | bytearray) -> None:
    try:
        write_all(descriptor, data, path)
    except OSError as error:
        raise with_path(error, path) from None
    faults.point("done", path)


class MetricsLog:
    """Appends the lines of one source to its file. `path` is the run's metrics.jsonl."""

    def __init__(self, path: Path, source: str, fence: Callable[[], None] | None = None):
        """fence: called before a line is written; an exception it raises prevents the write."""
        self.path, self.source, self.fence = sources_dir(path) / f"{source}.jsonl", source, fence
        self.file = open_lines(self.path)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends `{"step", "time", "source", **metrics}`; a value that is not finite is written
        as null."""
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3), "source": self.source}
        for name, value in metrics.items():
            line[name] = value if math.isfinite(value) else None
        if self.fence:
            self.fence()
        append(self.file, self.path, json.dumps(line).encode() + b"\n")


class Merger:
    """Writes metrics.jsonl: appends the lines of the sources that it lacks. Only one process of
    a run has a Merger."""

    def __init__(self, path: Path, fence: Callable[[], None] | None = None):
        """fence: see MetricsLog."""
        self.path, self.fence = path, fence
        self.readers: dict[Path, LineReader] = {}
        self.left: tuple[int, ...] | None = None
        """Inode and size of metrics.jsonl as this merger left it. If they are others, all is read
        again: a cut replaces the file."""

    def merge(self) -> None:
        """Appends new lines in one write, or in several of PIECE_BYTES. New lines of different
        sources are ordered by time, for people who read the file."""
        merged = set[bytes]()
        if self._identity() != self.left:
            merged, self.readers = set(map(blake2b, LineReader(self.path).all())), {}
        self.left, data = None, bytearray()
        for _, line in heapq.merge(*(self._new(file, merged) for file in source_files(self.path))):
            data += line + b"\n"
            if len(data) >= PIECE_BYTES:
                self._append(data)
                data = bytearray()
        if data:
            self._append(data)
        self.left = self._identity()

    def _identity(self) -> tuple[int, ...]:
        if not self.path.exists():
            return ()
        status = self.path.stat()
        return status.st_ino, status.st_size

    def _new(self, source: Path, merged: set[bytes]) -> Iterator[tuple[float, bytes]]:
        """Yields time and text of the new lines of a source whose checksums are not in `merged`."""
        for line in self.readers.setdefault(source, LineReader(source)).all():
            if (content := parse_line(line)) and not (merged and blake2b(line) in merged):
                yield content.get("time", 0.0), line

    def _append(self, data: bytearray) -> None:
        if self.fence:
            self.fence()
        file = open_lines(self.path)
        try:
            append(file, self.path, data)
        finally:
            os.close(file)


@contextlib.contextmanager
def merging(path: Path, fence: Callable[[], None]) -> Iterator[None]:
    """Merges every MERGE_S seconds in a thread, and once more at the end of the context: for a
    process without `rl` above it.

    fence: see MetricsLog. If the disk cannot be written, the merge is retried: the lines are still
    in their sources. A process that lost its role learns that at its next commit.
    """
    merger, over = Merger(path, fence), threading.Event()

    def merge() -> None:
        is_last = False
        while not is_last:
            is_last = over.wait(MERGE_S)
            with contextlib.suppress(OSError, RunError):
                merger.merge()

    thread = threading.Thread(target=merge, name="merge-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class MetricsReader(LineReader):
    """Follows a metrics file. `new` returns a limited number of lines: to get all, call it until
    it returns none."""

    # parsed lines
    def new(self) -> list[dict[str, Any]]:  # ty: ignore[incompatible-method-override]
        """Returns the content of the lines that were completed since the last call, without
        damaged ones."""
        return [content for content in map(parse_line, super().new()) if content]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the content of a line; None for an incomplete one, whose writer was killed or
    found the disk full."""
    try:
        content = msgspec.json.decode(line)
    except UNREADABLE:
        whole = line.rfind(b'{"step": ')  # another process's line after an incomplete one
        return parse_line(line[whole:]) if whole > 0 else None
    if not isinstance(content, dict) or not isinstance(content.get("source"), str):
        return None
    kept = {
        name: value
        for name, value in content.items()
        if name == "source" or value is None or is_number(value)
    }
    if not is_time(kept.get("time") or 0.0):
        kept.pop("time", None)
    return kept if type(kept.get("step")) is int else None


def is_number(value: Any) -> bool:
    """Returns whether a value of a line is a number that fits into 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and -LIMIT <= value < LIMIT)


def merge_lines(into: Lines, lines: Iterable[dict[str, Any]]) -> None:
    """Adds lines by (step, source). The later of two values of a metric counts, so a resume
    never duplicates a curve."""
    for line in lines:
        key = line["step"], line["source"]
        into[key] = into.get(key, {}) | line


def read_metrics(path: Path, source: str = "", last_bytes: int | None = None) -> Lines:
    """Returns the lines of a run by (step, source), including those not merged yet; see
    merge_lines. For a whole run rl.run_dir.numbers takes a tenth of the memory.

    `source`: reads only lines of this one. `last_bytes`: reads that many bytes of metrics.jsonl,
    and as many of all sources together.
    """
    merged: Lines = {}
    mark = f'"source": "{source}"'.encode()  # as MetricsLog writes it
    # of the sources only the newest lines can be missing in metrics.jsonl; reading others twice
    # changes nothing
    sources = source_files(path)
    share = (NEWEST_BYTES if last_bytes is None else last_bytes) // max(1, len(sources))
    for file in (path, *sources):
        lines = end_reader(file, last_bytes if file == path else share).all()
        wanted = (line for line in lines if not source or mark in line)
        merge_lines(merged, filter(None, map(parse_line, wanted)))
    return {key: line for key, line in merged.items() if source in ("", key[1])}


def end_reader(file: Path, limit: int | None) -> LineReader:
    """A reader of the last `limit` bytes of a file. It may begin inside a line, which is skipped
    as damaged."""
    is_whole = limit is None or not file.exists()
    return LineReader(file, 0 if is_whole else max(0, file.stat().st_size - limit))


def environment_rewards(line: Mapping[str, T]) -> dict[str, T]:
    """Returns environment -> mean training reward, from a line of the orchestrator, or from
    other values by metric."""
    matches = {name: re.fullmatch("reward/([^/]+)/mean", name) for name in line}
    return {match[1]: line[name] for name, match in matches.items() if match}


def cut_metrics(path: Path, last_step: int) -> list[bytes]:
    """Removes lines of steps after `last_step` and damaged lines from metrics.jsonl and its
    sources. Returns those of metrics.jsonl.

    Only for the process that merges, while no source is written. After a kill the same call
    completes the work.
    """
    if sources_dir(path).is_dir():
        Merger(path).merge()
    # metrics.jsonl last: otherwise a line left in a source would be merged again
    *_, cut = (cut_lines(file, last_step) for file in (*source_files(path), path))
    return cut


def cut_lines(path: Path, last_step: int) -> list[bytes]:
    """Removes lines from one file atomically and returns them; see cut_metrics."""

    def stays(line: bytes) -> bool:
        content = parse_line(line)
        return content is not None and content["step"] <= last_step

    if not path.exists():
        return []
    with path.open("rb") as file:
        if all(map(stays, file)):
            return []
        file.seek(0)
        lines = list(file)
    write_file(path, b"".join(filter(stays, lines)))
    return [line for line in lines if not stays(line)]


# What the metrics mean ----------------------------------------------------------------------------
#
# `<env>` stands for an environment's name; the description explains other words in angle brackets.


PASS = "pass@k: the chance that one of k samples has the highest reward, 1"
"""What a pass is, where one is shown beside a mean reward, which also counts partial answers."""
REWARD = {
    "reward/mean": "Mean reward of rollouts finished since the last batch, trained or not; with "
    "several agents, only of trainable ones.",
    "reward/<env>/mean": "The same for one environment.",
    "reward/<env>/<metric>": "Mean of an environment's own metric over the rollouts that have it; "
    "a metric named mean becomes `own_mean`.",
    "reward/<env>/agent_<agent>": "Mean reward of one agent, if episodes have several.",
    "reward/<env>/length_penalty": "Mean amount that orchestrator.credit.length_penalty subtracted "
    "from the reward before credit.",
}
ROLLOUTS = {
    "rollouts/finished": "Number of rollouts that were settled with this batch: trained, replaced "
    "or failed.",
    "rollouts/<env>/finished": "The same for one environment.",
    "rollouts/trained": "Number of rollouts in this batch.",
    "rollouts/<env>/trained": "The same for one environment.",
    "rollouts/missing": "Number of episodes missing from the batch (orchestrator.batch_size), if "
    "too many groups had no signal.",
    "rollouts/length_mean": "Mean number of sampled tokens of a rollout that did not fail.",
    "rollouts/turns_mean": "Mean number of turns of a rollout that did not fail.",
    "rollouts/truncated": "Share of the rollouts that did not fail in which an answer was cut off "
    "by a token limit.",
    "rollouts/overlong": "Share of all rollouts whose prompt left no room for an answer.",
    "rollouts/empty": "Share of all rollouts in which no token was sampled.",
    "rollouts/timeout": "Share of all rollouts that took too long.",
    "rollouts/errored": "Share of all rollouts that failed for good.",
    "rollouts/filtered": "Share of all rollouts that `orchestrator.filter` dropped.",
    "rollouts/<env>/filtered": "The same for one environment, if there are any.",
    "rollouts/retried": "Share of all rollouts that were retried after a failure.",
    "rollouts/unmerged_turns": "Share of the turns after the first that began a new sample, "
    "because their prompt rewrites earlier turns.",
    "rollouts/zero_advantage": "Share of all rollouts in groups without signal: all advantages are "
    "zero.",
    "rollouts/replaced_groups": "Number of groups without signal that were replaced.",
    "rollouts/<env>/replaced_groups": "The same for one environment, if there are any.",
    "rollouts/surplus_groups": "Number of groups begun in excess of the batch (`max_lag = 0`) that "
    "finished; no mean includes them.",
    "rollouts/cancelled_groups": "Number of groups begun in excess of the batch and cancelled "
    "while running. A few may still finish, and count in the next step's "
    "`rollouts/surplus_groups`.",
    "rollouts/stale_groups": "Number of groups cancelled or dropped because they exceeded "
    "orchestrator.max_off_policy_steps, or with `max_lag = 0` because an older version had sampled "
    "some of them.",
    "rollouts/<env>/stale_groups": "The same for one environment, if there are any.",
    "rollouts/<env>/share": "Share of the rollouts that belong to an environment, if there are "
    "several.",
    "rollouts/<env>/failed_<cause>": "Number of rollouts that failed for good: environment, "
    "reward, inference, worker, timeout, ...",
    "tasks/<env>/easy": "Number of tasks in the pool of easy ones "
    "(orchestrator.environment.difficulty).",
    "tasks/<env>/normal": "Number of tasks that are neither easy nor hard.",
    "tasks/<env>/hard": "Number of tasks in the pool of hard ones.",
    "tasks/<env>/skipped": "Number of times that an easy or hard task was skipped since the last "
    "batch.",
    "env/<env>/quarantined": "1 if the environment is lost: left out because its workers kept "
    "dying.",
    "tokens/kept_overflow": "Number of sampled tokens that are not trained, because truncation "
    "(top_p, top_k, min_p) kept more ids than trainer.max_kept.",
    "tokens/kept_mean": "Mean number of ids that truncation kept, over the tokens where it left "
    "any out.",
    "rollouts/route_bytes": "Bytes of routes per token of the trained rollouts, with "
    "trainer.router_replay = engine.",
    "lag/mean": "Mean lag of the trained tokens in versions: N - 1 minus the version that sampled "
    "them.",
    "lag/max": "Greatest lag of a trained token.",
}
EVALS = {
    "eval/<env>/reward_mean": "Mean reward over the examples of an evaluation; a failed rollout "
    "counts as 0.",
    "eval/<env>/reward_mean_stderr": "Its standard error over the examples.",
    "eval/<env>/avg@<k>": "reward_mean under a name with the number k of samples per example.",
    "eval/<env>/pass@<k>": "Probability that one of k samples solves an example (reward 1 or "
    "more), unbiased.",
    "eval/<env>/pass@<k>_stderr": "Its standard error over the examples.",
    "eval/<env>/agent_<agent>": "Mean reward of one agent, if there are several; a failed rollout "
    "counts as 0.",
    "eval/<env>/agent_<agent>_stderr": "Its standard error over the examples in which the agent "
    "plays.",
    "eval/<env>/length_mean": "Mean number of sampled tokens of a rollout. Missing if an endpoint "
    "does not count them.",
    "eval/<env>/errored": "Share of the episodes that failed for good.",
    "eval/<env>/truncated": "Share of the rollouts in which an answer was cut off by a token "
    "limit.",
    "eval/<env>/<metric>": "Mean of one of the environment's own reward functions or metrics.",
}
LOSS = {
    "loss/mean": "The loss that was minimised, as trainer.loss.aggregation averages it.",
    "entropy/mean": "Mean entropy of the policy at the trained tokens, nats.",
    "entropy/<env>/mean": "The same for one environment.",
    "mismatch_kl/mean": "Mean estimate (k3) of the KL divergence between sampler and trainer at "
    "tokens of the trained version, nats.",
    "mismatch_kl/<env>/mean": "The same for one environment.",
    "mismatch_kl/max": "Greatest estimate at one token.",
    "lag_kl/mean": "The same estimate at tokens of older versions: how far the policy has moved "
    "since they were sampled.",
    "lag_kl/<env>/mean": "The same for one environment.",
    "ratio/mean": "Mean of r, the ratio of the trainer's to the sampler's probability of a token.",
    "ratio/<env>/mean": "The same for one environment.",
    "ratio/<quantile>": "Quantile of r: p01, p50 (the median), p99.",
    "ratio/<env>/<quantile>": "The same for one environment.",
    "masked_fraction": "Share of the tokens without gradient: masked, or clipped by the loss.",
    "masked_fraction/<env>": "The same for one environment.",
    "reference_kl/mean": "Mean estimate of the KL divergence to the reference model, with "
    "trainer.loss.kl_coefficient, nats.",
    "reference_kl/<env>/mean": "The same for one environment.",
    "teacher_kl/mean": "Mean of log p(sampler) - log p(teacher) over the sampled tokens, with a "
    "teacher, nats.",
    "teacher_kl/<env>/mean": "The same for one environment.",
    "update_kl/mean": "Mean estimate of the KL divergence from the policy before the batch, with "
    "several optimizer steps.",
    "update_kl/<env>/mean": "The same for one environment.",
    "optim/grad_norm": "Norm of the gradient before it is clipped to trainer.optim.max_grad_norm.",
    "optim/lr": "Learning rate of the step.",
    "optim/steps": "Number of optimizer steps for the batch: trainer.minibatches x trainer.epochs.",
    "experts/load_mean": "Tokens of a layer's busiest expert divided by the mean of the layer's "
    "experts, mean over the layers.",
    "experts/load_max": "The same in the layer where it is greatest.",
    "experts/unused": "Share of the experts of all layers to which no token was sent.",
    "parity/tokens": "Number of tokens sampled by exactly the trained version, on which trainer "
    "and inference are compared.",
    "parity/mean": "Mean absolute difference of their log-probabilities, nats.",
    "parity/max": "Largest absolute difference, nats.",
    "parity/kl": "Mean estimate of the KL divergence on these tokens, nats.",
    "parity/agrees": "1 if the two agree within the limit for model.dtype, else 0.",
    "parity/unjudged": "Number of consecutive checkpoints without a comparison: no fresh token, no "
    "timely answer to the probe.",
    "quarantined": "1 for a step whose batch was quarantined because it repeatedly killed the "
    "trainer.",
}
SFT = {
    "epoch": "Passes over the examples so far (`rl sft`).",
    "validation/loss": "Mean cross entropy of the trained tokens of held-out examples, nats.",
    "validation/perplexity": "exp(validation/loss).",
    "validation/tokens": "Number of these tokens.",
}
TIME = {
    "time/step": "Seconds of the trainer's whole step, from requesting the batch to the end of the "
    "step.",
    "time/wait_for_batch": "Seconds that the trainer waited for the batch.",
    "time/forward_backward": "Seconds of the forward and backward passes, with the sums of metrics "
    "over ranks and the collection of the token log.",
    "time/old_logprobs": "Seconds for computing log-probabilities before the first of several "
    "optimizer steps.",
    "time/optimizer": "Seconds of clipping and of the optimizer step.",
    "time/publish_weights": "Seconds for which publishing a version held up the step.",
    "time/publish_latency": "Seconds from an optimizer step until the orchestrator knew its "
    "version; usually of the previous version.",
    "time/checkpoint": "Seconds for which a checkpoint held up the step.",
    "time/checkpoint_cost": "Seconds from the beginning of the newest complete checkpoint's copy "
    "until it was written.",
    "time/checkpoint_fraction": "time/checkpoint_cost divided by the time since the previous "
    "checkpoint, or training, began.",
    "time/parity": "Seconds of comparing trainer and inference on a probe, at a checkpoint.",
    "time/validation": "Seconds of a validation.",
    "time/batch": "Seconds between two batches of the orchestrator.",
    "time/pause_inference": "Seconds that generation paused for new weights since the last batch.",
    "time/eval": "Seconds of an evaluation.",
    "perf/tokens_per_s": "Tokens of the batch, including prompts but not padding, per second of "
    "the whole step.",
    "perf/generated_tokens_per_s": "Sampled tokens of settled rollouts per second between two "
    "batches.",
    "perf/inference_idle_fraction": "Share of the time between two batches in which inference had "
    "nothing to do.",
    "perf/shared_token_fraction": "Share of the batch's tokens that were not computed because "
    "another sample has the same prefix.",
    "perf/peak_memory_gib": "Peak memory of a rank so far, GiB: of the GPU, or of the process "
    "without a GPU.",
    "perf/mfu": "Model FLOP/s utilisation, on known GPUs in bfloat16 only.",
}
COST = {
    "tokens/prefilled": "Prompt tokens that inference computed for the rollouts that this batch "
    "settles, trained or not.",
    "tokens/cached": "Prompt tokens of these rollouts that came from the prefix cache.",
    "tokens/sampled": "Tokens sampled for these rollouts.",
    "tokens/dropped_<why>": "Those of them that are not trained, by the `why` of their rollout. "
    "`retried`: of failed attempts at an episode that was played again.",
    "tokens/eval/<env>/<kind>": "Tokens `prefilled`, `cached` and `sampled` for an evaluation.",
    "tokens/trained": "Loss tokens of the step, each counted once in any number of epochs.",
    "tokens/batch": "Tokens of the step's samples, prompts included.",
    "cost/machine_s": "Seconds that the run's machines were up, so far and all together.",
    "cost/machine_<index>_s": "Those of one machine, 0 if there is no other.",
    "cost/gpu_s": "The same seconds, times the GPUs of each machine.",
    "cost/total": "Price of all this so far, by the settings in `cost`.",
}
SECTIONS = {
    "Rewards": REWARD,
    "Rollouts, tasks and lag": ROLLOUTS,
    "Evaluations": EVALS,
    "Loss and agreement": LOSS,
    "Supervised fine-tuning": SFT,
    "Seconds and throughput": TIME,
    "What it cost": COST,
}
METRICS = {name: what for section in SECTIONS.values() for name, what in section.items()}
OWN = "Other"
"""The section of the user's own metrics."""


@cache
def matching(name: str) -> tuple[str, dict[str, str]]:
    """Returns a metric's name in METRICS, and what the words in angle brackets stand for; an empty
    name for the user's own metrics."""

    def group(word: re.Match[str]) -> str:
        """Only an environment's own names may have slashes."""
        return f"(?P<{word[1]}>{'.+' if word[1] in ('metric', 'agent') else '[^/]+'})"

    # first those of which most is fixed
    for known in sorted(METRICS, key=lambda known: -len(re.sub(r"<\w+>", "", known))):
        if match := re.fullmatch(re.sub(r"<(\w+)>", group, re.escape(known)), name):
            return known, match.groupdict()
    return "", {}


def series(name: str) -> tuple[str, dict[str, str]]:
    """Returns a metric's name for Prometheus, and as its labels the words in angle brackets. The
    user's own metrics have one name, and their own as a label."""
    known, labels = matching(name)
    if not known:
        return "rl_other", {"name": name}
    return re.sub("[^a-z0-9]+", "_", f"rl/{known}").rstrip("_"), labels


def meaning(name: str) -> tuple[str, str]:
    """Returns (section, description) of a metric; the description of a user's own metric is
    empty."""
    known, _ = matching(name)
    section = next((title for title, metrics in SECTIONS.items() if known in metrics), OWN)
    return section, METRICS.get(known, "")
