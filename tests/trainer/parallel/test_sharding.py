"""The same numbers on any number of ranks, however they are divided and a batch is cut: one
start of four processes for all layouts."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl.models.tiny import make_tiny_model
from rl.trainer.parallel.sharding import parts_of_row, slots_of_row
from tests.bounds import OPERATIONS, rounding
from tests.families import CONFIGS, SIZES
from tests.ports import free_ports
from tests.trainer.layouts import LAYOUTS
from tests.trainer.samples import assert_equal, with_float32
from tests.zygote import trainer_zygote

USUAL = {"initializer_range": 0.02}
"""Of larger weights the gradient's rounding is larger, too."""
MODELS: dict[str, dict[str, Any] | None] = {
    "llama": None,
    # learned positions
    "gpt2": USUAL
    | {"model_type": "gpt2", "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 2},
    # every other layer with a window that is shorter than the samples
    "gemma3": USUAL
    | SIZES
    | {
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "head_dim": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # routers and sinks in float32, which each rank holds whole
    "mixed": USUAL | CONFIGS["gpt_oss"],
}


def run_ranks(module: str, folder: Path, count: int) -> None:
    """Runs a module on each of some ranks, with the arguments RANK and FOLDER; as soon as one
    fails the others are ended."""
    processes = [
        trainer_zygote().fork(module, str(rank), str(folder), log=folder / f"rank{rank}.log")
        for rank in range(count)
    ]
    deadline = time.monotonic() + 240
    try:
        while any(process.poll() is None for process in processes) and not any(
            process.poll() for process in processes
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        failed = [process.log.read_text() for process in processes if process.poll()]
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
    assert not failed, failed[0]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    models = {kind: str(make_tiny_model(folder / kind, config)) for kind, config in MODELS.items()}
    with_float32(Path(models["mixed"]))
    (folder / "plan.json").write_text(
        json.dumps({"models": models, "ports": free_ports(len(LAYOUTS) + 4)})
    )
    run_ranks("tests.trainer.layouts", folder, 4)
    return folder


@pytest.mark.parametrize(
    "name", [name for name, layout in LAYOUTS.items() if layout.reference != name]
)
def test_every_layout_computes_the_same(results, name):
    more = ("masked_fraction", "optim/steps", "lag_kl/mean", "mismatch_kl/max")
    tensors, steps = assert_trained_alike(results, name, LAYOUTS[name].reference, more)
    assert any(key.startswith("moment.") for key in tensors) and "tokens.3.flags" in tensors
    # later ones lag behind
    assert ["mismatch_kl/max" in step for step in steps] == [True, False, False]
    assert all("lag_kl/mean" in step for step in steps[1:])


def assert_trained_alike(
    folder: Path, name: str, reference: str, more: tuple[str, ...] = ()
) -> tuple[dict, list[dict]]:
    """Metrics and tensors of two divisions differ by roundings at most; returns those of the
    first."""
    expected, steps = (
        json.loads((folder / f"{which}.json").read_text()) for which in (reference, name)
    )
    # a step's roundings are in the weights of the next
    bound = rounding(OPERATIONS * len(expected))
    for step, (ours, theirs) in enumerate(zip(steps, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        assert ours["optim/grad_norm"] == pytest.approx(theirs["optim/grad_norm"], rel=bound), step
        for key in theirs.keys() & {"loss/mean", "entropy/mean", *more}:
            assert ours[key] == pytest.approx(theirs[key], rel=bound, abs=bound), (step, key)
    expected, actual = (load_file(folder / f"{which}.safetensors") for which in (reference, name))
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        # Some biases have no gradient but rounding (softmax ignores the keys'), which AdamW scales
        # up: those are held to the bound, not to
        # that part of their own small norm.
        floor = 1e-6 if key.startswith("moment.") else 1.0
        assert (actual[key] - tensor).norm() <= bound * tensor.norm().clamp(min=floor), key
        if key.startswith("dither."):
            assert (
                actual[key].equal(tensor)
                and tensor.unique().numel() > min(tensor.numel(), 65535) / 2
            ), key
    return actual, steps


def test_a_checkpoint_passes_from_layout_to_layout(results):
    """Two ranks -> two replicas of two shards -> one rank: weights and moments, bit for bit."""
    first = load_file(results / "passed-two.safetensors")
    for name in ("hsdp", "one"):
        assert_equal(load_file(results / f"passed-{name}.safetensors"), first)


def test_every_rank_hears_of_the_damage_that_one_has_read(results):
    fault = results / "checkpoints" / "two" / "000002" / "__1_0.distcp"
    said = [(results / f"damaged-{rank}.txt").read_text() for rank in range(4)]
    assert len({*said}) == 1 and said[0].startswith(f"{fault}: damaged, as rank "), said


def test_every_rank_refuses_a_policy_that_is_wrong_on_one(results):
    """Rank 0 tested a model of its own, and the others none."""
    said = {(results / f"refusal-{rank}.txt").read_text() for rank in range(2)}
    assert len(said) == 1
    assert "cannot be trained: no mode matches each sample computed alone (blocks: " in said.pop()


def test_every_rank_says_how_the_nodes_differ(results):
    for rank in range(2):
        said = json.loads((results / f"nodes-{rank}.json").read_text())
        assert said[0] == ""
        assert (
            said[1]
            == "ranks [1] have a different configuration from rank 0; start every node with the "
            "same file and flags"
        )
        assert said[2].startswith("ranks [1] do not see rank 0's run directory")
        assert "a file system that all nodes share" in said[2]
    assert not list(results.glob("run*/.ranks-*"))


def test_experts_that_a_rank_does_not_use_keep_their_own_gradient(results):
    """Ranks added the gradients that they had in turn: rank 0's of the first expert to rank 1's
    of the second, without an error. What no rank uses has none, as on one rank: of zeros, AdamW
    would decay it, and go on with its momentum."""
    steps = [[1.0, 3.0, 2.0, None, None], [3.0, None, None, None, None]]
    assert [json.loads((results / f"experts-{rank}.json").read_text()) for rank in range(2)] == [
        steps
    ] * 2


def test_a_row_is_divided_into_parts_of_equal_cost():
    assert [part.tolist() for part in parts_of_row(8, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    for length, ranks in ((1, 2), (3, 4), (7, 2), (1000, 8)):
        parts = parts_of_row(length, ranks)
        assert all(map(len, parts)) and {*torch.cat(parts).tolist()} == {*range(length)}
        # by slots of equal length, the row again
        padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-1)
        assert padded.flatten()[slots_of_row(parts)].tolist() == list(range(length))
    costs = [int((part + 1).sum()) for part in parts]  # visible keys of one long sequence
    assert max(costs) < 1.02 * min(costs)
