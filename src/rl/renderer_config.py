"""Settings of the renderer: how chat messages become token ids."""

from typing import Literal

from rl.settings import Settings


class RendererConfig(Settings):
    """How chat messages become token ids and sampled ids become messages."""

    name: str = "auto"
    """`auto` looks at the model's template; `template` uses it as it is; `chatml` adds tools to one that has none; or any renderer of
    the `renderers` package: qwen3, llama-3, gpt-oss, ..."""
    thinking_retention: Literal["all", "tool_cycle", "template"] = "all"
    """Whether earlier thinking stays in a later turn's prompt: `all` always, so that a rollout is one sample; `tool_cycle` until the
    next user message; `template` as the model's template has it. Where thinking goes, a turn starts a new sample."""
    enable_thinking: bool | None = None
    """The template's switch of that name, where it has one. Default: as the template has it."""
