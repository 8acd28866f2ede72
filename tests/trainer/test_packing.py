import torch

from rl.trainer.packing import build_trees, pack, plan, to_tensors, tree_mask
from tests.trainer.samples import make_batch, make_sample

A, B, C, D, E = 10, 11, 12, 13, 14


def test_literal_tree_of_the_docstring():
    samples = [make_sample([A], [B, C]), make_sample([A], [B, D, E])]
    (tree,) = build_trees(samples, 100)
    assert tree.token_ids == [A, B, D] and tree.positions == [0, 1, 2] and tree.ends == [3, 3, 3]
    assert sorted(zip(tree.predicted_from, tree.targets, strict=True)) == [(0, B), (0, B), (1, C), (1, D), (2, E)]


def test_literal_branches_and_mask():
    # a b -> c d | e d : two branches of the same prompt; the last token of each sample is predicted, never seen.
    (tree,) = build_trees([make_sample([A, B], [C, D]), make_sample([A, B], [E, D])], 100)
    assert tree.token_ids == [A, B, C, E] and tree.positions == [0, 1, 2, 2] and tree.ends == [4, 4, 3, 4]
    assert not tree.is_chain
    seen = tree_mask(torch.tensor([tree.ends]))[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]


def test_tensors_of_two_rows():
    (branched,) = build_trees([make_sample([A, B], [C, D], advantage=0.5), make_sample([A, B], [E, D], advantage=-0.5)], 100)
    (chain,) = build_trees([make_sample([B, A], [C], temperature=0.5)], 100)
    batch = to_tensors([branched, chain])
    assert batch.input_ids.tolist() == [[A, B, C, E], [B, A, 0, 0]]
    assert batch.ends.tolist() == [[4, 4, 3, 4], [2, 2, 4, 4]]
    assert batch.logits_at.int().tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert batch.temperatures.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert batch.rows.tolist() == [0, 0, 1, 2, 3]
    assert batch.targets.tolist() == [C, E, D, D, C]
    assert batch.advantages.tolist() == [0.5, -0.5, 0.5, -0.5, 1.0]


def test_chains_need_no_mask():
    batch = to_tensors([tree for i in range(2) for tree in build_trees([make_sample([A, B] * (i + 1), [C, D])], 100)])
    assert batch.ends is None and batch.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_group_over_the_budget_is_split_and_a_long_sample_stands_alone():
    samples = [make_sample([A, B, C], [D, i]) for i in range(20, 23)] + [make_sample([A, B, C], [30 + i, 5]) for i in range(3)]
    trees = build_trees(samples, 5)
    assert [len(tree.token_ids) for tree in trees] == [5, 5]
    assert sum(len(tree.targets) for tree in trees) == 12
    assert [len(tree.token_ids) for tree in build_trees([make_sample([A] * 10, [B])], 4)] == [10]


def test_temperatures_and_groups_are_not_mixed():
    samples = [make_sample([A], [B]), make_sample([A], [B], temperature=0.5), make_sample([A], [B], group=1)]
    assert len([tree for batches in plan(samples, 1, 100, 64) for trees in batches for tree in trees]) == 3


def test_every_rank_gets_as_many_micro_batches_and_nothing_is_lost():
    batch = make_batch(1, groups=7)
    expected = sorted((t, a) for s in batch.samples for t, m, a in zip(s.token_ids, s.loss_mask, s.advantages, strict=True) if m)
    for ranks in (1, 2, 3, 16):
        packed = [pack(batch.samples, rank, ranks, 60, 64) for rank in range(ranks)]
        assert len({len(p.micro_batches) for p in packed}) == 1 and len({p.shared_token_fraction for p in packed}) == 1
        found = [(m.targets, m.advantages) for p in packed for m in p.micro_batches]
        assert sorted((t, a) for ts, adv in found for t, a in zip(ts.tolist(), adv.double().tolist(), strict=True)) == [
            (t, torch.tensor(a).double().item()) for t, a in expected
        ]
        assert all(m.input_ids.numel() <= 60 for p in packed for m in p.micro_batches)


def test_an_idle_rank_gets_one_token_without_loss():
    empty = pack([make_sample([A], [B])], 1, 2, 100, 64).micro_batches
    assert len(empty) == 1 and empty[0].input_ids.tolist() == [[0]] and empty[0].targets.numel() == 0
    assert empty[0].logits_at.tolist() == [[True]] and empty[0].temperatures.tolist() == [1.0]


def test_shared_token_fraction():
    # inputs a b c, a b e: 6 tokens alone, 4 in the tree
    samples = [make_sample([A, B], [C, D]), make_sample([A, B], [E, D])]
    assert pack(samples, 0, 1, 100, 64).shared_token_fraction == 1 - 4 / 6


def test_plan_is_balanced():
    rows = plan(make_batch(3, groups=16).samples, 4, 10_000, 64)
    tokens = [sum(len(tree.token_ids) for trees in batches for tree in trees) for batches in rows]
    assert max(tokens) <= 1.3 * min(tokens)
