"""What each process did when: lanes of spans, and events."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from rl.records.run import Run
from rl.records.timeline import SLACK_S, Done, Mark, spread
from rl.records.timeline import Timeline as Recorded
from rl.run_dir.spans import is_time
from rl.run_dir.status import PHASE_LANE, Phase, RoleStatus
from rl.system.errors import RunError
from rl.system.terminal import digits
from rl.view.curves import line_times
from rl.view.responses import Lane, LaneSpan, LaneTimeline, Moment

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
GAUGE_S = 4.0
"""Seconds that a gauge, which is written every two seconds, holds without a newer one."""
NO_SPANS = "no spans of this time are here: of each process spans/ has the newest 4 to 8 MiB"
DONE = {
    "batch": "batch {step} committed",
    "step": "step {step} trained",
    "eval": "version {step} evaluated",
}


def timeline(run: Run, begin: float | None, end: float | None) -> LaneTimeline:
    """The lanes between two times, by default of the newest WINDOW_S. Raises RunError if the
    interval is empty."""
    first, last = extent(run)
    written = run.recording.ends or (first, last)
    first, last = min(first or written[0], written[0]), max(last, written[1])
    if begin is not None and end is not None and begin > end:
        raise RunError(f"begin = {begin:.15g} is after end = {end:.15g}")
    until = last if end is None else min(end, last)
    since = max(first, until - WINDOW_S if begin is None else begin)
    if not since <= until:
        raise RunError(
            f"begin = {begin}, end = {end}: nothing lies in between; the run lasted from {first} "
            f"to {last}"
        )
    recorded = run.timeline(since, until)
    lanes, hidden = recorded_lanes(recorded.spans)
    lanes += gauge_lanes(recorded, until)
    lanes.sort(key=lambda lane: (rank(lane.process), lane.process))
    shown, note = longest(lanes)
    missing = "" if lanes or since == until else NO_SPANS
    known = known_until(recorded.spans, run.recording.counted, run.status)
    return LaneTimeline(
        begin=since,
        end=until,
        first=first,
        last=last,
        lanes=shown,
        moments=[
            Moment(
                kind=mark.name,
                time=mark.time,
                process=mark.process,
                text=mark_text(mark),
                step=mark.step,
            )
            for mark in recorded.marks
        ],
        quiet=quiet_times(recorded, since, min(until, known)),
        note="; ".join(filter(None, (note, hidden, missing))),
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


def quiet_times(recorded: Recorded, begin: float, end: float) -> list[LaneSpan]:
    """Intervals in which all processes only waited, and no request or rollout was under way.
    Empty if the run has no spans of inference."""
    if not any(done.process.startswith("inference") for done in recorded.spans):
        return []
    working = [
        (done.begin, done.end)
        for done in recorded.spans
        if WAITS.get(done.name) in WORKED_FOR and done.name not in IDLE
    ]
    for values in levels(recorded, end).values():
        working += [(first, last) for first, last, value in values if value]
    least, at, quiet = max(QUIET_S, QUIET_SHARE * (end - begin)), begin, []
    for first, last in [*sorted(working), (end, end)]:
        if (until := min(first, end)) - at >= least:
            quiet.append(LaneSpan(name="quiet", begin=at, end=until, text="no process worked"))
        at = max(at, last)
    return quiet


def extent(run: Run) -> tuple[float, float]:
    """The begin of the run and its last sign of life, without looking at spans."""
    times = [float(lines.min()) for _, lines in line_times(run).values() if len(lines)]
    times += [event.time for event in run.events]
    times += [status.heartbeat for status in run.status.values() if status.heartbeat]
    newest = (run.numbers.newest(), run.end and run.end.time)
    times += [time for time in newest if time and is_time(time)]
    return (min(times), max(times)) if times else (0.0, 0.0)


def recorded_lanes(spans: Sequence[Done]) -> tuple[list[Lane], str]:
    """The lanes of the recorded spans, at most LANES of one kind per process, and a sentence
    about what is left out."""
    by_lane = defaultdict[tuple[str, str], list[LaneSpan]](list)
    for done, lane in spread(spans):
        by_lane[done.process, lane].append(
            LaneSpan(
                name=done.name,
                begin=done.begin,
                end=done.end,
                text=span_text(done),
                waits_for=WAITS.get(done.name) or "",
            )
        )
    kinds, lanes = Counter[tuple[str, str]](), []
    for process, lane in sorted(by_lane, key=lambda key: (rank(key[0]), key[0], natural(key[1]))):
        kind = process, lane.rstrip("0123456789 ")
        kinds[kind] += 1
        if kinds[kind] <= LANES:
            lanes.append(Lane(process=process, name=lane, spans=by_lane[process, lane]))
    hidden = ", ".join(
        f"{LANES} of {count} lanes `{lane}` of {process}"
        for (process, lane), count in kinds.items()
        if count > LANES
    )
    return lanes, hidden and f"showing {hidden}"


def levels(
    recorded: Recorded, end: float
) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """(begin, end, value) of each gauge in GAUGES, by process and name. A value holds until the
    next one, but at most GAUGE_S."""
    by_gauge = defaultdict[tuple[str, str], list[tuple[float, float, float]]](list)
    for counted in reversed(recorded.gauges):
        for name in GAUGES.keys() & counted.values:
            values = by_gauge[counted.process, name]
            following = values[-1][0] if values else end
            until = min(following, counted.time + GAUGE_S, end)
            values.append((counted.time, until, counted.values[name]))
    return {key: values[::-1] for key, values in reversed(by_gauge.items())}


def gauge_lanes(recorded: Recorded, end: float) -> list[Lane]:
    """The number of requests or rollouts under way, as spans named by its level: its share of
    the maximum in LEVELS steps."""
    return [
        Lane(
            process=process,
            name=GAUGES[name],
            spans=[
                LaneSpan(
                    name=f"level {round(value / most * LEVELS)}",
                    begin=at,
                    end=until,
                    text=f"{value:g} {GAUGES[name]}",
                )
                for at, until, value in values
            ],
        )
        for (process, name), values in levels(recorded, end).items()
        if (most := max(value for _, _, value in values))
    ]


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
    order = np.argsort(-lengths, kind="stable")
    is_chosen = np.zeros(len(lengths), bool)
    is_chosen[order[:MOST_SPANS]] = True
    chosen, least = iter(is_chosen.tolist()), float(lengths[order[MOST_SPANS]])
    kept = [
        msgspec.structs.replace(lane, spans=[span for span in lane.spans if next(chosen)])
        for lane in lanes
    ]
    return kept, (
        f"the {MOST_SPANS:,} longest of {len(lengths):,} spans: some of {digits(least)} s or less "
        "are missing here and in the shares; choose a shorter time"
    )


def mark_text(mark: Mark) -> str:
    """The text of a mark, such as `batch 3 committed` or `death: killed by signal 9`."""
    if mark.name in DONE:
        return DONE[mark.name].format(step=mark.step)
    return f"{mark.name}: {mark.text}" if mark.text else mark.name
