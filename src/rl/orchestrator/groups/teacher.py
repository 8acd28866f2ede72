"""The teacher of on-policy distillation: log-probabilities of the sampled tokens from any
OpenAI-compatible vLLM server.

Token ids are sent as `prompt` of /completions, and `prompt_logprobs` come back, each given the
preceding tokens. vLLM computes them at temperature 1 and without top_p and the like, whatever the
request says, so distilled rollouts have to be sampled at temperature 1 (`rl.config.check.check`
ensures this). With a --logprobs-mode of logits vLLM 0.32 gives logits here as well, most of them
positive: such a server is refused.
"""

import asyncio
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from rl.config.orchestrator import OrchestratorConfig, TeacherConfig
from rl.config.run import RLConfig
from rl.models import probes
from rl.orchestrator.batches.contents import is_trained
from rl.run_dir.access_token import hides_keys
from rl.run_dir.files import UNREADABLE
from rl.system.credentials import redact
from rl.system.errors import RunError
from rl.wire.http import RETRY_S, AwayError, HttpClient, RefusedError, describe_refusal
from rl.wire.rollouts import Group, Rollout
from rl.wire.turns import pack_logprobs, unpack_ids
from rl.wire.worker_messages import Ready, RenderedChat

TRY_AGAIN = (408, 425, 429)
"""Statuses below 500 after which the same request may succeed later."""
NO_SUCH_ROUTE = (404, 405, 501)
PROBE = (
    "The teacher and the model must share their tokens: 1 + 2 = 3, naïve café, def f(x): return x"
)
ROUNDING = 1e-3
"""A log-probability, nats, may be above 0 by so much."""
LEAST_PLAIN = -3.0
"""The mean log-probability of the tokens of probes.CHAT, nats. Measured, with the gain that
teacher.least_gain is compared with: SmolLM2-135M-Instruct -1.2 and 3.7, with a random layer 15 of
30 -4.6 and 2.9, with a random first layer -10.1 and -0.5; a byte model that knows only one form of
sums -7.4 and 0.4; random weights, of that size or bytes, at most 0.07 (eight models)."""

T = TypeVar("T")


class UnreadableError(RunError):
    """An answer lacks what was asked for. Caught for a teacher that passed `check`, which is
    then asked again."""


class PromptToken(msgspec.Struct):
    """A token's entry in `prompt_logprobs`."""

    logprob: float


class ScoredPrompt(msgspec.Struct):
    """The part of a completion that is used."""

    prompt_logprobs: list[dict[int, PromptToken] | None] | None = None
    """One entry per prompt token, by token id; None for the first."""


class Completion(msgspec.Struct):
    """The answer to /completions."""

    choices: list[ScoredPrompt]


class ServedModel(msgspec.Struct):
    """One entry of /models; vLLM includes its maximum sequence length."""

    id: str
    max_model_len: int | None = None


class ServedModels(msgspec.Struct):
    """The answer to /models."""

    data: list[ServedModel]


class Tokenized(msgspec.Struct):
    """The answer to vLLM's /tokenize."""

    tokens: list[int]


class Detokenized(msgspec.Struct):
    """The answer to vLLM's /detokenize."""

    prompt: str


class Teacher:
    """One teacher server. Call `check` before anything else."""

    def __init__(self, config: TeacherConfig):
        self.config = config
        self.url = config.base_url.rstrip("/")
        self.model = config.model
        self.checked = False
        self.http = HttpClient()
        key = os.environ.get(config.api_key_var)
        self.withheld = bool(key) and not (hides_keys(self.url) or config.key_over_http)
        """Whether there is a key that is not sent because it could be read in transit."""
        self.headers = {"Authorization": f"Bearer {key}"} if key and not self.withheld else {}

    async def check(
        self, config: RLConfig, model_path: str | Path, environments: dict[str, Ready]
    ) -> list[str]:
        """Waits until the server is up, then checks its model, its sequence length, its tokenizer,
        its chat template and its log-probabilities. Returns warnings.

        environments: one of them has rendered the chat that the teacher scores.

        Raises RunError with the remedy.
        """
        chat = next(ready.chat for ready in environments.values() if ready.chat)
        max_model_len = config.model.max_model_len
        served = await self._ask(
            "GET", f"{self.url}/models", None, lambda content: decode(content, ServedModels).data
        )
        lengths = {model.id: model.max_model_len for model in served}
        self.model = self.model or next(iter(lengths), "")
        if self.model not in lengths:
            raise RunError(
                f"teacher {self.url} serves {', '.join(lengths) or 'no model'}, not "
                f"{self.model}: set teacher.model to one of its names"
            )
        longest = lengths[self.model]
        if longest is not None and longest <= max_model_len:
            raise RunError(
                f"teacher {self.url} takes sequences of {longest} tokens, one of which it "
                "generates itself; model.max_model_len = "
                f"{max_model_len} needs {max_model_len + 1}: start it with a higher "
                "--max-model-len, or lower model.max_model_len"
            )
        if (path := Path(model_path) / "tokenizer.json").exists():
            tokenizer = Tokenizer.from_file(str(path))
            probe = tokenizer.encode(PROBE, add_special_tokens=False).ids
            for ids in (probe, [tokenizer.get_vocab_size(with_added_tokens=True) - 1]):
                await self._check_tokens(ids, tokenizer.decode(ids, skip_special_tokens=False))
        warnings = await self._check_scores(chat, max_model_len)
        warnings += await self._check_template(chat, config.renderer.enable_thinking)
        self.checked = True
        return warnings

    async def check_alone(self, *run: Any) -> list[str]:
        """Like `check`, of a teacher that is asked nothing else."""
        try:
            return await self.check(*run)
        finally:
            await self.close()

    async def _check_tokens(self, ids: list[int], expected: str) -> None:
        """Checks that the teacher decodes the policy's ids to the same text. Servers without
        /detokenize are trusted.

        Scoring ids that the teacher may lack is not an alternative: an id just past its vocabulary
        crashes the engine of vLLM 0.29.
        """
        try:
            text = await self._text(ids)
        except RefusedError as error:
            if error.status in NO_SUCH_ROUTE:
                return
            raise
        if "".join(text.split()) != "".join(expected.split()):
            raise RunError(
                f"teacher {self.url} has another tokenizer: ids {ids[0]}... are {expected!r} "
                f"to the model and {text!r} to it. "
                "A teacher must have the tokenizer of the trained model: use one of the same family"
            )

    async def _text(self, ids: list[int]) -> str:
        return (await self._post("detokenize", Detokenized, tokens=ids)).prompt

    async def _check_template(self, chat: RenderedChat, thinking: bool | None) -> list[str]:
        """Compares the teacher's rendering with the run's: other special tokens are an error, other
        text a warning, which is returned. Servers without /tokenize are trusted."""
        switches = {} if thinking is None else {"enable_thinking": thinking}
        try:
            answer = await self._post(
                "tokenize", Tokenized, messages=chat.messages, chat_template_kwargs=switches
            )
        except RefusedError as error:
            if error.status in NO_SUCH_ROUTE:
                return []
            return [f"whether the teacher has the run's chat template is not known: {error}"]
        sides = chat.token_ids, answer.tokens
        if sides[0] == sides[1]:
            return []
        ours, theirs = [(await self._text(side)).replace(probes.TEXT, "...") for side in sides]
        fault = (
            f"teacher {self.url} has another chat template: it writes {theirs!r}, the run {ours!r}"
        )
        special, others = ([id for id in side if id in chat.special_ids] for side in sides)
        if special == others:
            return [f"{fault}. If it was not trained on the latter, it misjudges answers"]
        raise RunError(
            f"{fault}. Use a teacher of the same family, or set model.chat_template to the "
            "teacher's; if it knows the run's template as well, start it with --chat-template"
        )

    async def _check_scores(self, chat: RenderedChat, max_model_len: int) -> list[str]:
        """Checks that the teacher predicts text better than the same tokens in disorder. Returns
        warnings."""
        ids = chat.token_ids[:max_model_len]
        plain = [id for id in ids if id not in chat.special_ids]
        words = iter(plain[::3] + plain[1::3] + plain[2::3])
        mixed = [id if id in chat.special_ids else next(words) for id in ids]
        logprob = mean(await self.score(ids))
        gain = logprob - mean(await self.score(mixed))
        text = (
            f"teacher {self.url} gives a token of plain text {logprob:.1f} nats on average, "
            f"{gain:.2f} more than in disorder (good models more than {LEAST_PLAIN:g} and 2): look "
            "at its answers, its weights and its quantization"
        )
        if gain < self.config.least_gain:
            raise RunError(
                f"{text}; to score by it would be to learn nonsense, unless it knows only other "
                f"texts: then lower teacher.least_gain = {self.config.least_gain:g}"
            )
        return [text] if logprob < LEAST_PLAIN else []

    async def score_group(self, group: Group, mask_truncated: bool) -> None:
        """Scores every rollout that will be trained. A rollout that cannot be scored fails with
        cause `teacher`."""
        rollouts = [rollout for rollout in group.rollouts if is_trained(rollout, mask_truncated)]
        await asyncio.gather(*(self._score_rollout(rollout) for rollout in rollouts))

    async def _score_rollout(self, rollout: Rollout) -> None:
        turns = rollout.turns
        chains = {
            number: answers
            for number, answers in enumerate(turns.by_chain())
            if any(answer.logprobs for answer in answers)
        }
        try:
            scores = await asyncio.gather(
                *(self.score(unpack_ids(turns.ids(number))) for number in chains)
            )
        except RunError as error:
            rollout.error, rollout.cause = redact(str(error)), "teacher"
            return
        for answers, logprobs in zip(chains.values(), scores, strict=True):
            for answer in answers:
                answer.teacher_logprobs = pack_logprobs(logprobs[answer.start : answer.end])

    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns the log-probability of each token given the preceding ones, [T], nats; 0.0 for
        the first. Raises RunError."""
        body = {
            "model": self.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        return await self._ask(
            "POST",
            f"{self.url}/completions",
            body,
            lambda content: read_logprobs(content, token_ids),
        )

    async def _post(self, route: str, kind: type[T], **body: Any) -> T:
        """Asks one of vLLM's routes beside /v1."""
        url = f"{self.url.removesuffix('/v1')}/{route}"
        return await self._ask(
            "POST", url, {"model": self.model} | body, partial(decode, kind=kind)
        )

    async def _ask(
        self, method: str, url: str, body: dict[str, Any] | None, read: Callable[[bytes], T]
    ) -> T:
        """Returns the answer as parsed by `read`. Retries until the deadline while the server is
        away or busy, or `read` raises."""
        problem = "no answer yet"
        try:
            async with asyncio.timeout(self.config.timeout_s):
                while True:
                    try:
                        status, content = await self.http.request(method, url, body, self.headers)
                        if status == 200:
                            return read(content)
                        problem = describe_refusal(status, content)
                        if status not in TRY_AGAIN:
                            raise RefusedError(
                                status,
                                f"teacher {url} refused: it {problem}. {self._remedy(status)}",
                            )
                    except AwayError as error:
                        problem = str(error)
                    except UnreadableError as error:
                        if not self.checked:
                            raise
                        problem = str(error)
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise RunError(
                f"waited {self.config.timeout_s:.0f} s for the teacher at {url} ({problem}). "
                "Is the server up and base_url right? "
                "If it is just slow, raise teacher.timeout_s or give it more resources"
            ) from None

    def _remedy(self, status: int) -> str:
        if status in (401, 403) and self.withheld:
            return (
                f"Its key (${self.config.api_key_var}) is not sent over plain http: use an https "
                "address, or set teacher.key_over_http"
            )
        if status in (401, 403):
            return (
                f"Put its key into the environment variable {self.config.api_key_var} "
                "(teacher.api_key_var)"
            )
        if status == 404:
            return "Check teacher.base_url (it usually ends in /v1) and teacher.model"
        return (
            "A teacher must have the tokenizer of the trained model, and accept sequences of "
            "model.max_model_len + 1 tokens"
        )

    async def close(self) -> None:
        await self.http.close()


def decode(content: bytes, kind: type[T]) -> T:
    """Decodes an answer's content. Raises UnreadableError if it is not a valid `kind`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as error:
        raise UnreadableError(
            f"the teacher's answer cannot be read ({error}): {content[:200]!r}. Is it vLLM's "
            "OpenAI-compatible server?"
        ) from None


def read_logprobs(content: bytes, token_ids: list[int]) -> list[float]:
    """Returns the log-probabilities of `token_ids` in an answer of /completions, [T], nats; 0.0
    for the first. Raises UnreadableError."""
    choices = decode(content, Completion).choices
    entries = choices[0].prompt_logprobs if choices else None
    if entries is None or len(entries) != len(token_ids):
        raise UnreadableError(
            "the teacher's answer has no prompt_logprobs for the tokens that were sent; vLLM "
            "servers return them"
        )
    logprobs = [0.0]
    for token, entry in zip(token_ids[1:], entries[1:], strict=True):
        value = entry[token].logprob if entry and token in entry else math.nan
        if not -math.inf < value < ROUNDING:
            raise UnreadableError(
                f"the teacher's answer has {value} for token {token}, which is no log-probability: "
                "start vLLM without --logprobs-mode"
            )
        logprobs.append(value)
    return logprobs


def make_teachers(settings: OrchestratorConfig) -> dict[str, Teacher]:
    """Returns the teacher of each environment that has one, by its own setting or the default;
    equal settings share a teacher."""
    by_env: dict[str, Teacher] = {}
    for env in settings.environment:
        if config := env.teacher or settings.teacher:
            same = (teacher for teacher in by_env.values() if teacher.config == config)
            by_env[env.label] = next(same, None) or Teacher(config)
    return by_env
