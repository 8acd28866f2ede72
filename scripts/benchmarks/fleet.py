"""What a dead, a slow and a late inference server cost the others. `uv run scripts/bench.py fleet` prints JSON.

Four stub servers, each with its process: one is killed after a third of the time, one is ten times slower, one joins after two thirds. The
real client and the real keeper of versions (ServedPolicy) play sessions of a few turns against them, in a closed loop. The same loop with
one sound server alone says what a sound server answers a second.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SLOTS = 16
"""Requests that a stub answers at once; more wait."""
SLOW = 10.0


async def serve(status: Path, delay_s: float) -> None:
    from tests.stub_server import StubServer

    async with StubServer(delay_s=delay_s, slots=SLOTS, status=status):
        await asyncio.Event().wait()


def start(status: Path, delay_s: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "serve", str(status), str(delay_s)])


class Play:
    """Sessions of `turns` requests, `in_flight` at once. `answered` are the times of answers, `ends` those at which a session was over."""

    def __init__(self, folder: Path, in_flight: int, turns: int):
        from rl.config.command_line import build, parse_args
        from rl.orchestrator.evals.evaluator import Evaluator
        from rl.orchestrator.policy.served_policy import ServedPolicy
        from rl.orchestrator.step_clock import StepClock
        from rl.wire.inference_client import InferenceServers

        config = build(parse_args(["--name", "r", "--output_dir", str(folder), "--orchestrator.environment.id", "e"]))
        self.status = config.run_dir.status
        self.in_flight, self.turns, self.next = in_flight, turns, 0
        self.answered: list[float] = []
        self.ends: list[float] = []
        self.answers: Counter[int] = Counter()
        self.lost = 0
        servers = InferenceServers([], self.status("inference"), 30.0)
        self.servers, self.client = servers, InferenceServers([], self.status("inference"), 30.0)

        async def tell(server_set) -> None:
            self.client.follow(server_set)

        self.policy = ServedPolicy(servers, config.run_dir, str(folder), Evaluator(config, None, {}, StepClock()), tell)

    async def sessions(self) -> None:
        from rl.wire.inference_client import InferenceLostError

        while True:
            self.next += 1
            session = self.next
            try:
                for _ in range(self.turns):
                    answer = await self.client.generate(session, [session], {})
                    self.answers[session] += answer.token_ids == [session]
                    self.answered.append(time.monotonic())
                self.ends.append(time.monotonic())
            except InferenceLostError:
                self.lost += 1

    async def keep(self) -> None:
        from rl.orchestrator.orchestrator import SETTLE_EVERY_S

        while True:
            await asyncio.sleep(SETTLE_EVERY_S)
            await self.policy.reconcile()

    async def run(self, events: list[tuple[float, object]], seconds: float) -> list[float]:
        """Plays for so long, from the first server on; calls each event at its second. Returns when each event was, and the end."""
        await self.policy.start()
        tasks = [asyncio.create_task(self.sessions()) for _ in range(self.in_flight)] + [asyncio.create_task(self.keep())]
        began, times = time.monotonic(), [time.monotonic()]
        for at, event in [*events, (seconds, lambda: None)]:
            await asyncio.sleep(began + at - time.monotonic())
            event()
            times.append(time.monotonic())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.servers.close()
        await self.client.close()
        return times

    def rates(self, begin: float, end: float) -> tuple[float, float]:
        """Answers, and rollouts that ended, a second. When fewer servers are left rollouts take longer: those under way at the end of a
        short phase stand for more answers than those at its begin, and only the rate of answers is that of the servers."""
        responses, ends = (sum(begin <= at < end for at in times) / (end - begin) for times in (self.answered, self.ends))
        return responses, ends


async def alone(args: argparse.Namespace) -> tuple[float, float]:
    """Answers and rollouts a second of one sound server with its part of the load."""
    with tempfile.TemporaryDirectory() as folder:
        play = Play(Path(folder), args.in_flight // 2, args.turns)
        server = start(play.status("inference"), args.delay)
        try:
            times = await play.run([], args.seconds / 3)
        finally:
            server.kill()
            server.wait()
        return play.rates(times[0] + 1.0, times[-1])


async def troubled(args: argparse.Namespace, sound: tuple[float, float]) -> dict[str, object]:
    """Against four servers, three of them in trouble; `sound`: what `alone` found."""
    with tempfile.TemporaryDirectory() as folder:
        play = Play(Path(folder), args.in_flight, args.turns)
        servers = [start(play.status(name), delay) for name, delay in (("inference", args.delay), ("inference-a-1", args.delay))]
        servers.append(start(play.status("inference-a-2"), SLOW * args.delay))
        late = play.status("inference-a-3")
        third = args.seconds / 3
        while len(await play.servers.poll_versions()) < 3:
            await asyncio.sleep(0.1)
        try:
            events = [(third, servers[0].kill), (2 * third, lambda: servers.append(start(late, args.delay)))]
            times = await play.run(events, args.seconds)
        finally:
            for server in servers:
                server.kill()
                server.wait()
        first = times[0] + 1.0  # its first sessions end
        phases = [("one dies, one is slow", first, times[1], 2), ("one is left, one is slow", times[1], times[2], 1)]
        phases.append(("one has joined, one is slow", times[2] + args.join, times[3], 2))
        over = {name: [a / (num * b) for a, b in zip(play.rates(*when), sound, strict=True)] for name, *when, num in phases}
        played = sum(play.rates(*when)[0] * (when[1] - when[0]) for _, *when, _ in phases)
        possible = sum(sound[0] * num * (end - begin) for _, begin, end, num in phases)
        counts = [count for session, count in play.answers.items() if session <= play.next - play.in_flight]
        return {
            "rollouts": len(play.ends),
            "answers_per_s_of_a_sound_server": round(sound[0], 1),
            "answers_over_sound_ones": round(played / possible, 3),
            "answers_over_sound_ones_by_phase": {name: round(responses, 3) for name, (responses, _) in over.items()},
            "ended_rollouts_over_sound_ones_by_phase": {name: round(ends, 3) for name, (_, ends) in over.items()},
            "lost": play.lost,
            "answered_more_than_once": sum(count > args.turns for count in counts),
        }


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        return asyncio.run(serve(Path(sys.argv[2]), float(sys.argv[3])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3, help="requests of a rollout")
    parser.add_argument("--delay", type=float, default=0.4, help="seconds that a sound server takes for an answer")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--join", type=float, default=5.0, help="seconds for a late server's process to start, not counted")
    args = parser.parse_args()
    settings = {"in_flight": args.in_flight, "turns": args.turns, "delay_s": args.delay, "slots": SLOTS, "cores": os.cpu_count()}
    print(json.dumps(settings | asyncio.run(troubled(args, asyncio.run(alone(args)))), indent=2))
    return None


if __name__ == "__main__":
    main()
