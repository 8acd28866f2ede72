"""Policies out of folders of models, with what trains them."""

from rl.config.run import RLConfig
from rl.trainer.model.policy import load_policy
from rl.trainer.optim import make_optimizer


def learner(folder, world, dtype="float32", model=None, **trainer):
    """A policy, its optimizer and their configuration, of which these are sections."""
    model = {"name": str(folder), "dtype": dtype} | (model or {})
    config = RLConfig.model_validate({"model": model, "trainer": trainer})
    policy = load_policy(config.model.name, config.model, config.trainer, world)
    return policy, make_optimizer(policy, config.trainer.optim), config
