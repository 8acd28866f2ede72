"""A pool without worker processes: the orchestrator plays by itself, over the real HTTP client."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl.orchestrator.workers.pool import WorkerPool
from rl.wire.inference_client import InferenceServers
from rl.wire.rollouts import Rollout, Split
from rl.wire.worker_messages import Ready, ServerSet, WorkerSetup

TASKS = 24


class StubPool(WorkerPool):
    """Every rollout is one call of /generate. Tasks that divide by 5 give no signal; those that
    divide by 8 finish one by one."""

    setup: WorkerSetup

    def start(self, setup: WorkerSetup) -> None:  # type: ignore[override]
        self.setup = setup
        self.servers = InferenceServers([], Path(setup.policy.inference_status), 30.0)

    async def sizes(self, timeout_s: float) -> dict[str, Ready]:
        return {self.setup.env.name: Ready(TASKS, 2)}

    async def tell(self, server_set: ServerSet) -> None:
        self.servers.follow(server_set)

    async def play(
        self,
        env: str,
        split: Split,
        task: int,
        num_episodes: int,
        sampling: dict[str, Any],
        server: int,
        members: Sequence[Rollout] = (),
        on_members: Callable[[list[Rollout]], None] | None = None,
        keeps_last: bool = False,
        seed: int | None = None,
    ) -> list[Rollout]:
        rollouts = list(members)
        for episode in [
            i for i in range(num_episodes) if i not in {rollout.episode for rollout in members}
        ]:
            prompt = [10 + task, 100 + episode]
            turn = await self.servers.generate(server, prompt, sampling)
            reward = (
                0.5
                if task % 5 == 0
                else float((task + episode + sum(turn.completion_ids)) % 3 == 0) + 0.01 * episode
            )
            rollouts.append(Rollout(turns=[turn], reward=reward, stop="stop", episode=episode))
            if on_members and task % 8 == 0 and len(rollouts) < num_episodes:
                on_members(rollouts[-1:])
        return sorted(rollouts, key=lambda rollout: rollout.episode)

    async def close(self) -> None:
        await self.servers.close()
        await super().close()
