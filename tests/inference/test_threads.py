from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl.inference import threads as chosen
from rl.inference.threads import SIZES, choose_threads, largest_for_one, threads


@pytest.fixture(autouse=True)
def two_threads():
    with threads(2):
        yield


@pytest.mark.parametrize(("faster_up_to", "most"), [(0, 0), (SIZES[0], SIZES[0]), (10_000, SIZES[-1])])
def test_one_thread_gets_the_steps_that_it_computes_faster(faster_up_to, most):
    tried = []

    def seconds(tokens: int, number: int) -> float:
        tried.append(tokens)
        return 1.0 if (number == 1) == (tokens <= faster_up_to) else 2.0

    assert largest_for_one(seconds) == most
    assert len(set(tried)) == len(tried) and not set(tried) & set(SIZES), "no size keeps a kernel made for the other number of threads"


def runner(seen: list[int], num_layers: int = 1, width: int = 64) -> SimpleNamespace:
    layer = torch.nn.Linear(width, 64)
    layer.cpu_linear, layer.input_size_per_partition = torch.nn.functional.linear, width
    model = torch.nn.ModuleList([layer] * num_layers)

    def execute_model(scheduled, more):
        seen.append(torch.get_num_threads())
        return more

    return SimpleNamespace(get_model=lambda: model, dtype=torch.float32, execute_model=execute_model)


def test_small_steps_run_on_one_thread_and_the_others_on_all_again(monkeypatch):
    monkeypatch.setattr(chosen, "largest_for_one", lambda seconds: 64)
    seen: list[int] = []
    engine = runner(seen)
    choose_threads(engine)
    for tokens in (64, 65, 1):
        assert engine.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens), "x") == "x"
    assert seen == [1, 2, 1]


def test_nothing_is_changed_where_there_is_nothing_to_choose():
    """A model without packed layers, or of odd widths, which vLLM's norm does not take, or a single thread."""
    for number, num_layers, width in ((2, 0, 64), (2, 1, 63), (1, 1, 64)):
        with threads(number):
            engine = runner([], num_layers, width)
            before = engine.execute_model
            choose_threads(engine)
            assert engine.execute_model is before


def test_the_products_are_really_tried(capsys):
    torch.ops.load_library(next(Path(find_spec("vllm").origin).parent.glob("_C.abi3.so")))  # without importing vLLM
    choose_threads(runner([]))
    assert "steps of at most" in capsys.readouterr().err
