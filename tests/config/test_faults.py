"""What is said about an unknown key. A wrong hint is worse than none."""

import pytest

from rl.config.faults import hint
from rl.config.fields import field_tree
from rl.config.foreign import BY_NAME, FOREIGN
from rl.config.run import ALIASES, RLConfig


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("trainer.optim.lrr", "did you mean trainer.optim.lr?"),
        ("trainer.optim.learning_rate", "did you mean trainer.optim.lr?"),
        ("max_step", "did you mean max_steps?"),
        ("optim.lr", "did you mean trainer.optim.lr?"),
        ("trainer.batch_size", "did you mean orchestrator.batch_size or sft.batch_size?"),
        ("orchestrator.environment.0.wieght", "did you mean orchestrator.environment.weight?"),
        ("trainer.optim.beta", "did you mean trainer.optim.betas?"),
        ("trainer.loss.clip_low", "is only valid with trainer.loss.type = clip, cispo or gspo"),
        ("orchestrator.credit.epsilon", "is only valid with orchestrator.credit.type = grpo"),
        ("trainer.ckpt.interval", "is called trainer.checkpoint.interval here"),
        ("ckpt.weights.save_format", "ckpt is called trainer.checkpoint here"),
        ("model.ac.freq", "is called trainer.activation_checkpointing here"),
        ("eval.rollouts_per_example", "is called orchestrator.eval.samples here"),
        ("actor_rollout_ref.rollout.n", "is called orchestrator.group_size here"),
        ("seq_len", "is called model.max_model_len here: prompt and answer together"),
        ("kl_coef", "is called trainer.loss.kl_coefficient here"),
        (
            "inference.gpu_memory_utilization",
            "is called inference.vllm.gpu_memory_utilization here",
        ),
        ("max_async_level", "is called max_lag here: 0 is on-policy"),
        (
            "deployment.gpus_per_node",
            "deployment is called trainer.gpus and inference.gpus here: for several nodes "
            "see docs/clusters.md",
        ),
        (
            "critic.optim.lr",
            "there is no critic, value loss or discount here; credit comes from groups of "
            "rollouts (orchestrator.credit)",
        ),
        *(
            (key, "see --help all")
            for key in (
                "version",
                "bogus",
                "nope",
                "foo.name",
                "trainer.top_n",
                "x.interval",
                "ops",
            )
        ),
    ],
)
def test_hints(key, said):
    assert hint(key) == said


def test_the_table_names_keys_that_there_are_and_none_of_ours():
    tree = field_tree(RLConfig)
    for row in FOREIGN:
        for key in row.here.split(" and ") if row.here else ():
            assert key.partition(" = ")[0] in tree or key.startswith(("--", "inference.vllm.")), row
        assert row.here or row.note
    assert not {*BY_NAME} & {*tree, *ALIASES}
    assert len(BY_NAME) == sum(len(row.names.split()) for row in FOREIGN) > 150
