"""The turns of a rollout in memory linear in its tokens: only what each turn adds is stored, not
the prompt that it repeats.

Tokens are stored in chains. A turn whose prompt begins with a whole chain extends it (the first
one, if there are several); any other turn starts a new chain, which refers to the tokens that it
shares with an earlier one. So each chain makes one training sample: every sampled token in it
follows exactly the ids that it was sampled after, and nothing has to be compared again.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import msgspec

from rl.wire.messages import VersionSpan

ID_BYTES = array("i").itemsize
LOGPROB_BYTES = array("d").itemsize


class Turn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer of the policy, with exactly the ids that were sent and sampled."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """Log-probabilities of the completion's tokens, nats."""
    policy_versions: list[VersionSpan]
    """Spans of one version over the completion's tokens."""
    finish_reason: str
    teacher_logprobs: list[float] | None = None
    """Log-probabilities of the completion's tokens under the teacher, nats."""
    routes: bytes | None = None
    """Routes of the tokens from `routes_from` on, without the last: the same number of bytes for
    each, see TrainingSample."""
    routes_from: int = 0
    """Number of first tokens of the prompt whose routes an earlier turn has."""

    def __post_init__(self) -> None:
        check_lengths(self.completion_ids, self.logprobs, self.policy_versions)
        if self.completion_ids and not self.prompt_ids:
            raise ValueError("an answer to an empty prompt cannot be trained")
        if self.teacher_logprobs is not None and len(self.teacher_logprobs) != len(
            self.completion_ids
        ):
            raise ValueError("an answer's tokens and teacher logprobs differ in number")
        num_routed = len(self.prompt_ids) + len(self.completion_ids) - 1 - self.routes_from
        if self.routes and (num_routed < 1 or len(self.routes) % num_routed):
            raise ValueError(f"the routes of {num_routed} tokens have {len(self.routes)} bytes")

    @property
    def token_ids(self) -> list[int]:
        """The ids of prompt and completion."""
        return self.prompt_ids + self.completion_ids


class Chain(msgspec.Struct, array_like=True, gc=False):
    """A token sequence: the first `shared` tokens of chain `base`, followed by those in `tail`."""

    tail: bytes
    """Token ids, int32."""
    base: int = -1
    """Index of an earlier chain; -1 if nothing is shared."""
    shared: int = 0

    @property
    def num_tokens(self) -> int:
        return self.shared + len(self.tail) // ID_BYTES


class AnswerSpan(msgspec.Struct, array_like=True, gc=False):
    """A turn as a position in a chain: the tokens before `start` are its prompt."""

    chain: int
    start: int
    logprobs: bytes
    """Log-probabilities of the completion's tokens, nats, float64."""
    policy_versions: list[VersionSpan]
    finish_reason: str
    teacher_logprobs: bytes | None = None
    """Log-probabilities of the completion's tokens under the teacher, nats, float64."""
    routes: bytes | None = None
    """Routes of the chain's tokens up to the completion's last but one, without those that
    earlier answers of the chain have."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the completion."""
        return len(self.logprobs) // LOGPROB_BYTES

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Turns(msgspec.Struct, omit_defaults=True, gc=False):
    """A sequence of `Turn`s in playing order; compares equal to a list of them. Turns read from
    it are copies."""

    chains: list[Chain] = []
    answers: list[AnswerSpan] = []

    def __post_init__(self) -> None:
        for number, chain in enumerate(self.chains):
            if len(chain.tail) % ID_BYTES or not -1 <= chain.base < number:
                raise ValueError(
                    "a chain of tokens is cut short, or does not continue an earlier one"
                )
            if (
                not 0
                <= chain.shared
                <= (self.chains[chain.base].num_tokens if chain.base >= 0 else 0)
            ):
                raise ValueError("a chain shares more tokens than its base has")
        for answer in self.answers:
            if len(answer.logprobs) % LOGPROB_BYTES or not 0 <= answer.chain < len(self.chains):
                raise ValueError("an answer is cut short, or is not in a chain")
            if answer.end > self.chains[answer.chain].num_tokens or answer.start < bool(
                answer.num_tokens
            ):
                raise ValueError("an answer is outside of its chain, or has no prompt")
            if sum(span.num_tokens for span in answer.policy_versions) != answer.num_tokens:
                raise ValueError("an answer's tokens and policy versions differ in number")
            if answer.teacher_logprobs is not None and len(answer.teacher_logprobs) != len(
                answer.logprobs
            ):
                raise ValueError("an answer's tokens and teacher logprobs differ in number")

    @staticmethod
    def of(turns: Iterable[Turn]) -> "Turns":
        """Makes chains from turns."""
        found = Turns([], [])
        for turn in turns:
            found.add(turn)
        return found

    def add(self, turn: Turn) -> None:
        """Appends a turn."""
        prompt = pack_ids(turn.prompt_ids)
        common = self._common(prompt)
        number = next(
            (i for i, chain in enumerate(self.chains) if common[i] == chain.num_tokens),
            len(self.chains),
        )
        if number < len(self.chains):
            chain = self.chains[number]
            chain.tail += prompt[chain.num_tokens * ID_BYTES :] + pack_ids(turn.completion_ids)
        else:
            shared = max(common, default=0)
            base = common.index(shared) if shared else -1
            self.chains.append(
                Chain(prompt[shared * ID_BYTES :] + pack_ids(turn.completion_ids), base, shared)
            )
        routes = None if turn.routes is None else self._new_routes(turn, common, number)
        teacher = None if turn.teacher_logprobs is None else pack_logprobs(turn.teacher_logprobs)
        logprobs = pack_logprobs(turn.logprobs)
        self.answers.append(
            AnswerSpan(
                number,
                len(turn.prompt_ids),
                logprobs,
                turn.policy_versions,
                turn.finish_reason,
                teacher,
                routes,
            )
        )

    def routed(self, prompt_ids: list[int]) -> int:
        """Returns of how many of a prompt's first tokens the routes are known: those of the
        chain that the prompt extends."""
        common = self._common(pack_ids(prompt_ids))
        number = next(
            (i for i, chain in enumerate(self.chains) if common[i] == chain.num_tokens), -1
        )
        return self._known_routes(number)[1]

    def routes(self, number: int, count: int) -> bytes | None:
        """Returns the routes of a chain's first `count` tokens; None unless all are known."""
        whole, known = self._known_routes(number)
        return whole[: count * (len(whole) // known)] if known >= count and whole else None

    def _known_routes(self, number: int) -> tuple[bytes, int]:
        """Returns the known routes of a chain, and of how many of its first tokens they are."""
        found = [
            (answer.end - 1, answer.routes)
            for answer in self.answers
            if answer.chain == number and answer.routes
        ]
        return b"".join(routes for _, routes in found), max((end for end, _ in found), default=0)

    def _new_routes(self, turn: Turn, common: list[int], number: int) -> bytes | None:
        """Returns a turn's routes without those that its chain has. Those before `routes_from`
        are any chain's that begins with the same tokens: another turn may meanwhile have
        extended the one that this turn was to extend. None if no chain has them."""
        shares = (other for other, shared in enumerate(common) if shared >= turn.routes_from > 0)
        before = next(
            filter(None, (self.routes(other, turn.routes_from) for other in shares)),
            None if turn.routes_from else b"",
        )
        return (
            None
            if before is None
            else (before + (turn.routes or b""))[len(self._known_routes(number)[0]) :]
        )

    def _common(self, prompt: bytes) -> list[int]:
        """Returns the length of each chain's common prefix with a prompt, in tokens. Looks at
        each stored token once."""
        common: list[int] = []
        for chain in self.chains:
            with_base = common[chain.base] if chain.base >= 0 else 0
            if with_base < chain.shared:
                common.append(with_base)
            else:
                common.append(
                    chain.shared + num_common(chain.tail, prompt, chain.shared * ID_BYTES)
                )
        return common

    def ids(self, number: int, end: int | None = None) -> array:
        """Returns the first `end` token ids of a chain (default: all)."""
        chain = self.chains[number]
        end, parts = chain.num_tokens if end is None else end, []
        while end:
            if end > chain.shared:
                parts.append(chain.tail[: (end - chain.shared) * ID_BYTES])
                end = chain.shared
            chain = self.chains[chain.base]
        return array("i", b"".join(reversed(parts)))

    def by_chain(self) -> list[list[AnswerSpan]]:
        """Returns the answers in each chain."""
        found: list[list[AnswerSpan]] = [[] for _ in self.chains]
        for answer in self.answers:
            found[answer.chain].append(answer)
        return found

    def token_ids(self, index: int) -> list[int]:
        """Returns the ids of prompt and completion of a turn."""
        answer = self.answers[index]
        return self.ids(answer.chain, answer.end).tolist()

    def prompt_ids(self, index: int) -> list[int]:
        answer = self.answers[index]
        return self.ids(answer.chain, answer.start).tolist()

    def _turn(self, answer: AnswerSpan) -> Turn:
        ids = self.ids(answer.chain, answer.end).tolist()
        return Turn(
            prompt_ids=ids[: answer.start],
            completion_ids=ids[answer.start :],
            logprobs=unpack_logprobs(answer.logprobs),
            policy_versions=answer.policy_versions,
            finish_reason=answer.finish_reason,
            teacher_logprobs=None
            if answer.teacher_logprobs is None
            else unpack_logprobs(answer.teacher_logprobs),
            routes=self.routes(answer.chain, answer.end - 1),
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Turns):
            return (self.chains, self.answers) == (other.chains, other.answers)
        return isinstance(other, list) and list(self) == other

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> Turn:
        return self._turn(self.answers[index])

    def __iter__(self) -> Iterator[Turn]:
        return map(self._turn, self.answers)


def check_lengths(
    ids: Sequence[int], logprobs: Sequence[float | None], versions: list[VersionSpan]
) -> None:
    """Raises ValueError unless all three are about the same number of tokens."""
    lengths = {len(ids), len(logprobs), sum(span.num_tokens for span in versions)}
    if len(lengths) != 1:
        raise ValueError(
            f"an answer's tokens, logprobs and policy versions differ in number: {sorted(lengths)}"
        )


def answer_digest(
    prompt_ids: Sequence[int], completion_ids: Sequence[int], logprobs: Sequence[float]
) -> str:
    """Names an answer by all its values, which pass through other programs unchanged where its
    id does not."""
    parts = (
        array("q", [len(prompt_ids)]),
        array("i", prompt_ids),
        array("i", completion_ids),
        array("d", logprobs),
    )
    return blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).hexdigest()


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Packs log-probabilities as float64; None becomes nan, because JSON has null for values
    that are not finite."""
    return array(
        "d",
        [float("nan") if value is None else value for value in logprobs]
        if None in logprobs
        else logprobs,
    ).tobytes()


def unpack_logprobs(data: bytes) -> list[float]:
    return array("d", data).tolist()


def num_common(tail: bytes, prompt: bytes, offset: int) -> int:
    """Returns the number of leading tokens of `tail` that `prompt` also has from byte `offset`
    on."""
    if prompt.startswith(tail, offset):
        return len(tail) // ID_BYTES
    low, high = 0, min(len(tail), len(prompt) - offset) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        part = tail[low * ID_BYTES : middle * ID_BYTES]
        low, high = (
            (middle, high)
            if prompt.startswith(part, offset + low * ID_BYTES)
            else (low, middle - 1)
        )
    return low
