"""The turns of a rollout, linear in its tokens: what each turn adds, not the prompt that it repeats.

Tokens stand in chains. A turn whose prompt begins with the whole of a chain extends it, the first such chain if there are several; any
other turn starts a new chain, which refers to the tokens that it shares with an earlier one. So each chain is what one training sample is
made of: every sampled token in it follows exactly the ids that it was sampled after, and nothing has to be compared again.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import msgspec

from rl.wire.messages import VersionSpan

ID_BYTES = array("i").itemsize
LOGPROB_BYTES = array("d").itemsize


class Turn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer of the policy: exactly the ids that were sent and the ids that were sampled."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """Of the completion's tokens, nats."""
    policy_versions: list[VersionSpan]
    """Runs over the completion's tokens."""
    finish_reason: str
    teacher_logprobs: list[float] | None = None
    """Of the completion's tokens under the teacher, nats."""

    def __post_init__(self) -> None:
        lengths = {len(self.completion_ids), len(self.logprobs), sum(span.num_tokens for span in self.policy_versions)}
        if len(lengths) != 1:
            raise ValueError(f"an answer's tokens, logprobs and policy versions differ in number: {sorted(lengths)}")
        if self.completion_ids and not self.prompt_ids:
            raise ValueError("an answer to an empty prompt cannot be trained")
        if self.teacher_logprobs is not None and len(self.teacher_logprobs) != len(self.completion_ids):
            raise ValueError("a teacher's logprobs are as many as the tokens of the answer")

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion."""
        return self.prompt_ids + self.completion_ids


class Chain(msgspec.Struct, array_like=True, gc=False):
    """A token sequence: the first `shared` tokens of the chain `base`, and those in `tail`."""

    tail: bytes
    """int32 each."""
    base: int = -1
    """Index of an earlier chain; -1: it shares nothing."""
    shared: int = 0

    @property
    def num_tokens(self) -> int:
        return self.shared + len(self.tail) // ID_BYTES


class Answer(msgspec.Struct, array_like=True, gc=False):
    """A turn, by its place in a chain: its prompt are the tokens before `start`."""

    chain: int
    start: int
    logprobs: bytes
    """Of the completion's tokens, nats, float64 each."""
    policy_versions: list[VersionSpan]
    finish_reason: str
    teacher_logprobs: bytes | None = None
    """Of the completion's tokens under the teacher, nats, float64 each."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the completion."""
        return len(self.logprobs) // LOGPROB_BYTES

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Turns(msgspec.Struct, omit_defaults=True, gc=False):
    """A sequence of `Turn`s in the order in which they were played, equal to a list of them. A turn that is taken out of it is a copy."""

    chains: list[Chain] = []
    answers: list[Answer] = []

    def __post_init__(self) -> None:
        for number, chain in enumerate(self.chains):
            if len(chain.tail) % ID_BYTES or not -1 <= chain.base < number:
                raise ValueError("a chain of tokens is cut, or continues none before it")
            if not 0 <= chain.shared <= (self.chains[chain.base].num_tokens if chain.base >= 0 else 0):
                raise ValueError("a chain shares more tokens than there are")
        for answer in self.answers:
            if len(answer.logprobs) % LOGPROB_BYTES or not 0 <= answer.chain < len(self.chains):
                raise ValueError("an answer is cut, or stands in no chain")
            if answer.end > self.chains[answer.chain].num_tokens or answer.start < bool(answer.num_tokens):
                raise ValueError("an answer stands outside of its chain, or has no prompt")
            if sum(span.num_tokens for span in answer.policy_versions) != answer.num_tokens:
                raise ValueError("an answer's tokens and policy versions differ in number")
            if answer.teacher_logprobs is not None and len(answer.teacher_logprobs) != len(answer.logprobs):
                raise ValueError("a teacher's logprobs are as many as the tokens of the answer")

    @staticmethod
    def of(turns: Iterable[Turn]) -> "Turns":
        """The same turns in chains."""
        found = Turns([], [])
        for turn in turns:
            found.add(turn)
        return found

    def add(self, turn: Turn) -> None:
        """Appends a turn."""
        prompt = pack_ids(turn.prompt_ids)
        common = self._common(prompt)
        number = next((i for i, chain in enumerate(self.chains) if common[i] == chain.num_tokens), len(self.chains))
        if number < len(self.chains):
            chain = self.chains[number]
            chain.tail += prompt[chain.num_tokens * ID_BYTES :] + pack_ids(turn.completion_ids)
        else:
            shared = max(common, default=0)
            base = common.index(shared) if shared else -1
            self.chains.append(Chain(prompt[shared * ID_BYTES :] + pack_ids(turn.completion_ids), base, shared))
        teacher = None if turn.teacher_logprobs is None else pack_logprobs(turn.teacher_logprobs)
        logprobs = pack_logprobs(turn.logprobs)
        self.answers.append(Answer(number, len(turn.prompt_ids), logprobs, turn.policy_versions, turn.finish_reason, teacher))

    def _common(self, prompt: bytes) -> list[int]:
        """How many tokens each chain has in common with a prompt at the beginning. Looks at each stored token once."""
        common: list[int] = []
        for chain in self.chains:
            with_base = common[chain.base] if chain.base >= 0 else 0
            if with_base < chain.shared:
                common.append(with_base)
            else:
                common.append(chain.shared + num_common(chain.tail, prompt, chain.shared * ID_BYTES))
        return common

    def ids(self, number: int, end: int | None = None) -> array:
        """The first `end` token ids of a chain, or all."""
        chain = self.chains[number]
        end, parts = chain.num_tokens if end is None else end, []
        while end:
            if end > chain.shared:
                parts.append(chain.tail[: (end - chain.shared) * ID_BYTES])
                end = chain.shared
            chain = self.chains[chain.base]
        return array("i", b"".join(reversed(parts)))

    def first_rewritten(self) -> int | None:
        """The index of the first turn whose prompt does not begin with prompt and completion of any earlier turn; None without one.

        Only a turn that begins a chain can be one: those that extend it continue what stands there.
        """
        begun = set[int]()
        for index, answer in enumerate(self.answers):
            if index and answer.chain not in begun:
                common = self._common(self.ids(answer.chain, answer.start).tobytes())
                if not any(other.end <= common[other.chain] for other in self.answers[:index]):
                    return index
            begun.add(answer.chain)
        return None

    def by_chain(self) -> list[list[Answer]]:
        """The answers in each chain."""
        found: list[list[Answer]] = [[] for _ in self.chains]
        for answer in self.answers:
            found[answer.chain].append(answer)
        return found

    def token_ids(self, index: int) -> list[int]:
        """Prompt and completion of a turn."""
        answer = self.answers[index]
        return self.ids(answer.chain, answer.end).tolist()

    def prompt_ids(self, index: int) -> list[int]:
        answer = self.answers[index]
        return self.ids(answer.chain, answer.start).tolist()

    def _turn(self, answer: Answer) -> Turn:
        ids = self.ids(answer.chain, answer.end).tolist()
        return Turn(
            prompt_ids=ids[: answer.start],
            completion_ids=ids[answer.start :],
            logprobs=unpack_logprobs(answer.logprobs),
            policy_versions=answer.policy_versions,
            finish_reason=answer.finish_reason,
            teacher_logprobs=None if answer.teacher_logprobs is None else unpack_logprobs(answer.teacher_logprobs),
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Turns):
            return (self.chains, self.answers) == (other.chains, other.answers)
        return isinstance(other, list) and list(self) == other

    def __len__(self) -> int:
        return len(self.answers)

    @overload
    def __getitem__(self, index: int) -> Turn: ...
    @overload
    def __getitem__(self, index: slice) -> list[Turn]: ...
    def __getitem__(self, index: Any) -> Any:
        found = self.answers[index]
        return [self._turn(answer) for answer in found] if isinstance(index, slice) else self._turn(found)

    def __iter__(self) -> Iterator[Turn]:
        return map(self._turn, self.answers)


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Log-probabilities as float64; nan for None, which is what JSON has for one that is not finite."""
    return array("d", [float("nan") if value is None else value for value in logprobs] if None in logprobs else logprobs).tobytes()


def unpack_logprobs(data: bytes) -> list[float]:
    return array("d", data).tolist()


def num_common(tail: bytes, prompt: bytes, offset: int) -> int:
    """The number of tokens at the beginning of `tail` that `prompt` has from byte `offset` on."""
    if prompt.startswith(tail, offset):
        return len(tail) // ID_BYTES
    low, high = 0, min(len(tail), len(prompt) - offset) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        part = tail[low * ID_BYTES : middle * ID_BYTES]
        low, high = (middle, high) if prompt.startswith(part, offset + low * ID_BYTES) else (low, middle - 1)
    return low
