"""Messages to token ids, such that the ids of earlier turns are kept verbatim wherever the chat template is append-only."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

Messages = list[dict[str, Any]]


class ChatRenderer:
    """Renders conversations with a model's own chat template."""

    def __init__(self, model_path: str):
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        if not self.tokenizer.chat_template:
            raise ValueError(f"{Path(model_path).name} has no chat template; give one with model.chat_template = file.jinja")
        self.end = self.tokenizer.eos_token

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def render(self, messages: Messages, generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins."""
        return self.encode(self.render(messages))

    def next_prompt_ids(self, before: list[int], messages: Messages, num_old: int) -> list[int] | None:
        """Ids of a conversation whose first `num_old` messages are already in `before`, prompt and sampled answer, id for id.

        Only what the template puts after the answer is rendered and encoded; it begins at the end-of-turn token, so no token spans the
        seam. None if the template rewrites earlier messages (drops old reasoning, for example): then the caller renders anew.
        """
        old = self.render(messages[:num_old], generation_prompt=False)
        new = self.render(messages)
        end_at = old.rfind(self.end)
        if not new.startswith(old) or end_at < 0:
            return None
        after_end = old[end_at + len(self.end) :] + new[len(old) :]
        closed = bool(before) and before[-1] == self.tokenizer.eos_token_id
        return before + ([] if closed else [self.tokenizer.eos_token_id]) + self.encode(after_end)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)
