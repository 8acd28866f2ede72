"""Sentences that both the diagnosis and an orchestrator that ends a run say about rewards."""

from rl.config.run import RLConfig

MOSTLY = 0.8
"""Share of answers cut off above which little else matters; a model that has not learned to be
brief may reach two thirds."""


def equal_remedy(reward: float) -> str:
    """Returns why every answer has the same reward, and the remedy: another one for 0 than for
    any other number."""
    if reward:
        return (
            "the reward function does not tell answers apart: call it with a right and with a "
            "wrong answer, and mend it"
        )
    return (
        "either no answer is right, or the reward function misses the right ones. Read ten "
        "answers: if some are right, mend the reward "
        "function; if none is, take easier tasks, show solved examples in the prompt, reward "
        "a part of the way, or `rl sft` first"
    )


def cut_off_remedy(share: float, config: RLConfig) -> str:
    """Returns how many answers were cut off, and the remedy."""
    limits = sorted(
        {config.sampling_of(env)["max_tokens"] for env in config.orchestrator.environment}
    )
    remedy = f"raise orchestrator.sampling.max_tokens = {', '.join(map(str, limits))}"
    never = (
        "if they run on at any length, the model does not know where to stop: check "
        "model.chat_template"
    )
    return f"{share:.0%} of the answers were cut off: {remedy}; {never}"
