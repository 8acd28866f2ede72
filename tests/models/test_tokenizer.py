"""A worker's tokenizer and chat template: transformers' own, in its home the same ids as here."""

import json
import os
import subprocess

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rl.config.run import RendererConfig
from rl.models import probes
from rl.models.renderer import load_renderer
from rl.models.tiny import BOS_TOKEN, EOS_TOKEN, SPECIAL_TOKENS, byte_tokenizer
from rl.models.tokenizer import load_tokenizer, text_ids
from tests.interpreters import ROOT, worker_python
from tests.raised import run_error

IN_A_HOME = """
import json, sys
from rl.config.run import RendererConfig
from rl.models import probes
from rl.models.renderer import load_renderer

for path, settings in json.loads(sys.argv[1]):
    renderer = load_renderer(path, RendererConfig(**settings))
    talks = [(messages, tools if renderer.supports_tools else None) for messages, tools in probes.CONVERSATIONS]
    print(json.dumps([type(renderer).__name__, renderer.stop_token_ids, [renderer.prompt_ids(*talk) for talk in talks]]))
print(json.dumps("torch" in sys.modules))
"""


def test_a_home_gives_the_same_ids_as_we_do_and_has_no_torch(smol_path, qwen_path, plain_path):
    """A home has the newest transformers that suits its environment, we have the one that is
    installed."""
    cases = [
        (path, settings)
        for path in (smol_path, qwen_path, plain_path)
        for settings in ({}, {"name": "template"})
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [worker_python(), "-c", IN_A_HOME, json.dumps(cases)]
    *there, has_torch = map(
        json.loads,
        subprocess.run(
            command, env=env, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.splitlines(),
    )
    assert not has_torch
    for (path, settings), found in zip(cases, there, strict=True):
        renderer = load_renderer(path, RendererConfig(**settings))
        talks = [
            (messages, tools if renderer.supports_tools else None)
            for messages, tools in probes.CONVERSATIONS
        ]
        assert found == [
            type(renderer).__name__,
            renderer.stop_token_ids,
            [renderer.prompt_ids(*talk) for talk in talks],
        ]


def test_a_model_without_tokenizer_json_is_converted(plain_path, tmp_path):
    """Here one of GPT-2's form: a vocabulary and merges."""
    path = tmp_path / "old"
    path.mkdir()
    model = json.loads(AutoTokenizer.from_pretrained(plain_path).backend_tokenizer.to_str())[
        "model"
    ]
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("#version: 0.2\n")
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    (path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "chat_template": "x"}'
    )
    tokenizer = load_tokenizer(str(path))
    assert (
        tokenizer.decode(tokenizer.encode("words, words\n", add_special_tokens=False))
        == "words, words\n"
    )


def test_a_tokenizer_that_cannot_be_loaded_says_why(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer"})
    )
    (tmp_path / "tokenizer.model").write_bytes(b"damaged")
    with run_error(r"tokenizer of .*cannot be loaded: .*requirements = .*copy the model again"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with run_error(
        r"tokenizer of .*cannot be loaded: transformers raised KeyError: 'added_tokens' "
        r".*copy the model"
    ):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("adds", "begins"),
    [
        ("<|im_start|> $A", True),
        ("<|im_start|> $A <|im_end|>", True),
        ("$A <|im_end|>", False),
        ("$A", False),
        ("<|endoftext|> $A", False),
    ],
)
def test_a_plain_text_begins_with_bos_if_the_tokenizer_adds_it_and_with_nothing_else(adds, begins):
    backend = byte_tokenizer()
    special_tokens = [(token, backend.token_to_id(token)) for token in SPECIAL_TOKENS]
    backend.post_processor = processors.TemplateProcessing(
        single=adds, pair=f"{adds} $B", special_tokens=special_tokens
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS_TOKEN, eos_token=EOS_TOKEN
    )
    plain, bos = (
        tokenizer.encode("ab", add_special_tokens=False),
        [tokenizer.bos_token_id] if begins else [],
    )
    assert text_ids(tokenizer, "ab") == bos + plain and text_ids(tokenizer, "") == bos
    assert text_ids(tokenizer, BOS_TOKEN + "ab") == [tokenizer.bos_token_id, *plain], (
        "one that is written out is the only one"
    )


def test_a_tokenizer_without_bos_token_adds_nothing_to_a_plain_text():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=EOS_TOKEN)
    assert text_ids(tokenizer, "ab") == tokenizer.encode("ab")
