"""Where answers end: by the template, whatever the files of a base model say."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from rl.config.run import RendererConfig
from rl.models.ends import end_ids, write_ends
from rl.models.renderer import load_renderer
from rl.models.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_tokenizer, make_tiny_model
from rl.models.tokenizer import generation_ends

TEXT_END, START, TURN_END = range(3)


def edit(file: Path, **fields) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))


@pytest.fixture
def base(tmp_path):
    """A base model such as Qwen3-0.6B-Base: a ChatML template, and files that know only the end of texts."""
    folder = make_tiny_model(tmp_path / "base")
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, eos_token_id=TEXT_END)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        edit(folder / name, eos_token="<|endoftext|>")
    return folder


def test_an_answer_ends_with_the_templates_token_and_with_those_of_the_files(base):
    assert load_renderer(str(base), RendererConfig()).stop_token_ids == [TURN_END, TEXT_END]
    edit(base / "generation_config.json", eos_token_id=[TEXT_END, 9])
    assert load_renderer(str(base), RendererConfig()).stop_token_ids == [TURN_END, TEXT_END, 9]
    assert end_ids(AutoTokenizer.from_pretrained(base)) == [TURN_END, TEXT_END, 9]
    (base / "generation_config.json").unlink()
    assert generation_ends(base) == [TEXT_END]
    for told in (CHAT_TEMPLATE + "{{ raise_exception('never') }}", None):
        edit(base / "tokenizer_config.json", chat_template=told)
        assert end_ids(AutoTokenizer.from_pretrained(base)) == [TEXT_END]


def test_copies_of_a_base_model_say_where_its_template_ends_an_answer(base, tmp_path):
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    write_ends(base, copy, trusted=False)
    assert AutoTokenizer.from_pretrained(copy).eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(copy).eos_token_id == [TURN_END, TEXT_END]
    assert json.loads((copy / "config.json").read_text())["eos_token_id"] == [TURN_END, TEXT_END]
    written = {file.name: file.read_bytes() for file in copy.iterdir()}
    write_ends(copy, copy, trusted=False)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == written


def test_files_that_name_the_end_stay_as_they_are(base, tmp_path):
    """Such as Gemma's, whose tokenizer ends texts with another token than its generation_config.json ends answers."""
    edit(base / "generation_config.json", eos_token_id=[TEXT_END, TURN_END])
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    write_ends(base, copy, trusted=False)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == {file.name: file.read_bytes() for file in base.iterdir()}


GLM = [*SPECIAL_TOKENS, "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
GLM_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}{{ {'user': '<|user|>', 'tool': '<|observation|>'}.get(m.role, '<|assistant|>') }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize(("name", "thinks"), [("glm-4.5", None), ("glm-5", False), ("template", None)])
def test_an_answer_of_glm_ends_with_the_token_that_begins_the_next_turn(tmp_path, name, thinks):
    """GLM's template writes nothing after an answer: the model ends it with the role of whoever speaks next."""
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in GLM[3:]])
    tags = [f"<{slash}{tag}>" for tag in ("think", "tool_call", "arg_key", "arg_value", "tool_response") for slash in ("", "/")]
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = GLM_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    edit(tmp_path / "generation_config.json", eos_token_id=ids)
    renderer = load_renderer(str(tmp_path), RendererConfig(name=name, enable_thinking=thinks))
    assert renderer.stop_token_ids == ids
    ask = {"role": "user", "content": "What is 1 + 2?"}
    plain = renderer.answer_ids([ask, {"role": "assistant", "content": "3"}])
    assert plain[-1] == ids[1] and renderer.until_stop(plain) == plain[:-1]
    if name != "template":
        talk = [ask, {"role": "assistant", "content": "3"}, ask]
        assert renderer.next_prompt_ids(renderer.prompt_ids([ask]) + plain, talk, 2).count(ids[1]) == 2
    calls = [ask, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    renderer.supports_tools = True
    called = renderer.answer_ids(calls)
    assert called[-1] == ids[2] and "<tool_call>add" in renderer.text(called)
