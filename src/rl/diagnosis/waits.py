"""What a run waits for, from its files alone: for `rl doctor RUN`, and for the warning of a stall."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rl.config.run import RLConfig
from rl.diagnosis.ending import ended_well, how_it_ended
from rl.diagnosis.environments import environment_problems
from rl.diagnosis.problems import Problem, log_of, problems_of
from rl.diagnosis.rewards import reward_problems
from rl.diagnosis.state import Heartbeats, Process, RunState, read_state, span
from rl.run_dir.logs import last_lines, newest_log
from rl.run_dir.metrics import Numbers
from rl.run_dir.origin import read_origin
from rl.run_dir.paths import RunDir
from rl.run_dir.status import LOG_LINES, TRAINER_STEPS, Phase

DRY_S = 30.0
"""A server that is up and has sampled no token for so long has either nothing to do or hangs."""
SETTLED_S = 5.0
"""After a change, such as new weights, rollouts need a moment until they wait for what they usually wait for."""
DEADLOCK_S = 30.0
"""Two that wait for each other for so long will not stop doing so."""
TOKENS_HOLD = 0.75
"""Sampling takes the rollouts' time if more than this part of them wait for tokens; if fewer than a quarter do, environments do."""
UNEVEN = 0.4
"""Rollouts are the slower side if the trainer waits for more than this part of its time; if for less than half of that, the trainer is."""
ORCHESTRATOR_WORKS = (Phase.FILLING_BATCH, Phase.WAITING_FOR_VERSION, Phase.WAITING_FOR_TEACHER, Phase.WAITING_FOR_TRAINER_END)
"""Phases in which the pace of the newest steps still holds."""


@dataclass(frozen=True)
class Diagnosis:
    """What a run waits for and what is wrong with it."""

    state: Literal["live", "ended", "stopped", "died"]
    bottleneck: str
    """One sentence: the process that everything waits for, why, and what to do; or how the run ended."""
    lines: list[str]
    """The rest, ready to be printed."""
    problems: list[Problem]
    """Each with its remedy. Empty: the run goes on, or ended well."""
    hints: list[Problem]
    """What may hold the reward down; empty where it rises, or it is too early to tell."""
    age: str
    """The words of the sentence that say how long ago the run ended; empty where it says no such thing."""


def diagnose(run_dir: RunDir, config: RLConfig, heartbeats: Heartbeats | None = None, metrics: Numbers | None = None) -> Diagnosis:
    """The diagnosis of a run, alive or dead. heartbeats, metrics: see read_state."""
    state = read_state(run_dir, config, heartbeats, metrics)
    hints, environments = reward_problems(state), environment_problems(state)
    broken, doubtful = ([problem for problem in environments if problem.serious is serious] for serious in (True, False))
    how: Literal["live", "ended", "stopped", "died"]
    if not state.alive:
        bottleneck, how, log, age = how_it_ended(state)
        own = [] if how == "ended" else [Problem(bottleneck, serious=how == "died", files=(log,) if log else ())]
        problems = [*own, *problems_of(state, over=how == "ended")]
    else:
        how, age = "live", ""
        problems, path = problems_of(state, over=False), chain(state)
        bottleneck = problems[0].text if problems else end_of(state, path)
        stalled_s = state.moved_s()
        if stalled_s > config.supervisor.stall_s:
            bottleneck = f"nothing has moved for {span(stalled_s)}: {bottleneck}"
            first = problems[0] if problems else Problem("", files=log_of(state, path[-1]))
            problems = [replace(first, text=bottleneck), *problems[1:]]
        elif not problems and all_work(state) and (pace := pace_text(state)):
            bottleneck = f"{bottleneck}; {pace}"
    lines = [*report(state), *hint_lines(hints), *(problem.text for problem in doubtful)]
    return Diagnosis(how, bottleneck, lines, [*problems, *broken], [*hints, *doubtful], age)


def hint_lines(hints: list[Problem]) -> list[str]:
    """The hints as lines: what is the matter, then a line for each that may be the cause."""
    if len(hints) < 2:
        return [hint.text for hint in hints]
    return [f"{hints[0].text} To see why it does not:", *(f"  - {hint.text}" for hint in hints[1:])]


# Who waits for whom -----------------------------------------------------------------------------------------------------


def chain(state: RunState) -> list[str]:
    """Names from the trainer, which everything is for, to the process that waits for none. A name that comes twice closes a circle."""
    if "data" in state.processes and "trainer" not in state.processes:
        return ["data"]  # of supervised fine-tuning: made before the trainer starts
    path = ["trainer"]
    trainer, orchestrator = state.processes.get("trainer"), state.processes.get("orchestrator")
    if trainer and trainer.there and not trainer.status.waiting_for and orchestrator and orchestrator.status.waiting_for != "trainer":
        # Both work: from the one that the other waits for more.
        uneven = (state.share("time/wait_for_batch") or 0.0) > UNEVEN and "inference" in state.roles
        return ["orchestrator", "inference"] if uneven else ["trainer"]
    while (process := state.processes.get(path[-1])) and process.there and (other := process.status.waiting_for):
        path.append(other)
        if path.count(other) > 1:
            break
    return path


def end_of(state: RunState, path: list[str]) -> str:
    """Why the last process of a chain is held up, and what to look at."""
    last = path[-1]
    if path.count(last) > 1:
        return circle(state, path)
    process = state.inference if last == "inference" else state.processes.get(last)
    if last == "ranks":
        ranks = [process for name, process in state.processes.items() if name.startswith("trainer-")]
        doing = ", ".join(f"{rank.name} {rank.doing_for}" for rank in ranks) or "none of them has a status yet"
        return f"the trainer waits for its other ranks: {doing}; see {log_name(state, 'trainer')}"
    if last == "teacher":
        return f"the teacher does not answer: the orchestrator is {state.processes['orchestrator'].doing_for}; look at that server"
    if last == "environments":
        limit = f"orchestrator.worker_timeout_s = {state.config.orchestrator.worker_timeout_s:g} ends that"
        return f"the environments load for {span(state.processes['orchestrator'].phase_s)} ({limit}); see {state.run_dir.logs}/worker-*.log"
    if process is None or not process.there:
        return absent(state, last)
    if last == "inference":
        return inference_end(state, process)
    if process.status.phase is Phase.TRAINING:
        usual = f", a step takes {pace:.1f} s" if (pace := state.pace_s()) else ""
        trained = process.status.step is not None and process.status.step <= state.step
        again = " once more, on its way from its checkpoint," if trained else ""
        return f"the trainer works: {process.doing}{again} for {span(process.phase_s)}{usual}"
    return f"the {last} is {process.doing_for}; see {log_name(state, last)}"


def inference_end(state: RunState, process: Process) -> str:
    """Why rollouts do not come faster: the server starts, loads, samples, hangs, or has nothing to do."""
    orchestrator = state.processes.get("orchestrator")
    if not process.status.address:
        limit = f"inference.startup_timeout_s = {state.config.inference.startup_timeout_s:g}"
        return f"inference is not up yet: {process.doing_for} ({limit}); see {log_name(state, 'inference')}"
    if orchestrator and orchestrator.status.phase is Phase.LOADING_VERSION:
        places = f"{log_name(state, 'inference')}, and whether {state.run_dir.weights_dir} is slow"
        return f"inference takes new weights: {orchestrator.doing_for}; see {places}"
    if orchestrator and orchestrator.status.phase is Phase.WAITING_FOR_INFERENCE:
        unreached = f"the orchestrator does not reach it at {process.status.address}"
        return f"inference is {process.doing}, and {unreached}: is there a proxy or firewall between them?"
    dry_s = min(process.dry_s, orchestrator.phase_s if orchestrator else math.inf)
    if dry_s < DRY_S:
        rates = state.recent("orchestrator", "perf/generated_tokens_per_s")
        speed = f" ({rates[-1]:.0f} tokens a second in the last batch)" if rates else ""
        return f"inference samples{speed}: {filling(state)}{waiting_for_tokens(state, process)}"
    requests = process.status.requests
    if requests:
        seen = f"no token for {span(dry_s)} although {requests} requests are open"
        return f"inference hangs or is far too slow: {seen}; see {log_name(state, 'inference')} and whether other work takes its cores"
    workers = f"see {state.run_dir.logs}/worker-*.log, orchestrator.environment.max_scoring and .workers"
    if requests == 0:
        seen = f"inference sampled nothing for {span(dry_s)} and has no request, {filling(state)}"
        return f"the environments hold their rollouts (tools, scoring): {seen}; {workers}"
    return (
        f"no token for {span(dry_s)} though inference is up: environments hold their rollouts (tools, scoring), or the engine hangs; "
        f"{workers}, and {log_name(state, 'inference')}"
    )


def absent(state: RunState, name: str) -> str:
    """Why a process that others wait for is not there."""
    if name == "inference" and state.config.orchestrator.inference_urls:
        return f"inference runs elsewhere: see the servers at {', '.join(state.config.orchestrator.inference_urls)}"
    if search := model_log(state):
        last = next(iter(last_lines(search, 1)), "nothing logged yet")
        return f"model {state.config.model.name} is being found or downloaded: {last} (log: {search})"
    log, orchestrator = log_name(state, name), state.processes.get("orchestrator")
    if name == "trainer" and state.step >= state.config.max_steps and orchestrator and orchestrator.there:
        return f"the trainer has trained its last step and ended; the orchestrator is {orchestrator.doing_for}"
    if death := state.down(name):
        return f"the {name} died {span(state.now - death.time)} ago ({death.reason}) and is about to be started again; see {log}"
    if state.launcher and state.launcher.alive and (reason := ended_well(state)):
        return f"the run comes to its end ({reason}): `rl` ends what is left of it, and writes its report"
    if state.launcher and state.launcher.alive:
        return f"the {name} has no status yet: it starts, which takes some seconds of imports; see {log}"
    return f"the {name} is not running, and nothing starts it: no `rl` lives; start it, or all with `{state.resume}`"


def model_log(state: RunState) -> Path | None:
    """The log of the search for the model, while nothing was started after it."""
    found = newest_log(state.run_dir.logs, "model")
    if found is None or state.processes:
        return None
    others = [log for name in state.roles if (log := newest_log(state.run_dir.logs, name))]
    return found if all(log.stat().st_mtime < found.stat().st_mtime for log in others) else None


def circle(state: RunState, path: list[str]) -> str:
    """Two processes that wait for each other; for a moment that only means that one hands work over to the other."""
    waiting = [state.processes[name] for name in path[path.index(path[-1]) : -1]]
    texts = ", ".join(f"the {process.name} is {process.doing_for}" for process in waiting)
    if min(process.phase_s for process in waiting) < DEADLOCK_S:
        return f"work is being handed over: {texts}"
    last = waiting[-1]
    return f"they wait for each other: {texts}; `kill {last.status.pid}` has `rl` start the {last.name} again, which loses nothing"


# Parts of sentences ---------------------------------------------------------------------------------------------------


def log_name(state: RunState, name: str) -> str:
    return str(newest_log(state.run_dir.logs, name) or state.run_dir.logs)


def filling(state: RunState) -> str:
    """How full the batch is that is being filled, else what the orchestrator does."""
    process = state.processes.get("orchestrator")
    if not process:
        return "the orchestrator has no status yet"
    status = process.status
    if status.phase is not Phase.FILLING_BATCH or status.batch_done is None or status.batch_size is None:
        return process.doing
    return f"batch {status.batch} has {status.batch_done} of {status.batch_size} rollouts"


def waiting_for_tokens(state: RunState, inference: Process) -> str:
    """How many rollouts wait for tokens, and what that means: sampling takes their time, or the environments' own work."""
    orchestrator = state.processes.get("orchestrator")
    if not orchestrator or orchestrator.status.phase is not Phase.FILLING_BATCH or orchestrator.phase_s < SETTLED_S:
        return ""
    requests, playing = inference.status.requests, orchestrator.status.playing
    if requests is None or not playing:
        return ""
    text = f", of {playing} that play {min(requests, playing)} wait for tokens"
    if requests > TOKENS_HOLD * playing:
        return f"{text}: sampling holds them up, so a smaller max_tokens or more cores or GPUs for inference help"
    if requests < playing / 4:
        return f"{text}: the environments (tools, scoring) hold them up; see orchestrator.environment.workers"
    return text


def all_work(state: RunState) -> bool:
    """Whether nothing is starting or loading, so that the shares of time of the newest steps still hold."""
    phases = {name: process.status.phase for name, process in state.processes.items()}
    inference = state.inference
    served = "inference" not in state.roles or bool(inference and inference.status.address)
    return served and phases.get("trainer") in TRAINER_STEPS and phases.get("orchestrator") in ORCHESTRATOR_WORKS


def pace_text(state: RunState) -> str:
    """Which side is slower, in shares of time."""
    waits, idle = state.share("time/wait_for_batch"), state.recent("orchestrator", "perf/inference_idle_fraction")
    if waits is None or state.config.sft:
        return ""
    rest = f", no rollout was playing in {sum(idle) / len(idle):.0%}" if idle else ""
    shares = f"in the newest steps the trainer waited {waits:.0%} of the time{rest}"
    if waits > UNEVEN:
        return f"{shares}: rollouts are the slower side"
    return f"{shares}: the trainer is the slower side" if waits < UNEVEN / 2 else shares


def report(state: RunState) -> list[str]:
    """How far the run is, what each process does, what happened."""
    lines = [progress_text(state)]
    if origin := read_origin(state.run_dir):
        lines.append(f"{origin}" + "".join(f"; {change}" for change in origin.changes))
    for name in dict.fromkeys([*state.roles, *state.processes]):
        process = state.processes.get(name)
        if process or state.alive:
            lines.append(f"{name}: {process_text(process) if process else 'no status'}")
        if (process and (process.silent or not process.there)) or (not process and not state.alive and not ended_well(state)):
            lines += [f"  | {line}" for line in last_lines(newest_log(state.run_dir.logs, name), LOG_LINES)]
        if deaths := state.deaths(name):
            often = "once," if len(deaths) == 1 else f"{len(deaths)} times, the last time"
            lines.append(f"{name}: died {often} {span(state.now - deaths[-1].time)} ago: {deaths[-1].reason}")
    path = chain(state) if state.alive else []
    if len(path) > 1:
        texts = [f"{name} {state.processes[name].doing}" if name in state.processes else name for name in path]
        lines.append("who waits: " + " -> ".join(texts))
    for event in state.events:
        if event.event == "repair":
            lines += [f"repaired {span(state.now - event.time)} ago: {line}" for line in event.lines]
    if state.quarantined:
        names = ", ".join(map(str, state.quarantined))
        lines.append(f"quarantined batches, whose steps were skipped: {names} (batches/*.quarantined says why)")
    return lines


def progress_text(state: RunState) -> str:
    final, sft = state.config.max_steps, state.config.sft
    parts = [f"step {state.step}" if sft and sft.epochs else f"step {state.step} of {final}"]
    if not sft:
        parts += [f"batch {state.newest_batch}", f"version {state.newest_version}"]
    parts.append(f"checkpoint {state.newest_checkpoint or 'none'}")
    if state.newest_eval is not None:
        parts.append(f"eval of version {state.newest_eval}")
    if pace := state.pace_s():
        parts.append(f"{pace:.1f} s a step")
        if state.alive and state.step < final:
            parts.append(f"about {span(pace * (final - state.step))} to go")
    return ", ".join(parts)


def process_text(process: Process) -> str:
    if not process.there:
        return f"dead; it was {process.doing} {span(process.silent_s)} ago"
    beat = f"no heartbeat for {span(process.silent_s)}" if process.silent else f"heartbeat {process.silent_s:.0f} s ago"
    counted = "" if process.status.progress is None else f", counted {process.status.progress}"
    where = f"pid {process.status.pid}" + (f" on {process.status.host}" if process.alive is None else "")
    return f"{process.doing_for} ({beat}{counted}, {where})"
