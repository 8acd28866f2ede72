"""A model's calls, executed again by a trainer that only counts. With a real one: test_sdk.py."""

import asyncio
from types import SimpleNamespace

from rl.run_dir.paths import RunDir
from rl.tinker.replay import copy_calls, replay
from rl.tinker.storage import Storage
from rl.tinker.training import Training
from tests.tinker.test_app import Client, CountingLearner, forward_backward, new_model


async def session(root):
    """Two models: the second begins with a state of the first. Returns the run directory of the
    second, whose version 1 is that state."""
    async with Client(root) as client:
        first = await new_model(client)
        await client.step(first, 1)
        path = (await client.call("save_weights", {"model_id": first, "seq_id": 2, "path": "a"}))[
            "path"
        ]
        load = {
            "session_id": first.partition(":")[0],
            "model_seq_id": 1,
            "path": path,
            "optimizer": True,
        }
        model = (await client.call("load_weights", load))["model_id"]
        await client.call("forward_backward", forward_backward(model, 1))
        # refused, then as now
        await client.call("forward_backward", forward_backward(model, 2, "stable_reinforce"))
        await client.step(model, 3)
        await client.call("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "path": "b"})
        await client.step(model, 5)
        return client.training.models[model].run_dir, client.training.config


def again(run_dir, config, scratch, learner):
    storage = Storage(RunDir(scratch, scratch / "weights"))
    assert copy_calls(run_dir, storage) == 3
    found = replay(Training(config, storage, learner), run_dir, lambda there: "")
    return [(one["version"], one["kept"], one["tensor"]) for one in found]


def test_calls_executed_again_give_the_same_answers_and_versions_or_say_what_differs(tmp_path):
    run_dir, config = asyncio.run(session(tmp_path / "s"))
    before = sorted(path for path in run_dir.root.rglob("*") if path.is_file())
    equal = [(1, ["answers"], None), (2, ["answers", "digests"], None), (3, ["answers"], None)]
    assert again(run_dir, config, tmp_path / "1", CountingLearner()) == equal

    other = CountingLearner()
    other.optimizer_step = lambda name, step: (
        CountingLearner.optimizer_step(other, name, step),
        2.0,
    )[1]
    assert again(run_dir, config, tmp_path / "2", other)[1] == (
        2,
        ["answers"],
        "the answer to call 3 (optim_step)",
    )

    other = CountingLearner()
    other.publish = lambda name, folder, record: CountingLearner.publish(
        SimpleNamespace(steps={name: 9}), name, folder, record
    )
    assert again(run_dir, config, tmp_path / "3", other)[1] == (2, ["answers", "digests"], "a")
    assert sorted(path for path in run_dir.root.rglob("*") if path.is_file()) == before
