"""Settings of supervised fine-tuning: `rl sft`."""

from typing import Annotated, Literal

from pydantic import Field

from rl.config.base import PATH_IF_EXISTS, Settings

LEARNING_RATE = 2e-5
"""Default of trainer.optim.lr in fine-tuning of all weights."""


class SftColumns(Settings):
    """Names of the columns of a dataset."""

    messages: str = "messages"
    """Column with a conversation, a list of chat messages. Its assistant messages are trained
    on."""
    tools: str = "tools"
    """Column with the tool definitions that the conversation is rendered with, a list or JSON
    text. Optional."""
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    completion: str = "completion"
    """Column with the text to train on: text, or a list of chat messages."""


class SftConfig(Settings):
    """Supervised fine-tuning: the trainer alone, on examples instead of rollouts. The loss is
    cross entropy, and trainer.optim.lr defaults to 2e-5."""

    dataset: Annotated[str, PATH_IF_EXISTS]
    """A JSONL file or pattern ("data/*.jsonl"), a run directory or its
    "outputs/x/rollouts/*.jsonl", or a data set on the Hugging Face hub (owner/name) or in a
    folder."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    subset: str | None = None
    """Subset (configuration) of a Hugging Face data set."""
    columns: SftColumns = SftColumns()
    style: Literal["auto", "chat", "completion"] = "auto"
    """How text prompts and completions are read. `chat`: as a user message and its answer, in
    the model's chat template; `completion`: as plain text followed by the end-of-text token;
    `auto`: `chat` if the model has a chat template."""
    train: Literal["all", "last"] = "all"
    """Which assistant turns are trained on: all, or the last one."""
    drop_reasoning: bool = False
    """Whether reasoning is removed from the answers, for a model whose chat template cannot
    render it."""
    too_long: Literal["skip", "truncate"] = "skip"
    """What to do with examples longer than model.max_model_len: leave them out, or cut them
    there (the model never sees their end)."""
    min_reward: float | None = None
    """Lowest reward of a rollout to use. Failed and truncated rollouts are never used."""
    max_per_task: int | None = Field(None, ge=1)
    """Most rollouts to use per task: those with the highest rewards; among equals, the first."""
    batch_size: int = Field(64, ge=1)
    """Examples in a batch (one step). They are reshuffled in every pass and none is dropped: a
    batch at the end of a pass continues with the next one."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the data, instead of max_steps. The last batch then has the remaining
    examples."""
    validation: Annotated[str | None, PATH_IF_EXISTS] = None
    """Held-out examples, as in `dataset`. Their loss is computed before training, every
    validation_interval steps, and at the end."""
    validation_split: str | None = None
    """Split of `validation`, or of `dataset` if that is not given. Default: `split`."""
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Fraction of `dataset` to hold out instead; rollouts of one task, and rows of one prompt,
    stay together."""
    validation_interval: int = Field(50, ge=1)
    """Steps between validations."""
