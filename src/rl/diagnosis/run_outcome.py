"""Determines how a run ended that has no live process."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rl.diagnosis.state import RunState
from rl.run_dir.logs import last_lines, last_words
from rl.run_dir.status import RunEnd
from rl.system.terminal import span

if TYPE_CHECKING:
    from rl.run_dir.numbers import Numbers


class RunOutcome(NamedTuple):
    """How a run ended."""

    how: Literal["ended", "stopped", "died"]
    """Ended well; stopped by its user before the last step; died of a fault."""
    what: str
    ago_s: float | None = None
    rest: str = ""
    """Where and why, and the remedy: what follows the age."""
    log: Path | None = None
    """The log with the cause."""

    @property
    def lasting(self) -> str:
        """One sentence without the age, which changes with time."""
        return f"{self.what}{self.rest}"

    def __str__(self) -> str:
        age = "" if self.ago_s is None else f" {span(self.ago_s)} ago"
        return f"{self.what}{age}{self.rest}"


def nothing_trained(numbers: "Numbers") -> str:
    """Returns why a run that completed steps trained nothing; empty if it has trained, or
    completed no step."""
    steps = {step for step in numbers.steps("trainer") if step > 0}
    points = zip(*numbers.points("trainer", "quarantined"), strict=True)
    if not steps or steps - {step for step, value in points if value}:
        return ""
    return (
        "no step was trained: every batch was quarantined (see batches/*.quarantined); fix the "
        "cause, then --resume 0"
    )


def num_models(state: RunState) -> int | None:
    """Returns how many models the clients of an `rl serve` have made; None for one of these
    models, and for any other run."""
    is_server = state.config.kind == "serve" and state.rl_dir is state.run_dir
    return len([*state.run_dir.root.glob("models/*/calls.log")]) if is_server else None


def early_end(end: RunEnd | None, step: int, max_steps: int) -> str:
    """Returns where and why a run ended before its last step; empty for any other run."""
    if end is None or end.kind == "done":
        return ""
    return f"the run ended at step {step} of {max_steps}: {end.reason}"


def ended_well(state: RunState) -> str:
    """Returns why a finished run ended; empty for a run that did not finish."""
    if nothing_trained(state.numbers):
        return ""
    if sft := state.config.sft:
        epoch = [0.0, *state.recent("trainer", "epoch")][-1]
        is_done = (
            state.step >= state.config.max_steps
            if sft.epochs is None
            else epoch >= sft.epochs - 1e-6
        )
        is_kept = max(state.newest_checkpoint, state.newest_version) >= state.step > 0
        return f"{state.step} steps done" if is_done and is_kept else ""
    last = max([0, *state.quarantined, state.step])
    return state.end.reason if state.end and state.newest_checkpoint >= last else ""


def run_outcome(state: RunState) -> RunOutcome:
    """Returns how a run without live processes ended."""
    models, max_steps, end = num_models(state), state.config.max_steps, state.end
    at = f" at step {state.step}" if models is None else ""  # a server trains nothing itself
    if reason := ended_well(state):
        is_doubtful = end and end.kind == "doubtful"
        doubt = early_end(end, state.step, max_steps) if is_doubtful else ""
        return RunOutcome("ended", doubt or f"the run ended well: {reason}")
    if why := nothing_trained(state.numbers):
        return RunOutcome("died", why)
    if stop := state.stop:
        where = f"{at} of {max_steps}" if at else ""
        rest = f"{where}; continue it with `{state.resume}`"
        age_s = state.now - stop.time
        return RunOutcome("stopped", f"the run was stopped by {stop.reason}", age_s, rest)
    downs = [state.down(event.process) for event in state.recent_events]
    fatal = [e for e in state.recent_events if e.event == "give_up" or e in downs]
    if fatal:
        last, log = fatal[-1], state.log(fatal[-1].process)
        count, words = len(state.deaths(last.process)), last_words(log)
        often = f", the last of its {count} deaths" if count > 1 else ""
        quote = f", saying: {words}" if words and words not in last.reason else ""
        rest = (
            f"{at} with the {last.process}{often}: {last.reason}{quote}; see "
            f"{state.log_name(last.process)}, then `{state.resume}`"
        )
        return RunOutcome("died", "the run ended", state.now - last.time, rest, log)
    if dead := [process for process in state.processes.values() if not process.may_live]:
        doing = ", ".join(f"the {process.name} was {process.doing}" for process in dead)
        rest = f"{at}: {doing}; continue it with `{state.resume}`"
        if state.jobs:
            rest = (
                f"{at}: {doing}; its jobs, {state.jobs}, continue it if they are still in the "
                f"queue; else `{state.resume}`"
            )
        return RunOutcome("died", "the run was killed", dead[0].silent_s, rest)
    if state.config.kind == "serve":
        done = f"trained {state.step} steps" if models is None else f"made {models} models"
        return RunOutcome(
            "stopped", f"clients of `rl serve` {done}; they can go on after `{state.resume}`"
        )
    # `rl` itself writes a line of any start
    if not (state.numbers.tables.keys() - {"rl"} or state.newest_batch or state.log("trainer")):
        if state.jobs:
            return RunOutcome(
                "stopped", f"no machine has joined the run yet; its jobs are {state.jobs}"
            )
        log = state.log("data") or state.log("model")
        why = "".join(f"; the last line of {log}: {line}" for line in last_lines(log, 1))
        return RunOutcome(
            "died", f"the run did not start{why}; `{state.resume}` tries again", log=log
        )
    is_copy = not state.newest_checkpoint and not state.processes  # without its checkpoints
    if end and is_copy and state.step >= (state.newest_batch or max_steps):
        return RunOutcome(
            "ended", f"the run ended well: {end.reason}; its checkpoints are not here"
        )
    return RunOutcome(
        "stopped", f"the run was stopped{at} of {max_steps}; continue it with `{state.resume}`"
    )
