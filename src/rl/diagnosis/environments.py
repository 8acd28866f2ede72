"""Summarises each environment's rollouts from the orchestrator's metrics: how many failed, why,
and whether any was trained on."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from rl.config.run import RLConfig
from rl.diagnosis.problems import Problem
from rl.diagnosis.state import RECENT, RunState
from rl.run_dir.metrics import environment_rewards
from rl.wire.rollouts import Cause

if TYPE_CHECKING:
    from rl.run_dir.numbers import Numbers, Points

MANY = 0.1
"""Share of failed rollouts in the newest steps above which an environment is reported although
it is trained on."""

MANY_LONG = 0.2
"""Share of rollouts cut off or over the context length above which a step's line reports it."""


@dataclass
class Played:
    """An environment's rollouts over some steps."""

    finished: int = 0
    trained: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Failed rollouts by cause."""
    lost: bool = False
    """Whether the newest of these steps left the environment out."""

    @property
    def fault(self) -> str:
        """Describes what is wrong: `no rollout was trained on, 12 of 60 rollouts failed (reward
        12)`; empty if nothing is."""
        nothing = (
            ""
            if self.trained
            else "no rollout was trained on"
            if self.finished
            else "no rollout was finished"
        )
        causes = ", ".join(f"{cause} {count}" for cause, count in self.failed.most_common())
        failed = (
            f"{self.failed.total()} of {self.finished} rollouts failed ({causes})" if causes else ""
        )
        return ", ".join(
            part for part in (nothing, failed, "it is lost" if self.lost else "") if part
        )


def played(numbers: "Numbers", envs: Iterable[str], last: int | None = None) -> dict[str, Played]:
    """Summarises the rollouts of those of `envs` that the newest step has counts of, in all
    steps or the `last` ones."""
    steps, found = numbers.steps("orchestrator")[-last if last else None :], {}

    def points(env: str, name: str, kind: str = "rollouts") -> "Points":
        return numbers.points("orchestrator", f"{kind}/{env}/{name}", last)

    def total(env: str, name: str) -> int:
        return int(
            sum(value for step, value in zip(*points(env, name), strict=True) if step >= steps[0])
        )

    for env in envs:
        if not steps or steps[-1] not in points(env, "finished")[0][-1:]:
            continue
        failed = Counter({cause: total(env, f"failed_{cause}") for cause in get_args(Cause)})
        lost = steps[-1] in points(env, "quarantined", "env")[0][-1:]
        found[env] = Played(total(env, "finished"), total(env, "trained"), Counter(+failed), lost)
    return found


def played_in(numbers: "Numbers") -> dict[str, Played]:
    """Summarises the rollouts of all environments in the numbers."""
    names = (name.split("/") for name in numbers.names_of("orchestrator"))
    return played(
        numbers,
        [words[1] for words in names if words[0] == "rollouts" and words[2:] == ["finished"]],
    )


def step_texts(line: dict[str, Any]) -> list[str]:
    """Returns mean reward and share of failed rollouts by environment: `sums 0.25, 12% failed`;
    for a single one, only the latter."""
    from rl.run_dir.numbers import Numbers

    rewards, counts = environment_rewards(line), played_in(Numbers.of({(0, "orchestrator"): line}))
    texts = {
        env: "-" if value is None else f"{value:.2f}"
        for env, value in (dict.fromkeys(counts) | rewards).items()
    }
    faults = {env: fault for env, one in counts.items() if (fault := step_fault(one))}
    if len(texts) == 1:
        return list(faults.values())
    return [
        ", ".join([f"{env} {text}", *([faults[env]] if env in faults else [])])
        for env, text in sorted(texts.items())
    ]


def step_fault(one: Played) -> str:
    """Describes briefly what is wrong with an environment's rollouts of one step; empty if
    nothing is."""
    if one.lost:
        return "lost"
    failed = f"{one.failed.total() / one.finished:.0%} failed" if one.failed.total() else ""
    return f"{failed}, none trained" if failed and not one.trained else failed


def max_tokens(config: RLConfig) -> dict[str, int]:
    """Returns the most tokens of an answer, by environment."""
    return {
        env.label: config.sampling_of(env)["max_tokens"] for env in config.orchestrator.environment
    }


def length_texts(config: RLConfig, line: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns the length limits that many of a step's rollouts exceed: metric -> (`40% cut off`,
    a sentence with the limit)."""
    found, most = {}, sorted(set(max_tokens(config).values()))
    if (share := line.get("rollouts/truncated") or 0.0) > MANY_LONG:
        limit = (
            f"orchestrator.sampling.max_tokens = {', '.join(map(str, most))}"
            if most
            else "the limit with which it was recorded"
        )
        found["rollouts/truncated"] = (
            f"{share:.0%} cut off",
            f"{share:.0%} of its rollouts had an answer cut off at {limit}",
        )
    if (share := line.get("rollouts/overlong") or 0.0) > MANY_LONG:
        limit = f"model.max_model_len = {config.model.max_model_len}"
        ended = (
            f"{share:.0%} of its rollouts ended because their next prompt left no room for an "
            f"answer in {limit}"
        )
        found["rollouts/overlong"] = f"{share:.0%} overlong", ended
    return found


def environment_problems(state: RunState) -> list[Problem]:
    """Returns environments that are lost or whose rollouts all failed, and, not serious, those
    with many failed rollouts in the newest steps."""
    said = [event for event in state.recent_events if event.event == "warning"]
    envs, found = sorted(entry.label for entry in state.config.orchestrator.environment), []
    newest = played(state.numbers, envs, RECENT)
    for env, whole in played(state.numbers, envs).items():
        serious = whole.lost or (not whole.trained and whole.failed.total() > 0)
        one = whole if serious else newest[env]
        if serious or one.failed.total() > MANY * one.finished:
            when = "" if one == whole else f"in the newest {RECENT} steps, "
            about = [
                event.reason.replace(f"environment {env}:", "at first:", 1)
                for event in said
                if event.env == env
            ]
            look = (
                [f"`rl show {state.run_dir.root} --env {env} --why error` shows them"]
                if one.failed
                else []
            )
            text = "; ".join([f"environment {env}: {when}{one.fault}", *about, *look])
            found.append(Problem(text, serious, (f"rollouts/{env}/trained",), "error"))
    return found
