"""A worker's tokenizer and chat template: transformers' own, in its home the same ids as here."""

import json
import os
import subprocess

import pytest
from transformers import AutoTokenizer

from rl.config.run import RendererConfig
from rl.models import probes
from rl.models.renderer import load_renderer
from rl.models.tokenizer import load_tokenizer
from rl.system.errors import RunError
from tests.interpreters import ROOT, worker_python

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
    """A home has the newest transformers that suits its environment, we have the one that is installed."""
    cases = [(path, settings) for path in (smol_path, qwen_path, plain_path) for settings in ({}, {"name": "template"})]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [worker_python(), "-c", IN_A_HOME, json.dumps(cases)]
    *there, has_torch = map(json.loads, subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines())
    assert not has_torch
    for (path, settings), found in zip(cases, there, strict=True):
        renderer = load_renderer(path, RendererConfig(**settings))
        talks = [(messages, tools if renderer.supports_tools else None) for messages, tools in probes.CONVERSATIONS]
        assert found == [type(renderer).__name__, renderer.stop_token_ids, [renderer.prompt_ids(*talk) for talk in talks]]


def test_a_model_without_tokenizer_json_is_converted(plain_path, tmp_path):
    """Here one of GPT-2's form: a vocabulary and merges."""
    path = tmp_path / "old"
    path.mkdir()
    model = json.loads(AutoTokenizer.from_pretrained(plain_path).backend_tokenizer.to_str())["model"]
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("#version: 0.2\n")
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "chat_template": "x"}')
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.decode(tokenizer.encode("words, words\n", add_special_tokens=False)) == "words, words\n"


def test_a_tokenizer_that_cannot_be_loaded_says_why(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (tmp_path / "tokenizer.model").write_bytes(b"damaged")
    with pytest.raises(RunError, match=r"tokenizer of .*cannot be loaded: .*requirements = .*copy the model again"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(RunError, match=r"tokenizer of .*cannot be loaded: transformers raised KeyError: 'added_tokens' .*copy the model"):
        load_tokenizer(str(tmp_path))
