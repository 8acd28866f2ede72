"""The turns of a rollout in memory linear in its tokens: only what each turn adds is stored, not
the prompt that it repeats.

Numbers are bytes from our server to the trainer: ids int32, log-probabilities float32 in nats.

Tokens are stored in chains. A turn extends the first chain that its prompt begins with. Otherwise
it starts a new chain, which refers to the tokens that it shares with an earlier one. So each chain
makes one training sample: every sampled token in it follows exactly the ids that it was sampled
after, and nothing has to be compared again.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec

from rl.wire.messages import ITEM_BYTES, TOO_MANY, KeptTokens, VersionSpan

Usage = dict[Literal["prefilled", "cached", "sampled"], Annotated[int, msgspec.Meta(ge=0)]]
"""Numbers of tokens that inference has processed; those of prompts are prefilled unless they came
from the prefix cache."""


class Turn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer of the policy, with exactly the ids that were sent and sampled; also what a
    server answers to `/generate`, without the prompt."""

    packed_ids: bytes
    packed_logprobs: bytes
    """One for each token of the completion."""
    policy_versions: list[VersionSpan]
    """Spans of one version over the completion's tokens."""
    finish_reason: str
    num_cached: int = 0
    """Number of tokens of the prompt that came from the prefix cache; 0 if that is unknown."""
    packed_prompt: bytes = b""
    routes: bytes = b""
    """Routes of all tokens but the last, with the same number of bytes for each, see
    TrainingSample; empty if they were not asked for."""
    kept: KeptTokens | None = None
    """Of the completion's tokens; None if none was truncated, or they were not asked for."""
    packed_prompt_logprobs: bytes = b""
    """One for each token of the prompt, of the model itself at temperature 1; nan for the first.
    Empty if they were not asked for."""

    def __post_init__(self) -> None:
        num_tokens = sum(span.num_tokens for span in self.policy_versions)
        sizes = {len(self.packed_ids), len(self.packed_logprobs), num_tokens * ITEM_BYTES}
        if self.kept:
            sizes.add(len(self.kept.packed_counts))
        if len(sizes) > 1:
            raise ValueError(
                "an answer's tokens, logprobs, policy versions and kept tokens differ in number: "
                f"{[size // ITEM_BYTES for size in sorted(sizes)]}"
            )
        if self.packed_prompt and len(self.routes) % max(1, len(self.token_ids) - 1):
            raise ValueError(
                f"the routes of {len(self.token_ids) - 1} tokens have {len(self.routes)} bytes"
            )

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        logprobs: Sequence[float | None],
        policy_versions: list[VersionSpan],
        finish_reason: str = "stop",
        **others: Any,
    ) -> "Turn":
        """Returns the turn of numbers. Raises ValueError for an answer to an empty prompt."""
        if completion_ids and not prompt_ids:
            raise ValueError("an answer to an empty prompt cannot be trained")
        return cls(
            packed_prompt=pack_ids(prompt_ids),
            packed_ids=pack_ids(completion_ids),
            packed_logprobs=pack_logprobs(logprobs),
            policy_versions=policy_versions,
            finish_reason=finish_reason,
            **others,
        )

    @property
    def prompt_ids(self) -> list[int]:
        return unpack_ids(self.packed_prompt)

    @property
    def completion_ids(self) -> list[int]:
        return unpack_ids(self.packed_ids)

    @property
    def token_ids(self) -> list[int]:
        """The ids of prompt and completion."""
        return unpack_ids(self.packed_prompt + self.packed_ids)

    @property
    def logprobs(self) -> list[float]:
        return unpack_logprobs(self.packed_logprobs)

    def as_record(self) -> dict[str, Any]:
        """Returns the fields of a turn in JSON lines of rollouts."""
        return {
            "prompt_ids": self.prompt_ids,
            "completion_ids": self.completion_ids,
            "logprobs": self.logprobs,
            "policy_versions": self.policy_versions,
            "finish_reason": self.finish_reason,
            **({"routes": self.routes} if self.routes else {}),
            **({"kept": unpack_kept(self.kept)} if self.kept else {}),
        }


class Chain(msgspec.Struct, array_like=True, gc=False):
    """A token sequence: the first `shared` tokens of chain `base`, followed by those in `tail`."""

    tail: bytes
    """Token ids."""
    base: int = -1
    """Index of an earlier chain; -1 if nothing is shared."""
    shared: int = 0
    routes: bytes = b""
    """Routes of all its tokens but the last; empty if they are not known."""

    @property
    def num_tokens(self) -> int:
        return self.shared + len(self.tail) // ITEM_BYTES


class AnswerSpan(msgspec.Struct, array_like=True, gc=False):
    """A turn as a position in a chain: the tokens before `start` are its prompt."""

    chain: int
    start: int
    logprobs: bytes
    """Log-probabilities of the completion's tokens."""
    policy_versions: list[VersionSpan]
    finish_reason: str
    teacher_logprobs: bytes | None = None
    """Those under the teacher."""
    kept: KeptTokens | None = None
    """As in Turn."""
    num_cached: int = 0
    """As in Turn."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the completion."""
        return len(self.logprobs) // ITEM_BYTES

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def untrained(self) -> list[int]:
        """The indices of the tokens that cannot be trained, because too many ids were kept."""
        counts = unpack_ids(self.kept.packed_counts) if self.kept else []
        return [index for index, count in enumerate(counts) if count == TOO_MANY]

    def of_trained(self, column: bytes) -> bytes:
        """Returns a column, with ITEM_BYTES for each token, without the untrained tokens."""
        if not (untrained := {*self.untrained}):
            return column
        items = array("i", column)
        return array("i", [item for i, item in enumerate(items) if i not in untrained]).tobytes()


class Turns(msgspec.Struct, omit_defaults=True, gc=False):
    """A sequence of `Turn`s in playing order. Turns read from it are copies."""

    chains: list[Chain] = []
    answers: list[AnswerSpan] = []

    def __post_init__(self) -> None:
        for number, chain in enumerate(self.chains):
            if len(chain.tail) % ITEM_BYTES or not -1 <= chain.base < number:
                raise ValueError(
                    "a chain of tokens is cut short, or does not continue an earlier one"
                )
            most = self.chains[chain.base].num_tokens if chain.base >= 0 else 0
            if not 0 <= chain.shared <= most:
                raise ValueError("a chain shares more tokens than its base has")
            if len(chain.routes) % max(1, chain.num_tokens - 1):
                raise ValueError("a chain's routes do not cover its tokens")
        for answer in self.answers:
            if len(answer.logprobs) % ITEM_BYTES or not 0 <= answer.chain < len(self.chains):
                raise ValueError("an answer is cut short, or is not in a chain")
            if answer.end > self.chains[answer.chain].num_tokens or answer.start < bool(
                answer.num_tokens
            ):
                raise ValueError("an answer is outside of its chain, or has no prompt")
            if not 0 <= answer.num_cached <= answer.start:
                raise ValueError("more tokens of a prompt were cached than it has")
            if sum(span.num_tokens for span in answer.policy_versions) != answer.num_tokens:
                raise ValueError("an answer's tokens and policy versions differ in number")
            if answer.teacher_logprobs is not None and len(answer.teacher_logprobs) != len(
                answer.logprobs
            ):
                raise ValueError("an answer's tokens and teacher logprobs differ in number")
            if answer.kept and len(answer.kept.packed_counts) != len(answer.logprobs):
                raise ValueError("an answer's tokens and kept tokens differ in number")

    @staticmethod
    def of(turns: Iterable[Turn]) -> "Turns":
        """Makes chains from turns."""
        chained = Turns([], [])
        for turn in turns:
            chained.add(turn)
        return chained

    def add(self, turn: Turn) -> None:
        """Appends a turn."""
        common = self._common(turn.packed_prompt)
        continued = (i for i, chain in enumerate(self.chains) if common[i] == chain.num_tokens)
        number = next(continued, len(self.chains))
        if number == len(self.chains):
            shared = max(common, default=0)
            self.chains.append(Chain(b"", common.index(shared) if shared else -1, shared))
        chain = self.chains[number]
        chain.tail += turn.packed_prompt[chain.num_tokens * ITEM_BYTES :] + turn.packed_ids
        chain.routes = chain.routes + turn.routes[len(chain.routes) :] if turn.routes else b""
        self.answers.append(
            AnswerSpan(
                number,
                len(turn.packed_prompt) // ITEM_BYTES,
                turn.packed_logprobs,
                turn.policy_versions,
                turn.finish_reason,
                num_cached=turn.num_cached,
                kept=turn.kept,
            )
        )

    @property
    def usage(self) -> Usage:
        cached = sum(answer.num_cached for answer in self.answers)
        return {
            "prefilled": sum(answer.start for answer in self.answers) - cached,
            "cached": cached,
            "sampled": sum(answer.num_tokens for answer in self.answers),
        }

    def _common(self, prompt: bytes) -> list[int]:
        """Returns the length of each chain's common prefix with a prompt, in tokens. Looks at
        each stored token once."""
        common: list[int] = []
        for chain in self.chains:
            known = common[chain.base] if chain.base >= 0 else 0
            if known >= chain.shared:
                known = chain.shared + num_common(chain.tail, prompt[chain.shared * ITEM_BYTES :])
            common.append(known)
        return common

    def ids(self, number: int, end: int | None = None) -> bytes:
        """Returns the first `end` token ids of a chain (default: all)."""
        chain, tails = self.chains[number], []
        end = chain.num_tokens if end is None else end
        while end:
            tails.append(chain.tail[: max(0, end - chain.shared) * ITEM_BYTES])
            end = min(end, chain.shared)
            chain = self.chains[chain.base]
        return b"".join(reversed(tails))

    def routes(self, number: int, count: int) -> bytes:
        """Returns the routes of a chain's first `count` tokens; empty if they are not known."""
        chain = self.chains[number]
        return chain.routes[: count * (len(chain.routes) // max(1, chain.num_tokens - 1))]

    def by_chain(self) -> list[list[AnswerSpan]]:
        """Returns the answers in each chain."""
        answers: list[list[AnswerSpan]] = [[] for _ in self.chains]
        for answer in self.answers:
            answers[answer.chain].append(answer)
        return answers

    def token_ids(self, index: int) -> list[int]:
        """Returns the ids of prompt and completion of a turn."""
        answer = self.answers[index]
        return unpack_ids(self.ids(answer.chain, answer.end))

    def _turn(self, answer: AnswerSpan) -> Turn:
        ids, start = self.ids(answer.chain, answer.end), answer.start * ITEM_BYTES
        return Turn(
            packed_prompt=ids[:start],
            packed_ids=ids[start:],
            packed_logprobs=answer.logprobs,
            policy_versions=answer.policy_versions,
            finish_reason=answer.finish_reason,
            num_cached=answer.num_cached,
            routes=self.routes(answer.chain, answer.end - 1),
            kept=answer.kept,
        )

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> Turn:
        return self._turn(self.answers[index])

    def __iter__(self) -> Iterator[Turn]:
        return map(self._turn, self.answers)


def answer_digest(
    prompt_ids: Sequence[int], completion_ids: Sequence[int], logprobs: Sequence[float]
) -> str:
    """Names an answer by all its values, which pass through other programs unchanged where its
    id does not."""
    columns = (pack_ids([len(prompt_ids)]), pack_ids(prompt_ids), pack_ids(completion_ids))
    return blake2b(b"".join(columns) + pack_logprobs(logprobs), digest_size=16).hexdigest()


def pack_ids(ids: Sequence[int]) -> bytes:
    """Packs ids as int32. Raises OverflowError or TypeError for what is none."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return array("i", data).tolist()


def pack_logprobs(logprobs: Sequence[float | None]) -> bytes:
    """Packs log-probabilities as float32; None, which JSON has for what is not finite, as nan."""
    return array("f", [float("nan") if value is None else value for value in logprobs]).tobytes()


def unpack_logprobs(data: bytes) -> list[float]:
    return array("f", data).tolist()


def pack_kept(sets: Sequence[Sequence[int] | None]) -> KeptTokens | None:
    """Packs the ids that were kept at each token: none if all were, None for TOO_MANY. Returns
    None if nothing was truncated. Raises OverflowError or TypeError for what is no id."""
    counts = [TOO_MANY if ids is None else len(ids) for ids in sets]
    packed = b"".join(pack_ids(ids) for ids in sets if ids is not None)
    return KeptTokens(pack_ids(counts), packed) if any(counts) else None


def unpack_kept(kept: KeptTokens) -> list[list[int] | None]:
    """Returns what `pack_kept` has packed."""
    ids = iter(unpack_ids(kept.packed_ids))
    return [
        None if count == TOO_MANY else list(islice(ids, count))
        for count in unpack_ids(kept.packed_counts)
    ]


def num_common(tail: bytes, prompt: bytes) -> int:
    """Returns the number of first tokens that two sequences have in common."""
    size = min(len(tail), len(prompt))
    difference = int.from_bytes(tail[:size]) ^ int.from_bytes(prompt[:size])
    return (size - (difference.bit_length() + 7) // 8) // ITEM_BYTES
