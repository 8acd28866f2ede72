"""The seam to environments: the only file that imports `verifiers`. It turns a task index into finished Rollouts, nothing else.

Loaded in a worker process, because constructing an environment installs signal handlers, and its code may block or crash.
"""

import asyncio
import signal
import traceback
from typing import Any

import datasets
import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ResponseTokens, Usage

from rl.orchestrator.chat import ChatRenderer
from rl.orchestrator.env_ids import EnvLoadError, check_installed
from rl.orchestrator.inference_client import InferenceServers, PromptTooLongError
from rl.orchestrator.rollouts import Rollout, Split, Turn

SAMPLING_KEYS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed")
CHECKED_PROMPTS = 64
"""So many prompts of a data set are measured against the context before the run starts."""


def wire(message: Any) -> dict[str, Any]:
    """A message as a plain dict without empty fields."""
    plain = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    return {key: plain[key] for key in ("role", "content") if plain.get(key) is not None}


class RolloutClient(Client):
    """What an environment calls the model through: tokens in, tokens out, and every turn kept exactly as it was sampled.

    `turns[trajectory_id]` grows by one Turn a call.
    """

    def __init__(self, servers: InferenceServers, server: int, chat: ChatRenderer, max_model_len: int):
        super().__init__(servers)
        self.server = server
        self.chat = chat
        self.max_model_len = max_model_len
        self.turns: dict[str, list[Turn]] = {}

    def setup_client(self, config: Any) -> InferenceServers:
        raise NotImplementedError("constructed with live servers, never from a ClientConfig")

    async def close(self) -> None:
        """The servers belong to the worker."""

    async def to_native_tool(self, tool: Any) -> Any:
        raise NotImplementedError("tools are not supported yet")

    async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [wire(message) for message in messages], {}

    def prompt_ids(self, prompt: list[dict[str, Any]], state: Any) -> list[int]:
        """Continues the newest earlier turn whose conversation this prompt extends, id for id; else renders anew."""
        turns = self.turns.get(state["trajectory_id"], [])
        for step, turn in zip(reversed(state["trajectory"]), reversed(turns), strict=False):
            seen = [wire(message) for message in [*step["prompt"], *step["completion"]]]
            if len(seen) < len(prompt) and prompt[: len(seen)] == seen:
                ids = self.chat.next_prompt_ids(turn.prompt_ids + turn.completion_ids, prompt, len(seen))
                if ids is not None:
                    return ids
        return self.chat.prompt_ids(prompt)

    async def get_native_response(self, prompt: Any, model: str, sampling_args: dict[str, Any], tools: Any = None, **kwargs: Any) -> Turn:
        state = kwargs["state"]
        ids = self.prompt_ids(prompt, state)
        sampling = {key: sampling_args[key] for key in SAMPLING_KEYS if sampling_args.get(key) is not None}
        room = self.max_model_len - len(ids)
        if room <= 0:
            raise vf.OverlongPromptError(f"a prompt of {len(ids)} tokens fills model.max_model_len = {self.max_model_len}")
        sampling["max_tokens"] = min(sampling["max_tokens"], room)
        try:
            answer = await self.client.generate(self.server, ids, sampling)
        except PromptTooLongError as error:
            raise vf.OverlongPromptError(str(error)) from error
        turn = Turn(
            prompt_ids=ids,
            completion_ids=answer.token_ids,
            logprobs=answer.logprobs,
            policy_versions=answer.policy_versions,
            finish_reason=answer.finish_reason,
        )
        self.turns.setdefault(state["trajectory_id"], []).append(turn)
        return turn

    async def raise_from_native_response(self, response: Turn) -> None:
        """An immediate end of turn is a legal answer, and can be trained on."""

    async def from_native_response(self, response: Turn) -> Response:
        num_prompt, num_new = len(response.prompt_ids), len(response.completion_ids)
        tokens = ResponseTokens(
            prompt_ids=response.prompt_ids,
            prompt_mask=[0] * num_prompt,
            completion_ids=response.completion_ids,
            completion_mask=[1] * num_new,
            completion_logprobs=response.logprobs,
        )
        message = ResponseMessage(
            content=self.chat.decode(response.completion_ids),
            tokens=tokens,
            finish_reason="length" if response.finish_reason == "length" else "stop",
            is_truncated=response.finish_reason == "length",
        )
        usage = Usage(prompt_tokens=num_prompt, reasoning_tokens=0, completion_tokens=num_new, total_tokens=num_prompt + num_new)
        return Response(id="", created=0, model="", usage=usage, message=message)


def load(env_id: str, args: dict[str, Any]) -> Any:
    """Loads a classic environment by `name`, `owner/name` or `owner/name@version`.

    Raises EnvLoadError for one that is not installed, has another version, raises, or needs what is not supported.
    """
    path = check_installed(env_id)
    datasets.disable_progress_bars()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        env = vf.load_environment(path, **args)
    except (ValueError, RuntimeError, TypeError, vf.Error) as error:
        cause = error.__cause__ or error
        place = traceback.extract_tb(cause.__traceback__)[-1]
        raise EnvLoadError(
            f"environment {env_id} with args {args}: its load_environment raised {type(cause).__name__}: {cause} "
            f"(at {place.filename}:{place.lineno}); check orchestrator.environment.args and the environment itself"
        ) from error
    for number, handler in handlers.items():  # constructing an environment has replaced them
        signal.signal(number, handler)
    if isinstance(env, vf.ToolEnv):
        raise EnvLoadError(f"environment {env_id} is a ToolEnv: tools are not supported yet; use a SingleTurnEnv or a MultiTurnEnv")
    return env


class ClassicEnvironment:
    """A verifiers environment of the classic API: SingleTurnEnv, MultiTurnEnv, and group reward functions."""

    def __init__(self, env_id: str, args: dict[str, Any], chat: ChatRenderer, max_model_len: int):
        self.env = load(env_id, args)
        self.chat = chat
        self.max_model_len = max_model_len
        self.tasks: dict[str, list[dict[str, Any]]] = {
            "train": self.env.get_dataset().to_list(),
            "eval": self.env.get_eval_dataset().to_list(),
        }

    @property
    def scores_groups(self) -> bool:
        """Whether the rollouts of a task are scored together, so that one cannot be replaced alone."""
        return self.env.requires_group_rollouts

    def check_prompts(self, max_tokens: int) -> str | None:
        """What is wrong with the prompts' lengths, or None; looks at the first ones only."""
        for row in self.tasks["train"][:CHECKED_PROMPTS]:
            length = len(self.chat.prompt_ids([wire(message) for message in row["prompt"]]))
            if length + max_tokens > self.max_model_len:
                return (
                    f"a prompt of {length} tokens and orchestrator.sampling.max_tokens = {max_tokens} exceed model.max_model_len = "
                    f"{self.max_model_len}; raise model.max_model_len to {length + max_tokens} or lower max_tokens"
                )
        return None

    async def play(
        self, split: Split, task: int, num_rollouts: int, servers: InferenceServers, server: int, sampling: dict[str, Any], timeout_s: float
    ) -> list[Rollout]:
        """Plays one task several times at once. A rollout that fails comes back with its error; siblings are unharmed,
        unless the environment scores groups as a whole."""
        row = self.tasks[split][task]
        client = RolloutClient(servers, server, self.chat, self.max_model_len)
        common: dict[str, Any] = {"client": client, "model": "policy", "sampling_args": sampling, "state_columns": ["trajectory_id"]}
        if self.scores_groups:
            return await self._guarded(
                self.env.run_group([dict(row) for _ in range(num_rollouts)], **common), client, num_rollouts, timeout_s
            )
        plays = [self._guarded(self.env.run_rollout(dict(row), **common), client, 1, timeout_s) for _ in range(num_rollouts)]
        return [rollout for rollouts in await asyncio.gather(*plays) for rollout in rollouts]

    async def _guarded(self, play: Any, client: RolloutClient, count: int, timeout_s: float) -> list[Rollout]:
        """The one broad catch around rollouts: an environment may raise anything, and that is a failed rollout, not a failed run."""
        try:
            async with asyncio.timeout(timeout_s):  # not wait_for, which in Python 3.11 can swallow a cancellation
                outputs = await play
        except TimeoutError:
            return [Rollout(stop="timeout", error=f"timeout: longer than orchestrator.rollout_timeout_s = {timeout_s:.0f}")] * count
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            return [Rollout(stop="error", error=f"{type(error).__name__}: {error}\n{text[-2000:]}")] * count
        return [as_rollout(output, client) for output in (outputs if isinstance(outputs, list) else [outputs])]


def as_rollout(output: dict[str, Any], client: RolloutClient) -> Rollout:
    """verifiers' output, with the turns that the client kept."""
    error = output.get("error")
    return Rollout(
        turns=client.turns.get(output["trajectory_id"], []),
        messages=[wire(message) for message in [*output["prompt"], *(output["completion"] or [])]],
        reward=float(output["reward"] or 0.0),
        metrics={key: float(value) for key, value in (output.get("metrics") or {}).items() if value is not None},
        stop=output.get("stop_condition") or "",
        truncated=bool(output.get("is_truncated")),
        error=str(error.get("error_chain_repr") or error) if error else None,
    )
