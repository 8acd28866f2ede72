import pytest

from rl.config.trainer import FakeDataConfig
from rl.trainer.data.balance import Layout
from rl.trainer.data.fake import FakeBatches, full_batch
from rl.trainer.data.packing import pack


def test_batches_are_a_function_of_seed_and_step():
    config = FakeDataConfig(samples=6, group_size=4, prompt_tokens=5, completion_tokens=3)
    batch, *others = [
        FakeBatches(config, 50, seed).receive(step)
        for seed, step in ((1, 2), (1, 2), (2, 2), (1, 3))
    ]
    assert [other == batch for other in others] == [True, False, False]
    sizes = [(s.group_id, s.rollout_id, s.num_tokens, s.num_trained) for s in batch.samples]
    assert sizes == [(i // 4, i % 4, 8, 3) for i in range(6)]
    heads = [s.token_ids[:5].tolist() for s in batch.samples]
    assert heads[0] == heads[3] != heads[4] == heads[5]
    assert max(s.token_ids.max() for s in batch.samples) < 50


@pytest.mark.parametrize(("ranks", "length"), [(1, 100), (2, 100), (2, 30)])
def test_a_full_batch_is_one_full_row_for_each_rank(ranks, length):
    """Of sequences of 40 tokens, which are not divided."""
    batch = full_batch(ranks, length, 41, 50)
    for rank in range(ranks):
        layout = Layout(rank, ranks, length, 64)
        (row,) = pack(batch, [1.0] * len(batch.samples), layout).micro_batches
        assert len(row.input_ids) == len(row.predictors) == max(length, 40)
