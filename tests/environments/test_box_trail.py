"""An agent of another package that plays over HTTP: its tools, its compaction, and what happens
at each limit."""

import asyncio
import re

import pytest

from rl.envs.v1.environment import V1Environment
from rl.wire.worker_messages import EnvSpec
from tests.environments.playing import on_path
from tests.envs.stub_policy import StubPolicy, call, order

on_path("box_trail")


def walker(prompt):
    """Opens the box that was named last, until there is a number."""
    if numbers := re.findall(r"The number is (\d)", prompt):
        return numbers[-1]
    return call("open_box", letter=re.findall(r"(?:box is|[Oo]pen box) ([A-Z])", prompt)[-1])


def play(reply=walker, **args):
    """The rollout of one task with these arguments, and all prompts that were asked."""
    policy = StubPolicy(reply, max_model_len=args.pop("max_model_len", 4096))
    env = V1Environment(
        EnvSpec(name="trail", id="box-trail", args=args, timeout_s=args.pop("timeout_s", 60.0)),
        policy,
    )

    async def main():
        await env.start()
        try:
            [[rollout]] = await env.play(order(max_tokens=80), 1)
            return rollout
        finally:
            await env.close()

    return asyncio.run(main()), [
        "".join(map(chr, asked["token_ids"])) for asked in policy.servers.asked
    ]


def test_many_turns_are_one_sample():
    rollout, prompts = play(length=6)
    assert (rollout.reward, rollout.stop, rollout.outcome) == (1.0, "agent_completed", "finished")
    assert len(rollout.turns) == len(prompts) == 7
    assert rollout.metrics.items() >= {"steps": 6, "compactions": 0}.items()
    assert len(rollout.turns.by_chain()) == 1 and "[open_box]" in prompts[0]


def test_where_the_agent_rewrites_its_history_a_new_sample_begins():
    rollout, prompts = play(length=6, agent={"harness": {"keep": 4}})
    assert rollout.reward == 1.0 and rollout.metrics["compactions"] > 1 and len(rollout.turns) == 7
    assert len(rollout.turns.by_chain()) == 1 + rollout.metrics["compactions"]
    assert max(map(len, prompts)) < max(map(len, play(length=6)[1]))


@pytest.mark.parametrize(
    ("args", "outcome", "stop", "turns"),
    [
        ({"agent": {"max_turns": 2}}, "finished", "max_turns", 2),
        ({"agent": {"max_output_tokens": 100}}, "finished", "max_output_tokens", 2),
        ({"agent": {"max_total_tokens": 900}}, "finished", "max_total_tokens", None),
        ({"max_model_len": 450}, "overlong", "context_length", None),
        ({"agent": {"timeout": {"rollout": 0.5}}}, "timeout", "error", None),
    ],
)
def test_limits(args, outcome, stop, turns):
    """What was done until a limit is scored and trained; past a deadline the rollout failed."""

    async def slow(prompt):
        await asyncio.sleep(0.2)
        return walker(prompt)

    rollout, _ = play(slow if "timeout" in args.get("agent", {}) else walker, length=12, **args)
    assert (rollout.outcome, rollout.stop) == (outcome, stop), rollout.error
    assert turns is None or len(rollout.turns) == turns
    if outcome != "timeout":
        assert 0 < len(rollout.turns) < 13
        assert rollout.reward == pytest.approx(0.5 * rollout.metrics["steps"] / 12)
        assert rollout.metrics["steps"] > 0
