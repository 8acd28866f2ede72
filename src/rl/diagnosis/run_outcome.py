"""Determines how a run ended that has no live process."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rl.diagnosis.state import RunState
from rl.run_dir.logs import last_lines, last_words, newest_log
from rl.run_dir.status import RunEnd
from rl.system.terminal import span

if TYPE_CHECKING:
    from rl.run_dir.numbers import Numbers


class RunOutcome(NamedTuple):
    """How a run ended."""

    text: str
    """One sentence, with the remedy after a bad end."""
    how: Literal["ended", "stopped", "died"]
    """Ended well; stopped by its user before the last step; died of a fault."""
    log: Path | None = None
    """The log with the cause."""
    age: str = ""
    """The part of `text` that says how long ago the run ended."""


def nothing_trained(numbers: "Numbers") -> str:
    """Returns why a run that completed steps trained nothing; empty if it has trained, or
    completed no step."""
    steps = [step for step in numbers.steps("trainer") if step > 0]
    quarantined = {
        step for step, value in zip(*numbers.points("trainer", "quarantined"), strict=True) if value
    }
    if not steps or not quarantined.issuperset(steps):
        return ""
    return (
        "no step was trained: every batch was quarantined (see batches/*.quarantined); fix the "
        "cause, then --resume 0"
    )


def num_models(state: RunState) -> int | None:
    """Returns how many models the clients of an `rl serve` have made; None for one of these
    models, and for any other run."""
    is_server = state.config.serve and state.rl_dir is state.run_dir
    return len([*state.run_dir.root.glob("models/*/calls.log")]) if is_server else None


def early_end(end: RunEnd | None, step: int, max_steps: int) -> str:
    """Returns where and why a run ended before its last step; empty for any other run."""
    return (
        ""
        if end is None or end.kind == "done"
        else f"the run ended at step {step} of {max_steps}: {end.reason}"
    )


def ended_well(state: RunState) -> str:
    """Returns why a finished run ended; empty for a run that did not finish."""
    if nothing_trained(state.numbers):
        return ""
    if state.config.sft:
        passes = state.config.sft.epochs
        epoch = [*state.numbers.points("trainer", "epoch", 1)[1], 0.0][0]
        done = state.step >= state.config.max_steps if passes is None else epoch >= passes - 1e-6
        return (
            f"{state.step} steps done"
            if done and max(state.newest_checkpoint, state.newest_version) >= state.step > 0
            else ""
        )
    last = max([0, *state.quarantined, state.step])
    return state.end.reason if state.end and state.newest_checkpoint >= last else ""


def run_outcome(state: RunState) -> RunOutcome:
    """Returns how a run without live processes ended."""
    models = num_models(state)
    at = f" at step {state.step}" if models is None else ""  # a server trains nothing itself
    if reason := ended_well(state):
        doubtful = state.end if state.end and state.end.kind == "doubtful" else None
        return RunOutcome(
            early_end(doubtful, state.step, state.config.max_steps)
            or f"the run ended well: {reason}",
            "ended",
        )
    if why := nothing_trained(state.numbers):
        return RunOutcome(why, "died")
    if stop := state.stop:
        age = f" {span(state.now - stop.time)} ago"
        where = f"at step {state.step} of {state.config.max_steps}"
        return RunOutcome(
            f"the run was stopped by {stop.reason}{age} {where}; continue it with `{state.resume}`",
            "stopped",
            age=age,
        )
    fatal = [
        event
        for event in state.recent_events
        if event.event == "give_up" or event is state.down(event.process)
    ]
    if fatal:
        last = fatal[-1]
        count = len(state.deaths(last.process))
        often = f", the last of its {count} deaths" if count > 1 else ""
        log = newest_log(state.rl_dir.logs, last.process)
        quote = (
            f", saying: {words}" if (words := last_words(log)) and words not in last.reason else ""
        )
        age = f" {span(state.now - last.time)} ago"
        where = f"the run ended{age}{at} with the {last.process}{often}"
        return RunOutcome(
            f"{where}: {last.reason}{quote}; see {log or state.rl_dir.logs}, then `{state.resume}`",
            "died",
            log,
            age,
        )
    if left := [process for process in state.processes.values() if process.alive is False]:
        first = left[0]
        doing = ", ".join(f"the {process.name} was {process.doing}" for process in left)
        age = f" {span(first.silent_s)} ago"
        again = (
            f"its jobs, {state.jobs}, continue it if they are still in the queue; else"
            if state.jobs
            else "continue it with"
        )
        return RunOutcome(
            f"the run was killed{age}{at}: {doing}; {again} `{state.resume}`", "died", age=age
        )
    if state.config.serve:
        done = f"trained {state.step} steps" if models is None else f"made {models} models"
        return RunOutcome(
            f"clients of `rl serve` {done}; they can go on after `{state.resume}`", "stopped"
        )
    if (
        state.numbers.newest() is None
        and not state.newest_batch
        and newest_log(state.rl_dir.logs, "trainer") is None
    ):
        if state.jobs:
            return RunOutcome(
                f"no machine has joined the run yet; its jobs are {state.jobs}", "stopped"
            )
        log = newest_log(state.rl_dir.logs, "data") or newest_log(state.rl_dir.logs, "model")
        why = "".join(f"; the last line of {log}: {line}" for line in last_lines(log, 1))
        return RunOutcome(f"the run did not start{why}; `{state.resume}` tries again", "died", log)
    if (
        state.end
        and not state.newest_checkpoint
        and not state.processes
        and state.step >= (state.newest_batch or state.config.max_steps)
    ):
        # a copy without them
        return RunOutcome(
            f"the run ended well: {state.end.reason}; its checkpoints are not here", "ended"
        )
    text = (
        f"the run was stopped at step {state.step} of {state.config.max_steps}; continue it with "
        f"`{state.resume}`"
    )
    return RunOutcome(text, "stopped")
