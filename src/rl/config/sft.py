"""Settings of supervised fine-tuning: `rl sft`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rl.config.base import PATH_IF_EXISTS, Settings


class SftColumns(Settings):
    """What the columns of the rows are called."""

    messages: str = "messages"
    """Column with a conversation, a list of chat messages. Its assistant messages are trained."""
    tools: str = "tools"
    """Column with the tool definitions that the conversation is rendered with, a list or JSON text. It need not be there."""
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    completion: str = "completion"
    """Column with what is trained: text, or a list of chat messages."""


class SftConfig(Settings):
    """Supervised fine-tuning: the trainer alone, on examples instead of rollouts. Its loss is cross entropy, and trainer.optim.lr is 2e-5
    unless it is set."""

    dataset: Annotated[str, PATH_IF_EXISTS]
    """A JSONL file (or a pattern: "data/*.jsonl"), a run directory or its "outputs/x/rollouts/*.jsonl", or a data set on the Hugging Face
    hub (owner/name) or in a folder."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    subset: str | None = None
    """Subset (configuration) of a Hugging Face data set."""
    columns: SftColumns = SftColumns()
    style: Literal["auto", "chat", "completion"] = "auto"
    """How prompts and completions that are text are read. `chat`: as a user's message and its answer, in the model's chat template;
    `completion`: as plain text, and the end-of-text token; `auto`: chat if the model has a chat template."""
    train: Literal["all", "last"] = "all"
    """Which of the assistant's turns are trained: all, or the last one."""
    drop_reasoning: bool = False
    """Whether the reasoning is left out of the answers; for a model whose chat template cannot show it."""
    too_long: Literal["skip", "truncate"] = "skip"
    """What becomes of examples longer than model.max_model_len: left out, or cut there (the model then does not see their end)."""
    min_reward: float | None = None
    """Lowest reward of a rollout that is used. Failed and truncated ones are never used."""
    max_per_task: int | None = Field(None, ge=1)
    """Most rollouts of each task that are used: those with the highest rewards; among equals the first."""
    batch_size: int = Field(64, ge=1)
    """Examples in a batch, which is one step. They are shuffled anew in every pass and never left out: a batch at the end of a pass goes on
    with the next one."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the data, instead of max_steps. The last batch then has what is left."""
    validation: Annotated[str | None, PATH_IF_EXISTS] = None
    """Held-out examples, named as in `dataset`. Their loss is computed before training, every validation_interval steps, and at the end."""
    validation_split: str | None = None
    """Split of `validation`, or of `dataset` if that is not given. Default: `split`."""
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Fraction of `dataset` that is held out instead; rollouts of one task stay together."""
    validation_interval: int = Field(50, ge=1)
    """Steps between validations."""

    @property
    def validates(self) -> bool:
        return bool(self.validation or self.validation_split or self.validation_fraction)


def with_sft_defaults(values: Any) -> Any:
    """Raw settings of a run, with what fine-tuning has other defaults for: the loss, and a learning rate for imitation."""
    if not isinstance(values, dict) or not values.get("sft") or not isinstance(trainer := values.get("trainer", {}), dict):
        return values
    for section, key, value in (("loss", "type", "cross_entropy"), ("optim", "lr", 2e-5)):
        given = trainer.get(section, {})
        if isinstance(given, dict):
            trainer = {**trainer, section: {key: value} | given}
    return {**values, "trainer": trainer}
