"""A worker process: plays groups of one environment and nothing else. `python -m rl.orchestrator.worker '<WorkerSetup as JSON>'`."""

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from rl.orchestrator.env_ids import EnvLoadError
from rl.orchestrator.rollouts import Cancel, LoadFailed, Played, PlayGroup, Ready, Rollout, ToWorker, WorkerSetup
from rl.processes import die_with_parent

ENCODER = msgspec.msgpack.Encoder()
ORDERS = msgspec.msgpack.Decoder(ToWorker)
RETRY_PAUSE_S = 1.0


class Worker:
    """Takes orders from the orchestrator's pool and answers each group when all its rollouts are finished."""

    def __init__(self, setup: WorkerSetup):
        from rl.orchestrator.chat import ChatRenderer
        from rl.orchestrator.envs import ClassicEnvironment
        from rl.orchestrator.inference_client import InferenceServers

        self.setup = setup
        chat = ChatRenderer(setup.model_path)
        self.env = ClassicEnvironment(setup.env_id, setup.args, chat, setup.max_model_len)
        self.servers = InferenceServers(setup.inference_urls, Path(setup.inference_status), setup.rollout_timeout_s)
        self.plays: dict[int, asyncio.Task[None]] = {}

    async def run(self, socket: zmq.asyncio.Socket) -> None:
        """Consumes orders, produces Played; ends with the process."""
        await socket.send(ENCODER.encode(Ready(len(self.env.tasks["train"]), len(self.env.tasks["eval"]))))
        while True:
            match ORDERS.decode(await socket.recv()):
                case PlayGroup() as order:
                    self.plays[order.play_id] = asyncio.create_task(self.play(order, socket))
                case Cancel(play_id) if play_id in self.plays:
                    self.plays.pop(play_id).cancel()

    async def play(self, order: PlayGroup, socket: zmq.asyncio.Socket) -> None:
        """Plays one group; rollouts that fail are played again with fresh state, as often as allowed."""
        kept: list[Rollout] = []
        failed: list[Rollout] = []
        for attempt in range(self.setup.rollout_retries + 1):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            wanted = order.num_rollouts - len(kept)
            timeout_s = self.setup.rollout_timeout_s
            played = await self.env.play(order.split, order.task, wanted, self.servers, order.server, order.sampling, timeout_s)
            failed = [rollout for rollout in played if rollout.error is not None]
            if failed and self.env.scores_groups:
                continue
            kept += [rollout for rollout in played if rollout.error is None]
            if not failed:
                break
        await socket.send(ENCODER.encode(Played(order.play_id, kept + failed)))
        self.plays.pop(order.play_id, None)


async def serve(setup: WorkerSetup, worker: Worker | None, problem: str) -> None:
    """Reports a failed load, or plays until the process ends."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, setup.worker_id.encode())
    socket.connect(setup.orchestrator)
    if worker is None:
        await socket.send(ENCODER.encode(LoadFailed(problem)))
        socket.close(linger=5000)
        zmq.asyncio.Context.instance().term()
        raise SystemExit(1)
    await worker.run(socket)


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=WorkerSetup)
    worker, problem = None, None
    try:  # in the main thread and outside of an event loop: an environment's constructor may need the one and start the other
        worker = Worker(setup)
        problem = worker.env.check_prompts(setup.max_tokens)
    except (EnvLoadError, ValueError) as error:
        problem = str(error)
    asyncio.run(serve(setup, None if problem else worker, problem or ""))


if __name__ == "__main__":
    die_with_parent()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
