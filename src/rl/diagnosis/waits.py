"""Finds what a run is waiting for, from its files alone: for `rl doctor RUN`, and for the stall
warning."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rl.config.run import RLConfig
from rl.diagnosis.environments import environment_problems
from rl.diagnosis.machines import does, machine_line
from rl.diagnosis.problems import Problem, log_of, metrics_left_out, parity_missed, problems_of
from rl.diagnosis.rewards import reward_problems
from rl.diagnosis.run_outcome import ended_well, num_models, run_outcome
from rl.diagnosis.state import Machine, Process, RunState, read_state
from rl.run_dir.logs import last_lines, newest_log
from rl.run_dir.origin import read_origin
from rl.run_dir.paths import RunDir
from rl.run_dir.status import LOG_LINES, TRAINER_STEPS, Phase, Staleness
from rl.system.terminal import span

if TYPE_CHECKING:
    from rl.run_dir.numbers import Numbers

DRY_S = 30.0
"""Seconds without a sampled token after which a running server counts as idle or hung."""
SETTLED_S = 5.0
"""Seconds after a change, such as new weights, until rollouts wait for what they usually wait
for."""
DEADLOCK_S = 30.0
"""Seconds after which two processes that wait for each other count as deadlocked."""
TOKENS_HOLD = 0.75
"""Fraction of rollouts waiting for tokens above which sampling is the slow part; below a
quarter, the environments are."""
UNEVEN = 0.4
"""Fraction of its time that the trainer waits above which rollouts are the slower side; below
half of it, the trainer is."""
QUOTE = "  | "
"""The beginning of a line from a process's log."""
ORCHESTRATOR_WORKS = (
    Phase.FILLING_BATCH,
    Phase.WAITING_FOR_VERSION,
    Phase.WAITING_FOR_TEACHER,
    Phase.WAITING_FOR_TRAINER_END,
)
"""Phases in which the pace of the newest steps is still valid."""


@dataclass(frozen=True)
class Diagnosis:
    """What a run is waiting for, and what is wrong with it."""

    state: Literal["live", "ended", "stopped", "died"]
    bottleneck: str
    """One sentence: the process that all others wait for, why, and the remedy; or how the run
    ended."""
    lines: list[str]
    """Further lines to print."""
    problems: list[Problem]
    """Problems with remedies; empty if the run is progressing or ended well."""
    hints: list[Problem]
    """Possible causes of a low reward; empty if it rises, or it is too early to tell."""
    machines: list[tuple[Machine, str]]
    """The machines of a run on a cluster, each with the line about it that follows `lines`;
    empty if none is there, or has been lost."""
    age: str
    """The part of `bottleneck` that says how long ago the run ended; empty if there is none."""

    @property
    def all_lines(self) -> list[str]:
        """`lines`, and those about machines."""
        return [*self.lines, *(line for _, line in self.machines)]

    @property
    def lasting(self) -> str:
        """`bottleneck` without `age`, which changes with time."""
        return self.bottleneck.replace(self.age, "", 1) if self.age else self.bottleneck


def diagnose(
    run_dir: RunDir,
    config: RLConfig,
    heartbeats: Staleness | None = None,
    metrics: "Numbers | None" = None,
) -> Diagnosis:
    """Diagnoses a run, alive or dead. `heartbeats`, `metrics`: see read_state."""
    state = read_state(run_dir, config, heartbeats, metrics)
    hints, environments = reward_problems(state), environment_problems(state)
    broken = [problem for problem in environments if problem.serious]
    doubtful = [
        *(problem for problem in environments if not problem.serious),
        *metrics_left_out(state),
        *parity_missed(state),
    ]
    how: Literal["live", "ended", "stopped", "died"]
    if not state.alive:
        bottleneck, how, log, age = run_outcome(state)
        own = (
            []
            if how == "ended"
            else [Problem(bottleneck, serious=how == "died", files=(log,) if log else ())]
        )
        problems = [*own, *problems_of(state, over=how == "ended")]
    else:
        how, age = "live", ""
        problems, path = problems_of(state, over=False), chain(state)
        bottleneck = problems[0].text if problems else end_of(state, path)
        stalled_s = 0.0 if serves_clients(state) else state.moved_s()
        if stalled_s > config.supervisor.stall_s:
            bottleneck = f"nothing has moved for {span(stalled_s)}: {bottleneck}"
            first = problems[0] if problems else Problem("", files=log_of(state, path[-1]))
            problems = [replace(first, text=bottleneck), *problems[1:]]
        elif not problems and all_work(state) and (pace := pace_text(state)):
            bottleneck = f"{bottleneck}; {pace}"
    lines = [*report(state), *hint_lines(hints), *(problem.text for problem in doubtful)]
    some = any(machine.status for machine in state.machines)
    machines = [(machine, machine_line(machine, state)) for machine in state.machines if some]
    return Diagnosis(
        how, bottleneck, lines, [*problems, *broken], [*hints, *doubtful], machines, age
    )


def hint_lines(hints: list[Problem]) -> list[str]:
    """Formats hints as lines: the symptom, then one line per possible cause."""
    if len(hints) < 2:
        return [hint.text for hint in hints]
    return [f"{hints[0].text} Possible causes:", *(f"  - {hint.text}" for hint in hints[1:])]


# Who waits for whom -------------------------------------------------------------------------------


def chain(state: RunState) -> list[str]:
    """Returns names from the trainer to the process that waits for no other. A name that occurs
    twice closes a cycle."""
    if state.config.serve:
        return [next((name for name in state.roles if not is_ready(state, name)), "tinker")]
    if "data" in state.processes and "trainer" not in state.processes:
        return ["data"]  # fine-tuning prepares its data before the trainer starts
    path = ["trainer"]
    trainer, orchestrator = state.processes.get("trainer"), state.processes.get("orchestrator")
    if (
        trainer
        and trainer.there
        and not trainer.status.waiting_for
        and orchestrator
        and orchestrator.status.waiting_for != "trainer"
    ):
        # Both work: start from the one that holds up the other more.
        uneven = (state.share("time/wait_for_batch") or 0.0) > UNEVEN and bool(state.own_servers)
        return ["orchestrator", "inference"] if uneven else ["trainer"]
    while (
        (process := state.processes.get(path[-1]))
        and process.there
        and (other := process.status.waiting_for)
    ):
        path.append(other)
        if path.count(other) > 1:
            break
    return path


def end_of(state: RunState, path: list[str]) -> str:
    """Returns why the last process of a chain is held up, and where to look."""
    last = path[-1]
    if path.count(last) > 1:
        return circle(state, path)
    process = state.inference if last == "inference" else state.processes.get(last)
    if last == "ranks":
        ranks = [
            process
            for name, process in state.processes.items()
            if re.fullmatch(r"trainer-\d+", name)
        ]
        doing = (
            ", ".join(f"{rank.name} {rank.doing_for}" for rank in ranks)
            or "none of them has a status yet"
        )
        return f"the trainer waits for its other ranks: {doing}; see {log_name(state, 'trainer')}"
    if last == "teacher":
        return (
            "the teacher does not answer: the orchestrator is "
            f"{state.processes['orchestrator'].doing_for}; check the teacher's server"
        )
    if last == "environments":
        limit = (
            f"orchestrator.worker_timeout_s = {state.config.orchestrator.worker_timeout_s:g}; "
            f"see {state.rl_dir.logs}/worker-*.log"
        )
        return (
            "environments have been loading for "
            f"{span(state.processes['orchestrator'].phase_s)}; the limit is {limit}"
        )
    if process is None or not process.there:
        return absent(state, last)
    if last == "inference":
        return inference_end(state, process)
    if serves_clients(state):
        return f"clients are served at {process.status.address}: {requests_text(state)}"
    if process.status.phase is Phase.TRAINING:
        usual = f"; a step takes {pace:.1f} s" if (pace := state.pace_s()) else ""
        trained = process.status.step is not None and process.status.step <= state.step
        again = " again, after resuming from its checkpoint," if trained else ""
        return f"the trainer is working: {process.doing}{again} for {span(process.phase_s)}{usual}"
    return f"the {last} is {process.doing_for}; see {log_name(state, last)}"


def inference_end(state: RunState, process: Process) -> str:
    """Returns why rollouts are not faster: the server is starting, loading, sampling, hung, or
    idle."""
    orchestrator = state.processes.get("orchestrator")
    log = log_name(state, process.name)
    if not process.status.address:
        limit = f"inference.startup_timeout_s = {state.config.inference.startup_timeout_s:g}"
        return f"inference is not ready yet: {process.doing_for} ({limit}); see {log}"
    if orchestrator and orchestrator.status.phase is Phase.LOADING_VERSION:
        places = f"{log}, and whether {state.run_dir.weights_dir} is slow"
        return f"inference is loading new weights: {orchestrator.doing_for}; see {places}"
    if orchestrator and orchestrator.status.phase is Phase.WAITING_FOR_INFERENCE:
        unreached = f"the orchestrator cannot reach it at {process.status.address}"
        return (
            f"inference is {process.doing}, and {unreached}: is there a proxy or firewall "
            "between them?"
        )
    there = [server for server in state.servers if server.there and server.status.address]
    dry_s = min(
        [*(server.dry_s for server in there), orchestrator.phase_s if orchestrator else math.inf]
    )
    if dry_s < DRY_S:
        rates = state.recent("orchestrator", "perf/generated_tokens_per_s")
        speed = f" ({rates[-1]:.0f} tokens per second in the last batch)" if rates else ""
        return f"inference is sampling{speed}: {filling(state)}{waiting_for_tokens(state)}"
    requests = open_requests(state)
    if requests:
        seen = f"no token for {span(dry_s)} although {requests} requests are open"
        return (
            f"inference hangs or is far too slow: {seen}; see {log}, and check for other load on "
            "its cores"
        )
    workers = (
        f"see {state.rl_dir.logs}/worker-*.log, orchestrator.environment.max_scoring and .workers"
    )
    if requests == 0:
        seen = (
            f"inference has sampled nothing for {span(dry_s)} and has no requests, {filling(state)}"
        )
        return f"the environments hold up their rollouts (tools, scoring): {seen}; {workers}"
    return (
        f"no token for {span(dry_s)} although inference is up: environments hold up their "
        "rollouts (tools, scoring), or the engine hangs; "
        f"{workers}, and {log}"
    )


def is_ready(state: RunState, name: str) -> bool:
    process = state.processes.get(name)
    return bool(process and process.there and process.status.address)


def serves_clients(state: RunState) -> bool:
    """Returns whether this is an `rl serve`, or a model of its clients, that only waits for
    calls. None may come for days."""
    return bool(state.config.serve) and all(is_ready(state, name) for name in state.roles)


def requests_text(state: RunState) -> str:
    """Returns how many requests of clients inference has, and since when it has sampled nothing
    for them."""
    requests, dry_s = (
        open_requests(state) or 0,
        min((server.dry_s for server in state.servers), default=0.0),
    )
    dry = f", and has sampled nothing for {span(dry_s)}" if requests and dry_s >= DRY_S else ""
    return f"inference has {requests or 'no'} open request{'' if requests == 1 else 's'}{dry}"


def absent(state: RunState, name: str) -> str:
    """Returns why a process that others wait for is absent."""
    if name == "inference" and state.config.orchestrator.inference_urls:
        return (
            "inference runs elsewhere: check the servers at "
            f"{', '.join(state.config.orchestrator.inference_urls)}"
        )
    if search := model_log(state):
        last = next(iter(last_lines(search, 1)), "nothing logged yet")
        return (
            f"model {state.config.model.name} is being found or downloaded: {last} (log: {search})"
        )
    log, orchestrator = log_name(state, name), state.processes.get("orchestrator")
    if (
        name == "trainer"
        and (launcher := state.processes.get("trainer-launcher"))
        and launcher.there
        and launcher.status.detail
    ):
        return (
            f"the trainer waits for {launcher.status.detail}: do they run `rl node`, and are "
            f"they in their engine's queue? See {log}"
        )
    if (
        name == "trainer"
        and state.step >= state.config.max_steps
        and orchestrator
        and orchestrator.there
    ):
        return (
            "the trainer has finished its last step and exited; the orchestrator is "
            f"{orchestrator.doing_for}"
        )
    if away := machines_away(state, name):
        return away
    if death := state.down(name):
        return (
            f"the {name} died {span(state.now - death.time)} ago ({death.reason}) and is about "
            f"to be restarted; see {log}"
        )
    if state.is_led and (reason := ended_well(state)):
        return (
            f"the run is ending ({reason}): `rl` is stopping the remaining processes and writing "
            "its report"
        )
    if state.is_led:
        return (
            f"the {name} has no status yet: it is starting, and its imports take some seconds; "
            f"see {log}"
        )
    if any(machine.there for machine in state.machines):
        return (
            f"the {name} is not running, because no machine leads the run yet: see "
            f"{state.rl_dir.logs}/rl-*.log"
        )
    return (
        f"the {name} is not running, and no `rl` is running to start it; start it, or all "
        f"processes with `{state.resume}`"
    )


def machines_away(state: RunState, name: str) -> str:
    """Returns that none of the machines on which a process could run is there; empty if one is,
    or without a cluster."""
    kind = "inference" if name == "inference" else "trainer"
    needed = [machine for machine in state.machines if kind in machine.roles]
    if not needed or any(machine.there for machine in needed):
        return ""
    many = ", ".join(
        f"{machine.index} ({'lost' if machine.status else 'has not joined'})" for machine in needed
    )
    remedy = f"are its jobs queued? {state.jobs}" if state.jobs else "start `rl node` there"
    return f"no machine that {does(Machine(0, [kind]))} is there: {many}; {remedy}"


def model_log(state: RunState) -> Path | None:
    """Returns the log of the search for the model, if nothing has been started after it."""
    found = newest_log(state.rl_dir.logs, "model")
    if found is None or state.processes:
        return None
    others = [log for name in state.roles if (log := newest_log(state.rl_dir.logs, name))]
    return found if all(log.stat().st_mtime < found.stat().st_mtime for log in others) else None


def circle(state: RunState, path: list[str]) -> str:
    """Describes processes that wait for each other. For a moment, this only means that one hands
    work over to the other."""
    waiting = [state.processes[name] for name in path[path.index(path[-1]) : -1]]
    texts = ", ".join(f"the {process.name} is {process.doing_for}" for process in waiting)
    if min(process.phase_s for process in waiting) < DEADLOCK_S:
        return f"work is being handed over: {texts}"
    last = waiting[-1]
    return (
        f"deadlock: {texts}; after `kill {last.status.pid}`, `rl` restarts the {last.name}, "
        "which loses nothing"
    )


# Parts of sentences -------------------------------------------------------------------------------


def log_name(state: RunState, name: str) -> str:
    return str(state.log(name) or state.rl_dir.logs)


def filling(state: RunState) -> str:
    """Returns how full the current batch is, or else what the orchestrator is doing."""
    process = state.processes.get("orchestrator")
    if not process:
        return "the orchestrator has no status yet"
    status = process.status
    if (
        status.phase is not Phase.FILLING_BATCH
        or status.batch_done is None
        or status.batch_size is None
    ):
        return process.doing
    return f"batch {status.batch} has {status.batch_done} of {status.batch_size} rollouts"


def open_requests(state: RunState) -> int | None:
    """Returns the number of requests at all servers; None if none of them tells."""
    counts = [
        server.status.requests
        for server in state.servers
        if server.there and server.status.requests is not None
    ]
    return sum(counts) if counts else None


def waiting_for_tokens(state: RunState) -> str:
    """Returns how many rollouts wait for tokens, and whether sampling or the environments' own
    work holds them up."""
    orchestrator = state.processes.get("orchestrator")
    if (
        not orchestrator
        or orchestrator.status.phase is not Phase.FILLING_BATCH
        or orchestrator.phase_s < SETTLED_S
    ):
        return ""
    requests, playing = open_requests(state), orchestrator.status.playing
    if requests is None or not playing:
        return ""
    text = f", {min(requests, playing)} of {playing} rollouts in flight wait for tokens"
    if requests > TOKENS_HOLD * playing:
        return (
            f"{text}: sampling is the slow part, so use a smaller max_tokens, or more cores or "
            "GPUs for inference"
        )
    if requests < playing / 4:
        return (
            f"{text}: the environments (tools, scoring) are the slow part; see "
            "orchestrator.environment.workers"
        )
    return text


def all_work(state: RunState) -> bool:
    """Returns whether nothing is starting or loading, so that the newest steps' shares of time
    are still valid."""
    phases = {name: process.status.phase for name, process in state.processes.items()}
    inference = state.inference
    served = not state.own_servers or bool(inference and inference.status.address)
    return (
        served
        and phases.get("trainer") in TRAINER_STEPS
        and phases.get("orchestrator") in ORCHESTRATOR_WORKS
    )


def pace_text(state: RunState) -> str:
    """Returns which side is slower, with shares of time; empty if unknown."""
    waits, idle = (
        state.share("time/wait_for_batch"),
        state.recent("orchestrator", "perf/inference_idle_fraction"),
    )
    if waits is None or state.config.sft:
        return ""
    rest = f", and no rollout was in flight for {sum(idle) / len(idle):.0%}" if idle else ""
    shares = f"in the newest steps the trainer waited {waits:.0%} of the time{rest}"
    if waits > UNEVEN:
        return f"{shares}: rollouts are the slower side"
    return f"{shares}: the trainer is the slower side" if waits < UNEVEN / 2 else shares


def report(state: RunState) -> list[str]:
    """Returns lines about progress, each process, and events."""
    lines = [progress_text(state)]
    if origin := read_origin(state.run_dir):
        lines.append(f"{origin}" + "".join(f"; {change}" for change in origin.changes))
    for name in dict.fromkeys([*state.roles, *state.processes]):
        process = state.processes.get(name)
        if name == "trainer-launcher" and "trainer" in state.processes:
            continue  # it only waits for the ranks, of which there are lines
        if process or state.alive:
            lines.append(f"{name}: {process_text(process) if process else 'no status'}")
        if (process and (process.silent or not process.there)) or (
            not process and not state.alive and not ended_well(state)
        ):
            lines += [f"{QUOTE}{line}" for line in last_lines(state.log(name), LOG_LINES)]
        if deaths := state.deaths(name):
            often = "once," if len(deaths) == 1 else f"{len(deaths)} times, the last time"
            lines.append(
                f"{name}: died {often} {span(state.now - deaths[-1].time)} ago: {deaths[-1].reason}"
            )
    path = chain(state) if state.alive else []
    if len(path) > 1:
        texts = [
            f"{name} {state.processes[name].doing}" if name in state.processes else name
            for name in path
        ]
        lines.append("who waits: " + " -> ".join(texts))
    for event in state.events:
        if event.event == "repair":
            lines += [
                f"repaired {span(state.now - event.time)} ago: {line}" for line in event.lines
            ]
    if state.quarantined:
        names = ", ".join(map(str, state.quarantined))
        lines.append(
            f"quarantined batches, whose steps were skipped: {names} (batches/*.quarantined "
            "says why)"
        )
    return lines


def progress_text(state: RunState) -> str:
    final, sft, models = state.config.max_steps, state.config.sft, num_models(state)
    if models is not None:
        return f"models: {models}"
    if state.config.serve:
        return f"step {state.step}, version {state.newest_version}"
    parts = [f"step {state.step}" if sft and sft.epochs else f"step {state.step} of {final}"]
    if not sft:
        parts += [f"batch {state.newest_batch}", f"version {state.newest_version}"]
    parts.append(f"checkpoint {state.newest_checkpoint or 'none'}")
    if state.newest_eval is not None:
        parts.append(f"eval of version {state.newest_eval}")
    if pace := state.pace_s():
        parts.append(f"{pace:.1f} s per step")
        if state.alive and state.step < final:
            parts.append(f"about {span(pace * (final - state.step))} left")
    return ", ".join(parts)


def process_text(process: Process) -> str:
    if not process.there:
        return f"dead; it was {process.doing} {span(process.silent_s)} ago"
    beat = (
        f"no heartbeat for {span(process.silent_s)}"
        if process.silent
        else f"heartbeat {process.silent_s:.0f} s ago"
    )
    counted = "" if process.status.progress is None else f", counted {process.status.progress}"
    where = f"pid {process.status.pid}" + (
        f" on {process.status.host}" if process.alive is None else ""
    )
    return f"{process.doing_for} ({beat}{counted}, {where})"
