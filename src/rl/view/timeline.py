"""What each process did when: lanes of spans, and what happened in between."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from rl.records.run import Run
from rl.records.spans import Done
from rl.records.timeline import SLACK_S, Mark, spread
from rl.records.timeline import Timeline as Recorded
from rl.run_dir.status import PHASE_LANE, Phase, RoleStatus
from rl.system.errors import RunError
from rl.view.answers import Lane, Moment, Span, Timeline
from rl.view.curves import line_times

WINDOW_S = 600.0
"""What is shown without a stretch of time: the newest ten minutes."""
MOST_SPANS = 6000
"""Of one answer; of more the longest are given."""
LANES = 8
"""Of one kind of a process: a worker may play a hundred rollouts at once."""
QUIET_S, QUIET_SHARE = 1.0, 0.002
"""From so long on, and from this part of what is shown, it is said that nobody works."""
WAITS = {phase.value: phase.waits_for for phase in Phase if phase.waits_for} | dict.fromkeys(
    ("wait_for_batch", "fetch_batch"), "orchestrator"
)
"""Spans in which a process waits, and whom for."""
WORKED_FOR = (None, "environments")
"""Work, and waits for whoever has no lane of its own while it works: an environment that is loaded."""
IDLE = ("serving",)
"""What a server is in, whether it has requests or not."""
ORDER = ("rl", "trainer", "inference", "orchestrator")
GAUGES, LEVELS = {"requests": "in flight", "playing": "at play"}, 5
JOIN_S = 0.5
"""A phase that begins so soon behind another one belongs to the same life: times of two clocks differ by less."""
GAUGE_S = 4.0
"""For so long a number holds, which is noted every two seconds, if no other comes."""
DONE = {"batch": "batch {step} committed", "step": "step {step} trained", "eval": "version {step} evaluated"}
STEP_PARTS = (
    ("wait_for_batch", "waits for the batch"),
    ("old_logprobs", "log-probabilities before the first optimizer step"),
    ("forward_backward", "forward and backward"),
    ("optimizer", "optimizer"),
    ("publish_weights", "publishing held the step up"),
    ("checkpoint", "a checkpoint held the step up"),
    ("validation", "validation"),
    ("parity", "compares with inference"),
)
"""Parts of the trainer's step in their order, where a run has no spans: `time/<name>` is their length."""
TIMES = ["time/step", *(f"time/{name}" for name, _ in STEP_PARTS)]


def timeline(run: Run, begin: float | None, end: float | None) -> Timeline:
    """The lanes between two times; without them the newest WINDOW_S."""
    first, last = extent(run)
    written = run.recording.ends or (first, last)
    first, last = min(first or written[0], written[0]), max(last, written[1])
    if begin is not None and end is not None and begin > end:
        raise RunError(f"begin = {begin:.15g} is after end = {end:.15g}")
    given = f"begin = {begin}, end = {end}"
    end = last if end is None else min(end, last)
    begin = max(first, end - WINDOW_S) if begin is None else max(begin, first)
    if not begin <= end:
        raise RunError(f"{given}: nothing is between them; the run lasted from {first} to {last}")
    found = run.timeline(begin, end)
    lanes, hidden = recorded_lanes(found.spans)
    lanes = sorted([*lanes, *gauge_lanes(found, end)], key=lambda lane: (rank(lane.process), lane.process))
    if not any(lane.process.startswith("trainer") for lane in lanes):
        lanes = [*metric_lanes(run, begin, end), *lanes]
    shown, *notes = longest(lanes)
    note = "; ".join(text for text in (*notes, hidden) if text)
    quiet = quiet_times(found, begin, min(end, known_until(found.spans, run.recording.counted, run.status)))
    return Timeline(begin=begin, end=end, first=first, last=last, lanes=shown, moments=moments(found.marks), quiet=quiet, note=note)


def known_until(spans: list[Done], newest: Mapping[str, float], statuses: Mapping[str, RoleStatus]) -> float:
    """Until when all that was done is written. newest: when each process last wrote numbers, which it does behind its spans: a phase that
    was not over then and is over now is neither written nor in the status."""
    known, last = math.inf, max(newest.values(), default=math.inf)
    for name, status in statuses.items():
        if (time := newest.get(name, -math.inf)) >= last - SLACK_S:
            ends = [done.end for done in spans if done.process == name and done.lane == PHASE_LANE and done.end <= time]
            known = min(known, time if (status.since or 0.0) <= time else max(ends, default=time))
    return known


def quiet_times(recorded: Recorded, begin: float, end: float) -> list[Span]:
    """Stretches in which no process did anything but wait, and no request or rollout was under way. Empty without spans of inference, which
    not every run has."""
    if not any(done.process.startswith("inference") for done in recorded.spans):
        return []
    least, at, found = max(QUIET_S, QUIET_SHARE * (end - begin)), begin, []
    working = [(done.begin, done.end) for done in recorded.spans if WAITS.get(done.name) in WORKED_FOR and done.name not in IDLE]
    for process in {counted.process for counted in recorded.gauges}:
        for name in GAUGES:
            working += [(first, last) for first, last, value in held(recorded, process, name, end) if value]
    for first, last in [*sorted(working), (end, end)]:
        if min(first, end) - at >= least:
            found.append(Span(name="quiet", begin=at, end=min(first, end), text="no process worked"))
        at = max(at, last)
    return found


def extent(run: Run) -> tuple[float, float]:
    """When the run began, and when something was last heard of it, by all but its spans."""
    times = [float(some.min()) for _, some in line_times(run).values() if len(some)]
    times += filter(None, (run.numbers.newest(), run.end and run.end.time))
    times += [event.time for event in run.events]
    times += [status.heartbeat for status in run.status.values() if status.heartbeat]
    return (min(times), max(times)) if times else (0.0, 0.0)


def recorded_lanes(spans: list[Done]) -> tuple[list[Lane], str]:
    """Lanes of what the processes wrote down, and what is left out: of things done at the same time LANES of one kind have lanes."""
    found: dict[tuple[str, str], list[Span]] = {}
    for done, lane in spread(spans):
        own = found.setdefault((done.process, lane), [])
        own.append(Span(name=done.name, begin=done.begin, end=done.end, text=span_text(done), waits_for=WAITS.get(done.name) or ""))
    kinds = Counter[tuple[str, str]]()
    lanes = []
    for process, lane in sorted(found, key=lambda key: (rank(key[0]), key[0], natural(key[1]))):
        kind = (process, lane.rstrip("0123456789 "))
        kinds[kind] += 1
        if kinds[kind] <= LANES:
            lanes.append(Lane(process=process, name=lane, spans=found[process, lane]))
    more = [f"{LANES} of {count} lanes `{lane}` of {process}" for (process, lane), count in kinds.items() if count > LANES]
    return lanes, f"shown are {', '.join(more)}: so much was done at once" if more else ""


def held(recorded: Recorded, process: str, name: str, end: float) -> list[tuple[float, float, float]]:
    """(begin, end, value) of a number of a process: each value holds until the next one; where none comes within GAUGE_S, so long, but not
    beyond its death, nor the last sign of life of its phases, or where it has none, of anyone's."""
    values = [(one.time, one.values[name]) for one in recorded.gauges if one.process == process and name in one.values]
    deaths = [mark.time for mark in recorded.marks if mark.name in ("death", "stop") and mark.process in (process, "rl")]
    phases = [done for done in recorded.spans if done.lane == PHASE_LANE and done.name != Phase.STARTING.value]
    signs = [done for done in phases if done.process == process] or phases
    nexts = [*(time for time, _ in values[1:]), math.inf]
    return [
        (at, min([following, end, *(death for death in deaths if death >= at)]), value)
        for (at, value), time in zip(values, nexts, strict=False)
        for following in [time if time <= at + GAUGE_S else last_sign(signs, at)]
    ]


def last_sign(signs: list[Done], at: float) -> float:
    """Until when what lived at a time is known to have lived, GAUGE_S behind it at most. signs: phases in the order of their begins, of
    which one follows the other in a life."""
    until = at
    for done in signs:
        if done.begin <= until + JOIN_S and done.end > until:
            until = done.end
    return min(until, at + GAUGE_S)


def gauge_lanes(recorded: Recorded, end: float) -> list[Lane]:
    """How many requests or rollouts were under way, as spans whose names are the parts of the most, in LEVELS."""
    lanes = []
    for process in dict.fromkeys(one.process for one in recorded.gauges):
        for name in GAUGES:
            values = held(recorded, process, name, end)
            if most := max((value for _, _, value in values), default=0):
                spans = [
                    Span(name=f"level {round(value / most * LEVELS)}", begin=at, end=until, text=f"{value:g} {GAUGES[name]}")
                    for at, until, value in values
                ]
                lanes.append(Lane(process=process, name=GAUGES[name], spans=spans))
    return lanes


def span_text(done: Done) -> str:
    """What a span was about, in words."""
    about = ", ".join(f"{name} {value}" for name, value in done.about.items())
    step = "" if done.step is None else f" {done.step}"
    return f"{done.name.replace('_', ' ')}{step}" + (f" ({about})" if about else "")


def rank(process: str) -> int:
    """The trainer first, then inference and the orchestrator, the workers last."""
    return next((i for i, name in enumerate(ORDER) if process.startswith(name)), len(ORDER))


def natural(lane: str) -> tuple[str, int]:
    """For the order of `play 2` and `play 10`."""
    head, _, tail = lane.rpartition(" ")
    return (head, int(tail)) if tail.isdigit() else (lane, 0)


def metric_lanes(run: Run, begin: float, end: float) -> list[Lane]:
    """Lanes as the metrics tell them, for runs without spans: the parts of the trainer's steps, the orchestrator's batches, evaluations."""
    trainer, orchestrator, evals = list[Span](), list[Span](), list[Span]()
    tables = run.numbers.tables
    for step, time, line in tables["trainer"].since(begin, TIMES) if "trainer" in tables else ():
        trainer += step_parts(step, time, line)
    for step, time, line in tables["orchestrator"].since(begin, ["time/batch"]) if "orchestrator" in tables else ():
        orchestrator += [Span(name="batch", begin=time - seconds, end=time, text=f"batch {step}") for seconds in line.values()]
    for step, time, line in tables["eval"].since(begin, ["time/eval"]) if "eval" in tables else ():
        evals += [Span(name="eval", begin=time - seconds, end=time, text=f"evaluation of version {step}") for seconds in line.values()]
    found = {"trainer": trainer, "orchestrator": orchestrator, "evaluations": evals}
    inside = {name: [span for span in spans if span.begin <= end and span.end >= begin] for name, spans in found.items()}
    return [Lane(process=name, name="", spans=spans) for name, spans in inside.items() if spans]


def step_parts(step: int, end: float, line: dict) -> Iterator[Span]:
    """The parts of a step, one behind the other from its begin on."""
    at = end - (line.get("time/step") or 0.0)
    for name, what in STEP_PARTS:
        seconds = line.get(f"time/{name}") or 0.0
        if seconds > 0:
            yield Span(name=name, begin=at, end=min(at + seconds, end), text=f"step {step}: {what}", waits_for=WAITS.get(name) or "")
            at += seconds


def longest(lanes: list[Lane]) -> tuple[list[Lane], str]:
    """The MOST_SPANS longest spans if there are more, of equal ones the first; and what that leaves out."""
    lengths = np.array([span.end - span.begin for lane in lanes for span in lane.spans])
    if len(lengths) <= MOST_SPANS:
        return lanes, ""
    longest_first = np.argsort(-lengths, kind="stable")
    least, chosen = float(lengths[longest_first[MOST_SPANS]]), iter(np.isin(np.arange(len(lengths)), longest_first[:MOST_SPANS]).tolist())
    kept = [Lane(process=lane.process, name=lane.name, spans=[span for span in lane.spans if next(chosen)]) for lane in lanes]
    return kept, (
        f"the {MOST_SPANS:,} longest of {len(lengths):,} spans: of those of {least:.3g} s or less not all are here, nor in the shares; "
        "look at less time"
    )


def moments(marks: list[Mark]) -> list[Moment]:
    """What happened, in words."""
    return [Moment(kind=mark.name, time=mark.time, process=mark.process, text=mark_text(mark), step=mark.step) for mark in marks]


def mark_text(mark: Mark) -> str:
    """`batch 3 committed`, `death: killed by signal 9`."""
    if mark.name in DONE:
        return DONE[mark.name].format(step=mark.step)
    return f"{mark.name}: {mark.text}" if mark.text else mark.name
