"""Guards scoring: a function that raises or returns no number fails the rollout, where verifiers
would count it as 0.0.

What is guarded are the places of verifiers that turn failures into zeros, whichever rubric comes by
there, and whenever.
"""

import sys
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import verifiers as vf
from verifiers.rubrics import judge_rubric
from verifiers.utils import thread_utils
from verifiers.utils.async_utils import maybe_await, maybe_call_with_named_args

from rl.envs.policy import RolloutError
from rl.system.functions import as_numbers, raised, returned

BROKEN: list[str] = []
"""How process pools of verifiers broke in this process. Each fails all rollouts that were being
scored: they may have asked it."""


@dataclass
class Scoring:
    """One call of a rubric, in a `with` block, which raises RolloutError at its end if a function
    failed.

    A failed metric is left out instead, if it can be shown that nobody reads it: it has the weight
    0 to the end, no function with a weight is called after it, and no code but verifiers' own sums
    up the rewards.
    """

    rubric: vf.Rubric

    def __enter__(self) -> "Scoring":
        self.token = SCORING.set(self)
        self.num_broken = len(BROKEN)
        self.faults: list[str] = []
        # Failed metrics, by the id of the state and the function's name: their rubric, function and
        # fault.
        self.absent: dict[tuple[int, str], Any] = {}
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        SCORING.reset(self.token)
        mend_pools()
        late = [fault for rubric, func, fault in self.absent.values() if has_weight(rubric, func)]
        self.faults += late + BROKEN[self.num_broken :]
        # of a custom rubric, or of verifiers' arithmetic on the rewards
        if isinstance(error, Exception):
            self.faults.append(f"the rubric {raised(error)}")
        elif error:
            return
        if self.faults:
            raise RolloutError("reward", "; ".join(dict.fromkeys(self.faults))) from error


SCORING: ContextVar[Scoring | None] = ContextVar("scoring", default=None)
"""The current call. A context variable, because the functions are called by rubrics, which may
be the environment's own."""


def guard() -> None:
    """Puts our functions into the places of verifiers that turn failures into zeros."""
    vf.Rubric._call_individual_reward_func = vf.Rubric._call_group_reward_func = score
    judge_rubric.maybe_await = verdict
    if math_rubric := sys.modules.get("verifiers.legacy.rubrics.math_rubric"):
        # After this time an answer that waits for the process pool would be wrong. Our timeout_s
        # applies in its place.
        math_rubric.MathRubric.HARD_TIMEOUT_SECONDS = None


def rubrics(rubric: vf.Rubric) -> list[vf.Rubric]:
    """A rubric and, recursively, its members."""
    return [
        rubric,
        *(inner for member in getattr(rubric, "rubrics", []) for inner in rubrics(member)),
    ]


def scored_by_verifiers(rubric: vf.Rubric) -> list[vf.Rubric]:
    """A rubric and its members if only verifiers' own methods score with them: these call
    functions in order, and add up those with a weight. Else nothing."""
    members = rubrics(rubric)
    methods = [method for inner in members for method in (inner.score_rollout, inner.score_group)]
    return members if all(method.__module__.startswith("verifiers.") for method in methods) else []


def has_weight(rubric: vf.Rubric, func: Any) -> bool:
    """Whether a function has a weight in its rubric now. One that is not listed is called by
    other code, which has a use for it."""
    weights = [
        weight
        for listed, weight in zip(rubric.funcs, rubric.weights, strict=False)
        if listed is func
    ]
    return not weights or any(weights)


async def score(rubric: vf.Rubric, func: Any, state: Any = None, states: Any = None) -> Any:
    """What a function gives for a state, or for a list of those of a group; zeros if it fails,
    which `SCORING` is told. Raises RolloutError outside of a scoring: in an executor's thread,
    or while the environment plays."""
    scored = states or state
    scoring = SCORING.get()
    weighs = has_weight(rubric, func)
    is_group = isinstance(scored, list)
    objects = rubric.group_score_objects(scored) if is_group else rubric.score_objects(scored)
    states = scored if is_group else [scored]
    objects.pop("func", None)  # a column of this name has never reached a function
    if scoring and weighs:  # it may read what failed metrics should have left
        scoring.faults += [
            f"{fault}; put it last, as later functions may read what it leaves"
            for *_, fault in scoring.absent.values()
        ]
    numbers = None
    try:
        value = await maybe_call_with_named_args(func, **objects)
        numbers = as_numbers(value if is_group else [value], len(states))
        fault = (
            f"{returned(value)}, not "
            f"{f'a list of {len(states)} finite numbers' if is_group else 'a finite number'}"
        )
    # Broad, because verifiers' is too: it would turn the error into a reward of 0.0, and an exit()
    # would end the event loop.
    except (Exception, SystemExit) as error:
        fault = raised(error)
    if numbers is None:
        fault = f"reward function {func.__name__} {fault}"
        numbers = [0.0] * len(states)
        if not scoring:
            raise RolloutError("reward", fault)
        if weighs or rubric not in scored_by_verifiers(scoring.rubric):
            scoring.faults.append(fault)
        else:
            scoring.absent |= {
                (id(state), func.__name__): (rubric, func, fault) for state in states
            }
    return numbers if is_group else numbers[0]


async def verdict(create: Any, **request: Any) -> Any:
    """A judge's answer, for JudgeRubric, which takes a missing text for the text `None`. Raises
    ValueError if it is empty or cut."""
    answer = await maybe_await(create, **request)
    choice = answer.choices[0]
    if not choice.message.content or choice.finish_reason == "length":
        raise ValueError("its verdict is empty or cut; raise max_tokens in judge_sampling_args")
    return answer


def mend_pools() -> None:
    """Starts broken process pools of verifiers again: they stay broken, and MathRubric counts
    0.0 for what it asks them."""
    for pool, _ in thread_utils._executor_registry.values():
        if pool._broken:
            BROKEN.append(
                f"a process pool of verifiers broke, and was started again: {pool._broken}"
            )
            pool.__init__(pool._max_workers)
