"""A worker process, which plays groups of one environment: `python -m rl.envs.worker FILE`,
where FILE is a WorkerSetup in JSON."""

import asyncio
import contextlib
import importlib
import logging
import math
import os
import sys
import traceback
from collections import Counter
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import msgspec

from rl.models.tokenizer import hide_torch
from rl.run_dir import spans
from rl.run_dir.access_token import VARIABLE, run_token
from rl.system.credentials import Redacting, redact, redact_json, resolve, strings
from rl.system.errors import RunError
from rl.system.functions import described
from rl.system.linux import die_with_parent, raise_open_files
from rl.system.prefork import leave
from rl.wire.rollouts import Episode, Rollout, unfit
from rl.wire.turns import unpack_logprobs
from rl.wire.worker_messages import (
    MAX_MESSAGE_BYTES,
    MAX_ROLLOUTS,
    Cancel,
    Close,
    Describe,
    Description,
    Heartbeat,
    LoadFailed,
    MessageStream,
    Played,
    PlayOrder,
    Ready,
    ServerSet,
    ToWorker,
    WorkerSetup,
)

ENCODER = msgspec.msgpack.Encoder()
ORDERS = msgspec.msgpack.Decoder(ToWorker)
ROLLOUTS = msgspec.msgpack.Decoder(Rollout)
RETRY_PAUSE_S = 1.0
HEARTBEAT_S = 2.0
GATHER_S = 1.0
"""Seconds that a finished episode waits for others of its group, so that a group of short ones
goes in one message."""
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""Exceptions that encoding raises for values that cannot be sent; msgspec's errors are
subclasses."""
MAX_PLAYED_BYTES = MAX_MESSAGE_BYTES - 100
"""Most bytes of the rollouts in a message, whose own fields take the rest."""
MAX_NESTING = 64
"""Maximum nesting depth of a rollout's messages. Decoders manage several hundred levels, but
fewer deep inside a call stack."""
MAX_MESSAGES = 16 << 20
"""Maximum size of a rollout's messages in bytes of JSON: rollouts/ keeps them for every rollout."""
MAX_ERROR = 8000
"""Maximum length of an error text in characters; up to half of it is the end of a traceback."""
RENDERING = ("jinja2", "transformers.models.auto.tokenization_auto", "renderers.base")
"""Modules that render conversations for our own servers."""


class Worker:
    """Takes orders from the orchestrator's pool and sends the episodes of each group as they
    finish."""

    def __init__(self, setup: WorkerSetup):
        from rl.envs.load import load, load_policy

        self.setup = setup
        self.policy = load_policy(setup)
        self.env = load(setup.env, self.policy)
        self.plays: dict[int, asyncio.Task[None]] = {}

    async def run(self, pool: MessageStream) -> None:
        """Plays what the pool orders, until the pool closes the worker or disconnects."""
        env = self.env
        ready = Ready(
            env.num_tasks("train"),
            env.num_tasks("eval"),
            env.scores_groups,
            env.notice,
            self.policy.template_fault,
            self.policy.chat_for_teachers(),
        )
        await pool.send(ENCODER.encode(ready))
        heartbeats = asyncio.create_task(self.send_heartbeats(pool))
        try:
            while (data := await pool.receive()) is not None:
                match ORDERS.decode(data):
                    case PlayOrder() as order:
                        self.plays[order.play_id] = asyncio.create_task(self.play(order, pool))
                    case ServerSet() as server_set if self.policy.endpoint is None:
                        self.policy.servers.follow(server_set)
                    case Cancel(play_id) if play_id in self.plays:
                        self.plays.pop(play_id).cancel()
                    case Close():
                        return
                    case Describe() as question:
                        await pool.send(ENCODER.encode(self.describe(question)))
        finally:
            heartbeats.cancel()
            await env.close()

    async def send_heartbeats(self, pool: MessageStream) -> None:
        """Sends heartbeats from a task, not a thread: they prove that the event loop runs."""
        while True:
            await pool.send(ENCODER.encode(Heartbeat()))
            spans.gauges(playing=len(self.plays))
            for _ in range(spans.FLUSHES):
                spans.flush()
                await asyncio.sleep(HEARTBEAT_S / spans.FLUSHES)

    def describe(self, question: Describe) -> Description:
        """Answers a question, with as many of the tasks as fit into a message."""
        about = redact_json(msgspec.json.encode({"kind": self.env.kind, **self.env.describe()}))
        description = Description(msgspec.json.decode(about), [])
        ends = [self.env.num_tasks(question.split)]
        if question.num_tasks >= 0:
            ends.append(question.first + question.num_tasks)
        size = 0
        for i in range(question.first, min((end for end in ends if end is not None), default=0)):
            task = redact_json(msgspec.json.encode(self.env.task(question.split, i)))
            size += len(task)
            if description.tasks and size > MAX_MESSAGE_BYTES // 2:
                break
            description.tasks.append(msgspec.json.decode(task))
        return description

    async def play(self, order: PlayOrder, pool: MessageStream) -> None:
        """Plays one group and sends its episodes as they finish; episodes that finish within
        GATHER_S share a message."""
        indices: dict[asyncio.Task[list[Episode]], list[int]] = {}
        if self.env.scores_groups:
            whole = asyncio.create_task(self.play_with_retries(order, order.num_episodes))
            indices[whole] = [*range(order.num_episodes)]
        else:
            for i in {*range(order.num_episodes)} - {*order.done}:
                play = self.play_with_retries(order.seeded("episode", i), 1)
                indices[asyncio.create_task(play)] = [i]
        playing = set(indices)
        try:
            if not playing:
                await pool.send(ENCODER.encode(Played(order.play_id, [])))
            while playing:
                finished, playing = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
                if playing:
                    later, playing = await asyncio.wait(playing, timeout=GATHER_S)
                    finished |= later
                rollouts = []
                for part in sorted(finished, key=lambda part: indices[part][0]):
                    rollouts += numbered(part, indices[part])
                unfinished = sum(len(indices[part]) for part in playing)
                for message in encode_result(order, rollouts, unfinished):
                    await pool.send(message)
        finally:
            for part in playing:
                part.cancel()
        self.plays.pop(order.play_id, None)

    async def play_with_retries(self, order: PlayOrder, num_episodes: int) -> list[Episode]:
        """Plays episodes together. If one fails, plays all of them again with fresh state, up to
        `retries` times."""
        used = Counter()
        for attempt in range(self.setup.retries + 1):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            episodes = await self.play_once(order.seeded("attempt", attempt), num_episodes)
            for rollout in chain(*episodes):
                rollout.retries = attempt
            for rollout in episodes[0][:1]:
                rollout.retried = dict(used)
            for rollout in chain(*episodes):
                used.update(rollout.turns.usage)
            if not any(rollout.error for rollout in chain(*episodes)):
                break
        return episodes

    async def play_once(self, order: PlayOrder, num_episodes: int) -> list[Episode]:
        """Plays episodes once, in the one broad `except` around rollouts: what an environment
        raises fails the rollout, not the run."""
        from rl.envs.policy import TALKS

        TALKS.set(talks := [])
        try:
            with spans.span("play", "rollouts", task=order.task, split=order.split):
                episodes = await self.env.play(order, num_episodes)
            for rollout in chain(*episodes):
                refuse_unfit(rollout)
                if order.split == "train":
                    refuse_logprobs(rollout)
            return episodes
        # an environment's exit() must not end the others' rollouts
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise
            return [[failed_by(error, *talks[i : i + 1])] for i in range(num_episodes)]


def failed_by(error: BaseException, talk: Any = None) -> Rollout:
    """A rollout that failed because of `error`, with the turns and messages of `talk` (one of
    TALKS, or None) from before."""
    from rl.envs.policy import RolloutError

    failed = Rollout(stop="error", cause="environment")
    if isinstance(error, RolloutError):
        failed.cause, failed.error = error.cause, str(error)
    elif isinstance(error, asyncio.CancelledError):
        failed.error = "the environment's code was cancelled: it cancelled its own task, or awaits "
        failed.error += "one that it cancelled"
    else:
        text = "".join(traceback.format_exception(error))
        failed.error = f"{described(error)}\n{text[-MAX_ERROR // 2 :]}"
    if talk:
        prompt, answered = talk.messages()
        failed.turns, failed.text = talk.turns, [*prompt, *answered]
        failed.num_prompt_messages = len(prompt)
    return failed


def numbered(part: asyncio.Task[list[Episode]], indices: list[int]) -> Episode:
    """The rollouts of the finished part of a group, numbered by their episodes' indices in the
    group. Failed ones if its environment cancelled it (the pool cancels the whole play, and then
    nobody asks), or made even telling how it failed fail: the pool waits for an answer."""
    error = asyncio.CancelledError() if part.cancelled() else part.exception()
    episodes = [[failed_by(error)] for _ in indices] if error else part.result()
    for i, episode in zip(indices, episodes, strict=True):
        for rollout in episode:
            rollout.episode = i
    return [*chain(*episodes)]


def refuse_unfit(rollout: Rollout) -> None:
    """Marks a rollout with unusable numbers or names as failed (unless it is already), and
    resets them."""
    if why := unfit(rollout):
        if not rollout.error:
            rollout.cause, rollout.error, rollout.stop = "reward", why, "error"
        rollout.reward, rollout.metrics = 0.0, {}
        rollout.agent = rollout.agent if not unfit(rollout) else "agent"


def refuse_logprobs(rollout: Rollout) -> None:
    """Marks a rollout with a log-probability that is not finite as failed: it has no valid
    importance ratio and would make the step's loss non-finite."""
    for number, answer in enumerate(rollout.turns.answers if not rollout.error else [], 1):
        for token, logprob in enumerate(unpack_logprobs(answer.logprobs), 1):
            if not math.isfinite(logprob):
                rollout.cause = "logprobs"
                rollout.error = (
                    f"inference gave token {token} of turn {number} the log-probability "
                    f"{logprob}, which cannot be trained"
                )
                return


def encode_result(order: PlayOrder, rollouts: list[Rollout], unfinished: int = 0) -> list[bytes]:
    """Encodes the reply to an order: as few Played as have room for all episodes."""
    episodes = [[*episode] for _, episode in groupby(rollouts, lambda rollout: rollout.episode)]
    replies, size = [Played(order.play_id, [])], 0
    for number, episode in enumerate(episodes, 1):
        most = MAX_PLAYED_BYTES // len(episode)
        encoded: list[Any] = [sealed(rollout, most) for rollout in episode]
        size += sum(map(len, encoded))
        before = len(replies[-1].rollouts)
        if before and (size > MAX_PLAYED_BYTES or before + len(episode) > MAX_ROLLOUTS):
            replies.append(Played(order.play_id, []))
            size = sum(map(len, encoded))
        replies[-1].rollouts += map(msgspec.Raw, encoded)
        replies[-1].unfinished = unfinished + len(episodes) - number
    return [ENCODER.encode(reply) for reply in replies]


def sealed(rollout: Rollout, most: int) -> bytes:
    """Encodes a rollout, with secrets redacted: the pool stops a worker whose message it cannot
    decode.

    Environments put arbitrary data into rollouts. One that cannot be encoded (half a surrogate
    pair, an object, a huge number) or has more than `most` bytes becomes a failed one.
    """
    # redact first: half a secret is not recognised
    rollout.error = rollout.error and redact(rollout.error)[:MAX_ERROR]
    try:
        rollout.text = json_text(rollout.messages)
        data = ENCODER.encode(rollout)
        if len(data) > most:
            raise ValueError(
                f"{len(data) >> 20} MiB of tokens and messages, {most + 100 >> 20} are allowed"
            )
        ROLLOUTS.decode(data)
        return data
    except UNSENDABLE as error:
        text = redact(f"its messages or metrics cannot be written: {type(error).__name__}: {error}")
        failed = Rollout(episode=rollout.episode, stop="error", cause="environment", error=text)
        return ENCODER.encode(failed)


def json_text(messages: list[dict[str, Any]]) -> bytes:
    """Messages as JSON, with secrets redacted. Raises ValueError if they are too long or too
    deeply nested for a JSON writer."""
    text = redact_json(msgspec.json.encode(messages))
    if len(text) > MAX_MESSAGES:
        raise ValueError(
            f"the messages have {len(text) / 2**20:.0f} MiB, {MAX_MESSAGES / 2**20:g} are allowed"
        )
    if (levels := depth(messages)) > MAX_NESTING:
        raise ValueError(f"nested {levels} deep, {MAX_NESTING} are allowed")
    return text


def depth(value: Any) -> int:
    """The number of lists and objects within each other."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return 1 + max(map(depth, value), default=0)


async def serve(setup: WorkerSetup, worker: Worker | None, problem: str) -> None:
    """Connects to the pool and plays, or reports why the environment cannot be played and exits
    with status 1."""
    pool = await MessageStream.connect(setup.orchestrator)
    await pool.send(setup.worker_id.encode())
    try:
        if worker:
            await worker.env.start()
    except RunError as error:
        worker, problem = None, str(error)
    if worker is None:
        await pool.send(ENCODER.encode(LoadFailed(redact(problem)[:MAX_ERROR])))
        await pool.close()
        raise SystemExit(1)
    await worker.run(pool)


def given_setup() -> WorkerSetup:
    return msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=WorkerSetup)


def given_arguments(setup: WorkerSetup, key: str) -> dict[str, Any]:
    """The environment's `args` or `set_kwargs` with secrets looked up. `env:RL_TOKEN` is the
    run's own token if that variable is not set, for judges that the run's servers play; only
    where the status directory is, not in a sandbox. Raises RunError."""
    table, status = getattr(setup.env, key), setup.policy.inference_status
    if (
        status
        and not os.environ.get(VARIABLE)
        and any(value == f"env:{VARIABLE}" for _, value in strings(table))
    ):
        os.environ[VARIABLE] = run_token(Path(status).parent)
    return resolve(table, f"environment {setup.env.name}: {key}")


def main() -> None:
    import uvloop

    from rl.envs.environment import check_prompts

    logging.getLogger("verifiers").setLevel(logging.WARNING)  # it logs every rollout
    setup = given_setup()
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)  # both go to a log file
    if setup.spans:
        spans.start(Path(setup.spans), f"worker-{setup.worker_id}")
    worker, problem = None, None
    # in the main thread and outside an event loop: an environment's constructor may need the thread
    # and start a loop
    try:
        for key in ("args", "set_kwargs"):
            setattr(setup.env, key, given_arguments(setup, key))
        worker = Worker(setup)
        problem = check_prompts(worker.env, setup.max_tokens)
    except (RunError, ValueError) as error:
        problem = str(error)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(setup, None if problem else worker, problem or ""))
        # an environment may raise it in a task of its own; then nothing may delay the exit
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
    spans.stop()
    sys.stdout.flush()
    # the environment is closed; a regular interpreter shutdown would take two seconds more
    os._exit(0)


def import_libraries() -> None:
    """Imports what the worker will need except the environment itself; see WorkerLauncher.
    Errors are ignored: they recur where they are reported. A forked copy may play another
    environment, so this one's folder is removed from the import path again."""
    from rl.envs.load import library

    setup, path = given_setup(), [*sys.path]
    with contextlib.suppress(ImportError, RunError):
        for module in (
            "uvloop",
            "rl.envs.policy",
            *(() if setup.policy.endpoint else RENDERING),
            library(setup.env),
        ):
            importlib.import_module(module)
    sys.path[:] = path


if __name__ == "__main__":
    die_with_parent()
    raise_open_files()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # silences a warning that torch is missing
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # only our own interpreter has torch to hide
    if not given_setup().python and not given_setup().policy.trust_remote_code:
        hide_torch()
    leave(import_libraries)
    main()
