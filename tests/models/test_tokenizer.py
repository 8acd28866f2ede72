"""The tokenizer without transformers: the same ids, texts and refusals as with it, found out before a worker relies on it."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from rl.config.run import RendererConfig
from rl.models import probes
from rl.models.renderer import load_renderer
from rl.models.tokenizer import FACTS, SlimTokenizer, load_tokenizer
from rl.models.tokenizer_files import difference, slim_tokenizer, write
from rl.system.errors import RunError

SWITCH = "{% if tools %}{{ tools | tojson }}{% endif %}"
ODD_TEMPLATE = (
    "{%- set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'assistant' %}{% generation %}<{{ m.content }}|{{ m.thinking }}>{% endgeneration %}\n"
    "{% elif m.role == 'tool' %}{{ raise_exception('no tools') }}{% else %}{{ bos_token }}{{ m.content }}\n{% endif %}{% endfor %}"
    "{{ ns.n }} {{ strftime_now('%Y') }} {{ dict(a=1) | tojson(indent=1) }} {{ {'b': '<ü>'} | tojson }}"
)


def folder_with(path, target, **changes):
    """The tokenizer in `path`, changed, in a folder of its own."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(target)
    return target


@pytest.mark.parametrize("name", ["smol_path", "qwen_path", "plain_path"])
def test_it_is_what_transformers_loads(name, request, tmp_path):
    path = request.getfixturevalue(name)
    (tmp_path / "slim").mkdir()
    write(path, tmp_path / "slim")
    ours, theirs = SlimTokenizer(tmp_path / "slim", path), AutoTokenizer.from_pretrained(path)
    assert len(ours.facts.probes) >= 10 and difference(theirs, ours) == ""
    assert ours.get_vocab() == theirs.get_vocab() and ours.convert_tokens_to_ids(["a", "nonsense"]) == theirs.convert_tokens_to_ids(
        ["a", "nonsense"]
    )
    for settings in ({}, {"name": "template"}):
        config = RendererConfig(**settings)
        one, other = load_renderer(path, config, slim=str(tmp_path / "slim")), load_renderer(path, config)
        assert type(one) is type(other) and one.stop_token_ids == other.stop_token_ids and one.supports_tools == other.supports_tools
        for messages, tools in probes.CONVERSATIONS:
            tools = tools if one.supports_tools else None
            assert one.prompt_ids(messages, tools) == other.prompt_ids(messages, tools)


def test_what_templates_may_use(plain_path, tmp_path):
    path = folder_with(plain_path, tmp_path / "odd", chat_template=ODD_TEMPLATE)
    (tmp_path / "slim").mkdir()
    write(path, tmp_path / "slim")
    ours, theirs = SlimTokenizer(tmp_path / "slim", str(path)), AutoTokenizer.from_pretrained(path)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c", "tool_calls": None}]
    text = ours.apply_chat_template(talk)
    assert text == theirs.apply_chat_template(talk, tokenize=False) and '{"b": "<ü>"}' in text
    assert ("<b|c>" in text) == ours.facts.names_thinking  # transformers 5.19 does not give it, 5.23 does
    with pytest.raises(Exception, match="no tools"):
        ours.apply_chat_template([{"role": "tool", "content": ""}])
    two = {"default": "d", "tool_use": "t" + SWITCH}
    path = folder_with(plain_path, tmp_path / "two", chat_template=two)
    (tmp_path / "slim2").mkdir()
    write(path, tmp_path / "slim2")
    ours = SlimTokenizer(tmp_path / "slim2", str(path))
    assert ours.apply_chat_template(talk) == "d" and ours.apply_chat_template(talk, [{"x": 1}]) == 't[{"x": 1}]'


@pytest.mark.parametrize(
    "attack", ["{{ namespace.mro() }}", "{% set ns = namespace(__class__=1) %}", "{{ dict.mro() }}", "{{ ''.__class__.mro() }}"]
)
def test_a_template_cannot_reach_python(attack, plain_path, tmp_path):
    from jinja2 import TemplateError

    path = folder_with(plain_path, tmp_path / "evil", chat_template=attack)
    (tmp_path / "slim").mkdir()
    write(path, tmp_path / "slim")
    ours = SlimTokenizer(tmp_path / "slim", str(path))
    if ours.facts.unfit:  # this version of transformers would show it, so nothing is loaded without transformers
        return
    with pytest.raises((TemplateError, TypeError)):
        ours.apply_chat_template(probes.ASK)


def test_a_worker_s_policy_needs_neither_torch_nor_transformers(plain_path, tmp_path, monkeypatch):
    """And the folder is made once, by a process of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    slim, unfit = slim_tokenizer(plain_path)
    assert unfit == "" and slim.startswith(str(tmp_path)) and slim_tokenizer(plain_path) == (slim, "")
    code = (
        "import sys; from rl.config.run import RendererConfig; from rl.models.renderer import load_renderer; from rl.models import probes\n"
        f"r = load_renderer({plain_path!r}, RendererConfig(), slim={slim!r}); print(r.prompt_ids(probes.ASK))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    ids, heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert json.loads(ids) == load_renderer(plain_path, RendererConfig()).prompt_ids(probes.ASK) and heavy == "[]"


def test_a_tokenizer_that_comes_out_differently_is_left_to_transformers(plain_path, tmp_path, capsys):
    (tmp_path / "slim").mkdir()
    write(plain_path, tmp_path / "slim")
    facts = json.loads((tmp_path / "slim" / FACTS).read_text())
    facts["probes"][2]["ids"][0] += 1
    (tmp_path / "slim" / FACTS).write_text(json.dumps(facts))
    assert type(load_tokenizer(plain_path, str(tmp_path / "slim"))).__module__.startswith("transformers")
    assert "'The quick brown fox" in (said := capsys.readouterr().out) and "transformers loads it instead" in said


def test_an_interpreter_without_transformers_says_what_it_needs(plain_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RunError, match=r"needs transformers, and this interpreter has none; add it: .*requirements ="):
        load_tokenizer(plain_path, "")


def test_a_model_without_tokenizer_json_is_converted(plain_path, tmp_path, monkeypatch):
    """Here one of GPT-2's form: a vocabulary and merges."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "old"
    path.mkdir()
    model = json.loads((AutoTokenizer.from_pretrained(plain_path)).backend_tokenizer.to_str())["model"]
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("#version: 0.2\n")
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "chat_template": "x"}')
    slim, unfit = slim_tokenizer(str(path))
    assert unfit == "" and not (path / "tokenizer.json").exists()
    theirs = AutoTokenizer.from_pretrained(path)
    text = "words, words\n"
    assert load_tokenizer(str(path), slim).encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_what_only_transformers_can_load_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}')
    assert slim_tokenizer(str(tmp_path), trust_remote_code=True) == ("", "it is made by code of the model's own")
    folder, unfit = slim_tokenizer(str(tmp_path))
    assert folder == "" and unfit, "the process that would make it fails, with transformers' reason"
