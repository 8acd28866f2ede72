"""What each process did when: lanes of spans, and events."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rl.records.run import Run
from rl.records.spans import Done
from rl.records.timeline import SLACK_S, Mark, spread
from rl.records.timeline import Timeline as Recorded
from rl.run_dir.spans import is_time
from rl.run_dir.status import PHASE_LANE, Phase, RoleStatus
from rl.system.errors import RunError
from rl.system.terminal import digits
from rl.view.curves import line_times
from rl.view.responses import Lane, Moment, Span, Timeline

WINDOW_S = 600.0
"""The default interval: the newest ten minutes."""
MOST_SPANS = 6000
"""Maximum number of spans in one answer; the longest are kept."""
LANES = 8
"""Maximum number of lanes of one kind per process: a worker may play a hundred rollouts at once."""
QUIET_S, QUIET_SHARE = 1.0, 0.002
"""Minimum length of a time without work that is reported: in seconds, and as a share of the
interval."""
WAITS = {phase.value: phase.waits_for for phase in Phase if phase.waits_for} | dict.fromkeys(
    ("wait_for_batch", "fetch_batch"), "orchestrator"
)
"""Spans in which a process waits, and what it waits for."""
WORKED_FOR = (None, "environments")
"""Counts as work: work itself, and waits for something without a lane of its own, such as
environments being loaded."""
IDLE = ("serving",)
"""Phases of a server that do not show whether it has requests."""
ORDER = ("rl", "trainer", "inference", "orchestrator")
GAUGES, LEVELS = {"requests": "in flight", "playing": "at play"}, 5
JOIN_S = 0.5
"""A phase that begins within so many seconds after another belongs to the same life: two clocks
differ by less."""
GAUGE_S = 4.0
"""Seconds that a gauge, which is written every two seconds, holds without a newer one."""
NO_SPANS = "no spans of this time are here: of each process spans/ has the newest 4 to 8 MiB"
DONE = {
    "batch": "batch {step} committed",
    "step": "step {step} trained",
    "eval": "version {step} evaluated",
}


def timeline(run: Run, begin: float | None, end: float | None) -> Timeline:
    """The lanes between two times, by default of the newest WINDOW_S. Raises RunError if the
    interval is empty."""
    first, last = extent(run)
    written = run.recording.ends or (first, last)
    first, last = min(first or written[0], written[0]), max(last, written[1])
    if begin is not None and end is not None and begin > end:
        raise RunError(f"begin = {begin:.15g} is after end = {end:.15g}")
    given = f"begin = {begin}, end = {end}"
    end = last if end is None else min(end, last)
    begin = max(first, end - WINDOW_S) if begin is None else max(begin, first)
    if not begin <= end:
        raise RunError(f"{given}: nothing lies in between; the run lasted from {first} to {last}")
    found = run.timeline(begin, end)
    lanes, hidden = recorded_lanes(found.spans)
    lanes = sorted(
        [*lanes, *gauge_lanes(found, end)], key=lambda lane: (rank(lane.process), lane.process)
    )
    shown, *notes = longest(lanes)
    moments = [
        Moment(
            kind=mark.name,
            time=mark.time,
            process=mark.process,
            text=mark_text(mark),
            step=mark.step,
        )
        for mark in found.marks
    ]
    note = "; ".join(
        text for text in (*notes, hidden, "" if lanes or begin == end else NO_SPANS) if text
    )
    quiet = quiet_times(
        found, begin, min(end, known_until(found.spans, run.recording.counted, run.status))
    )
    return Timeline(
        begin=begin,
        end=end,
        first=first,
        last=last,
        lanes=shown,
        moments=moments,
        quiet=quiet,
        note=note,
    )


def known_until(
    spans: Sequence[Done], newest: Mapping[str, float], statuses: Mapping[str, RoleStatus]
) -> float:
    """The time up to which all spans are known. newest: when each process last wrote its gauges,
    which it does after its spans: a phase that ended since then is neither written nor in the
    status."""
    known, last = math.inf, max(newest.values(), default=math.inf)
    for name, status in statuses.items():
        if (time := newest.get(name, -math.inf)) >= last - SLACK_S:
            ends = [
                done.end
                for done in spans
                if done.process == name and done.lane == PHASE_LANE and done.end <= time
            ]
            known = min(known, time if (status.since or 0.0) <= time else max(ends, default=time))
    return known


def quiet_times(recorded: Recorded, begin: float, end: float) -> list[Span]:
    """Intervals in which all processes only waited, and no request or rollout was under way.
    Empty if the run has no spans of inference."""
    if not any(done.process.startswith("inference") for done in recorded.spans):
        return []
    least, at, found = max(QUIET_S, QUIET_SHARE * (end - begin)), begin, []
    working = [
        (done.begin, done.end)
        for done in recorded.spans
        if WAITS.get(done.name) in WORKED_FOR and done.name not in IDLE
    ]
    for process in {counted.process for counted in recorded.gauges}:
        for name in GAUGES:
            working += [
                (first, last) for first, last, value in held(recorded, process, name, end) if value
            ]
    for first, last in [*sorted(working), (end, end)]:
        if min(first, end) - at >= least:
            found.append(
                Span(name="quiet", begin=at, end=min(first, end), text="no process worked")
            )
        at = max(at, last)
    return found


def extent(run: Run) -> tuple[float, float]:
    """The begin of the run and its last sign of life, without looking at spans."""
    times = [float(some.min()) for _, some in line_times(run).values() if len(some)]
    times += (
        time for time in (run.numbers.newest(), run.end and run.end.time) if time and is_time(time)
    )
    times += [event.time for event in run.events]
    times += [status.heartbeat for status in run.status.values() if status.heartbeat]
    return (min(times), max(times)) if times else (0.0, 0.0)


def recorded_lanes(spans: Sequence[Done]) -> tuple[list[Lane], str]:
    """The lanes of the recorded spans, at most LANES of one kind per process, and a sentence
    about what is left out."""
    found: dict[tuple[str, str], list[Span]] = {}
    for done, lane in spread(spans):
        own = found.setdefault((done.process, lane), [])
        own.append(
            Span(
                name=done.name,
                begin=done.begin,
                end=done.end,
                text=span_text(done),
                waits_for=WAITS.get(done.name) or "",
            )
        )
    kinds = Counter[tuple[str, str]]()
    lanes = []
    for process, lane in sorted(found, key=lambda key: (rank(key[0]), key[0], natural(key[1]))):
        kind = (process, lane.rstrip("0123456789 "))
        kinds[kind] += 1
        if kinds[kind] <= LANES:
            lanes.append(Lane(process=process, name=lane, spans=found[process, lane]))
    more = [
        f"{LANES} of {count} lanes `{lane}` of {process}"
        for (process, lane), count in kinds.items()
        if count > LANES
    ]
    return lanes, f"showing {', '.join(more)}" if more else ""


def held(
    recorded: Recorded, process: str, name: str, end: float
) -> list[tuple[float, float, float]]:
    """(begin, end, value) of a process's gauge. A value holds until the next one, but at most
    GAUGE_S if none comes in time, and not beyond the process's death or the last sign of life in
    its phases (in anyone's phases if it has none)."""
    values = [
        (one.time, one.values[name])
        for one in recorded.gauges
        if one.process == process and name in one.values
    ]
    deaths = [
        mark.time
        for mark in recorded.marks
        if mark.name in ("death", "stop") and mark.process in (process, "rl")
    ]
    phases = [
        done
        for done in recorded.spans
        if done.lane == PHASE_LANE and done.name != Phase.STARTING.value
    ]
    signs = [done for done in phases if done.process == process] or phases
    nexts = [*(time for time, _ in values[1:]), math.inf]
    return [
        (at, min([following, end, *(death for death in deaths if death >= at)]), value)
        for (at, value), time in zip(values, nexts, strict=False)
        for following in [time if time <= at + GAUGE_S else last_sign(signs, at)]
    ]


def last_sign(signs: list[Done], at: float) -> float:
    """The time up to which a process that was alive at `at` is known to have lived, at most
    GAUGE_S later. signs: phases sorted by begin; in one life they follow each other without a
    gap."""
    until = at
    for done in signs:
        if done.begin <= until + JOIN_S and done.end > until:
            until = done.end
    return min(until, at + GAUGE_S)


def gauge_lanes(recorded: Recorded, end: float) -> list[Lane]:
    """The number of requests or rollouts under way, as spans named by its level: its share of
    the maximum in LEVELS steps."""
    lanes = []
    for process in dict.fromkeys(one.process for one in recorded.gauges):
        for name in GAUGES:
            values = held(recorded, process, name, end)
            if most := max((value for _, _, value in values), default=0):
                spans = [
                    Span(
                        name=f"level {round(value / most * LEVELS)}",
                        begin=at,
                        end=until,
                        text=f"{value:g} {GAUGES[name]}",
                    )
                    for at, until, value in values
                ]
                lanes.append(Lane(process=process, name=GAUGES[name], spans=spans))
    return lanes


def span_text(done: Done) -> str:
    """The description of a span."""
    about = ", ".join(f"{name} {value}" for name, value in done.about.items())
    step = "" if done.step is None else f" {done.step}"
    return f"{done.name.replace('_', ' ')}{step}" + (f" ({about})" if about else "")


def rank(process: str) -> int:
    """Sort key of a process: rl and the trainer first, then inference and the orchestrator,
    workers last."""
    return next((i for i, name in enumerate(ORDER) if process.startswith(name)), len(ORDER))


def natural(lane: str) -> tuple[str, int]:
    """Sort key of a lane, which puts `play 2` before `play 10`."""
    head, _, tail = lane.rpartition(" ")
    return (head, int(tail)) if tail.isdigit() else (lane, 0)


def longest(lanes: list[Lane]) -> tuple[list[Lane], str]:
    """Keeps the MOST_SPANS longest spans, the first of equal ones; also returns a sentence about
    what is left out."""
    lengths = np.array([span.end - span.begin for lane in lanes for span in lane.spans])
    if len(lengths) <= MOST_SPANS:
        return lanes, ""
    longest_first = np.argsort(-lengths, kind="stable")
    least, chosen = (
        float(lengths[longest_first[MOST_SPANS]]),
        iter(np.isin(np.arange(len(lengths)), longest_first[:MOST_SPANS]).tolist()),
    )
    kept = [
        Lane(
            process=lane.process,
            name=lane.name,
            spans=[span for span in lane.spans if next(chosen)],
        )
        for lane in lanes
    ]
    return kept, (
        f"the {MOST_SPANS:,} longest of {len(lengths):,} spans: some of {digits(least)} s or "
        "less are missing here and in the shares; "
        "choose a shorter time"
    )


def mark_text(mark: Mark) -> str:
    """The text of a mark, such as `batch 3 committed` or `death: killed by signal 9`."""
    if mark.name in DONE:
        return DONE[mark.name].format(step=mark.step)
    return f"{mark.name}: {mark.text}" if mark.text else mark.name
