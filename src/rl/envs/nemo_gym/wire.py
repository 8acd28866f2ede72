"""A NeMo Gym deployment, found through its head server: its agents, their addresses, and requests
that are repeated; and its rows, requests and replies in our terms."""

import asyncio
import json
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, get_args
from urllib.parse import urlsplit

import aiohttp
import yaml

from rl.envs.policy import RolloutError
from rl.models.chat import Message, Tool, chat_call
from rl.system.errors import RunError
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Cause, Rollout, Turn
from rl.wire.turns import answer_digest

START = "start it with `python scripts/nemo_gym.py start ...` or `ng_run`, see docs/nemo_gym.md"
AGENTS, MODELS = "responses_api_agents", "responses_api_models"
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses in seconds between tries while nothing answers; their sum is the time that NeMo Gym
takes to restart."""
MAX_FAILURES = 3
"""Number of answers with status >= 500 that fail an episode: the server's own code failed, and
rarely recovers."""


class Agent(NamedTuple):
    """An agent server, its model server, and the policy servers that this is configured to
    query."""

    url: str
    policy_urls: list[str]
    returns_tokens: bool
    """Whether its answers have token ids and log-probabilities."""
    model_url: str = ""
    """Empty if the head server names no model server that has an address."""


class Head:
    """Requests to the servers of a deployment. Cookies are not kept: they carry the session of
    one episode."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.agents: dict[str, Agent] = {}
        self._http: aiohttp.ClientSession | None = None

    @property
    def http(self) -> aiohttp.ClientSession:
        if self._http is None:  # can only be made inside a running event loop
            timeout, jar = aiohttp.ClientTimeout(total=None, connect=10.0), aiohttp.DummyCookieJar()
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=jar, timeout=timeout
            )
        return self._http

    async def close(self) -> None:
        if self._http:
            await self._http.close()

    async def discover(self) -> None:
        """Asks the head server for its agents. Raises RunError if it does not answer."""
        try:
            async with self.http.get(f"{self.url}/global_config_dict_yaml") as response:
                response.raise_for_status()
                config = yaml.safe_load(json.loads(await response.text()))
        except (aiohttp.ClientError, ValueError, yaml.YAMLError) as error:
            raise RunError(
                f"no NeMo Gym head server at {self.url} ({type(error).__name__}: {error}); {START}"
            ) from error
        self.agents |= find_agents(config, self.url)

    async def post(
        self, url: Callable[[], str], body: Any, cause: Cause, cookies: dict[str, str] | None = None
    ) -> str:
        """Returns a server's answer. Retries with growing pauses while nothing answers or its
        status is 500 or more. Raises RolloutError.

        `url` is asked before each try, because a restarted NeMo Gym has new ports. `cookies` gets
        those of the answer.
        """
        failures = 0
        for pause in (*PAUSES_S, None):
            address = url()
            try:
                async with self.http.post(address, json=body, cookies=cookies) as response:
                    status, text = response.status, await response.text()
                if status == 200:
                    if cookies is not None:
                        cookies.update(
                            {name: morsel.value for name, morsel in response.cookies.items()}
                        )
                    return text
                problem = f"{address} answered {status}: {text[-500:]}"
                failures += 1
                if status < 500 or failures == MAX_FAILURES:
                    break
            except aiohttp.ClientError as error:
                problem = f"{address}: {type(error).__name__} {error}"
            if pause is not None:
                await asyncio.sleep(pause)
                # while the head server is down, the old addresses are kept
                with suppress(RunError):
                    await self.discover()
        raise RolloutError(
            cause,
            f"NeMo Gym (head server {self.url}): {problem}. See ng_run's output; if it is "
            f"gone, {START}",
        )


def server_of(config: dict[str, Any], name: str, kind: str) -> dict[str, Any] | None:
    """The settings of the server `name`, nested as `{name: {kind: {implementation: settings}}}`."""
    entry = config.get(name)
    servers = entry.get(kind) if isinstance(entry, dict) else None
    return next(iter(servers.values())) if isinstance(servers, dict) and servers else None


def find_agents(config: Any, head: str) -> dict[str, Agent]:
    """The agents in a head server's configuration that have an address."""
    agents = {}
    for name in config if isinstance(config, dict) else ():
        settings = server_of(config, name, AGENTS)
        if not settings or not settings.get("port"):
            continue
        model = (
            server_of(config, (settings.get("model_server") or {}).get("name", ""), MODELS) or {}
        )
        urls = resolved(config, model.get("base_url")) or []
        agents[name] = Agent(
            url_of(settings, head),
            [urls] if isinstance(urls, str) else urls,
            bool(model.get("return_token_id_information")),
            url_of(model, head) if model.get("port") else "",
        )
    return agents


def url_of(settings: dict[str, Any], head: str) -> str:
    """The address of a server. One bound to all interfaces is reachable at the head server's
    host."""
    host = settings.get("host") or "127.0.0.1"
    return f"http://{urlsplit(head).hostname if host == '0.0.0.0' else host}:{settings['port']}"


def resolved(config: dict[str, Any], value: Any) -> Any:
    """A setting, or the one that `${name}` refers to: the head server returns its configuration
    unresolved."""
    name = (
        value.removeprefix("${").removesuffix("}")
        if isinstance(value, str) and value.startswith("${")
        else None
    )
    return config.get(name) if name else value


TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
SAMPLING_PARAMS = ("temperature", "top_p", "max_output_tokens")
"""The sampling settings under their names in the Responses API."""
EXTRA_SAMPLING = ("top_k", "min_p", "stop", "seed")
"""Sampling settings without a field in the Responses API; NeMo Gym's vLLM client takes them from
the metadata."""

FAILURE = "_ng_failure_class"
"""The key of a result that NeMo Gym counts as failed: it is stored apart, and asked for again."""


def no_tokens(server: str) -> str:
    """The error message for a model server whose answers have no token ids."""
    return (
        f"{server} returns no token ids; start ng_run with "
        "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml "
        "(return_token_id_information: true)"
    )


def request_body(
    row: dict[str, Any], args: dict[str, Any], sampling: dict[str, Any]
) -> dict[str, Any]:
    """The request for a row: `args` override its responses_create_params, and our sampling
    overrides both."""
    params = row["responses_create_params"] | args
    params |= {"temperature": sampling["temperature"], "max_output_tokens": sampling["max_tokens"]}
    params["top_p"] = sampling.get("top_p")
    if params["top_p"] is None:
        del params["top_p"]
    extra = {key: sampling[key] for key in EXTRA_SAMPLING if sampling.get(key) is not None}
    if extra:
        metadata = params.get("metadata") or {}
        extra = json.loads(metadata.get("extra_body", "{}")) | extra
        params["metadata"] = metadata | {"extra_body": json.dumps(extra)}
    return row | {"responses_create_params": params}


def decode_reply(text: str) -> dict[str, Any]:
    """Decodes a reply of `/run`. Raises RolloutError if the agent reports a failure, or there is
    no valid `response.output`."""
    try:
        reply = json.loads(text)
        if kind := reply.get(FAILURE):
            cause: Any = kind if kind in get_args(Cause) else "environment"
            raise RolloutError(
                cause, str(reply.get("error") or f"the agent reports the failure {kind}")
            )
        if all(isinstance(item, dict) for item in reply["response"]["output"]):
            return reply
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    raise RolloutError("environment", f"/run answered without response.output: {text[:500]}")


def to_rollout(
    reply: dict[str, Any],
    body: dict[str, Any],
    version: int | None,
    exact: dict[str, list[VersionSpan]],
) -> Rollout:
    """Converts a reply to a rollout. `version` is None if an endpoint played, which returns no
    tokens; that of answers whose versions are not in `exact`, by answer_digest. Raises
    RolloutError."""
    response, params = reply["response"], body["responses_create_params"]
    reward = reply.get("reward")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RolloutError(
            "reward",
            f"NeMo Gym returned the reward {reward!r}, not a finite number; see the "
            "resources server's output",
        )
    used = response.get("temperature")
    if used not in (None, params["temperature"]):
        raise RolloutError(
            "environment",
            f"the agent sampled at temperature {used}, not at the requested "
            f"{params['temperature']}",
        )
    items = response["output"]
    reason = (response.get("incomplete_details") or {}).get("reason")
    truncated, overlong, turns = reason == "max_output_tokens", False, []
    if version is not None:
        answered = [item for item in items if item.get("generation_token_ids")]
        turns = [as_turn(item, version, exact.get(digest_of(item) or "")) for item in answered]
        # To a prompt that fills the context, the model server answers with an empty item marked
        # as incomplete.
        if truncated and items and items[-1] in answered[-1:]:
            turns[-1].finish_reason = "length"
        else:
            overlong = truncated
        if not turns and not overlong:
            raise RolloutError("inference", no_tokens("NeMo Gym"))
    prompt = to_messages(input_items(params))
    # the finite numbers that the resources server added to the row
    metrics = {
        key: float(value)
        for key, value in reply.items()
        if key not in {*body, "reward"} and isinstance(value, int | float) and math.isfinite(value)
    }
    return Rollout(
        turns=turns,
        text=[*prompt, *to_messages(items)],
        num_prompt_messages=len(prompt),
        reward=float(reward),
        metrics=metrics,
        stop=reason or "completed",
        truncated=truncated,
        overlong=overlong,
        completion_tokens=(response.get("usage") or {}).get("output_tokens") or 0,
    )


def digest_of(item: dict[str, Any]) -> str | None:
    """The answer_digest of a turn, from its last item; None for any other item, and for tokens
    that are none."""
    try:
        return (
            answer_digest(*(item[key] for key in TOKEN_KEYS))
            if item.get("generation_token_ids")
            else None
        )
    except (LookupError, TypeError, OverflowError):
        return None


def as_turn(
    item: dict[str, Any],
    version: int,
    spans: list[VersionSpan] | None = None,
    finish_reason: str = "stop",
) -> Turn:
    """The turn of an item or message, without tokens if the model server does not return them;
    of `version`, unless its `spans` are known. Raises RolloutError."""
    prompt_ids, completion_ids, logprobs = ([*(item.get(key) or ())] for key in TOKEN_KEYS)
    try:
        versions = spans or [VersionSpan(version, len(completion_ids))]
        return Turn.of(prompt_ids, completion_ids, logprobs, versions, finish_reason)
    except (ValueError, TypeError, OverflowError) as error:
        raise RolloutError("inference", f"NeMo Gym's model server: {error}") from error


def input_items(params: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of a request, whose input may be plain text."""
    items = params["input"]
    return (
        [{"role": "user", "content": items}]
        if isinstance(items, str)
        else [dict(item) for item in items]
    )


def joined_text(content: Any) -> Any:
    """Joins content parts into one text if all of them are text."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and "text" in part for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


def chat_prompt(params: dict[str, Any]) -> tuple[list[Message], list[Tool]]:
    """The messages and tools of a row's responses_create_params in chat API form."""
    functions = [
        {key: value for key, value in tool.items() if key not in ("type", "strict")}
        for tool in params.get("tools") or ()
    ]
    return to_messages(input_items(params)), [
        {"type": "function", "function": function} for function in functions
    ]


def to_messages(items: Iterable[dict[str, Any]]) -> list[Message]:
    """Converts items of the Responses API to chat messages; reasoning, text and calls of one
    turn become one message."""
    messages: list[Message] = []
    answer: Message | None = None
    for item in items:
        kind, content = item.get("type") or "message", joined_text(item.get("content"))
        if kind == "function_call_output":
            output = joined_text(item.get("output"))
            call = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": call, "content": output})
            answer = None
            continue
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": content})
            answer = None
            continue
        if answer is None:
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        if kind == "reasoning":
            thought = answer.get("reasoning_content", "")
            answer["reasoning_content"] = thought + joined_text(item.get("summary") or "")
        elif kind == "function_call":
            answer.setdefault("tool_calls", []).append(
                chat_call(item | {"id": item.get("call_id")})
            )
        else:
            answer["content"] += str(content or "") if kind == "message" else f"[{kind}]"
        if item.get("generation_token_ids"):  # the last item of a turn
            answer = None
    return messages
