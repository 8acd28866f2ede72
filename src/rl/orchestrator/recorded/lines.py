"""A line of recorded rollouts, as docs/recorded.md describes it, and its conversion to a
rollout. Checks everything that could train something else than what was sampled."""

import math
from collections import Counter
from typing import Any

import msgspec

from rl.config.loss import AnyLossConfig, CrossEntropyConfig, PolicyGradientConfig
from rl.config.run import RLConfig
from rl.models.chat import Message, Tool, chat_tools
from rl.models.renderer import conversation_ids, has_content, load_renderer, missing_text
from rl.orchestrator.workers.validate_played import MOST_LIKELY
from rl.system.errors import RunError
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Rollout, unfit
from rl.wire.turns import Turn, Turns

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
        has_logprobs = any(turn.logprobs is not None for turn in recorded)
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
            )
        except ValueError as error:
            raise RunError(f"{where}: {error}") from None

    def fault(self, turn: RecordedTurn) -> str:
        """Names the first field of a turn that cannot be trained, and the remedy; empty if there
        is none."""
        limit, loss = self.vocabulary or MAX_IDS, self.config.trainer.loss
        for name, ids in (("prompt_ids", turn.prompt_ids), ("completion_ids", turn.completion_ids)):
            for i, id in enumerate(ids if ids and not 0 <= min(ids) <= max(ids) < limit else ()):
                if not 0 <= id < limit:
                    return (
                        f"{name}[{i}]: {id} is not in the model's vocabulary of {limit}: was it "
                        "recorded with another model?"
                    )
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
