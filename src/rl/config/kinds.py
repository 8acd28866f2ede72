"""The kinds of runs, decided in `RLConfig.kind`, so that no room asks which sections are set, and
their settings: `rl sft`, recorded rollouts, `rl serve`."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from rl.config.base import PATH, PATH_IF_EXISTS, Host, Settings
from rl.config.tinker import service_defaults

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


class Kind(StrEnum):
    """What a run is; equal to its name, so that `config.kind == "sft"` and tables by name work."""

    RL = "rl"
    SFT = "sft"
    RECORDED = "recorded"
    SERVE = "serve"

    @property
    def roles(self) -> tuple[str, ...]:
        """The processes of a run on one machine, in the order in which they are started."""
        return ROLES[self]

    @property
    def program(self) -> str:
        """The command that trains."""
        return {"sft": "rl sft", "recorded": "rl train"}.get(self, "rl")

    @property
    def has_rollouts(self) -> bool:
        """Whether an orchestrator makes batches of rollouts."""
        return "orchestrator" in self.roles


ROLES = {
    Kind.RL: ("inference", "orchestrator", "trainer"),
    Kind.SFT: ("trainer",),
    Kind.RECORDED: ("orchestrator", "trainer"),
    Kind.SERVE: ("inference", "tinker"),
}
BatchesFrom = Literal["orchestrator", "examples", "clients", "fake", "replay"]
SOURCES: dict[Kind, BatchesFrom] = {
    Kind.RL: "orchestrator",
    Kind.SFT: "examples",
    Kind.RECORDED: "orchestrator",
    Kind.SERVE: "clients",
}
"""Who gives the trainer its batches; instead of them, trainer.data may name random samples
(`fake`) or the batches of an earlier run (`replay`)."""
DEFAULTS = {
    "sft": {"loss": {"type": "cross_entropy"}, "optim": {"lr": LEARNING_RATE}},
    "serve": {"lora": {"rank": 32}},
}
"""Section of a kind of run -> the trainer's defaults in it."""


def with_defaults(values: Any) -> Any:
    """Returns a run's raw settings with the defaults of its kind, and of who trains."""
    for kind, trainer in DEFAULTS.items():
        if isinstance(values, dict) and values.get(kind) not in (None, False):
            values = completed(values, {"trainer": trainer})
    match values:
        case {"trainer": {"backend": "tinker"}}:
            return completed(values, service_defaults(values))
    return values


def completed(values: Any, defaults: dict[str, Any]) -> Any:
    """Returns nested tables with these defaults where they say nothing. What should be a table
    and is none stays as it is."""
    if not isinstance(values, dict):
        return defaults if values is None else values
    return values | {
        key: completed(values.get(key), default)
        if isinstance(default, dict)
        else values.get(key, default)
        for key, default in defaults.items()
    }


class RecordedConfig(Settings):
    """Training on recorded rollouts: orchestrator and trainer, without environments and
    inference. Batches have orchestrator.batch_size rollouts, whole tasks in the order of the
    file, and orchestrator.credit is theirs."""

    rollouts: Annotated[str, PATH]
    """A JSONL file or pattern ("data/*.jsonl"): lines of `rl collect` or `rl.record`, results
    that verifiers has saved, or the rollouts of a run. docs/recorded.md has the form of a line."""


class ServeConfig(Settings):
    """A server of the Tinker API over `model`: clients train adapters on it and sample from them
    (docs/tinker.md). trainer.lora.rank is the largest rank of an adapter, and defaults to 32."""

    alias: str | None = Field(None, min_length=1)
    """Name by which clients ask for the model. Default: model.name. Programs that know only
    certain names, as the Tinker cookbook does, need one of theirs."""
    host: Host = "127.0.0.1"
    """Address to bind. Anything but loopback opens the server to other machines that have its
    key (docs/security.md)."""
    port: int = Field(8600, ge=0, le=65535)
    """Port to bind; 0: any free one."""
    checkpoint_s: float = Field(60.0, gt=0)
    """Shortest time in seconds between two copies of a model's state, after which a restarted
    trainer computes again at most this much."""
