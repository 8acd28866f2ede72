"""What a run waits for, from its files alone: for `rl doctor RUN`, for a stall, and for the message of every wait that expires."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from rl.config import RLConfig
from rl.reward_hints import reward_lines
from rl.run_dir import RunDir
from rl.run_ending import ended_well, how_it_ended
from rl.run_state import SILENT_S, Process, RunState, log_end, newest_log, read_state, span
from rl.run_trouble import problems_of
from rl.status import read_status

PEER_LINES = 6
"""Of a peer's log, in the message of whoever waited for it in vain."""
DRY_S = 30.0
"""Without a token for so long, a server that answers has either nothing to do or hangs."""
SETTLED_S = 5.0
"""After a change, such as new weights, rollouts need a moment until they wait for what they usually wait for."""
TANGLED_S = 30.0
"""Two that wait for each other for so long will not stop doing so."""
TOKENS_HOLD = 0.75
"""Of the rollouts that play, more wait for tokens than this part: sampling is what takes their time. Below a quarter, it is not."""
UNEVEN = 0.4
"""The trainer waits for more than this part of its time: rollouts are the slower side. Less than half of it: the trainer is."""
WAITS = (
    ("trainer", "waiting for the other ranks", "ranks"),
    ("trainer", "waiting", "orchestrator"),
    ("orchestrator", "waiting for the trainer", "trainer"),
    ("orchestrator", "waiting for the teacher", "teacher"),
    ("orchestrator", "loading environments", "environments"),
    ("orchestrator", "waiting for inference", "inference"),
    ("orchestrator", "loading version", "inference"),
    ("orchestrator", "filling batch", "inference"),
    ("orchestrator", "evaluating", "inference"),
)
"""Who, how what it does begins, and for whom it waits then."""


@dataclass(frozen=True)
class Diagnosis:
    """What is to be said of a run."""

    bottleneck: str
    """One sentence: the process that everything waits for, why, and what to do; or how the run ended."""
    lines: list[str]
    """The rest, ready to be printed."""
    problems: list[str] = field(default_factory=list)
    """What is wrong, each with its remedy. Empty: the run goes on, or ended well."""

    @property
    def fine(self) -> bool:
        return not self.problems


def diagnose(run_dir: RunDir, config: RLConfig) -> Diagnosis:
    """Looks at a run, alive or dead."""
    return judge(read_state(run_dir, config))


def judge(state: RunState) -> Diagnosis:
    """What the state of a run means."""
    if not state.alive:
        bottleneck, good = how_it_ended(state)
        problems = [*([] if good else [bottleneck]), *problems_of(state, over=good)]
    else:
        problems = problems_of(state, over=False)
        path = chain(state)
        bottleneck = problems[0] if problems else end_of(state, path)
        stalled_s = state.moved_s()
        if stalled_s > state.config.supervisor.stall_s:
            bottleneck = f"nothing has moved for {span(stalled_s)}: {bottleneck}"
            problems = [bottleneck, *problems[1:]]
        elif not problems and all_work(state) and (pace := pace_text(state)):
            bottleneck = f"{bottleneck}; {pace}"
    return Diagnosis(bottleneck, report(state), problems)


# Who waits for whom -----------------------------------------------------------------------------------------------------


def waits_for(process: Process) -> str:
    """The process that another waits for; empty: none, it works."""
    role = process.name.partition("-")[0]
    return next((other for name, doing, other in WAITS if name == role and process.doing.startswith(doing)), "")


def chain(state: RunState) -> list[str]:
    """From the trainer, which everything is for, to the one that waits for nobody. A name that comes twice closes a circle."""
    if "data" in state.processes and "trainer" not in state.processes:
        return ["data"]  # of supervised fine-tuning: made before the trainer starts
    path = ["trainer"]
    first = state.processes.get("trainer")
    if first and first.there and not waits_for(first) and (other := state.processes.get("orchestrator")) and waits_for(other) != "trainer":
        return slower_side(state)
    while (process := state.processes.get(path[-1])) and process.there and (other := waits_for(process)):
        path.append(other)
        if path.count(other) > 1:
            break
    return path


def slower_side(state: RunState) -> list[str]:
    """The trainer and rollouts both work: the chain from the one that the other waits for more."""
    if (state.share("time/wait_for_batch") or 0.0) <= UNEVEN or "inference" not in state.roles:
        return ["trainer"]
    return ["orchestrator", "inference"]


def end_of(state: RunState, path: list[str]) -> str:
    """The last of a chain, why it is held up, and what to look at."""
    last = path[-1]
    if path.count(last) > 1:
        return circle(state, path)
    process = state.processes.get(last)
    if last == "ranks":
        return f"the trainer waits for its other ranks: {ranks_text(state)}; see {log_name(state, 'trainer')}"
    if last == "teacher":
        doing = state.processes["orchestrator"].doing
        return f"the teacher does not answer: the orchestrator is {doing} for {held(state, 'orchestrator')}; look at that server"
    if last == "environments":
        limit = f"orchestrator.worker_timeout_s = {state.config.orchestrator.worker_timeout_s:g} ends that"
        return f"the environments load for {held(state, 'orchestrator')} ({limit}); see {state.run_dir.logs}/worker-*.log"
    if process is None or not process.there:
        return absent(state, last)
    if last == "inference":
        return inference_end(state, process)
    if last == "trainer" and state.config.max_steps and process.doing.startswith("training step"):
        usual = f", a step takes {pace:.1f} s" if (pace := state.pace_s()) else ""
        again = " once more, on its way from its checkpoint," if int(process.status.get("step", state.step)) < state.step else ""
        return f"the trainer works: {process.doing}{again} for {span(process.doing_s)}{usual}"
    return f"the {last} is {process.doing} for {span(process.doing_s)}; see {log_name(state, last)}"


def inference_end(state: RunState, process: Process) -> str:
    """Why rollouts do not come faster: the server starts, loads, samples, hangs, or has nothing to do."""
    orchestrator = state.processes.get("orchestrator")
    if "address" not in process.status:
        limit = state.config.inference.startup_timeout_s
        log = log_name(state, "inference")
        return f"inference is not up yet: {process.doing} for {span(process.doing_s)} (inference.startup_timeout_s = {limit:g}); see {log}"
    if orchestrator and orchestrator.doing.startswith("loading version"):
        told = f"{orchestrator.doing} for {span(orchestrator.doing_s)}"
        return f"inference takes new weights: {told}; see {log_name(state, 'inference')}, and whether {state.run_dir.weights_dir} is slow"
    if orchestrator and orchestrator.doing.startswith("waiting for inference"):
        address = process.status["address"]
        return (
            f"inference is {process.doing}, and the orchestrator does not reach it at {address}: is there a proxy or firewall between them?"
        )
    dry_s = min(process.up_s if process.idle_s is None else process.idle_s, held_s(state, "orchestrator"))
    if dry_s < DRY_S:
        return f"inference samples{speed(state)}: {filling(state)}{waiting_for_tokens(state, process)}"
    requests = process.status.get("requests")
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
    if name == "inference" and name not in state.roles:
        return f"inference runs elsewhere: see the servers at {', '.join(state.config.orchestrator.inference_urls)}"
    if resolving := model_log(state):
        said = log_end(resolving, 1)
        return f"model {state.config.model.name} is being found or downloaded: {said[0] if said else 'nothing said yet'} (log: {resolving})"
    log = log_name(state, name)
    if died := state.down(name):
        reason = died.get("reason") or f"exit code {died.get('exit')}"
        return f"the {name} died {span(state.now - died['time'])} ago ({reason}) and is about to be started again; see {log}"
    if state.launcher and state.launcher.alive:
        return f"the {name} has not said anything yet: it starts, which takes some seconds of imports; see {log}"
    return f"the {name} is not running, and nothing starts it: no `rl` lives; start it, or all with `{state.resume}`"


def model_log(state: RunState) -> Path | None:
    """The log of the search for the model, while nothing was started after it."""
    found = newest_log(state.run_dir.logs, "model")
    if found is None or state.processes:
        return None
    others = [log for name in state.roles if (log := newest_log(state.run_dir.logs, name))]
    return found if all(log.stat().st_mtime < found.stat().st_mtime for log in others) else None


def circle(state: RunState, path: list[str]) -> str:
    """Two that wait for each other: for a moment that is a handing over."""
    names = path[path.index(path[-1]) : -1]
    texts = ", ".join(f"the {name} is {state.processes[name].doing} for {held(state, name)}" for name in names)
    if min(held_s(state, name) for name in names) < TANGLED_S:
        return f"work is being handed over: {texts}"
    pid = state.processes[names[-1]].status.get("pid")
    return f"they wait for each other: {texts}; `kill {pid}` has `rl` start the {names[-1]} again, which loses nothing"


# Parts of sentences ---------------------------------------------------------------------------------------------------


def held_s(state: RunState, name: str) -> float:
    return state.processes[name].doing_s if name in state.processes else float("inf")


def held(state: RunState, name: str) -> str:
    return span(held_s(state, name))


def log_name(state: RunState, name: str) -> str:
    return str(newest_log(state.run_dir.logs, name) or state.run_dir.logs)


def speed(state: RunState) -> str:
    rates = state.recent("orchestrator", "perf/generated_tokens_per_s")
    return f" ({rates[-1]:.0f} tokens a second in the last batch)" if rates else ""


def filling(state: RunState) -> str:
    """How far the batch is that is being filled."""
    process = state.processes.get("orchestrator")
    status = process.status if process else {}
    if not process or not {"batch", "batch_done", "batch_size"} <= set(status) or not process.doing.startswith("filling"):
        return process.doing if process else "the orchestrator has not said anything"
    return f"batch {status['batch']} has {status['batch_done']} of {status['batch_size']} rollouts"


def waiting_for_tokens(state: RunState, inference: Process) -> str:
    """Whether sampling or the environments' own work makes rollouts take their time, by what they wait for at the moment."""
    orchestrator = state.processes.get("orchestrator")
    requests = inference.status.get("requests")
    playing = orchestrator.status.get("playing") if orchestrator else None
    if (
        not orchestrator
        or not playing
        or requests is None
        or not orchestrator.doing.startswith("filling")
        or orchestrator.doing_s < SETTLED_S
    ):
        return ""
    said = f", of {playing} that play {min(requests, playing)} wait for tokens"
    if requests > TOKENS_HOLD * playing:
        return f"{said}: sampling holds them up, so a smaller max_tokens or more cores or GPUs for inference help"
    return (
        f"{said}: the environments (tools, scoring) hold them up; see orchestrator.environment.workers" if requests < playing / 4 else said
    )


def ranks_text(state: RunState) -> str:
    others = [process for name, process in state.processes.items() if name.startswith("trainer-")]
    return ", ".join(f"{one.name} {one.doing} for {span(one.doing_s)}" for one in others) or "none of them has said anything"


def all_work(state: RunState) -> bool:
    """Nothing is starting or loading: what the newest steps say of the two sides holds now."""
    doing = {name: process.doing for name, process in state.processes.items()}
    usual = ("training step", "waiting for batch", "publishing", "writing checkpoint")
    inference = state.processes.get("inference")
    served = "inference" not in state.roles or (inference is not None and "address" in inference.status)
    return (
        served and doing.get("trainer", "").startswith(usual) and doing.get("orchestrator", "").startswith(("filling", "waiting for the"))
    )


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
    """How far the run is, what each process does, what happened, what stands in the way of a rising reward."""
    lines = [progress_text(state)]
    for name in dict.fromkeys([*state.roles, *state.processes]):
        process = state.processes.get(name)
        if process or state.alive:
            lines.append(f"{name}: {process_text(process) if process else 'no status'}")
        if (process and (process.silent or not process.there)) or (not process and not state.alive and not ended_well(state)):
            lines += [f"  | {line}" for line in log_end(newest_log(state.run_dir.logs, name), PEER_LINES)]
        if deaths := state.deaths(name):
            last = deaths[-1]
            reason = last.get("reason") or f"exit code {last.get('exit')}"
            often = "once," if len(deaths) == 1 else f"{len(deaths)} times, the last time"
            lines.append(f"{name}: died {often} {span(state.now - last['time'])} ago: {reason}")
    path = chain(state) if state.alive else []
    if len(path) > 1:
        texts = [f"{name} {state.processes[name].doing}" if name in state.processes else name for name in path]
        lines.append("who waits: " + " -> ".join(texts))
    for event in state.events:
        if event.get("event") == "repair":
            lines += [f"repaired {span(state.now - event['time'])} ago: {line}" for line in event.get("lines") or []]
    if state.quarantined:
        names = ", ".join(str(step) for step in state.quarantined)
        lines.append(f"quarantined batches, whose steps were skipped: {names} (batches/*.quarantined says why)")
    return lines + reward_lines(state)


def progress_text(state: RunState) -> str:
    final = state.config.max_steps
    parts = [f"step {state.step} of {final}" if not (state.config.sft and state.config.sft.epochs) else f"step {state.step}"]
    if not state.config.sft:
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
    beat = f"no heartbeat for {span(process.silent_s)}" if process.silent_s > SILENT_S else f"heartbeat {process.silent_s:.0f} s ago"
    counted = f", counted {process.status['progress']}" if "progress" in process.status else ""
    where = f"pid {process.status.get('pid')}" + (f" on {process.status.get('host')}" if process.alive is None else "")
    return f"{process.doing} for {span(process.doing_s)} ({beat}{counted}, {where})"


# For whoever waited in vain -------------------------------------------------------------------------------------------


def peer(run_dir: RunDir, role: str) -> str:
    """What a process (`orchestrator`, `inference`, `trainer`, `trainer-1`) last said of itself: its heartbeat and the end of its log."""
    return peer_at(run_dir.status(role))


def peer_at(status_path: Path) -> str:
    """As `peer`, for who knows only where the process's status stands."""
    status = read_status(status_path)
    if not isinstance(status, dict):
        said = "it has no status file: it is not up, or has ended"
    else:
        now = time.time()
        said = f"last heartbeat {now - status.get('heartbeat', now):.0f} s ago: {status.get('doing', 'nothing that it told')}"
        if (since := now - status.get("since", now)) >= 1:
            said += f" for {since:.0f} s"
    log = newest_log(status_path.parent.parent / "logs", status_path.stem)
    if log is None:
        return said
    lines = log_end(log, PEER_LINES)
    return "\n".join([f"{said}; the end of {log}:", *(f"  | {line}" for line in lines or ["(empty)"])])
