"""What a run promises, checked from its directory and the process table: `tests/proofs/chaos.py`
calls this after its kills.

Each check returns the sentences that say what is broken; none: the promise holds.
"""

import json
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rl.config.run import RLConfig
from rl.run_dir.files import CorruptFileError, decode_records
from rl.run_dir.metrics import parse_line, read_metrics, sources_dir
from rl.run_dir.paths import RunDir, numbered
from rl.wire.batch_file import decode_batch, open_rollouts
from rl.wire.rollouts import DECODER, Drawn, Group

INTERRUPTED_S = 60.0
"""Half-written things that are younger were being written when the run was stopped."""
LEFTOVER = re.compile(r"\..+\.(tmp|old|replaced)")


def pending_records(path: Path) -> list[Group | Drawn]:
    """What pending.log has whole, as the next orchestrator will find it; of one that is being
    written, what is before the torn end."""
    found: list[Group | Drawn] = []
    with suppress(CorruptFileError, FileNotFoundError):
        for payload in decode_records(path.read_bytes(), str(path)):
            found.append(DECODER.decode(payload))
    return found


def pending_groups(path: Path) -> set[int]:
    """Ids of the whole groups of pending.log."""
    return {
        record.group_id
        for record in pending_records(path)
        if isinstance(record, Group) and record.finished
    }


def rollout_lines(run_dir: RunDir) -> dict[int, list[dict[str, Any]]]:
    """The lines of rollouts/ by batch. A file without its batch is from before a death, and is
    written again."""
    files, found = run_dir.rollout_files(), {}
    for step in numbered(run_dir.batches, ".batch"):
        with open_rollouts(files[step]) as lines:
            found[step] = list(map(json.loads, lines))
    return found


def exactly_once(run_dir: RunDir, seen: set[int]) -> tuple[list[str], int]:
    """Every batch is there; every finished group (`seen`: found in pending.log at some time) is
    in one place. Returns the rollouts lost."""
    broken = []
    steps = list(numbered(run_dir.batches, ".batch"))
    if steps != list(range(1, len(steps) + 1)):
        broken.append(f"batches are missing: there are {steps}")
    lines = rollout_lines(run_dir)
    places = defaultdict(list)
    for step, of_step in lines.items():
        for group in {line["group_id"] for line in of_step}:
            places[group].append(step)
        trained = Counter(
            (line["group_id"], line["rollout_id"]) for line in of_step if line["trained"]
        )
        batch = decode_batch(run_dir.batch(step).read_bytes(), f"batch {step}").batch
        if trained.keys() != {(sample.group_id, sample.rollout_id) for sample in batch.samples}:
            broken.append(f"batch {step} trains other rollouts than rollouts/{step:06d}.jsonl says")
        if any(count > 1 for count in trained.values()):
            broken.append(f"a rollout stands twice in rollouts/{step:06d}.jsonl")
        if any(not line["trained"] and not line["why"] for line in of_step):
            broken.append(f"rollouts/{step:06d}.jsonl has one that is not trained for no reason")
    twice = {group: where for group, where in places.items() if len(where) > 1}
    if twice:
        broken.append(f"groups in several batches: {dict(list(twice.items())[:5])}")
    waiting = pending_groups(run_dir.pending)
    lost = {group for group in seen if group not in places and group not in waiting}
    if lost:
        broken.append(f"groups finished and lost: {sorted(lost)[:10]}")
    if used := waiting & places.keys():
        settled = max(steps, default=0)
        broken += (
            [f"groups {sorted(used)[:5]} still wait after they were used"]
            if any(settled not in places[g] for g in used)
            else []
        )
    sizes = [
        sum(1 for _ in of_step) / max(1, len({line["group_id"] for line in of_step}))
        for of_step in lines.values()
    ]
    return broken, round(len(lost) * (sum(sizes) / len(sizes) if sizes else 0))


def every_step_trained(run_dir: RunDir) -> list[str]:
    """A metrics line of trainer and orchestrator for each step up to the newest version, and no
    version without its batch."""
    metrics = read_metrics(run_dir.metrics)
    newest = max(numbered(run_dir.weights_dir), default=0)
    broken = []
    # the line follows what it tells of
    for source, last in (("trainer", newest - 1), ("orchestrator", run_dir.newest_batch() - 1)):
        missing = [step for step in range(1, last + 1) if (step, source) not in metrics]
        broken += (
            [f"no line of the {source} in metrics.jsonl for steps {missing}"] if missing else []
        )
    if newest > run_dir.newest_batch():
        broken.append(f"version {newest} has no batch")
    return broken + [
        f"{path.name}: a batch was quarantined"
        for path in sorted(run_dir.batches.glob("*.quarantined"))
    ]


def numbers_once(run_dir: RunDir) -> list[str]:
    """Every line of metrics/*.jsonl stands in metrics.jsonl, once, and none there is torn."""
    merged = Counter(run_dir.metrics.read_bytes().splitlines())
    sources = [
        line
        for path in sources_dir(run_dir.metrics).glob("*.jsonl")
        for line in path.read_bytes().splitlines()
    ]
    broken = [
        f"metrics.jsonl has a torn line: {line[:60]!r}" for line in merged if not parse_line(line)
    ]
    broken += [
        f"metrics.jsonl has a line {count} times: {line[:60]!r}"
        for line, count in merged.items()
        if count > 1
    ]
    return broken + [
        f"metrics.jsonl lacks a line of a source: {line[:60]!r}"
        for line in sources
        if parse_line(line) and line not in merged
    ]


def lag(run_dir: RunDir, config: RLConfig) -> tuple[list[str], float, int]:
    """Bounds of the lag over all tokens of all batches; also its mean and largest value."""
    broken, lags = [], Counter[int]()
    for step, path in numbered(run_dir.batches, ".batch").items():
        for sample in decode_batch(path.read_bytes(), str(path)).batch.samples:
            for span in sample.spans:
                lags[step - 1 - span.policy_version] += span.end - span.start
    limit = config.orchestrator.max_off_policy_steps if config.max_lag else 0
    if lags and (min(lags) < 0 or max(lags) > limit):
        broken.append(f"a token lags {min(lags)} to {max(lags)} versions; allowed are 0 to {limit}")
    return (
        broken,
        sum(lag * count for lag, count in lags.items()) / max(1, lags.total()),
        max(lags, default=0),
    )


def replay_equal(
    run_dir: RunDir, environment: dict[str, str], timeout_s: float
) -> tuple[list[str], str]:
    """`rl replay` over the whole run: all versions equal bit for bit. Also returns what it said
    last."""
    command = [str(Path(sys.executable).parent / "rl"), "replay", str(run_dir.root)]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return [f"rl replay did not end within {timeout_s:.0f} s"], ""
    said = "\n".join(done.stdout.splitlines()[-8:])
    return ([f"rl replay ends with {done.returncode}:\n{said}"] if done.returncode else []), said


def repeated_steps(run_dir: RunDir) -> tuple[int, float]:
    """How many trained steps were trained again after a death, and the seconds of their first
    time. Unfinished ones left no line."""
    times: dict[int, list[float]] = defaultdict(list)
    for raw in run_dir.metrics.read_bytes().splitlines():
        line = parse_line(raw)
        if line and line["source"] == "trainer" and line.get("time/step"):
            times[line["step"]].append(line["time/step"])
    return sum(len(each) - 1 for each in times.values()), sum(
        sum(each[:-1]) for each in times.values()
    )


def processes_with(word: str) -> list[psutil.Process]:
    """Living processes that bear `word` in RL_CHAOS: below a run, wherever they have gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and word in process.environ().get(
                "RL_CHAOS", ""
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def told(processes: list[psutil.Process]) -> list[str]:
    """Processes in words."""
    words = []
    for process in processes:
        try:
            words.append(
                f"{process.pid} {process.status()} "
                f"{' '.join(process.cmdline())[:100] or process.name()}"
            )
        except psutil.NoSuchProcess:
            continue
    return words


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """Segments in /dev/shm that processes have mapped."""
    found = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {
            line[line.index("/dev/shm/") :].removesuffix(" (deleted)")
            for line in lines
            if "/dev/shm/" in line
        }
    return found


def nothing_left(run_dir: RunDir, temporary: Path, segments: set[str], word: str) -> list[str]:
    """After the end: no process, no temporary file of the run, no shared memory, nothing half in
    the run directory.

    What the last stop interrupted may stand there until the next start, which clears it away; what
    an earlier death left may not.
    """
    broken = [f"an orphan is left: {line}" for line in told(processes_with(word))]
    broken += [
        f"{path} is left"
        for path in sorted(temporary.iterdir())
        if not path.name.startswith("torchinductor_")
    ]
    broken += [f"{path} is left" for path in sorted(segments) if Path(path).exists()]
    folders = [
        run_dir.weights_dir,
        *(path for path in run_dir.root.rglob("*") if path.is_dir() and path.name != "discarded"),
    ]
    half = [
        path
        for folder in [run_dir.root, *folders]
        for path in folder.glob(".*")
        if LEFTOVER.fullmatch(path.name)
    ]
    return broken + [
        f"{path} is left"
        for path in sorted(set(half))
        if time.time() - path.stat().st_mtime > INTERRUPTED_S
    ]
