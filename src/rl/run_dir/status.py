"""`status/<process>.json`: who runs where, its heartbeat, and what it does or waits for, as typed fields. Beside it, why a run ended.

Programs read the fields of RoleStatus. The sentence that people read is made of them by `describe`, where it is shown; nobody parses it.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from rl.run_dir import spans
from rl.run_dir.files import clean_leftovers, temporary_name
from rl.run_dir.logs import last_lines, newest_log
from rl.system import faults
from rl.system.linux import place
from rl.system.terminal import clip

T = TypeVar("T")
HEARTBEAT_S = 2.0
MAX_WARNING = 500
"""Characters of a warning that are kept; a log has all of it."""
PHASE_LANE = "phase"
"""Where the phases of a process stand among its spans."""
UNREADABLE = (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading a JSON file raises that is missing or damaged; the last for tables nested without end."""


Awaited = Literal["inference", "orchestrator", "trainer", "ranks", "teacher", "environments"]


class Phase(StrEnum):
    """What a process does: the value in its status file, the sentence for people, and whom it waits for meanwhile.

    A sentence takes the status's `step` and `detail`; a detail that it has no place for follows after a colon.
    """

    sentence: str
    waits_for: Awaited | None

    def __new__(cls, value: str, sentence: str, waits_for: Awaited | None = None) -> "Phase":
        phase = str.__new__(cls, value)
        phase._value_, phase.sentence, phase.waits_for = value, sentence, waits_for
        return phase

    STARTING = "starting", "starting"
    LOADING_MODEL = "loading_model", "loading the model"
    # Supervised fine-tuning's data.
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
    WAITING_FOR_VERSION = "waiting_for_version", "waiting for the trainer's version {step}", "trainer"
    WAITING_FOR_TRAINER_END = "waiting_for_trainer_end", "waiting for the trainer to end", "trainer"
    # The trainer.
    WAITING_FOR_RANKS = "waiting_for_ranks", "waiting for the other ranks of the trainer", "ranks"
    TRYING_MEMORY = "trying_memory", "trying a micro batch of full size"
    WAITING_FOR_BATCH = "waiting_for_batch", "waiting for batch {step}", "orchestrator"
    TRAINING = "training", "training step {step}"
    VALIDATING = "validating", "validating version {step}"
    PUBLISHING = "publishing", "publishing version {step}"
    ANNOUNCING_VERSION = "announcing_version", "waiting for word that version {step} was noted", "orchestrator"
    COPYING_STATE = "copying_state", "copying the state of step {step} for a checkpoint"
    CHECKPOINTING = "checkpointing", "writing checkpoint {step}"
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
    }
)
"""Phases of a trainer that is up: the parts of its steps."""


class RunWarning(msgspec.Struct, frozen=True):
    """Something that the run's user is to know, of an environment or of the run's files."""

    about: Literal["failed", "died", "lost", "renamed", "damaged", "inexact"]
    """Its first rollouts that failed for good; the first death of a worker of its; that it is given up; metrics of its own that are called
    like ours; a file that does not hold what was written; a version that came out otherwise when it was trained again."""
    env: str
    """Empty for what is of the files."""
    text: str
    """For people."""


class RoleStatus(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """A status file. None, or an empty string, is what a process does not report. Times are seconds since the epoch."""

    process: str = ""
    """`inference`, `inference-<host>-<port>` for a server that `rl` has not started, `orchestrator`, `trainer`, `trainer-1` for rank 1,
    `data`."""
    pid: int | None = None
    host: str = ""
    place: str = ""
    """Where the pid means something, see rl.system.linux.place."""
    started: float | None = None
    phase: Phase | None = None
    step: int | None = None
    """The step, batch or policy version that the phase is about."""
    waiting_for: Awaited | None = None
    detail: str = ""
    """For people. Nothing depends on it."""
    since: float | None = None
    """When this phase began for this step."""
    heartbeat: float | None = None
    progress: int | None = None
    """Counts what shows that work goes on: micro batches, rollouts, tokens."""
    progressed: float | None = None
    """When `progress` last grew."""
    address: str | None = None
    max_steps: int | None = None
    """The trainer's; where epochs are set, it alone knows how many steps they are."""
    batch: int | None = None
    """The orchestrator's: the batch that is being filled, then how many of how many rollouts it has."""
    batch_done: int | None = None
    batch_size: int | None = None
    policy_version: int | None = None
    """The orchestrator's: the version that inference holds. A server's that starts: the one that it reads, and that is kept for it."""
    quarantined: list[str] = []
    """Environments that are given up."""
    warnings: list[RunWarning] = []
    """What its user is to know. `rl` says each once."""
    playing: int | None = None
    """Rollouts in flight."""
    requests: int | None = None
    """Inference's open requests."""


TIMES = ("started", "since", "heartbeat", "progressed")


def describe(status: RoleStatus | None) -> str:
    """What a process does, as a sentence for people: `waiting for batch 13: filling batch 13`."""
    if status is None or status.phase is None:
        return "in an unknown phase"
    template = status.phase.sentence
    sentence = template.format(step="?" if status.step is None else status.step, detail=status.detail or "?")
    return f"{sentence}: {status.detail}" if status.detail and "{detail}" not in template else sentence


class Status:
    """Publishes this process's status from a thread of its own, so that a blocked process shows the same phase for long."""

    def __init__(self, path: Path, process: str):
        self.path = path
        clean_leftovers(path.parent, ours=path.name)  # of a beat that a predecessor did not finish
        self.current = RoleStatus(process=process, pid=os.getpid(), host=socket.gethostname(), place=place(), started=time.time())
        self.stopped, self.writing, self.changing = threading.Event(), threading.Lock(), threading.Lock()
        self.progress, self.progressed = 0, (0, time.time())
        """The count, and its value when it was last seen to have grown, with the time of that."""
        self.entered = time.monotonic()
        """When it entered its phase."""
        self.gauges: dict[str, Callable[[], int]] = {}
        """Field of RoleStatus -> its value at the moment, which every heartbeat asks for."""
        self.enter(Phase.STARTING)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def enter(self, phase: Phase, step: int | None = None, detail: str = "", **fields: Any) -> None:
        """Sets what the process does or waits for; written at once. Other fields, such as `address`, stay as they are until set again."""
        with self.changing:
            if (phase, step) != (self.current.phase, self.current.step):
                fields["since"] = time.time()
                self._note_phase()
            now = {"phase": phase, "step": step, "waiting_for": phase.waits_for, "detail": detail}
            self.current = msgspec.structs.replace(self.current, **now, **fields)
        self._write()

    def warn(self, warning: RunWarning) -> None:
        """Has `rl` say it; written at once. The second of a kind about an environment is not, nor the second of a text."""
        with self.changing:
            said = self.current.warnings
            warning = msgspec.structs.replace(warning, text=clip(warning.text, MAX_WARNING))
            if any((one.about, one.env or one.text) == (warning.about, warning.env or warning.text) for one in said):
                return
            self.current = msgspec.structs.replace(self.current, warnings=[*said, warning])
        self._write()

    def advance(self, count: int = 1) -> None:
        """Counts progress. Written with the next heartbeat; any thread may call it."""
        with self.changing:
            self.progress += count

    def close(self) -> None:
        """Deletes the status; a heartbeat that is under way does not bring it back."""
        self.stopped.set()
        with self.writing:
            self.path.unlink(missing_ok=True)
        self._note_phase()
        spans.stop()

    def _note_phase(self) -> None:
        """Notes the phase that ends."""
        before, self.entered = self.entered, time.monotonic()
        if self.current.phase:
            spans.note(self.current.phase.value, before, self.entered, PHASE_LANE, self.current.step)

    def _beat(self) -> None:
        for count in itertools.count(1):
            if self.stopped.wait(HEARTBEAT_S / spans.FLUSHES):
                return
            if count % spans.FLUSHES == 0:
                self._write()
                spans.gauges(progress=self.progress, **{name: read() for name, read in self.gauges.items()})
            spans.flush()

    def _write(self) -> None:
        # A status is for the eyes of others: a full disk must not end the process through it.
        with self.writing, contextlib.suppress(OSError):
            if self.stopped.is_set():
                return
            now = time.time()
            if self.progress != self.progressed[0]:
                self.progressed = (self.progress, now)
            counted = {"progress": self.progress, "progressed": self.progressed[1], "heartbeat": now}
            gauges = {name: read() for name, read in self.gauges.items()}
            write_status(self.path, msgspec.structs.replace(self.current, **counted, **gauges))


def reachable(host: str) -> str:
    """The name under which others find a socket that is bound to `host`: for a wildcard, this machine's."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def write_status(path: Path, status: RoleStatus) -> None:
    """Replaces a status file without fsync: it has no worth after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.write_bytes(msgspec.json.encode(status))
    faults.point("status.rename")
    temporary.rename(path)


def read_json(path: Path, kind: type[T]) -> T | None:
    """The content of a JSON file; None when it is missing, damaged, or of another version of rl."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except UNREADABLE:
        return None


def read_status(path: Path) -> RoleStatus | None:
    """The last status of a process; None if it has none that is JSON. A field whose value cannot be its own counts as not there."""
    content = read_json(path, dict[str, Any])
    if content is None:
        return None
    found = {}
    for field in msgspec.structs.fields(RoleStatus):
        if field.name in content:
            with contextlib.suppress(msgspec.ValidationError):
                found[field.name] = msgspec.convert(content[field.name], field.type)
    return RoleStatus(**{name: value for name, value in found.items() if name not in TIMES or spans.is_time(value)})


def bury(path: Path, folder: Path) -> None:
    """Removes the status of a process that is dead, and notes among its spans, in `folder`, what it was in until its last heartbeat."""
    status = read_status(path)
    path.unlink(missing_ok=True)
    if status and status.phase and status.since is not None and status.heartbeat is not None:
        now, end = time.time(), max(status.since, status.heartbeat)
        clock = spans.Start(process=path.stem, pid=status.pid or 0, host=status.host, place=status.place, time=now, monotonic=now)
        last = spans.Span(name=status.phase.value, begin=status.since, end=end, lane=PHASE_LANE, step=status.step)
        spans.note_last(folder / f"{path.stem}.jsonl", clock, last)


class Beats:
    """For how long heartbeats have been the same, by this process's clock: another host's may show any time."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float | None, float]] = {}
        """Name -> the last heartbeat, and when it was first seen (time.monotonic)."""

    def silent_s(self, name: str, status: RoleStatus) -> float:
        """Seconds since the heartbeat of a process, given its newest status, was first seen to be what it is."""
        now = time.monotonic()
        if name not in self.seen or self.seen[name][0] != status.heartbeat:
            self.seen[name] = status.heartbeat, now
        return now - self.seen[name][1]


def read_address(path: Path) -> str | None:
    """Where a process answers; None while it has not said so."""
    status = read_status(path)
    return status.address if status else None


def server_files(status_dir: Path) -> list[Path]:
    """The status files of a run's inference servers: `inference.json` of the one that `rl` keeps, and those of further ones."""
    return [*status_dir.glob("inference.json"), *sorted(status_dir.glob("inference-*.json"))]


def further_server(port: int) -> str:
    """The name of an inference server on this machine that `rl` has not started, as a process of the run."""
    return f"inference-{socket.gethostname()}-{port}"


LOG_LINES = 6
"""Log lines quoted in a timeout error."""


def last_seen(status_path: Path) -> str:
    """What a process last reported, for the error of whoever waited for it: its heartbeat, its phase, the end of its log."""
    status = read_status(status_path)
    if status is None:
        text = "it has no status file: it is not up, or has ended"
    else:
        now = time.time()
        heartbeat, since = (now if at is None else at for at in (status.heartbeat, status.since))
        text = f"last heartbeat {now - heartbeat:.0f} s ago: {describe(status)}"
        if now - since >= 1:
            text += f" for {now - since:.0f} s"
    log = newest_log(status_path.parent.parent / "logs", status_path.stem)
    if log is None:
        return text
    lines = last_lines(log, LOG_LINES)
    return "\n".join([f"{text}; the end of {log}:", *(f"  | {line}" for line in lines or ["(empty)"])])


EndKind = Literal["done", "early", "doubtful"]
"""How a run came to its end: with all its steps; before that, for it has learned what there was; or before that, and perhaps of a fault."""


class RunEnd(msgspec.Struct, frozen=True):
    """The content of `status/orchestrator.end`: the orchestrator's account of a run that came to its end. A run that goes on has none."""

    reason: str
    """For people."""
    time: float
    kind: EndKind = "done"
