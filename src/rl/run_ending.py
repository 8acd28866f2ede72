"""How a run that no longer lives came to its end."""

import re

from rl.run_state import RunState, log_end, newest_log, span

SAID = re.compile(r"\bended: (.+)")
"""The orchestrator's last word when all is done."""


def ended_well(state: RunState) -> str:
    """In words, why the run was over; empty when it was not."""
    if state.config.sft:
        passes = state.config.sft.epochs
        newest = state.lines.get((state.step, "trainer"), {})
        done = state.step >= state.config.max_steps if passes is None else float(newest.get("epoch") or 0.0) >= passes - 1e-6
        return f"{state.step} steps done" if done and state.newest_checkpoint >= state.step > 0 else ""
    said = [match[1] for line in log_end(newest_log(state.run_dir.logs, "orchestrator"), 5) if (match := SAID.search(line))]
    last = max([0, *state.quarantined, state.step])
    return said[-1] if said and state.newest_checkpoint >= last else ""


def how_it_ended(state: RunState) -> tuple[str, bool]:
    """One sentence, and whether it was a good end."""
    if words := ended_well(state):
        return f"the run ended well: {words}", True
    fatal = [event for event in state.recent_events if event.get("event") in ("give_up", "death")]
    if fatal:
        last = fatal[-1]
        name = last.get("process") or "rl"
        many = len(state.deaths(name))
        often = f", the last of its {many} deaths" if many > 1 else ""
        reason = last.get("reason") or f"exit code {last.get('exit')}"
        log = newest_log(state.run_dir.logs, name) or state.run_dir.logs
        ago = span(state.now - last["time"])
        said = "".join(f", saying: {line}" for line in log_end(newest_log(state.run_dir.logs, name), 1))
        where = f"the run ended {ago} ago at step {state.step} with the {name}{often}"
        return f"{where}: {reason}{said}; see {log}, then `{state.resume}`", False
    if left := [process for process in state.processes.values() if process.alive is False]:
        first = left[0]
        doing = ", ".join(f"the {process.name} was {process.doing}" for process in left)
        return f"the run was killed {span(first.silent_s)} ago at step {state.step}: {doing}; continue it with `{state.resume}`", False
    if not state.lines and not state.newest_batch and newest_log(state.run_dir.logs, "trainer") is None:
        log = newest_log(state.run_dir.logs, "model")
        said = log_end(log, 1)
        why = f"; the model was the last it looked for: {said[0]} (log: {log})" if said else ""
        return f"the run did not come to its start{why}; `{state.resume}` tries again", False
    return f"the run was stopped at step {state.step} of {state.config.max_steps}; continue it with `{state.resume}`", False
