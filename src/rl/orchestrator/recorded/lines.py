"""A line of recorded rollouts, as docs/recorded.md describes it, and its conversion to a rollout.
Checks everything that could train something else than what was sampled.

Rows that verifiers has saved become such lines: results.jsonl of its classic API, and traces.jsonl
of its v1 API.
"""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import msgspec

from rl.config.loss import AnyLossConfig, CrossEntropyConfig, PolicyGradientConfig
from rl.config.run import RLConfig
from rl.models.chat import Message, Tool, chat_call, chat_tools
from rl.models.renderer import conversation_ids, has_content, load_renderer, missing_text
from rl.orchestrator.workers.pool_worker import MOST_LIKELY
from rl.system.errors import RunError
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Rollout, unfit
from rl.wire.turns import Turn, Turns, pack_kept

NO_VERSION = -1
"""Policy version of tokens of which nobody says who sampled them."""
MAX_IDS = 1 << 31
"""Ids are stored as int32. The limit of a model that does not tell the size of its vocabulary."""


class RecordedTurn(msgspec.Struct, kw_only=True):
    """One answer: a `Turn` whose sampler may be unknown."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None = None
    policy_versions: list[VersionSpan] | None = None
    finish_reason: str = "stop"
    routes: bytes = b""
    kept: list[list[int] | None] | None = None
    """The ids that truncation kept at each token: none if all were, null if too many to train."""


class RecordedLine(msgspec.Struct, kw_only=True):
    """One rollout."""

    reward: float | None
    """Null only if the rollout failed."""
    turns: list[RecordedTurn] | None = None
    """Missing: `messages` are rendered, and their answers tokenised."""
    messages: list[Message] = []
    num_prompt_messages: int | None = None
    tools: list[Tool] | None = None
    """Tool definitions that `messages` are rendered with."""
    env: str = "recorded"
    task: int | str | None = None
    """Missing: rollouts with equal prompts are of one task."""
    group_id: int | str | None = None
    """Rollouts of one task are compared with each other; with this, only those that have the
    same one."""
    sample: int | str | None = None
    """Rollouts with the same one are agents of one episode. Missing: an episode of its own."""
    agent: str = "agent"
    agents: int = 1
    """Number of lines of its episode, of which several may have one agent."""
    rollout_id: int | str | None = None
    """Number in its group, in a run's own rollouts."""
    temperature: float | None = None
    """Missing: orchestrator.sampling.temperature."""
    metrics: dict[str, float] = {}
    stop: str = ""
    truncated: bool = False
    outcome: str = ""
    error: str | None = None
    why: str | None = None
    trainable: bool = True
    num_turns: int | None = None
    """Number of answers that the policy sampled."""

    @property
    def failure(self) -> str | None:
        """The error of a rollout that failed."""
        return self.error or (
            f"its outcome is {self.outcome}" if self.outcome in ("failed", "timeout") else None
        )

    @property
    def is_trainable(self) -> bool:
        """Whether its agent is trained."""
        return self.trainable and self.why != "not_trainable"

    @property
    def prompt(self) -> Any:
        """What tells the task of a rollout without a name for it."""
        if self.messages:
            roles = [message.get("role") for message in self.messages]
            first = roles.index("assistant") if "assistant" in roles else None
            end = first if self.num_prompt_messages is None else self.num_prompt_messages
            return self.messages[:end]
        return self.turns[0].prompt_ids if self.turns else None


def parse(row: dict[str, Any], where: str) -> RecordedLine:
    """Returns a line's fields. Raises RunError that names the field."""
    if "rollout_id" in row:  # of a run's own rollouts
        row = {"sample": row.get("episode")} | row
    try:
        line = msgspec.convert(row, RecordedLine)
    except msgspec.ValidationError as error:
        raise RunError(f"{where}: {error}; docs/recorded.md has the form of a line") from None
    for name in RecordedLine.__struct_fields__:
        try:
            msgspec.json.encode(getattr(line, name))
        except (ValueError, RecursionError) as error:  # half of a surrogate pair, say
            raise RunError(
                f"{where}: {name}: cannot be written again ({error}); correct it, or leave "
                "the line out"
            ) from None
    return line


def weighs_by_sampler(loss: AnyLossConfig) -> bool:
    """Whether a loss depends on the log-probabilities of the sampler."""
    return not isinstance(loss, CrossEntropyConfig) and not (
        isinstance(loss, PolicyGradientConfig) and loss.importance == "none"
    )


class Converter:
    """Makes rollouts from lines, for one model. `counts` says how many lack what, for the user."""

    def __init__(self, config: RLConfig, model_path: str, vocabulary: int):
        self.config, self.model_path, self.vocabulary = config, model_path, vocabulary
        self.counts: Counter[str] = Counter()
        self.renderer: Any = None

    def rollout(self, line: RecordedLine, where: str) -> Rollout:
        """Returns a line's rollout. Raises RunError that names the line and the field."""
        error = line.failure
        if line.reward is None and not error:
            raise RunError(
                f"{where}: reward: null, but the rollout did not fail; give a number, or "
                "leave the line out"
            )
        recorded = line.turns
        if error or recorded is None:
            recorded = [] if error else self.rendered(line, where)
        turns = [self.turn(turn, f"{where}: turns[{i}]") for i, turn in enumerate(recorded)]
        has_logprobs = any(turn.logprobs for turn in recorded)
        if any(turn.logprobs is None for turn in recorded):
            self.counts[
                "have no log-probabilities: no ratio to their sampler is computed, and no "
                "mask on it acts on them"
            ] += 1
        if any(turn.policy_versions is None for turn in recorded):
            self.counts[
                "do not say which version sampled them: their lag is neither counted nor bounded"
            ] += 1
            if line.is_trainable and line.temperature is None and has_logprobs:
                self.counts[
                    "have log-probabilities, but neither temperature nor versions: nothing "
                    "compares them with the trainer's"
                ] += 1
        if (
            has_logprobs
            and line.is_trainable
            and not all(turn.kept for turn in recorded)
            and self.config.truncates(self.vocabulary, replayed=True)
        ):
            self.counts[
                "do not say which ids top_p, top_k or min_p kept: if they were sampled so, ratios "
                "to their sampler are below 1: record them again"
            ] += 1
        rollout = Rollout(
            turns=Turns.of(turns),
            text=line.messages,
            num_prompt_messages=line.num_prompt_messages,
            reward=line.reward or 0.0,
            metrics=line.metrics,
            stop=line.stop,
            truncated=line.truncated or any(turn.finish_reason == "length" for turn in recorded),
            overlong=line.outcome == "overlong",
            error=error,
            cause=("timeout" if line.outcome == "timeout" else "environment") if error else None,
            agent=line.agent,
            trainable=line.is_trainable,
        )
        if fault := unfit(rollout):
            raise RunError(f"{where}: {fault}")
        return rollout

    def turn(self, turn: RecordedTurn, where: str) -> Turn:
        """Returns a checked turn. Raises RunError."""
        count = len(turn.completion_ids)
        if fault := self.fault(turn):
            raise RunError(f"{where}.{fault}")
        try:
            return Turn.of(
                turn.prompt_ids,
                turn.completion_ids,
                [None] * count if turn.logprobs is None else turn.logprobs,
                [VersionSpan(NO_VERSION, count)]
                if turn.policy_versions is None
                else turn.policy_versions,
                turn.finish_reason,
                routes=turn.routes,
                kept=pack_kept(self.limited(turn.kept or [])),
            )
        except ValueError as error:
            raise RunError(f"{where}: {error}") from None

    def limited(self, sets: list[list[int] | None]) -> list[list[int] | None]:
        """Returns kept ids within trainer.max_kept."""
        if not (limit := self.config.trainer.max_kept):
            return [[]] * len(sets)
        return [None if ids and len(ids) > limit else ids for ids in sets]

    def fault(self, turn: RecordedTurn) -> str:
        """Names the first field of a turn that cannot be trained, and the remedy; empty if there
        is none."""
        limit, loss = self.vocabulary or MAX_IDS, self.config.trainer.loss
        for name, ids in (("prompt_ids", turn.prompt_ids), ("completion_ids", turn.completion_ids)):
            for i, id in enumerate(ids):
                if not 0 <= id < limit:
                    return (
                        f"{name}[{i}]: {id} is not in the model's vocabulary of {limit}: was it "
                        "recorded with another model?"
                    )
        for i, (id, ids) in enumerate(zip(turn.completion_ids, turn.kept or (), strict=False)):
            if ids and (id not in ids or not 0 <= min(ids) <= max(ids) < limit):
                return f"kept[{i}]: lacks the token {id} itself, or has ids of another vocabulary"
            if ids and len({*ids}) < len(ids):
                return f"kept[{i}]: has an id twice"
        num_tokens = len(turn.prompt_ids) + len(turn.completion_ids)
        if num_tokens > self.config.model.max_model_len:
            return (
                f"completion_ids: ends after {num_tokens} tokens, but model.max_model_len = "
                f"{self.config.model.max_model_len}: raise it"
            )
        if turn.logprobs is None and weighs_by_sampler(loss):
            change = "trainer.loss.importance = none"
            if loss.type != "policy_gradient":
                change = "type = policy_gradient, importance = none"
            return (
                f"logprobs: missing, and trainer.loss.type = {loss.type} weighs tokens by them: "
                f"record them, or choose a loss without: {change}, or trainer.loss.type = "
                "cross_entropy"
            )
        for i, logprob in enumerate(turn.logprobs or ()):
            if not -math.inf < logprob <= MOST_LIKELY:
                return (
                    f"logprobs[{i}]: {logprob} is not the logarithm of a probability: give a "
                    "finite number of at most 0, in nats"
                )
        if turn.policy_versions is None and not self.config.max_lag:
            return (
                "policy_versions: missing, and max_lag = 0 trains only tokens of exactly the "
                "trained version: give them, or raise max_lag"
            )
        if any(span.policy_version < 0 for span in turn.policy_versions or ()):
            return "policy_versions: a version is 0, the model that the run begins with, or more"
        return ""

    def rendered(self, line: RecordedLine, where: str) -> list[RecordedTurn]:
        """Returns the turns of a rollout that is only text, with the ids that our renderer gives
        it. Raises RunError."""
        if line.truncated or line.outcome in ("truncated", "overlong", "empty"):
            self.counts[
                "are truncated and have no token ids: they are not trained, but their rewards count"
            ] += 1
            return []
        answers = self.answers(line, where)
        try:
            self.renderer = self.renderer or load_renderer(
                self.model_path,
                self.config.renderer,
                trust_remote_code=self.config.model.trust_remote_code,
            )
            turns, tools = [], chat_tools(line.tools)
            for i, _, prompt, answer in conversation_ids(
                self.renderer, line.messages, answers, tools
            ):
                if lost := missing_text(self.renderer, prompt, answer, line.messages[i], tools):
                    raise RunError(lost)
                turns.append(RecordedTurn(prompt_ids=prompt, completion_ids=answer))
        except RunError as error:
            raise RunError(f"{where}: messages: {error}") from None
        self.counts["have no token ids: their messages were rendered and tokenised anew"] += 1
        return turns

    def answers(self, line: RecordedLine, where: str) -> list[int]:
        """Returns the indices of the messages that the policy wrote. Raises RunError."""
        if not line.messages:
            raise RunError(
                f"{where}: has neither turns nor messages; docs/recorded.md has the form of a line"
            )
        answers, first = list[int](), line.num_prompt_messages or 0
        for i, message in enumerate(line.messages):
            if not isinstance(role := message.get("role"), str):
                raise RunError(f"{where}: messages[{i}].role: missing")
            if i >= first and role == "assistant" and has_content(message):
                answers.append(i)
        if line.num_turns and line.num_turns < len(answers):
            raise RunError(
                f"{where}: the policy sampled {line.num_turns} of its {len(answers)} answers, "
                "and nothing says which: record token ids (turns)"
            )
        return answers


# Rows of verifiers --------------------------------------------------------------------------------


Row = dict[str, Any]


def lines_of(row: Row) -> Iterator[Row]:
    """Yields the lines of a row: of a v1 episode one for each trace, of any row that is not
    verifiers' itself. Raises KeyError, TypeError and AttributeError for a row that lacks what
    verifiers writes, RunError for one that cannot be trained."""
    if isinstance(row.get("traces"), list):
        yield from (line_of_trace(trace, row) for trace in row["traces"])
    elif "example_id" in row and "completion" in row:
        yield line_of_result(row)
    else:
        yield row


def line_of_result(row: Row) -> Row:
    """Returns the line of a row of the classic API. Token ids are in its `trajectory`, if that
    is among the saved state columns."""
    error, prompt, completion = row.get("error"), row["prompt"], row["completion"]
    line = {
        "task": row["example_id"],
        "reward": None if error else row["reward"],
        "metrics": row.get("metrics") or {},
        "stop": row.get("stop_condition") or "",
        "truncated": bool(row.get("is_truncated")),
    }
    info = row.get("info")
    # an EnvGroup's name, or names, of the environment
    if env := info.get("env_id") if isinstance(info, dict) else None:
        line["env"] = env if isinstance(env, str) else "/".join(env)
    if error:
        chain = error.get("error_chain_repr", error) if isinstance(error, dict) else error
        line["error"] = str(chain)
    steps = row.get("trajectory")
    if steps and all(step.get("tokens") for step in steps):
        line["turns"] = [turn_of_step(step["tokens"]) for step in steps]
    if isinstance(prompt, list) and isinstance(completion, list):
        line |= {
            "messages": [message_of(message) for message in (*prompt, *completion)],
            "num_prompt_messages": len(prompt),
            "tools": row.get("tool_defs"),
        }
    elif "turns" not in line and not error:
        raise RunError(
            "completion: is text without token ids; save them, with trajectory among "
            "verifiers' state columns"
        )
    return line


def turn_of_step(tokens: Row) -> Row:
    """Returns the turn of a step of a trajectory. Masked tokens of a completion are not the
    policy's: nothing says how to train it then."""
    if not all(tokens["completion_mask"]):
        raise RunError("trajectory: an answer has masked tokens, which the policy did not sample")
    reason = "length" if tokens.get("is_truncated") else "stop"
    turn = {
        "prompt_ids": tokens["prompt_ids"],
        "completion_ids": tokens["completion_ids"],
        "finish_reason": reason,
    }
    return turn | {"logprobs": logprobs_of(turn, tokens.get("completion_logprobs"))}


def logprobs_of(turn: Row, saved: list[float] | None) -> list[float] | None:
    """Returns the log-probabilities of a turn: verifiers writes an empty list also for those
    that it does not have."""
    return saved or (None if turn["completion_ids"] else [])


def message_of(message: Row) -> Row:
    """Returns a message in the form of chat APIs: calls are JSON text in the classic API, and
    have no `function` in v1."""
    calls = [chat_call(call) for call in message.get("tool_calls") or ()]
    return {key: value for key, value in message.items() if value is not None} | (
        {"tool_calls": calls} if calls else {}
    )


def line_of_trace(trace: Row, episode: Row) -> Row:
    """Returns the line of one agent of an episode of the v1 API."""
    nodes, task, agent = trace["nodes"], episode["task"], trace["agent"]
    rewards = {name: reward for name, reward in trace.get("rewards", {}).items() if reward}
    metrics = {name: reward["score"] for name, reward in rewards.items()} | {
        name: value for name, value in trace.get("metrics", {}).items() if value is not None
    }
    path = path_to(nodes, len(nodes) - 1)
    sampled = [i for i, node in enumerate(nodes) if node.get("sampled")]
    prompt = takewhile(lambda i: not nodes[i].get("sampled"), path)
    line = {
        "env": episode.get("env", {}).get("id") or "recorded",
        "task": task.get("key") or task.get("hash"),
        "group_id": (episode.get("group") or {}).get("id"),
        "sample": episode["id"],
        "agent": agent.get("name", "agent"),
        "reward": sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards.values()),
        "metrics": metrics,
        "stop": trace.get("stop_condition") or "",
        "truncated": any(call.get("finish_reason") == "length" for call in trace.get("calls", ())),
        "messages": [message_of(nodes[i]["message"]) for i in path],
        "num_prompt_messages": len([*prompt]),
        "tools": trace.get("tools"),
        "num_turns": len(sampled),
    }
    if not (episode.get("ok") and trace.get("ok")):
        errors = [*episode.get("errors", ()), *trace.get("errors", ())]
        text = str(errors[-1]["message"]) if errors else "the episode was not completed"
        line |= {"reward": None, "error": text}
    if agent.get("trainable", True):
        line["temperature"] = temperature_of(trace)
    else:
        line["trainable"] = False
    if sampled and all(nodes[i].get("token_ids") for i in sampled):
        line["turns"] = [turn_of_node(nodes, i) for i in sampled]
    return line


def temperature_of(trace: Row) -> float | None:
    """Returns the temperature of the calls of a trace that were answered; None if it is not
    recorded. Raises RunError if they differ."""
    answered = [call for call in trace.get("calls", ()) if not call.get("error")]
    temperatures = {(call.get("sampling") or {}).get("temperature") for call in answered} or {None}
    if len(temperatures) > 1:
        values = ", ".join(sorted(map(str, temperatures)))
        raise RunError(
            f"calls: sampled at several temperatures ({values}), but a rollout is trained at "
            "one; leave it out"
        )
    return temperatures.pop()


def path_to(nodes: list[Row], last: int) -> list[int]:
    """Returns the indices of a node and those before it in its conversation, in order."""
    path: list[int] = []
    at: int | None = last if nodes else None
    while at is not None:
        path.insert(0, at)
        at = nodes[at].get("parent")
    return path


def turn_of_node(nodes: list[Row], index: int) -> Row:
    """Returns the turn that sampled a node: its own tokens begin with the end of the prompt."""
    before = [id for i in path_to(nodes, index)[:-1] for id in nodes[i].get("token_ids", ())]
    ids, mask = nodes[index]["token_ids"], nodes[index]["mask"]
    first = mask.index(True) if True in mask else len(mask)
    if not all(mask[first:]):
        raise RunError(
            f"nodes[{index}].mask: an answer has masked tokens, which the policy did not sample"
        )
    turn = {"prompt_ids": before + ids[:first], "completion_ids": ids[first:]}
    return turn | {"logprobs": logprobs_of(turn, nodes[index].get("logprobs"))}
