from rl.config.trainer import FakeDataConfig
from rl.trainer.data.balance import Layout
from rl.trainer.data.fake import FakeBatches, full_batch
from rl.trainer.data.packing import pack
from rl.wire.messages import TrainBatch


def test_batches_are_a_function_of_seed_and_step():
    config = FakeDataConfig(samples=6, group_size=4, prompt_tokens=5, completion_tokens=3)
    batch = FakeBatches(config, 50, seed=1).receive(2)
    assert batch == FakeBatches(config, 50, seed=1).receive(2)
    assert batch != FakeBatches(config, 50, seed=2).receive(2) and batch != FakeBatches(
        config, 50, seed=1
    ).receive(3)
    assert [(s.group_id, s.rollout_id, s.num_tokens, s.num_trained) for s in batch.samples] == [
        *((0, i, 8, 3) for i in range(4)),
        *((1, i, 8, 3) for i in range(2)),
    ]
    heads = [s.token_ids[:5].tolist() for s in batch.samples]
    assert (
        heads[0] == heads[3] != heads[4] == heads[5]
        and max(s.token_ids.max() for s in batch.samples) < 50
    )


def sizes(batch: TrainBatch, ranks: int, row_tokens: int):
    rows = [
        pack(batch, [1.0] * len(batch.samples), Layout(rank, ranks, row_tokens, 64)).micro_batches
        for rank in range(ranks)
    ]
    return [[(len(row.input_ids), len(row.predictors)) for row in batches] for batches in rows]


def test_a_full_batch_is_one_full_row_for_each_rank():
    assert sizes(full_batch(1, 100, 41, 50), 1, 100) == [[(100, 100)]]  # 40 + 40 + 20
    assert sizes(full_batch(2, 100, 41, 50), 2, 100) == [[(100, 100)], [(100, 100)]]
    # a sequence is not divided
    assert sizes(full_batch(2, 30, 41, 50), 2, 30) == [[(40, 40)], [(40, 40)]]
