"""From a finished verifiers v1 episode to Rollouts: one for each trace, with its own reward, or with why it failed."""

import math
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from rl.orchestrator.envs.v1_client import Seat
from rl.orchestrator.rollouts import Cause, Episode, Rollout

Failure = tuple[Cause, str]
MAX_ERROR = 4000
OVERLONG = "context_length"
"""verifiers' stop condition for a prompt that leaves no room for an answer."""


def as_episode(env: vf.Env, episode: vf.Episode, seats: dict[str, Seat]) -> tuple[Episode, Failure | None]:
    """A Rollout for each trace, and why the episode as a whole does not count, if so. What counts is the environment's `complete`.

    Where it does not, all rollouts carry the error, those that went well too: their rewards may lack what the others decide.
    """
    rollouts = [as_rollout(trace, seats[trace.id], is_policy(env, trace)) for trace in episode.traces]
    if env.complete(episode):
        return rollouts, None
    failure = episode_failure(env, episode)
    failure = next(((rollout.cause, rollout.error) for rollout in rollouts if rollout.cause and rollout.error), failure)
    for rollout in rollouts:
        if not rollout.error:
            fail(rollout, failure)
    return rollouts, failure


def is_policy(env: vf.Env, trace: vf.Trace) -> bool:
    """Whether our policy answered: a seat with an endpoint of its own is somebody else."""
    return getattr(env.config, trace.agent.name).client is None


def as_rollout(trace: vf.Trace, seat: Seat, is_policy: bool) -> Rollout:
    """The turns are those that our client kept; verifiers' own record serves as the text."""
    turns = seat.conversation.turns if seat.conversation and is_policy else []
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = scores | {name: value for name, value in trace.metrics.items() if value is not None}
    overlong = trace.stop_condition == OVERLONG
    rollout = Rollout(
        turns=turns,
        messages=messages_of(trace),
        reward=float(trace.reward),
        metrics=metrics,
        stop=trace.stop_condition or "",
        truncated=overlong or any(call.finish_reason == "length" for call in trace.calls),
        overlong=overlong,
        agent=trace.agent.name,
        trainable=trace.agent.trainable and is_policy,
        completion_tokens=0 if turns else sum(call.usage.completion_tokens for call in trace.calls if call.usage),
    )
    if not trace.ok:
        fail(rollout, trace_failure(trace, seat))
    elif wrong := [name for name, value in {"the reward": trace.reward, **metrics}.items() if not math.isfinite(value)]:
        fail(rollout, ("reward", f"{', '.join(wrong)}: not a finite number"))
    return rollout


def fail(rollout: Rollout, failure: Failure) -> None:
    """Only finite numbers are left: a failed rollout's are shown, and cross the wire, like any other's."""
    rollout.cause, rollout.error = failure[0], failure[1][:MAX_ERROR]
    rollout.stop = "error"
    rollout.reward = 0.0
    rollout.metrics = {name: value for name, value in rollout.metrics.items() if math.isfinite(value)}


def trace_failure(trace: vf.Trace, seat: Seat) -> Failure:
    """The last failure of a trace. verifiers' errors are classes by where they arose, and text by what they were."""
    error = trace.last_error
    if error is None:
        return "environment", "the trace failed without an error"
    text = told(error)
    if error.type == "ProviderError":
        return seat.failed or "inference", text
    if timed_out(error):
        return "timeout", text
    if trace.timing.scoring.start:  # nothing but scoring can fail a trace after this
        return "reward", text
    return "environment", text


def episode_failure(env: vf.Env, episode: vf.Episode) -> Failure:
    """The failure of the environment's own hooks. `finalize` is where agents are judged together."""
    error = episode.last_error
    if error is None:
        return "environment", f"{type(env).__name__}.complete() does not accept the episode"
    if timed_out(error):
        return "timeout", told(error)
    judged = error.type == "EnvError" and error.message.startswith(f"{type(env).__name__}.finalize()")
    return "reward" if judged else "environment", told(error)


def timed_out(error: vf.Error) -> bool:
    """A deadline is not a class of its own in verifiers: its boundaries say it in these words."""
    return error.type == "TimeoutError" or error.message.endswith(" timed out") or error.message.startswith("agent timeout: ")


def told(error: vf.Error) -> str:
    """Message and the end of the traceback: the place in the environment's code."""
    return f"{error.type}: {error.message}" + (f"\n{error.traceback[-MAX_ERROR // 2 :]}" if error.traceback else "")


def messages_of(trace: vf.Trace) -> list[dict[str, Any]]:
    """The talk's last branch; before the first answer, what the task opens with."""
    if trace.branches:
        return [message_to_wire(message) for message in trace.branches[-1].messages]
    return opening(trace.task.data)


def opening(data: vf.TaskData) -> list[dict[str, Any]]:
    """What a task says before the first answer; nothing but instructions where a user opens the talk."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt is not None else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message_to_wire(message) for message in data.prompt or [])]
