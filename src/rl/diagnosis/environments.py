"""Summarises each environment's rollouts from the orchestrator's metrics: how many failed, why,
and whether any was trained on."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from rl.config.run import RLConfig
from rl.diagnosis.problems import Problem
from rl.diagnosis.state import RECENT, RunState
from rl.run_dir.metrics import environment_rewards
from rl.wire.rollouts import Cause

if TYPE_CHECKING:
    from rl.run_dir.numbers import Numbers

MANY = 0.1
"""Share of failed rollouts in the newest steps above which an environment is reported although
it is trained on."""
MANY_LONG = 0.2
"""Share of rollouts cut off or over the context length above which a step's line reports it."""
MOSTLY = 0.8
"""Share of answers cut off above which little else matters; a model that has not learned to be
brief may reach two thirds."""


@dataclass
class EnvSummary:
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
        clauses, causes = list[str](), self.failed.most_common()
        if not self.trained:
            clauses.append(f"no rollout was {'trained on' if self.finished else 'finished'}")
        if causes:
            listed = ", ".join(f"{cause} {count}" for cause, count in causes)
            clauses.append(f"{self.failed.total()} of {self.finished} rollouts failed ({listed})")
        return ", ".join([*clauses, *(["it is lost"] if self.lost else [])])

    @property
    def step_fault(self) -> str:
        """Describes briefly what is wrong in one step; empty if nothing is."""
        if self.lost or not self.failed:
            return "lost" if self.lost else ""
        none = "" if self.trained else ", none trained"
        return f"{self.failed.total() / self.finished:.0%} failed{none}"


def played(
    numbers: "Numbers", envs: Iterable[str] | None = None, last: int | None = None
) -> dict[str, EnvSummary]:
    """Summarises the rollouts of those of `envs`, or all, that the newest step has counts of, in
    all steps or the `last` ones."""
    steps = numbers.steps("orchestrator")[-last if last else None :]
    if envs is None:
        names = (name.split("/") for name in numbers.names_of("orchestrator"))
        envs = [name[1] for name in names if name[0] == "rollouts" and name[2:] == ["finished"]]

    def count(env: str, name: str) -> int:
        points = zip(*numbers.points("orchestrator", f"rollouts/{env}/{name}"), strict=True)
        return int(sum(value for step, value in points if step >= steps[0]))

    def is_newest(metric: str) -> bool:
        return numbers.points("orchestrator", metric, 1)[0] == steps[-1:]

    return {
        env: EnvSummary(
            count(env, "finished"),
            count(env, "trained"),
            +Counter({cause: count(env, f"failed_{cause}") for cause in get_args(Cause)}),
            is_newest(f"env/{env}/quarantined"),
        )
        for env in envs
        if steps and is_newest(f"rollouts/{env}/finished")
    }


def step_texts(line: dict[str, Any]) -> list[str]:
    """Returns mean reward and share of failed rollouts by environment: `sums 0.25, 12% failed`;
    for a single one, only the latter."""
    from rl.run_dir.numbers import Numbers

    rewards, counts = environment_rewards(line), played(Numbers.of({(0, "orchestrator"): line}))
    faults = {env: counts[env].step_fault if env in counts else "" for env in {*counts, *rewards}}
    if len(faults) == 1:
        return [fault for fault in faults.values() if fault]
    texts = {env: "-" if (x := rewards.get(env)) is None else f"{x:.2f}" for env in faults}
    return [
        f"{env} {texts[env]}" + (f", {faults[env]}" if faults[env] else "") for env in sorted(texts)
    ]


def max_tokens(config: RLConfig) -> dict[str, int]:
    """Returns the most tokens of an answer, by environment."""
    return {
        env.label: config.sampling_of(env)["max_tokens"] for env in config.orchestrator.environment
    }


def limits_text(config: RLConfig) -> str:
    """Returns the setting that cuts answers off, with its values: `orchestrator.sampling.max_tokens
    = 512`."""
    limits = ", ".join(map(str, sorted(set(max_tokens(config).values()))))
    return f"orchestrator.sampling.max_tokens = {limits}"


def length_texts(config: RLConfig, line: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns the length limits that many of a step's rollouts exceed: metric -> (`40% cut off`,
    a sentence with the limit)."""
    limit = limits_text(config) if config.plays else "the recorded limit"
    context = f"model.max_model_len = {config.model.max_model_len}"
    kinds = {
        "rollouts/truncated": ("cut off", f"had an answer cut off at {limit}"),
        "rollouts/overlong": (
            "overlong",
            f"ended because their next prompt left no room for an answer in {context}",
        ),
    }
    shares = {name: line.get(name) or 0.0 for name in kinds}
    return {
        name: (f"{share:.0%} {kinds[name][0]}", f"{share:.0%} of its rollouts {kinds[name][1]}")
        for name, share in shares.items()
        if share > MANY_LONG
    }


def environment_problems(state: RunState) -> Iterator[Problem]:
    """Yields environments that are lost or whose rollouts all failed, and, not serious, those
    with many failed rollouts in the newest steps."""
    envs = sorted(entry.label for entry in state.config.orchestrator.environment)
    newest = played(state.numbers, envs, RECENT)
    for env, whole in played(state.numbers, envs).items():
        is_serious = whole.lost or (not whole.trained and whole.failed.total() > 0)
        summary = whole if is_serious else newest[env]
        if not is_serious and summary.failed.total() <= MANY * summary.finished:
            continue
        when = "" if summary == whole else f"in the newest {RECENT} steps, "
        warned = [e.reason for e in state.recent_events if e.event == "warning" and e.env == env]
        look = f"`rl show {state.run_dir.root} --env {env} --why error` shows them"
        clauses = [f"environment {env}: {when}{summary.fault}", *warned]
        text = "; ".join([*clauses, look] if summary.failed else clauses)
        yield Problem(text, is_serious, (f"rollouts/{env}/trained",), "error")


# Sentences that both the diagnosis and an orchestrator that ends a run say about rewards ----------


def equal_remedy(reward: float) -> str:
    """Returns why every answer has the same reward, and the remedy: another one for 0 than for
    any other number."""
    if reward:
        return (
            "the reward function does not tell answers apart: call it with a right and with a "
            "wrong answer, and mend it"
        )
    return (
        "either no answer is right, or the reward function misses the right ones. Read ten "
        "answers: if some are right, mend the reward function; if none is, take easier tasks, show "
        "solved examples in the prompt, reward a part of the way, or `rl sft` first"
    )


def cut_off_remedy(share: float, config: RLConfig) -> str:
    """Returns how many answers were cut off, and the remedy."""
    return (
        f"{share:.0%} of the answers were cut off: raise {limits_text(config)}; if they run on at "
        "any length, the model does not know where to stop: check model.chat_template"
    )
