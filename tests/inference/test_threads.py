import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl.inference.threads import Choice, Threads, handler_of, threads

QUIET, BUSY = {False: 0.045, True: 0.068}, {False: 0.152, True: 0.071}
"""Seconds of a decode step of 64 on two cores that nobody else, or one other process, wants: by all threads and by one."""


@pytest.fixture(autouse=True)
def two_threads():
    with threads(2):
        yield


def play(choice: Choice, steps: int, seconds: Callable[[bool], float], tokens: int = 64) -> float:
    """Seconds that steps take as they are chosen."""
    total = 0.0
    for _ in range(steps):
        took = seconds(choice.alone)
        choice.took(tokens, took)
        total += took
    return total


def test_the_faster_number_computes_and_trials_cost_little_also_when_the_machine_changes():
    choice = Choice(2)
    for times in (QUIET, BUSY, QUIET, BUSY):
        began = play(choice, 150, times.__getitem__)
        assert began < 1.25 * 150 * min(times.values()), "found soon"
        assert play(choice, 400, times.__getitem__) < 1.03 * 400 * min(times.values()), "and kept"
        assert choice.chosen == (times is BUSY)


def test_what_gains_little_changes_nothing_and_a_first_meeting_of_a_size_does_not_count():
    choice, steps = Choice(2), iter([0.9, 0.045, 0.9, 0.042])
    play(choice, 4, lambda alone: next(steps))
    assert choice.tried is None and not choice.chosen and choice.expected == (64, 0.045)
    assert choice.left < 10, "as good as equal: to try again costs nothing"


def test_one_slow_step_is_no_reason_for_a_trial_and_two_in_a_row_are():
    choice = Choice(2)
    play(choice, 4, QUIET.__getitem__)
    steps = iter([0.2, 0.045, 0.2])
    play(choice, 3, lambda alone: next(steps))
    assert choice.tried is None
    play(choice, 1, BUSY.__getitem__)
    assert choice.tried == []


def test_steps_of_other_sizes_are_not_compared():
    choice = Choice(2)
    for number in range(60):
        tokens = 64 if number % 2 else 40
        choice.took(tokens, tokens * (0.0001 if choice.alone else 0.001))
        assert not choice.alone and not choice.chosen


def test_long_steps_are_left_to_all_threads():
    choice, seen = Choice(16), []
    play(choice, 50, lambda alone: seen.append(alone) or 0.1)
    assert not any(seen), "one thread might take 1.6 s"


def runner(seen: list[int], busy: list[bool]) -> SimpleNamespace:
    def execute_model(scheduled, more):
        seen.append(torch.get_num_threads())
        time.sleep(0.004 if (torch.get_num_threads() == 1) != busy[0] else 0.001)
        return more

    return SimpleNamespace(get_model=torch.nn.Module, dtype=torch.bfloat16, execute_model=execute_model)


def test_steps_run_on_the_chosen_number_by_size_and_a_change_has_the_other_sizes_tried():
    seen, busy = [], [True]
    engine = runner(seen, busy)
    chosen = Threads(engine)
    for tokens in (64, 300):
        for _ in range(5):
            assert engine.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens), "x") == "x"
    assert seen == [2, 2, 1, 1, 1] * 2
    chosen.choices[9].left = 1000
    busy[0] = False
    chosen.choices[6].left = 0
    for _ in range(5):
        engine.execute_model(SimpleNamespace(total_num_scheduled_tokens=64), "x")
    assert not chosen.choices[6].chosen and chosen.choices[9].left == 0
    engine.execute_model(SimpleNamespace(total_num_scheduled_tokens=0), "x")
    assert set(chosen.choices) == {6, 9}


def test_one_thread_is_left_as_it_is():
    with threads(1):
        engine = runner([], [True])
        before = engine.execute_model
        Threads(engine).adopt()
        assert engine.execute_model is before


def test_a_product_has_the_same_bits_on_one_thread_and_really_is_computed_by_one():
    torch.ops.load_library(next(Path(find_spec("vllm").origin).parent.glob("_C.abi3.so")))  # without importing vllm
    weight = torch.randn(3072, 576, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    packed = torch.ops._C.create_onednn_mm_handler(weight.t(), 32)
    handler = SimpleNamespace(n=3072, k=576, handler_tensor=torch.tensor(packed))
    layer = torch.nn.Linear(1, 1)
    layer.cpu_linear = (lambda handler: lambda x, weight, bias: handler)(handler)
    engine = SimpleNamespace(get_model=lambda: layer, dtype=torch.bfloat16, execute_model=None)
    chosen = Threads(engine)
    assert handler_of(layer) is handler and handler_of(torch.nn.Linear(1, 1)) is None
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    outputs, shares = [], []
    for number in (2, 1, 2):
        torch._C.set_num_threads(number)
        chosen.alone = number == 1
        outputs.append(layer.cpu_linear(x, None, None))
        time.sleep(0.1)  # the other thread goes to sleep
        all_s, this_s = time.process_time(), time.thread_time()
        for _ in range(100):
            layer.cpu_linear(x, None, None)
        shares.append(1 - (time.thread_time() - this_s) / (time.process_time() - all_s))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert shares[1] < 0.1 < 0.25 < min(shares[0], shares[2]), "processor time of the other thread"
    biased = layer.cpu_linear(x, None, torch.ones(3072, dtype=torch.bfloat16))
    assert float((biased - outputs[0] - 1).abs().max()) < 0.6
    torch.ops._C.release_dnnl_matmul_handler(packed)
