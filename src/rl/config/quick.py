"""`--quick`: the smallest version of a run that still goes through everything, to see that a
configuration works."""

from rl.config.run import RLConfig

STEPS, GROUPS, GROUP_SIZE, TOKENS, EXAMPLES = 2, 2, 4, 32, 4


def shrink(config: RLConfig) -> RLConfig:
    """Returns a copy with every size lowered to that of a trial, and its own name. A size is
    raised only to stay consistent with another. Groups without signal are trained on, because a
    hard task must not end the trial."""
    config = config.model_copy(deep=True)
    settings = config.orchestrator
    config.name = config.name if config.name.endswith("-quick") else f"{config.name}-quick"
    config.max_steps = min(config.max_steps, STEPS)
    if config.sft:
        config.sft.epochs, config.sft.batch_size = (
            None,
            min(config.sft.batch_size, GROUPS * GROUP_SIZE),
        )
    settings.group_size = min(settings.group_size, GROUP_SIZE)
    for env in settings.environment:
        env.group_size = min(env.group_size, GROUP_SIZE) if env.group_size else None
    config.trainer.minibatches = min(config.trainer.minibatches, GROUPS)
    largest = max([settings.group_size, *(env.group_size or 0 for env in settings.environment)])
    settings.batch_size = GROUPS * largest
    settings.replace_no_signal = False  # the trial does not test whether the task is too hard
    settings.sampling.max_tokens = min(settings.sampling.max_tokens, TOKENS)
    for entry in [*settings.environment, *settings.eval]:
        entry.sampling.max_tokens = (
            min(entry.sampling.max_tokens, TOKENS) if entry.sampling.max_tokens else None
        )
    for entry in settings.eval:
        entry.num_examples = (
            min(entry.num_examples, EXAMPLES) if entry.num_examples >= 0 else EXAMPLES
        )
        entry.samples = 1
    return config
