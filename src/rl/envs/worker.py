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
from collections.abc import Iterable, Mapping, Sequence
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
from rl.wire.streams import MAX_MESSAGE_BYTES, MessageStream
from rl.wire.turns import unpack_logprobs
from rl.wire.worker_messages import (
    Cancel,
    Close,
    Describe,
    Description,
    Heartbeat,
    LoadFailed,
    Played,
    PlayGroup,
    Ready,
    ServerSet,
    ToWorker,
    WorkerSetup,
)

ENCODER = msgspec.msgpack.Encoder()
ORDERS = msgspec.msgpack.Decoder(ToWorker)
RETRY_PAUSE_S = 1.0
HEARTBEAT_S = 2.0
GATHER_S = 1.0
"""Seconds that a finished episode waits for others of its group, so that a group of short ones
goes in one message."""
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""Exceptions that encoding raises for values that cannot be sent; msgspec's errors are
subclasses."""
PLAYED = msgspec.msgpack.Decoder(Played)
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
        )
        await pool.send(ENCODER.encode(ready))
        heartbeats = asyncio.create_task(self.send_heartbeats(pool))
        try:
            while (data := await pool.receive()) is not None:
                match ORDERS.decode(data):
                    case PlayGroup() as order:
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
            await self.env.close()

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
        limits = (
            self.env.num_tasks(question.split),
            question.first + question.num_tasks if question.num_tasks >= 0 else None,
        )
        tasks, size = [], 0
        for i in range(
            question.first, min((limit for limit in limits if limit is not None), default=0)
        ):
            task = redact_json(msgspec.json.encode(self.env.task(question.split, i)))
            size += len(task)
            if tasks and size > MAX_MESSAGE_BYTES // 2:
                break
            tasks.append(msgspec.json.decode(task))
        about = msgspec.json.decode(
            redact_json(msgspec.json.encode({"kind": self.env.kind, **self.env.describe()}))
        )
        return Description(about, tasks)

    async def play(self, order: PlayGroup, pool: MessageStream) -> None:
        """Plays one group and sends its episodes as they finish; episodes that finish within
        GATHER_S share a message."""
        if self.env.scores_groups:
            parts = {
                asyncio.create_task(self.play_with_retries(order, order.num_episodes)): range(
                    order.num_episodes
                )
            }
        else:
            left = [i for i in range(order.num_episodes) if i not in order.done]
            parts = {
                asyncio.create_task(self.play_with_retries(order.seeded("episode", i), 1)): [i]
                for i in left
            }
        playing = set(parts)
        try:
            if not playing:
                await pool.send(encoded(Played(order.play_id, [])))
            while playing:
                finished, playing = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
                if playing:
                    more, playing = await asyncio.wait(playing, timeout=GATHER_S)
                    finished |= more
                for message in encode_result(
                    order, numbered(finished, parts), sum(len(parts[part]) for part in playing)
                ):
                    await pool.send(message)
        finally:
            for part in playing:
                part.cancel()
        self.plays.pop(order.play_id, None)

    async def play_with_retries(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        """Plays episodes together. If one fails, plays all of them again with fresh state, up to
        `retries` times."""
        for attempt in range(self.setup.retries + 1):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            episodes = await self.play_once(order.seeded("attempt", attempt), num_episodes)
            for rollout in chain(*episodes):
                rollout.retries = attempt
                refuse_unfit(rollout)
                if order.split == "train":
                    refuse_logprobs(rollout)
            if not any(rollout.error for rollout in chain(*episodes)):
                break
        return episodes

    async def play_once(self, order: PlayGroup, num_episodes: int) -> list[Episode]:
        """Plays episodes once, in the one broad `except` around rollouts: what an environment
        raises fails the rollout, not the run."""
        from rl.envs.policy import TALKS, RolloutError

        TALKS.set(talks := [])
        try:
            with spans.span("play", "rollouts", task=order.task, split=order.split):
                return await self.env.play(order, num_episodes)
        except RolloutError as error:
            failed = Rollout(stop="error", cause=error.cause, error=str(error))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            text = "the environment's code was cancelled: it awaits a task that it cancelled itself"
            failed = Rollout(stop="error", cause="environment", error=text)
        # an environment's exit() must not end the others' rollouts
        except (Exception, SystemExit) as error:
            failed = failed_by(error)
        return [[with_talk(failed, *talks[i : i + 1])] for i in range(num_episodes)]


def with_talk(failed: Rollout, talk: Any = None) -> Rollout:
    """A copy of a failed rollout, with the turns and messages of `talk` (a Talk or None) from
    before the environment's code raised."""
    prompt, answered = talk.messages() if talk else ([], [])
    said = (
        {"turns": talk.turns, "text": [*prompt, *answered], "num_prompt_messages": len(prompt)}
        if talk
        else {}
    )
    return msgspec.structs.replace(failed, **said)


def numbered(
    finished: Iterable[asyncio.Task[list[Episode]]],
    parts: Mapping[asyncio.Task[list[Episode]], Sequence[int]],
) -> list[Rollout]:
    """The rollouts of finished parts of a group, numbered and ordered by their episode's index
    in the group."""
    rollouts = []
    for part in sorted(finished, key=lambda part: parts[part][0]):
        for i, episode in zip(parts[part], episodes_of(part, len(parts[part])), strict=True):
            for rollout in episode:
                rollout.episode = i
            rollouts += episode
    return rollouts


def episodes_of(part: asyncio.Task[list[Episode]], num_episodes: int) -> list[Episode]:
    """The episodes of a finished part; failed ones if it raised what play_once lets through, or
    its environment cancelled it: the pool cancels the whole play, and then nobody asks."""
    if part.cancelled():
        failed = Rollout(
            stop="error", cause="environment", error="the environment's code cancelled its own task"
        )
    elif (error := part.exception()) is not None:
        failed = failed_by(error)
    else:
        return part.result()
    return [[with_talk(failed)] for _ in range(num_episodes)]


def failed_by(error: BaseException) -> Rollout:
    """A rollout that failed because the environment's code raised `error`."""
    text = "".join(traceback.format_exception(error))
    return Rollout(
        stop="error", cause="environment", error=f"{described(error)}\n{text[-MAX_ERROR // 2 :]}"
    )


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
        for place, logprob in enumerate(unpack_logprobs(answer.logprobs), 1):
            if not math.isfinite(logprob):
                rollout.cause = "logprobs"
                rollout.error = (
                    f"inference gave token {place} of turn {number} the log-probability "
                    f"{logprob}, which cannot be trained"
                )
                return


def encode_result(order: PlayGroup, rollouts: list[Rollout], unfinished: int = 0) -> list[bytes]:
    """Encodes the reply to an order: one Played, or one per episode if they cannot be sent
    together.

    Environments put arbitrary data into rollouts. A rollout that is too large for a message or
    cannot be encoded (half a surrogate pair, an object, a huge number) becomes a failed one;
    secrets are redacted.
    """
    try:
        return [encoded(Played(order.play_id, rollouts, unfinished))]
    except UNSENDABLE:
        episodes = [
            list(episode) for _, episode in groupby(rollouts, lambda rollout: rollout.episode)
        ]
        left = range(unfinished + len(episodes) - 1, unfinished - 1, -1)
        messages = []
        for episode, later in zip(episodes, left, strict=True):
            share = MAX_MESSAGE_BYTES // len(episode)
            messages.append(
                encoded(
                    Played(order.play_id, [sendable(rollout, share) for rollout in episode], later)
                )
            )
        return messages


def encoded(played: Played, most: int = MAX_MESSAGE_BYTES) -> bytes:
    """Encodes a message. Raises an error of UNSENDABLE, also if the message has more than `most`
    bytes."""
    for rollout in played.rollouts:
        rollout.text = json_text(rollout.messages)
        # redact first: half a secret is not recognised
        rollout.error = rollout.error and redact(rollout.error)[:MAX_ERROR]
    data = ENCODER.encode(played)
    if len(data) > most:
        raise ValueError(f"{len(data) >> 20} MiB of tokens and messages, {most >> 20} are allowed")
    PLAYED.decode(data)  # the pool stops a worker whose message it cannot decode
    return data


def sendable(rollout: Rollout, most: int) -> Rollout:
    """Returns the rollout, or a failed one in its place if it cannot be sent in `most` bytes,
    its share of a message."""
    try:
        encoded(Played(0, [rollout]), most)
    except UNSENDABLE as error:
        text = redact(f"its messages or metrics cannot be written: {type(error).__name__}: {error}")
        return Rollout(episode=rollout.episode, stop="error", cause="environment", error=text)
    return rollout


def json_text(messages: list[dict[str, Any]]) -> bytes:
    """Messages as JSON, with secrets redacted. Raises ValueError if they are too long or too
    deeply nested for a JSON writer."""
    text = redact_json(msgspec.json.encode(messages))
    if len(text) > MAX_MESSAGES:
        raise ValueError(
            f"the messages have {len(text) / 2**20:.0f} MiB, {MAX_MESSAGES / 2**20:g} are allowed"
        )
    depth, tables = 0, [messages]
    while tables:
        depth += 1
        items = [
            item
            for table in tables
            for item in (table.values() if isinstance(table, dict) else table)
        ]
        tables = [item for item in items if isinstance(item, dict | list | tuple)]
    if depth > MAX_NESTING:
        raise ValueError(f"nested {depth} deep, {MAX_NESTING} are allowed")
    return text


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
