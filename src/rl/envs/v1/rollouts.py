"""From a finished verifiers v1 episode to Rollouts: one for each trace, with its own reward, or with why it failed."""

import math
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from rl.envs.policy import RolloutError
from rl.envs.v1.active import OVERLONG, ActiveTrace
from rl.envs.v1.harness import opening
from rl.wire.rollouts import Cause, Episode, Rollout
from rl.wire.turns import Turns

Failure = tuple[Cause, str]
MAX_TRACEBACK = 2000


def as_episode(env: vf.Env, episode: vf.Episode, active: dict[str, ActiveTrace]) -> Episode:
    """A Rollout for each trace. Raises RolloutError for an episode that failed before there was one.

    Where the environment's `complete` rejects the episode, all rollouts carry the error, those that went well too: their rewards may
    lack what the others decide.
    """
    rollouts = [as_rollout(env, trace, active[trace.id]) for trace in episode.traces]
    if rollouts and env.complete(episode):
        return rollouts
    failure = next(((rollout.cause, rollout.error) for rollout in rollouts if rollout.error), None) or episode_failure(env, episode)
    if not rollouts:
        raise RolloutError(*failure)
    for rollout in rollouts:
        if not rollout.error:
            fail(rollout, failure)
    return rollouts


def as_rollout(env: vf.Env, trace: vf.Trace, active: ActiveTrace) -> Rollout:
    """A trace as a Rollout: its turns are those of our conversation, its messages those of verifiers' own record."""
    is_policy = getattr(env.config, trace.agent.name).client is None  # an agent with an endpoint of its own is another model
    turns = active.conversation.turns if active.conversation and is_policy else Turns()
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = scores | {name: value for name, value in trace.metrics.items() if value is not None}
    overlong = trace.stop_condition == OVERLONG
    messages, num_prompt = messages_of(trace)
    rollout = Rollout(
        turns=turns,
        messages=messages,
        num_prompt_messages=num_prompt,
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
        fail(rollout, trace_failure(trace, active))
    elif getattr(trace, "is_timeout", False):  # a limit since 0.4, which scores what there is: a reward for less than was asked
        stage = (trace.stop_condition or "").removesuffix("_timeout")
        fail(rollout, ("timeout", f"{stage} timed out; see timeout of the task and of args.{trace.agent.name}"))
    elif wrong := [name for name, value in {"the reward": trace.reward, **metrics}.items() if not math.isfinite(value)]:
        fail(rollout, ("reward", f"{', '.join(wrong)}: not a finite number"))
    return rollout


def fail(rollout: Rollout, failure: Failure) -> None:
    """Makes a rollout a failed one, with finite metrics only: they are shown, and cross the wire, like any other's."""
    rollout.cause, rollout.error = failure
    rollout.stop = "error"
    rollout.reward = 0.0
    rollout.metrics = {name: value for name, value in rollout.metrics.items() if math.isfinite(value)}


def trace_failure(trace: vf.Trace, active: ActiveTrace) -> Failure:
    """The last failure of a trace. verifiers' errors are classes by where they arose, and text by what they were."""
    error = trace.last_error
    if error is None:
        return "environment", "the trace failed without an error"
    text = error_text(error)
    if error.type == "ProviderError":
        return active.failure or "inference", text
    if timed_out(error):
        return "timeout", text
    if trace.timing.scoring.start:  # nothing but scoring can fail a trace after this
        return "reward", text
    return "environment", text


def episode_failure(env: vf.Env, episode: vf.Episode) -> Failure:
    """The failure of the environment's own hooks. `finalize` is where agents are judged together."""
    error = episode.last_error
    if error is None and not episode.traces:
        return "environment", "the episode has no trace"
    if error is None:
        return "environment", f"{type(env).__name__}.complete() does not accept the episode"
    if timed_out(error) or getattr(episode, "is_timeout", False):
        return "timeout", error_text(error)
    judged = error.type == "EnvError" and error.message.startswith(f"{type(env).__name__}.finalize()")
    return "reward" if judged else "environment", error_text(error)


def timed_out(error: vf.Error) -> bool:
    """Whether an error is a deadline, which verifiers shows by these words and no class of its own."""
    return error.type == "TimeoutError" or error.message.endswith(" timed out") or error.message.startswith("agent timeout: ")


def error_text(error: vf.Error) -> str:
    """An error's message and the end of its traceback: the place in the environment's code."""
    return f"{error.type}: {error.message}" + (f"\n{error.traceback[-MAX_TRACEBACK:]}" if error.traceback else "")


def messages_of(trace: vf.Trace) -> tuple[list[dict[str, Any]], int]:
    """The conversation's last branch, and how many of its messages come before the first that was sampled; before the first answer, the
    task's opening messages. Where a harness rewrote what had been said, the rewritten messages are no longer what was sampled."""
    if branches := trace.branches:
        nodes = branches[-1].nodes
        num_prompt = next((i for i, node in enumerate(nodes) if node.sampled), len(nodes))
        return [message_to_wire(node.message) for node in nodes], num_prompt
    messages = opening(trace.task.data.system_prompt, trace.task.data.prompt)
    return messages, len(messages)
