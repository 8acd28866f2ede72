"""`rl.record`: any program that speaks OpenAI's API plays the policy, and what it plays is written
as rollouts. See docs/recorded.md.

A server in this process answers `/v1/chat/completions`, with an address of its own for each
episode, by asking the policy's inference server for token ids. So each call becomes a turn with
exactly the ids that were sent and sampled.

`python -m rl.commands.record` is the policy's inference server, until standard input ends. It is a
process of its own, because what starts servers belongs into a main thread, and adopts orphans and
handles signals there.
"""

import asyncio
import contextlib
import secrets
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Coroutine
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rl.commands.collect import append_episode, only_writer, read_present
from rl.commands.options import POLICY, load, resolve
from rl.commands.play_session import policy_server, run
from rl.config.command_line import build, parse_args, write_config
from rl.config.run import RLConfig
from rl.envs.policy import Conversation, Policy, RolloutError, chat_completion
from rl.launch.children import Children
from rl.models.chat import Message, assistant_message
from rl.models.folder import resolve_model
from rl.orchestrator.workers.pool_worker import faults_of_turns
from rl.orchestrator.workers.setups import policy_spec
from rl.system.children import PYTHON
from rl.system.errors import WRONG_SETTINGS, ConfigError, RunError
from rl.wire.inference_client import PromptTooLongError
from rl.wire.rollouts import Rollout, unfit

OPTIONAL = ("orchestrator.environment",)
"""Settings that nothing is played with."""


def serve_policy() -> None:
    children = Children()
    children.stop_on_signals()
    config, _, values = load("rl.record", sys.argv[1:], (POLICY,), "", optional=OPTIONAL)
    raise SystemExit(run("rl.record", children, serve(config, values, children)))


async def serve(config: RLConfig, values: dict[str, Any], children: Children) -> int:
    """Starts the server and prints the path of its configuration; ends it with standard input,
    or raises RunError if it ends itself."""
    source = resolve(values["policy"], config, None, None)
    if source.endpoint:
        raise RunError(
            f"{source.label} is an endpoint that returns no token ids: give a model or a run, or "
            "the addresses of servers of rl (orchestrator.inference_urls)"
        )
    async with contextlib.AsyncExitStack() as on_exit:
        folder = Path(on_exit.enter_context(tempfile.TemporaryDirectory(prefix="rl-record-")))
        config, server, path = config.with_absolute_paths(), None, folder / "config.toml"
        if source.model:
            starting = policy_server(config, source.model, folder, children, source.adapter)
            server = await on_exit.enter_async_context(starting)
            await server.ready()
            path = server.config.run_dir.config
        else:
            write_config(path, config)
        print(path, flush=True)
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not ended.done():
            if server:
                server.check()
            await asyncio.wait({ended}, timeout=POLL_S)
    return 0


if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

READ = {
    "model",
    "messages",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "seed",
    "temperature",
    "n",
    "stream",
}
WITHOUT_EFFECT = {
    "user",
    "metadata",
    "store",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
}
"""Fields of a request that do not change what is sampled."""
LAST_LINES = 30
STOP_S, POLL_S = 30.0, 1.0
MAX_REQUEST_BYTES = 1 << 28


class RecordedEpisode:
    """One play of a task by your program. `client` and `async_client` are OpenAI's own;
    `base_url` and `api_key` are for anything else."""

    def __init__(self, recorder: "Recorder", env: str, task: int | str):
        self.recorder, self.env, self.task = recorder, env, task
        self.key = secrets.token_hex(16)
        self.conversation = Conversation(
            recorder.policy, next(recorder.sessions), recorder.sampling
        )
        self.messages: list[Message] = []
        self.overlong = False
        self.failure: RolloutError | None = None
        """The first failed call, which the program may have ignored."""
        self.finished = False

    @property
    def base_url(self) -> str:
        """The address of the policy for this episode."""
        return f"{self.recorder.url}/{self.key}/v1"

    @property
    def api_key(self) -> str:
        """A key that OpenAI's clients demand; the address itself is secret."""
        return "unused"

    @property
    def client(self) -> "OpenAI":
        """A client of OpenAI's SDK whose answers are the policy's."""
        from openai import OpenAI

        return OpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=0, timeout=None)

    @property
    def async_client(self) -> "AsyncOpenAI":
        """The same for asyncio."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, max_retries=0, timeout=None
        )

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request of OpenAI's API. Raises RolloutError and PromptTooLongError."""
        if fault := fault_of(body, self.recorder.sampling) or (
            self.finished and "this episode is finished: begin another one"
        ):
            raise RolloutError("environment", fault)
        messages = body["messages"]
        turn, answer = await self.conversation.answer(messages, body.get("tools"), body)
        self.messages = [*messages, assistant_message(answer)]
        return chat_completion(turn, answer, body.get("model") or "policy")

    def finish(
        self, reward: float, metrics: dict[str, float] | None = None, *, truncated: bool = False
    ) -> Rollout:
        """Ends the episode and appends its rollout to the file. `truncated`: whether your
        program broke it off; an answer cut short says so itself. A rollout one of whose calls
        has failed is written as failed. Raises RunError."""
        turns, history = self.conversation.turns, self.conversation.history
        if self.finished:
            raise RunError(
                "this episode is finished already: begin another one with recorder.episode()"
            )
        if not turns and not self.failure and not self.overlong:
            raise RunError(
                "this episode has no call of the policy: give your program its client, or its "
                "base_url"
            )
        is_cut = any(answer.finish_reason == "length" for answer in turns.answers)
        rollout = Rollout(
            turns=turns,
            text=self.messages,
            num_prompt_messages=history[-1].num_prompt if history else len(self.messages),
            reward=float(reward),
            metrics=metrics or {},
            truncated=truncated or self.overlong or is_cut,
            overlong=self.overlong,
            error=str(self.failure) if self.failure else None,
            cause=self.failure.cause if self.failure else None,
        )
        faults = [unfit(rollout), *faults_of_turns(turns, self.recorder.policy.spec, None)]
        if fault := next(filter(None, faults), ""):
            raise RunError(fault)
        self.finished = True
        self.recorder.write(self, rollout)
        return rollout


def fault_of(body: dict[str, Any], sampling: dict[str, Any]) -> str:
    """Describes what a request asks for that would not be done and that its conversation does
    not refuse; empty if there is nothing."""
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        return "messages: give a list of chat messages"
    set_names = {name for name, value in body.items() if value not in (None, False, [], {})}
    if unknown := sorted(set_names - READ - WITHOUT_EFFECT):
        return (
            f"{unknown[0]}: is not supported by rl.record: leave it out; settings of sampling are "
            "given to rl.record itself"
        )
    if body.get("stream"):
        return "stream: answers come in one piece: leave it out"
    if (heat := body.get("temperature")) is not None and heat != sampling["temperature"]:
        return (
            f"temperature: the policy is sampled at {sampling['temperature']}, at which the "
            "trainer will score it: leave it out, or give it to rl.record: "
            f"orchestrator__sampling__temperature={heat}"
        )
    return ""


class ServerProcess:
    """The policy's inference server, in a process of its own, see `serve_policy`."""

    def __init__(self, args: list[str]):
        """Waits until it is ready. Raises RunError or ConfigError."""
        self.lines = deque[str](maxlen=LAST_LINES)
        self.process = subprocess.Popen(
            [*PYTHON, "-m", "rl.commands.record", *args],
            start_new_session=True,
            errors="replace",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self.config = build(parse_args([f"@{self._ready()}"]), OPTIONAL)
            on_failure.pop_all()
        rest = (self.process.stdout,)
        threading.Thread(target=self.lines.extend, args=rest, daemon=True).start()

    def _ready(self) -> Path:
        """Shows what the process says, and returns the path of its configuration when it is
        ready. Raises RunError or ConfigError."""
        assert self.process.stdout
        for line in self.process.stdout:
            if (path := Path(line.strip())).is_absolute() and path.name == "config.toml":
                return path
            self.lines.append(line)
            print(line, end="", flush=True)
        raise (ConfigError if self.process.wait() == WRONG_SETTINGS else RunError)(self.fault())

    def fault(self) -> str:
        """Describes how the process has ended; empty if it lives."""
        if (code := self.process.poll()) is None:
            return ""
        return f"the policy's server has ended with {code}:\n{''.join(self.lines).rstrip()}"

    def close(self) -> None:
        """Ends the process: its standard input ends."""
        with contextlib.suppress(OSError):
            if self.process.stdin:
                self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Recorder(contextlib.AbstractContextManager["Recorder"]):
    """Records episodes of your programs with one policy. Use it in a `with` block, which ends
    the policy's server."""

    def __init__(
        self,
        policy: Policy,
        sampling: dict[str, Any],
        name: str,
        output: Path,
        server: ServerProcess | None = None,
    ):
        """`name`: the policy's in the file. Raises RunError if `output` is a file of something
        else, or is being written."""
        self.policy, self.sampling, self.name, self.server = policy, sampling, name, server
        self.output = output.expanduser().absolute()
        self.lock, self.sessions = threading.Lock(), count()
        self.on_close = contextlib.ExitStack()
        self.on_close.enter_context(only_writer(self.output))
        self.present = read_present(self.output)
        self.episodes: dict[str, RecordedEpisode] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="rl.record", daemon=True).start()
        self.url = self._do(self._serve())

    @staticmethod
    def of(args: list[str], output: Path) -> "Recorder":
        """Serves the policy that `args` name. Raises RunError and ConfigError."""
        server = ServerProcess(args)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(server.close)
            config = server.config
            policy = Policy(
                policy_spec(config, resolve_model(config.model)),
                config.orchestrator.inference_timeout_s,
            )
            sampling = config.orchestrator.sampling.model_dump(exclude_none=True)
            recorder = Recorder(policy, sampling, config.model.name, output, server)
            on_failure.pop_all()
        return recorder

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine in the thread of the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _serve(self) -> str:
        """Starts to answer on this machine's loopback. Returns the address."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/{episode}/v1/chat/completions", self._complete)
        # an answer that nobody waits for is no turn
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _complete(self, request: web.Request) -> web.Response:
        """Answers one call. Refusals have status 400, which SDKs do not repeat."""
        episode = self.episodes.get(request.match_info["episode"])
        if episode is None:
            return refusal("no such episode: is its recorder closed?", "not_found", 404)
        try:
            body = await request.json()
            if not isinstance(body, dict):
                return refusal("the body is not an object", "invalid_request_error")
            return web.json_response(await self._while_served(episode.answer(body)))
        except PromptTooLongError as error:
            episode.overlong = True
            return refusal(str(error), "context_length_exceeded")
        except RolloutError as error:
            if error.cause != "environment":
                episode.failure = episode.failure or error
            return refusal(str(error), error.cause)
        except (ValueError, KeyError, TypeError) as error:
            return refusal(f"{type(error).__name__}: {error}", "invalid_request_error")

    async def _while_served(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Awaits work that asks the server. Raises RolloutError if the server's process ends
        meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self.server and (fault := self.server.fault()):
                    raise RolloutError("inference", fault)
                await asyncio.wait({task}, timeout=POLL_S)
            return task.result()
        finally:
            task.cancel()

    def episode(self, task: int | str, env: str = "recorded") -> RecordedEpisode:
        """Begins an episode. `task`: number or name of what is played; rollouts of one task are
        compared with each other. `env`: a name for metrics."""
        episode = RecordedEpisode(self, env, task)
        self.episodes[episode.key] = episode
        return episode

    def write(self, episode: RecordedEpisode, rollout: Rollout) -> None:
        """Appends the rollout of a finished episode, with the lowest free number of a sample."""
        self.episodes.pop(episode.key, None)
        with self.lock:
            append_episode(
                self.output,
                self.present,
                [rollout],
                episode.env,
                episode.task,
                self.name,
                self.sampling["temperature"],
            )

    def close(self) -> None:
        """Ends the policy's server. Episodes that are not finished are not written."""
        self._do(self.runner.cleanup())
        self._do(self.policy.servers.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.on_close.close()
        if self.server:
            self.server.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def refusal(message: str, kind: str, status: int = 400) -> web.Response:
    """An error in the form of OpenAI's API."""
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": kind}}, status=status
    )


if __name__ == "__main__":
    serve_policy()
