"""`status/<process>.json`: where a process runs, its heartbeat, and what it does or waits for, as
typed fields. Also: why a run ended.

Programs read the fields of RoleStatus. `describe` turns them into a sentence for people where it is
shown; no program parses that.
"""

import contextlib
import itertools
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from rl.run_dir import spans
from rl.run_dir.files import UNREADABLE, clean_leftovers, temporary_name
from rl.run_dir.logs import last_lines, newest_log
from rl.system import faults
from rl.system.linux import is_alive, own_start, pid_scope
from rl.system.terminal import clip

T = TypeVar("T")
HEARTBEAT_S = 2.0
MAX_JSON_BYTES = 1 << 26
MAX_WARNING = 500
"""Characters of a warning that are kept; the log has all of it."""
NODE_ADDRESS = "RL_NODE_ADDRESS"
"""Environment variable with the name or address at which other machines reach this one."""
MACHINE_LEASE = "RL_MACHINE_LEASE"
"""Environment variable with the lease of this machine of a cluster, as a path in status/."""
PHASE_LANE = "phase"
"""Lane of the phases of a process among its spans."""
Time = spans.Time


Awaited = Literal["inference", "orchestrator", "trainer", "ranks", "teacher", "environments"]


class Phase(StrEnum):
    """What a process is doing: the value in its status file, the sentence for people, and whom it
    waits for.

    The sentence is formatted with the status's `step` and `detail`; a detail without a placeholder
    is appended after a colon.
    """

    sentence: str
    waits_for: Awaited | None

    def __new__(cls, value: str, sentence: str, waits_for: Awaited | None = None) -> "Phase":
        phase = str.__new__(cls, value)
        phase._value_, phase.sentence, phase.waits_for = value, sentence, waits_for
        return phase

    STARTING = "starting", "starting"
    LOADING_MODEL = "loading_model", "loading the model"
    WAITING_FOR_SERVICE = "waiting_for_service", "waiting for {detail}"
    # Data of supervised fine-tuning.
    VERIFYING_DATA = "verifying_data", "verifying the examples"
    LOADING_TOKENIZER = "loading_tokenizer", "loading the tokenizer"
    READING_DATA = "reading_data", "reading {detail}"
    # Inference.
    SERVING = "serving", "serving"
    # The orchestrator.
    LOADING_ENVIRONMENTS = "loading_environments", "loading environments", "environments"
    WAITING_FOR_TEACHER = "waiting_for_teacher", "waiting for the teacher at {detail}", "teacher"
    WAITING_FOR_INFERENCE = "waiting_for_inference", "waiting for inference", "inference"
    LOADING_VERSION = "loading_version", "loading version {step} into inference", "inference"
    FILLING_BATCH = "filling_batch", "filling batch {step}", "inference"
    EVALUATING = "evaluating", "evaluating {detail} at version {step}", "inference"
    WAITING_FOR_VERSION = (
        "waiting_for_version",
        "waiting for the trainer's version {step}",
        "trainer",
    )
    WAITING_FOR_TRAINER_END = "waiting_for_trainer_end", "waiting for the trainer to end", "trainer"
    # The trainer.
    WAITING_FOR_RANKS = "waiting_for_ranks", "waiting for the other ranks of the trainer", "ranks"
    TRYING_MEMORY = "trying_memory", "trying a micro batch of full size"
    WAITING_FOR_BATCH = "waiting_for_batch", "waiting for batch {step}", "orchestrator"
    TRAINING = "training", "training step {step}"
    VALIDATING = "validating", "validating version {step}"
    PUBLISHING = "publishing", "publishing version {step}"
    ANNOUNCING_VERSION = (
        "announcing_version",
        "waiting for the orchestrator to confirm version {step}",
        "orchestrator",
    )
    COPYING_STATE = "copying_state", "copying the state of step {step} for a checkpoint"
    CHECKPOINTING = "checkpointing", "writing checkpoint {step}"
    WRITING_TOKEN_LOG = "writing_token_log", "writing the token log of step {step}"
    COMPARING = "comparing", "comparing version {step}"


TRAINER_STEPS = frozenset(
    {
        Phase.WAITING_FOR_BATCH,
        Phase.TRAINING,
        Phase.VALIDATING,
        Phase.PUBLISHING,
        Phase.ANNOUNCING_VERSION,
        Phase.COPYING_STATE,
        Phase.CHECKPOINTING,
        Phase.WRITING_TOKEN_LOG,
    }
)
"""Phases of a running trainer: the parts of its steps."""


class RunWarning(msgspec.Struct, frozen=True):
    """A warning to the user about an environment or the run's files."""

    about: Literal[
        "failed", "died", "lost", "renamed", "inexact", "recorded", "template", "service", "unused"
    ]
    """Of an environment: first rollouts that failed for good, first death of a worker, its loss,
    metrics whose names collide with ours. Of files: a version that differed when it was trained
    again. Of recorded rollouts: something that they
    lack. Of the model: a chat template without a beginning or an end of answers, what seems wrong
    with a teacher, tensors that are not used. Of a service with the Tinker API: an answer that it
    owes."""
    env: str
    """Empty for warnings about anything else."""
    text: str
    """Text for people."""


class RoleStatus(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """A status file. Fields that a process does not report are None or empty. Times are seconds
    since the epoch."""

    process: str = ""
    """`inference`, `inference-<host>-<port>` for a server not started by `rl`, `orchestrator`,
    `trainer`, `trainer-1` (rank 1), `data`."""
    pid: int | None = None
    host: str = ""
    place: str = ""
    """Scope of the pid, see rl.system.linux.pid_scope."""
    start_ticks: str = ""
    """Start of the process in clock ticks since boot: another process that reuses its pid has
    another start."""
    started: Time | None = None
    phase: Phase | None = None
    step: int | None = None
    """Step, batch or policy version that the phase is about."""
    waiting_for: Awaited | None = None
    detail: str = ""
    """Text for people. Nothing depends on it."""
    since: Time | None = None
    """Time at which this phase began for this step."""
    heartbeat: Time | None = None
    progress: int | None = None
    """Counts units of work that show progress: micro batches, rollouts, tokens."""
    progressed: Time | None = None
    """Time at which `progress` last grew."""
    address: str | None = None
    max_steps: int | None = None
    """Of the trainer: if epochs are set, only the trainer knows their number of steps. Of an
    orchestrator with recorded rollouts: the step at which they end."""
    batch: int | None = None
    """Of the orchestrator: the batch being filled; `batch_done` of its `batch_size` episodes are
    done."""
    batch_done: int | None = None
    batch_size: int | None = None
    policy_version: int | None = None
    """Of the orchestrator: the version that inference holds. Of a starting server: the version
    that it reads and that is kept for it."""
    quarantined: list[str] = []
    """Lost environments, under an older name that the file keeps: their workers could not be
    kept alive."""
    warnings: list[RunWarning] = []
    """Warnings to the user. `rl` prints each once."""
    playing: int | None = None
    """Rollouts in flight."""
    requests: int | None = None
    """Requests in flight at inference."""
    prefill_tokens: int = 0
    """The most tokens of prompts that inference computes at once."""

    def lives(self) -> bool | None:
        """Returns whether the process is alive; None if that cannot be seen from here."""
        return None if self.pid is None else is_alive(self.pid, self.place, self.start_ticks)


FIELDS = {field.name: field.type for field in msgspec.structs.fields(RoleStatus)}
"""Once, because resolving the types takes longer than all else in `read_status`, which reads
hundreds of files a second."""


def describe(status: RoleStatus | None) -> str:
    """Describes what a process is doing, for people: `waiting for batch 13: filling batch 13`."""
    if status is None or status.phase is None:
        return "in an unknown phase"
    template = status.phase.sentence
    step, detail = "?" if status.step is None else status.step, status.detail
    if "{detail}" in template or not detail:
        return template.format(step=step, detail=detail or "?")
    return f"{template.format(step=step)}: {detail}"


class Status:
    """Publishes this process's status from its own thread, so that a blocked process still shows
    its phase."""

    def __init__(self, path: Path, process: str):
        self.path = path
        clean_leftovers(path.parent, ours=path.name)  # an unfinished heartbeat of a predecessor
        self.current = RoleStatus(
            process=process,
            started=time.time(),
            pid=os.getpid(),
            host=socket.gethostname(),
            place=pid_scope(),
            start_ticks=own_start(),
        )
        self.stopped = threading.Event()
        self.changing, self.writing = threading.Lock(), threading.Lock()
        self.progress, self.seen = 0, (0, time.time())
        """The current count; and (count, time) when it was last seen to grow."""
        self.writes_at_once = True
        """Whether `enter` writes, or leaves it to the next heartbeat: for an event loop, which
        must not wait for the disk."""
        self.entered = time.monotonic()
        """Time at which the current phase began."""
        self.fenced = False
        self.gauges: dict[str, int] = {}
        """Field of RoleStatus -> value, written at every heartbeat; see `follow`."""
        self.enter(Phase.STARTING)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def enter(self, phase: Phase, step: int | None = None, detail: str = "", **fields: Any) -> None:
        """Sets and writes what the process does or waits for. Other fields, such as `address`,
        keep their values until set again."""
        with self.changing:
            if (phase, step) != (self.current.phase, self.current.step):
                fields["since"] = time.time()
                self._note_phase()
            self.current = msgspec.structs.replace(
                self.current,
                phase=phase,
                step=step,
                waiting_for=phase.waits_for,
                detail=detail,
                **fields,
            )
        if self.writes_at_once:
            self._write()

    def warn(self, warning: RunWarning) -> None:
        """Publishes a warning for `rl` to print. Repetitions are dropped: the same kind about an
        environment, or the same text."""

        def key(warning: RunWarning) -> tuple[str, str]:
            return warning.about, warning.env or warning.text

        warning = msgspec.structs.replace(warning, text=clip(warning.text, MAX_WARNING))
        with self.changing:
            warnings = self.current.warnings
            if key(warning) in map(key, warnings):
                return
            self.current = msgspec.structs.replace(self.current, warnings=[*warnings, warning])
        self._write()

    def advance(self, count: int = 1) -> None:
        """Counts progress, which the next heartbeat publishes. Thread-safe."""
        with self.changing:
            self.progress += count

    def follow(self, gauge: str, read: Callable[[], int]) -> None:
        """Reads a gauge every HEARTBEAT_S in the running event loop, whose thread owns what is
        counted: a fault is logged there, and neither ends the heartbeat nor the process."""
        import asyncio

        def look() -> None:
            asyncio.get_running_loop().call_later(HEARTBEAT_S, look)
            self.gauges = self.gauges | {gauge: read()}

        asyncio.get_running_loop().call_soon(look)

    def close(self) -> None:
        """Deletes the status; a concurrent heartbeat does not bring it back."""
        self.stopped.set()
        if self._is_fenced():
            return
        with self.writing:
            self.path.unlink(missing_ok=True)
        self._note_phase()
        spans.stop()

    def _is_fenced(self) -> bool:
        """Returns whether this machine of a cluster was declared lost: its processes write
        nothing any more."""
        if lease := os.environ.get(MACHINE_LEASE):
            self.fenced = is_over(self.path.parent / lease)
        return self.fenced

    def _note_phase(self) -> None:
        """Records the span of the phase that ends, unless this machine was declared lost."""
        begin, self.entered = self.entered, time.monotonic()
        phase, step = self.current.phase, self.current.step
        if phase and not self.fenced:
            spans.note(phase.value, begin, self.entered, PHASE_LANE, step)

    def _beat(self) -> None:
        for count in itertools.count(1):
            if self.stopped.wait(HEARTBEAT_S / spans.FLUSHES) or self._is_fenced():
                return
            if count % spans.FLUSHES == 0:
                self._write()
                spans.gauges(progress=self.progress, **self.gauges)
            spans.flush()

    def _write(self) -> None:
        # The status only informs others: a full disk must not end the process here.
        with self.writing, contextlib.suppress(OSError):
            if self.stopped.is_set() or self._is_fenced():
                return
            now = time.time()
            if self.progress != self.seen[0]:
                self.seen = self.progress, now
            progress, progressed = self.seen
            counts = self.gauges | {"progress": progress}
            write_status(
                self.path,
                msgspec.structs.replace(
                    self.current, heartbeat=now, progressed=progressed, **counts
                ),
            )


def reachable(host: str) -> str:
    """Returns the name at which others reach a socket bound to `host`: for a wildcard that of
    the machine, which `rl node` knows better."""
    is_wildcard = host in ("0.0.0.0", "::")
    return (os.environ.get(NODE_ADDRESS) or socket.gethostname()) if is_wildcard else host


def write_status(path: Path, status: RoleStatus) -> None:
    """Replaces a status file without fsync: it is worthless after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.write_bytes(msgspec.json.encode(status))
    faults.point("status.rename")
    temporary.rename(path)


def is_over(lease: Path) -> bool:
    """Returns whether a lease was given back, taken over, or ended by `declare_lost`; False if
    its disk does not answer."""
    # opening it asks the file server, while looking up a name or its size may be answered from a
    # cache
    try:
        return not lease.read_bytes()
    except FileNotFoundError:
        return True
    except OSError:
        return False


def read_json(path: Path, kind: type[T]) -> T | None:
    """Reads a JSON file; None if it is missing, damaged, too large, or from an incompatible
    version of rl."""
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_JSON_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE):
        pass
    return None


def read_status(path: Path) -> RoleStatus | None:
    """Reads the last status of a process; None if it is missing or not JSON. Fields with an
    invalid value count as missing."""
    content = read_json(path, dict[str, Any])
    if content is None:
        return None
    valid = {}
    for name in FIELDS.keys() & content:
        with contextlib.suppress(msgspec.ValidationError):
            valid[name] = msgspec.convert(content[name], FIELDS[name])
    return RoleStatus(**valid)


def archive_status(path: Path, folder: Path) -> None:
    """Removes the status of a dead process, and records its last phase, until the last
    heartbeat, among its spans in `folder`."""
    status = read_status(path)
    path.unlink(missing_ok=True)
    if not (status and status.phase and status.since and status.heartbeat):
        return
    now = time.time()
    clock = spans.Start(
        process=path.stem,
        pid=status.pid or 0,
        host=status.host,
        place=status.place,
        time=now,
        monotonic=now,
    )
    last = spans.Span(
        name=status.phase.value,
        begin=status.since,
        end=max(status.since, status.heartbeat),
        lane=PHASE_LANE,
        step=status.step,
    )
    with contextlib.suppress(OSError):
        spans.append(folder / f"{path.stem}.jsonl", spans.encoded([clock, last]))


class Staleness:
    """Measures how long signs of life have not changed, by this process's clock: clocks of other
    hosts may differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seen: dict[str, tuple[object, float, bool]] = {}
        """Name -> (last sign, such as a heartbeat; time at which it was first seen; whether
        another one was seen before)."""

    def look(self, name: str, sign: object) -> float:
        """Takes the newest sign of a process, and returns the seconds since it was first seen;
        0.0 if it is new."""
        known, now = self.seen.get(name), self.clock()
        if known is None or known[0] != sign:
            self.seen[name] = sign, now, known is not None
            return 0.0
        return now - known[1]

    def moved(self, name: str) -> bool:
        """Returns whether the sign was seen to change."""
        return name in self.seen and self.seen[name][2]


def read_address(path: Path) -> str | None:
    """Returns the address of a process; None until it has published one."""
    status = read_status(path)
    return status.address if status else None


def server_files(status_dir: Path) -> list[Path]:
    """Returns the status files of a run's inference servers: `inference.json` of the one that
    `rl` runs, and those of further ones."""
    return [*status_dir.glob("inference.json"), *sorted(status_dir.glob("inference-*.json"))]


SERVER_NAME = "RL_SERVER_NAME"
"""Environment variable with the process name of a server that `rl node` starts:
`inference-node3`."""


def further_server(port: int) -> str:
    """Returns the process name of an inference server on this machine that `rl` has not started."""
    return f"inference-{socket.gethostname()}-{port}"


LOG_LINES = 6
"""Number of log lines quoted in a timeout error."""


def last_seen(status_path: Path) -> str:
    """Describes what a process last reported, for timeout errors: its heartbeat, its phase, the
    end of its log."""
    status, now = read_status(status_path), time.time()
    text = "it has no status file: it has not started, or has ended"
    if status:
        text = f"last heartbeat {now - (status.heartbeat or now):.0f} s ago: {describe(status)}"
        if (since_s := now - (status.since or now)) >= 1:
            text += f" for {since_s:.0f} s"
    log = newest_log(status_path.parent.parent / "logs", status_path.stem)
    if log:
        lines = last_lines(log, LOG_LINES) or ["(empty)"]
        text = "\n  | ".join([f"{text}; the end of {log}:", *lines])
    return text


EndKind = Literal["done", "early", "doubtful"]
"""How a run ended: with all its steps; early, because there was nothing left to learn; or early,
perhaps because of a fault."""


class RunEnd(msgspec.Struct, frozen=True):
    """The content of `status/orchestrator.end`, which the orchestrator writes when a run ends. A
    running run has none."""

    reason: str
    """Text for people."""
    time: float
    kind: EndKind = "done"
