"""Finds what a run is waiting for, from its files alone: for `rl doctor RUN`, and for the stall
warning."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rl.config.run import RLConfig
from rl.diagnosis.environments import environment_problems
from rl.diagnosis.problems import MismatchRow, Problem, doubts, problems_of
from rl.diagnosis.rewards import other_signs, reward_problems
from rl.diagnosis.run_outcome import RunOutcome, ended_well, num_models, run_outcome
from rl.diagnosis.state import RANK, VERBS, Process, RunMachine, RunState
from rl.run_dir.logs import last_lines
from rl.run_dir.paths import RunDir, read_origin
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
ORCHESTRATOR_WORKS = (
    Phase.FILLING_BATCH,
    Phase.WAITING_FOR_VERSION,
    Phase.WAITING_FOR_TEACHER,
    Phase.WAITING_FOR_TRAINER_END,
)
"""Phases in which the pace of the newest steps is still valid."""


@dataclass(frozen=True)
class Line:
    """A line of a diagnosis."""

    text: str
    quoted: list[str] = field(default_factory=list)
    """The end of the log that the line is about."""


@dataclass(frozen=True)
class Diagnosis:
    """What a run is waiting for, and what is wrong with it."""

    outcome: RunOutcome | None
    """How the run ended; None while it is live."""
    bottleneck: str
    """One sentence: the process that all others wait for, why, and the remedy; or how the run
    ended."""
    lines: list[Line]
    """Progress, the processes, events, hints and doubts."""
    problems: list[Problem]
    """Problems with remedies; empty if the run is progressing or ended well."""
    hints: list[Problem]
    """Possible causes of a low reward; empty if it rises, or it is too early to tell."""
    machines: list[tuple[RunMachine, str]]
    """The machines of a run on a cluster, each with the line about it; empty if none is there, or
    has been lost."""
    mismatch: list[MismatchRow]

    @property
    def state(self) -> Literal["live", "ended", "stopped", "died"]:
        return self.outcome.how if self.outcome else "live"

    @property
    def all_lines(self) -> list[str]:
        """`lines` with what they quote, those about machines, and mismatch KL by place."""
        lines = [
            text for line in self.lines for text in (line.text, *(f"  | {q}" for q in line.quoted))
        ]
        return [*lines, *(text for _, text in self.machines), *map(str, self.mismatch)]


def diagnose(
    run_dir: RunDir,
    config: RLConfig,
    heartbeats: Staleness | None = None,
    metrics: "Numbers | None" = None,
    reads_tokens: bool = False,
) -> Diagnosis:
    """Diagnoses a run, alive or dead. `heartbeats`, `metrics`: see RunState. `reads_tokens`: also
    by its token logs, which may take a second."""
    from rl.diagnosis.mismatch import mismatch_by_place  # numpy

    state = RunState(run_dir, config, heartbeats, metrics)
    hints, environments = reward_problems(state), [*environment_problems(state)]
    broken = [problem for problem in environments if problem.serious]
    doubtful = [*(problem for problem in environments if not problem.serious), *doubts(state)]
    mismatch, rises = mismatch_by_place(state) if reads_tokens else ([], [])
    doubtful += [*other_signs(state, hints), *rises]
    outcome = None if state.alive else run_outcome(state)
    problems = problems_of(state, over=bool(outcome and outcome.how == "ended"))
    bottleneck = str(outcome) if outcome else waits_for(state, problems)
    if outcome and outcome.how != "ended":
        files = (outcome.log,) if outcome.log else ()
        problems.insert(0, Problem(bottleneck, serious=outcome.how == "died", files=files))
    lines = [*report(state), *map(Line, hint_lines(hints)), *(Line(p.text) for p in doubtful)]
    joined = any(machine.status for machine in state.machines)
    machines = [(m, machine_line(m, state)) for m in state.machines if joined]
    problems += broken
    return Diagnosis(outcome, bottleneck, lines, problems, [*hints, *doubtful], machines, mismatch)


def waits_for(state: RunState, problems: list[Problem]) -> str:
    """Returns what a live run waits for: its first problem, else the end of the chain. If nothing
    has moved for long, that becomes the first of the `problems`."""
    path = chain(state)
    text = problems[0].text if problems else end_of(state, path)
    stalled_s = 0.0 if serves_clients(state) else state.moved_s()
    if stalled_s > state.config.supervisor.stall_s:
        text = f"nothing has moved for {span(stalled_s)}: {text}"
        files = problems[0].files if problems else state.logs(path[-1])
        problems[:1] = [Problem(text, files=files)]
    elif not problems and all_work(state) and (pace := pace_text(state)):
        return f"{text}; {pace}"
    return text


def hint_lines(hints: list[Problem]) -> list[str]:
    """Formats hints as lines: the symptom, then one line per possible cause."""
    if len(hints) < 2:
        return [hint.text for hint in hints]
    return [f"{hints[0].text} Possible causes:", *(f"  - {hint.text}" for hint in hints[1:])]


# Who waits for whom -------------------------------------------------------------------------------


def chain(state: RunState) -> list[str]:
    """Returns names from the trainer to the process that waits for no other. A name that occurs
    twice closes a cycle."""
    processes = state.processes
    if state.config.kind == "serve":
        return [next((name for name in state.roles if not is_ready(state, name)), "tinker")]
    if "data" in processes and "trainer" not in processes:
        return ["data"]  # fine-tuning prepares its data before the trainer starts
    trainer, orchestrator = processes.get("trainer"), processes.get("orchestrator")
    works = trainer and trainer.may_live and not trainer.status.waiting_for
    if works and orchestrator and orchestrator.status.waiting_for != "trainer":
        # Both work: start from the one that holds up the other more.
        uneven = (state.share("time/wait_for_batch") or 0.0) > UNEVEN and state.own_servers
        return ["orchestrator", "inference"] if uneven else ["trainer"]
    path = ["trainer"]
    while path.count(path[-1]) == 1:
        process = processes.get(path[-1])
        if not process or not process.may_live or not process.status.waiting_for:
            break
        path.append(process.status.waiting_for)
    return path


def end_of(state: RunState, path: list[str]) -> str:
    """Returns why the last process of a chain is held up, and where to look."""
    last, servers = path[-1], state.servers
    if path.count(last) > 1:
        return circle([state.processes[name] for name in path[path.index(last) : -1]])
    if last == "ranks":
        ranks = [
            p for name, p in state.processes.items() if name != "trainer" and RANK.fullmatch(name)
        ]
        doing = ", ".join(f"{rank.name} {rank.doing_for}" for rank in ranks)
        return (
            f"the trainer waits for its other ranks: {doing or 'none of them has a status yet'}; "
            f"see {state.log_name('trainer')}"
        )
    if last == "teacher":
        return (
            "the teacher does not answer: the orchestrator is "
            f"{state.processes['orchestrator'].doing_for}; check the teacher's server"
        )
    if last == "environments":
        return (
            "environments have been loading for "
            f"{span(state.processes['orchestrator'].phase_s)}; the limit is "
            f"orchestrator.worker_timeout_s = {state.config.orchestrator.worker_timeout_s:g}; "
            f"see {state.rl_dir.logs}/worker-*.log"
        )
    process = next(iter(servers), None) if last == "inference" else state.processes.get(last)
    if process is None or not process.may_live:
        return absent(state, last)
    if last == "inference":
        return inference_end(state, process)
    if serves_clients(state):
        requests, dry_s = (
            open_requests(state) or 0,
            min([server.dry_s for server in servers] or [0]),
        )
        dry = f", and has sampled nothing for {span(dry_s)}" if requests and dry_s >= DRY_S else ""
        return (
            f"clients are served at {process.status.address}: inference has {requests or 'no'} "
            f"open request{'' if requests == 1 else 's'}{dry}"
        )
    if process.status.phase is Phase.TRAINING:
        usual = f"; a step takes {pace:.1f} s" if (pace := state.pace_s()) else ""
        is_again = process.status.step is not None and process.status.step <= state.step
        again = " again, after resuming from its checkpoint," if is_again else ""
        return f"the trainer is working: {process.doing}{again} for {span(process.phase_s)}{usual}"
    return f"the {last} is {process.doing_for}; see {state.log_name(last)}"


def inference_end(state: RunState, process: Process) -> str:
    """Returns why rollouts are not faster: the server is starting, loading, sampling, hung, or
    idle."""
    log, orchestrator = state.log_name(process.name), state.processes.get("orchestrator")
    phase = orchestrator.status.phase if orchestrator else None
    if not process.status.address:
        limit = f"inference.startup_timeout_s = {state.config.inference.startup_timeout_s:g}"
        return f"inference is not ready yet: {process.doing_for} ({limit}); see {log}"
    if orchestrator and phase is Phase.LOADING_VERSION:
        return (
            f"inference is loading new weights: {orchestrator.doing_for}; see {log}, and whether "
            f"{state.run_dir.weights_dir} is slow"
        )
    if phase is Phase.WAITING_FOR_INFERENCE:
        return (
            f"inference is {process.doing}, and the orchestrator cannot reach it at "
            f"{process.status.address}: is there a proxy or firewall between them?"
        )
    times = [server.dry_s for server in state.servers if server.is_ready]
    dry_s = min([*times, orchestrator.phase_s if orchestrator else math.inf])
    if dry_s < DRY_S:
        rates = state.recent("orchestrator", "perf/generated_tokens_per_s")
        speed = f" ({rates[-1]:.0f} tokens per second in the last batch)" if rates else ""
        return f"inference is sampling{speed}: {filling(state)}{waiting_for_tokens(state)}"
    requests = open_requests(state)
    if requests:
        return (
            f"inference hangs or is far too slow: no token for {span(dry_s)} although {requests} "
            f"requests are open; see {log}, and check for other load on its cores"
        )
    workers = (
        f"see {state.rl_dir.logs}/worker-*.log, orchestrator.environment.max_scoring and .workers"
    )
    if requests == 0:
        return (
            "the environments hold up their rollouts (tools, scoring): inference has sampled "
            f"nothing for {span(dry_s)} and has no requests, {filling(state)}; {workers}"
        )
    return (
        f"no token for {span(dry_s)} although inference is up: environments hold up their "
        f"rollouts (tools, scoring), or the engine hangs; {workers}, and {log}"
    )


def is_ready(state: RunState, name: str) -> bool:
    process = state.processes.get(name)
    return bool(process and process.is_ready)


def serves_clients(state: RunState) -> bool:
    """Returns whether this is an `rl serve`, or a model of its clients, that only waits for
    calls. None may come for days."""
    return state.config.kind == "serve" and all(is_ready(state, name) for name in state.roles)


def absent(state: RunState, name: str) -> str:
    """Returns why a process that others wait for is absent."""
    urls, log = state.config.orchestrator.inference_urls, state.log_name(name)
    if name == "inference" and urls:
        return f"inference runs elsewhere: check the servers at {', '.join(urls)}"
    if not state.processes and (search := newest_of(state, ["model", *state.roles])):
        last = next(iter(last_lines(search, 1)), "nothing logged yet")
        return (
            f"model {state.config.model.name} is being found or downloaded: {last} (log: {search})"
        )
    launcher, orchestrator = map(state.processes.get, ("trainer-launcher", "orchestrator"))
    if name == "trainer" and launcher and launcher.may_live and launcher.status.detail:
        return (
            f"the trainer waits for {launcher.status.detail}: do they run `rl node`, and are "
            f"they in their engine's queue? See {log}"
        )
    is_done = name == "trainer" and state.step >= state.config.max_steps
    if is_done and orchestrator and orchestrator.may_live:
        return (
            "the trainer has finished its last step and exited; the orchestrator is "
            f"{orchestrator.doing_for}"
        )
    kind = "inference" if name == "inference" else "trainer"
    needed = [machine for machine in state.machines if kind in machine.roles]
    if needed and not any(machine.is_up for machine in needed):
        many = ", ".join(f"{m.index} ({'lost' if m.status else 'has not joined'})" for m in needed)
        remedy = f"are its jobs queued? {state.jobs}" if state.jobs else "start `rl node` there"
        return f"no machine that {VERBS[kind]} is there: {many}; {remedy}"
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
    if any(machine.is_up for machine in state.machines):
        return (
            f"the {name} is not running, because no machine leads the run yet: see "
            f"{state.rl_dir.logs}/rl-*.log"
        )
    return (
        f"the {name} is not running, and no `rl` is running to start it; start it, or all "
        f"processes with `{state.resume}`"
    )


def newest_of(state: RunState, names: list[str]) -> Path | None:
    """Returns the log of the first of these processes if it is the newest of all their logs."""
    logs = [(log.stat().st_mtime, name, log) for name in names for log in state.logs(name)]
    return max(logs)[2] if logs and max(logs)[1] == names[0] else None


def circle(waiting: list[Process]) -> str:
    """Describes processes that wait for each other. For a moment, this only means that one hands
    work over to the other."""
    texts = ", ".join(f"the {process.name} is {process.doing_for}" for process in waiting)
    if min(process.phase_s for process in waiting) < DEADLOCK_S:
        return f"work is being handed over: {texts}"
    return (
        f"deadlock: {texts}; after `kill {waiting[-1].status.pid}`, `rl` restarts the "
        f"{waiting[-1].name}, which loses nothing"
    )


# Parts of sentences -------------------------------------------------------------------------------


def filling(state: RunState) -> str:
    """Returns how full the current batch is, or else what the orchestrator is doing."""
    process = state.processes.get("orchestrator")
    if not process:
        return "the orchestrator has no status yet"
    status = process.status
    if status.phase is not Phase.FILLING_BATCH or None in (status.batch_done, status.batch_size):
        return process.doing
    return f"batch {status.batch} has {status.batch_done} of {status.batch_size} rollouts"


def open_requests(state: RunState) -> int | None:
    """Returns the number of requests at all servers; None if none of them tells."""
    counts = [server.status.requests for server in state.servers if server.may_live]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def waiting_for_tokens(state: RunState) -> str:
    """Returns how many rollouts wait for tokens, and whether sampling or the environments' own
    work holds them up."""
    orchestrator, requests = state.processes.get("orchestrator"), open_requests(state)
    if not orchestrator or requests is None or not (playing := orchestrator.status.playing):
        return ""
    if orchestrator.status.phase is not Phase.FILLING_BATCH or orchestrator.phase_s < SETTLED_S:
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
    is_served = not state.own_servers or any(server.status.address for server in state.servers[:1])
    works = phases.get("orchestrator") in ORCHESTRATOR_WORKS
    return is_served and works and phases.get("trainer") in TRAINER_STEPS


def pace_text(state: RunState) -> str:
    """Returns which side is slower, with shares of time; empty if unknown."""
    waits, idle = (
        state.share("time/wait_for_batch"),
        state.recent("orchestrator", "perf/inference_idle_fraction"),
    )
    if waits is None or state.config.kind == "sft":
        return ""
    rest = f", and no rollout was in flight for {sum(idle) / len(idle):.0%}" if idle else ""
    shares = f"in the newest steps the trainer waited {waits:.0%} of the time{rest}"
    if waits > UNEVEN:
        return f"{shares}: rollouts are the slower side"
    return f"{shares}: the trainer is the slower side" if waits < UNEVEN / 2 else shares


def report(state: RunState) -> Iterator[Line]:
    """Yields lines about progress, each process, and events."""
    yield Line(progress_text(state))
    if origin := read_origin(state.run_dir):
        yield Line("; ".join(map(str, [origin, *origin.changes])))
    over = not state.alive and not ended_well(state)
    for name in dict.fromkeys([*state.roles, *state.processes]):
        if name == "trainer-launcher" and "trainer" in state.processes:
            continue  # it only waits for the ranks, of which there are lines
        process = state.processes.get(name)
        is_odd = process.silent or not process.may_live if process else over
        quoted = last_lines(state.log(name), LOG_LINES) if is_odd else []
        if process or state.alive or quoted:
            yield Line(f"{name}: {process_text(process) if process else 'no status'}", quoted)
        if deaths := state.deaths(name):
            often = "once," if len(deaths) == 1 else f"{len(deaths)} times, the last time"
            ago = f"{span(state.now - deaths[-1].time)} ago"
            yield Line(f"{name}: died {often} {ago}: {deaths[-1].reason}")
    path = chain(state) if state.alive else []
    if len(path) > 1:
        doing = {name: f" {process.doing}" for name, process in state.processes.items()}
        yield Line("who waits: " + " -> ".join(f"{name}{doing.get(name, '')}" for name in path))
    for event in state.events:
        for line in event.lines if event.event == "repair" else ():
            yield Line(f"repaired {span(state.now - event.time)} ago: {line}")
    if state.quarantined:
        yield Line(
            "quarantined batches, whose steps were skipped: "
            f"{', '.join(map(str, state.quarantined))} (batches/*.quarantined says why)"
        )


def machine_line(machine: RunMachine, state: RunState) -> str:
    if machine.status is None:
        return f"machine {machine.index}: is not there; it {machine.does}"
    age_s = max(0.0, machine.status.heartbeat - machine.status.started)
    life = machine.loss if machine.state == "lost" else f"for {span(age_s)}"
    leaving = "leaving" if machine.state == "leaving" else ""
    what = filter(None, [machine.facts, life, leaving, *state.processes_on(machine)])
    return f"machine {machine.index}: {machine.status.host} {machine.does}, {', '.join(what)}"


def progress_text(state: RunState) -> str:
    final, sft, models = state.config.max_steps, state.config.sft, num_models(state)
    if models is not None:
        return f"models: {models}"
    if state.config.kind == "serve":
        return f"step {state.step}, version {state.newest_version}"
    facts = [f"step {state.step}" if sft and sft.epochs else f"step {state.step} of {final}"]
    if not sft:
        facts.append(f"batch {state.newest_batch}, version {state.newest_version}")
    facts.append(f"checkpoint {state.newest_checkpoint or 'none'}")
    if state.newest_eval is not None:
        facts.append(f"eval of version {state.newest_eval}")
    if pace := state.pace_s():
        facts.append(f"{pace:.1f} s per step")
        if state.alive and state.step < final:
            facts.append(f"about {span(pace * (final - state.step))} left")
    return ", ".join(facts)


def process_text(process: Process) -> str:
    if not process.may_live:
        return f"dead; it was {process.doing} {span(process.silent_s)} ago"
    age, status = span(process.silent_s), process.status
    beat = f"no heartbeat for {age}" if process.silent else f"heartbeat {age} ago"
    counted = "" if status.progress is None else f", counted {status.progress}"
    host = f" on {status.host}" if process.alive is None else ""
    return f"{process.doing_for} ({beat}{counted}, pid {status.pid}{host})"
