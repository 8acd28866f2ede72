"""Renderers of three models: SmolLM2 (ChatML without tools), one like Qwen3, and the tiny model."""

import functools
import json
from pathlib import Path

import pytest

from rl.config.run import ModelConfig, RendererConfig
from rl.models.folder import resolve_model, with_template
from rl.models.renderer import load_renderer
from rl.models.tiny import write_tokenizer
from rl.system.errors import RunError

DROPS_THINKING = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% "
    "set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ "
    "messages[0].content + '\n\n' }}{% endif %}{{ HEADER }}"
    "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ FOOTER }}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content "
    "}}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > last.user and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ '
    "call.function.arguments }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' "
    "%}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% "
    "endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% "
    "endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def smol_path():
    try:
        return resolve_model(ModelConfig())
    except RunError as missing:
        pytest.skip(f"SmolLM2 cannot be had here: {missing}")


@pytest.fixture(scope="module")
def smol(smol_path):
    return load_renderer(smol_path, RendererConfig())


@pytest.fixture(scope="module")
def qwen_path(tmp_path_factory):
    """A byte-level BPE with some merges, Qwen3's tokens, and a template that drops the thinking
    of earlier rounds as Qwen3's does."""
    from renderers.qwen3 import _TOOLS_FOOTER, _TOOLS_HEADER
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(
        ["assistant user system tool the answer is three, I think; one and two", DROPS_THINKING]
        * 3,
        trainer,
    )
    tags = [
        f"<{slash}{name}>"
        for name in ("think", "tool_call", "tool_response")
        for slash in ("", "/")
    ]
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = DROPS_THINKING.replace("HEADER", json.dumps(_TOOLS_HEADER)).replace(
        "FOOTER", json.dumps(_TOOLS_FOOTER)
    )
    path = tmp_path_factory.mktemp("some-local-model")
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def qwen(qwen_path):
    """Loads the Qwen3-like model once for each setting."""

    @functools.cache
    def load(**settings):
        return load_renderer(qwen_path, RendererConfig(**settings))

    return load


@pytest.fixture
def templated(tmp_path, monkeypatch):
    """Loads the renderer of a folder with another template, as model.chat_template gives it one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def load(path, template, **settings):
        return load_renderer(
            str(with_template(Path(path), template.encode())), RendererConfig(**settings)
        )

    return load


@pytest.fixture(scope="module")
def plain_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    write_tokenizer(path)
    return str(path)
