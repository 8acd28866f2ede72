"""Converts a finished verifiers v1 episode to Rollouts: one per trace, with its own reward or
the reason why it failed."""

from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from rl.envs.policy import RolloutError
from rl.envs.v1.client import OVERLONG, ActiveTrace
from rl.envs.v1.harness import opening
from rl.wire.rollouts import Cause, Episode, Rollout
from rl.wire.turns import Turns

Failure = tuple[Cause, str]
MAX_TRACEBACK = 2000


def as_episode(env: vf.Env, episode: vf.Episode, active: dict[str, ActiveTrace]) -> Episode:
    """A Rollout for each trace. Raises RolloutError for an episode that failed before its first
    trace.

    If the environment's `complete` rejects the episode, all rollouts fail, including successful
    ones: their rewards may depend on the others.
    """
    rollouts = [as_rollout(env, trace, active[trace.id]) for trace in episode.traces]
    if rollouts and env.complete(episode):
        return rollouts
    failures = [(rollout.cause, rollout.error) for rollout in rollouts if rollout.error]
    failure: Any = failures[0] if failures else episode_failure(env, episode)
    if not rollouts:
        raise RolloutError(*failure)
    for rollout in rollouts:
        if not rollout.error:
            fail(rollout, failure)
    return rollouts


def as_rollout(env: vf.Env, trace: vf.Trace, active: ActiveTrace) -> Rollout:
    """Converts a trace to a Rollout: the turns come from our conversation, the messages from
    verifiers' own record."""
    # an agent with its own endpoint is another model
    is_policy = getattr(env.config, trace.agent.name).client is None
    turns = active.kept_turns() if is_policy else Turns()
    metrics = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    if active.conversation and active.conversation.forced:
        metrics["forced_sampling"] = float(active.conversation.forced)
    stop = trace.stop_condition or ""
    messages, num_prompt = messages_of(trace)
    usages = [call.usage for call in trace.calls if call.usage and not turns]
    rollout = Rollout(
        turns=turns,
        text=messages,
        num_prompt_messages=num_prompt,
        reward=float(trace.reward),
        metrics=metrics,
        stop=stop,
        truncated=stop == OVERLONG or any(call.finish_reason == "length" for call in trace.calls),
        overlong=stop == OVERLONG,
        agent=trace.agent.name,
        trainable=trace.agent.trainable and is_policy,
        completion_tokens=sum(usage.completion_tokens for usage in usages),
    )
    if not trace.ok:
        fail(rollout, trace_failure(trace, active))
    elif active.failure:  # verifiers scores what a harness makes of the error
        fail(rollout, active.failure)
    # since 0.4 a limit: verifiers scores the incomplete answer
    elif getattr(trace, "is_timeout", False):
        what = f"{stop.removesuffix('_timeout')} timed out; see timeout of the task and of "
        fail(rollout, ("timeout", f"{what}args.{trace.agent.name}"))
    return rollout


def fail(rollout: Rollout, failure: Failure) -> None:
    """Marks a rollout as failed."""
    rollout.cause, rollout.error = failure
    rollout.stop = "error"
    rollout.reward = 0.0


def trace_failure(trace: vf.Trace, active: ActiveTrace) -> Failure:
    """The last failure of a trace. The type of a verifiers error tells where it arose; only its
    text tells what it was."""
    error, cause = trace.last_error, "environment"
    if error is None:
        return cause, "the trace failed without an error"
    if error.type == "ProviderError":
        cause = active.failure[0] if active.failure else "inference"
    elif timed_out(error):
        cause = "timeout"
    elif trace.timing.scoring.start:  # only scoring can fail a trace after this
        cause = "reward"
    return cause, error_text(error)


def episode_failure(env: vf.Env, episode: vf.Episode) -> Failure:
    """A failure of the environment's own hooks. Agents are judged together in `finalize`."""
    error, name = episode.last_error, type(env).__name__
    if error is None:
        return "environment", (
            f"{name}.complete() does not accept the episode"
            if episode.traces
            else "the episode has no trace"
        )
    if timed_out(error) or getattr(episode, "is_timeout", False):
        return "timeout", error_text(error)
    judged = error.type == "EnvError" and error.message.startswith(f"{name}.finalize()")
    return "reward" if judged else "environment", error_text(error)


def timed_out(error: vf.Error) -> bool:
    """Whether an error is a timeout, which verifiers marks by these words, not by a class of its
    own."""
    return (
        error.type == "TimeoutError"
        or error.message.endswith(" timed out")
        or error.message.startswith("agent timeout: ")
    )


def error_text(error: vf.Error) -> str:
    """An error's message and the end of its traceback, which shows the place in the
    environment's code."""
    return f"{error.type}: {error.message}" + (
        f"\n{error.traceback[-MAX_TRACEBACK:]}" if error.traceback else ""
    )


def messages_of(trace: vf.Trace) -> tuple[list[dict[str, Any]], int]:
    """The messages of the conversation's last branch (the task's opening messages if nothing was
    answered), and the number of them before the first sampled one. If a harness rewrote the
    history, the rewritten messages are not the sampled ones."""
    if branches := trace.branches:
        nodes = branches[-1].nodes
        num_prompt = next((i for i, node in enumerate(nodes) if node.sampled), len(nodes))
        return [message_to_wire(node.message) for node in nodes], num_prompt
    messages = opening(trace.task.data.system_prompt, trace.task.data.prompt)
    return messages, len(messages)
