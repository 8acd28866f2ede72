"""What became of each environment's rollouts, by the orchestrator's metrics: how many failed and why, and whether any was trained."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

from rl.config.run import RLConfig
from rl.diagnosis.problems import Problem
from rl.diagnosis.state import RunState
from rl.run_dir.metrics import Curve, Lines, Numbers, ReadOnce, environment_rewards
from rl.wire.rollouts import Cause

MANY = 0.1
"""Share of failed rollouts above which an environment is told of although it is trained."""

MANY_LONG = 0.2
"""Share of rollouts that are cut off, or outgrew the context, above which a step's line says so."""


@dataclass
class Played:
    """An environment's rollouts over some steps."""

    finished: int = 0
    trained: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By cause."""
    left_out: bool = False
    """Whether the newest of these steps went on without it."""

    @property
    def fault(self) -> str:
        """What is the matter with it: `nothing of it was trained, 12 of 60 rollouts failed (reward 12)`; empty if nothing is."""
        nothing = "" if self.trained else "nothing of it was trained" if self.finished else "none of its rollouts was settled"
        causes = ", ".join(f"{cause} {count}" for cause, count in self.failed.most_common())
        failed = f"{self.failed.total()} of {self.finished} rollouts failed ({causes})" if causes else ""
        return ", ".join(part for part in (nothing, failed, "it is left out" if self.left_out else "") if part)


def played(numbers: Numbers, envs: Iterable[str]) -> dict[str, Played]:
    """What became of the rollouts of `envs`, those of which the newest step has counts: earlier versions of rl wrote none."""
    newest, found = (numbers.steps("orchestrator") or [None])[-1], {}

    def points(env: str, name: str, kind: str = "rollouts", last: int | None = None) -> Curve:
        return numbers.points("orchestrator", f"{kind}/{env}/{name}", last)

    for env in envs:
        steps, finished = points(env, "finished")
        if newest is None or newest not in steps[-1:]:
            continue
        failed = {cause: int(sum(points(env, f"failed_{cause}")[1])) for cause in get_args(Cause)}
        left_out = newest in points(env, "quarantined", "env", last=1)[0]
        found[env] = Played(int(sum(finished)), int(sum(points(env, "trained")[1])), Counter(+Counter(failed)), left_out)
    return found


def played_in(lines: Lines) -> dict[str, Played]:
    """The same of all environments that metric lines are of."""
    keys = (key.split("/") for (_, source), line in lines.items() if source == "orchestrator" for key in line if is_count(key))
    return played(ReadOnce(lines), sorted({env for _, env, name in keys if name == "finished"}))


def is_count(metric: str) -> bool:
    """Whether `played` reads a metric."""
    kind, _, rest = metric.partition("/")
    name = rest.partition("/")[2]
    return kind in ("rollouts", "env") and (name in ("finished", "trained", "quarantined") or name.startswith("failed_"))


def step_texts(line: dict[str, Any]) -> list[str]:
    """Of a step's environments the mean reward and the share of rollouts that failed: `sums 0.25, 12% failed`. One alone has the latter."""
    rewards, counts = environment_rewards(line), played_in({(0, "orchestrator"): line})
    texts = {env: "-" if value is None else f"{value:.2f}" for env, value in (dict.fromkeys(counts) | rewards).items()}
    faults = {env: fault for env, one in counts.items() if (fault := step_fault(one))}
    if len(texts) == 1:
        return list(faults.values())
    return [", ".join([f"{env} {text}", *([faults[env]] if env in faults else [])]) for env, text in sorted(texts.items())]


def step_fault(one: Played) -> str:
    """What is the matter with an environment's rollouts of one step, in short; empty if nothing is."""
    if one.left_out:
        return "left out"
    failed = f"{one.failed.total() / one.finished:.0%} failed" if one.failed.total() else ""
    return f"{failed}, none trained" if failed and not one.trained else failed


def max_tokens(config: RLConfig) -> dict[str, int]:
    """How many tokens an answer of each environment may have."""
    return {env.label: config.sampling_of(env)["max_tokens"] for env in config.orchestrator.environment}


def length_texts(config: RLConfig, line: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Of a step's line the lengths that many rollouts are over: metric -> (`40% cut off`, the limit that does it, in a sentence)."""
    found, most = {}, sorted(set(max_tokens(config).values()))
    if (share := line.get("rollouts/truncated") or 0.0) > MANY_LONG:
        limit = f"orchestrator.sampling.max_tokens = {', '.join(map(str, most))}"
        found["rollouts/truncated"] = f"{share:.0%} cut off", f"an answer of {share:.0%} of its rollouts was cut off, at {limit}"
    if (share := line.get("rollouts/overlong") or 0.0) > MANY_LONG:
        limit = f"model.max_model_len = {config.model.max_model_len}"
        ended = f"{share:.0%} of its rollouts ended because their next prompt left no room for an answer in {limit}"
        found["rollouts/overlong"] = f"{share:.0%} overlong", ended
    return found


def environment_problems(state: RunState) -> list[Problem]:
    """Environments that are left out, or of which only failures came; and, not serious, those of which many rollouts failed."""
    said = [event for event in state.recent_events if event.event == "warning"]
    found = []
    for env, one in played(state.numbers, sorted(entry.label for entry in state.config.orchestrator.environment)).items():
        serious = one.left_out or (not one.trained and one.failed.total() > 0)
        if serious or one.failed.total() > MANY * one.finished:
            about = [event.reason.replace(f"environment {env}:", "at first:", 1) for event in said if event.env == env]
            look = [f"`rl show {state.run_dir.root} --env {env} --why error` shows them"] if one.failed else []
            text = "; ".join([f"environment {env}: {one.fault}", *about, *look])
            found.append(Problem(text, serious, (f"rollouts/{env}/trained",), "error"))
    return found
