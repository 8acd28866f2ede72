"""Rendering and parsing on SmolLM2's own tokenizer, and on a small trained one with a template in the manner of Qwen3."""

import functools
import json
import re
import subprocess
import sys

import pytest

from rl.config import ModelConfig
from rl.models import ModelError, resolve_model
from rl.renderer import RendererError, load_renderer, published_names
from rl.renderer_config import RendererConfig
from tests.tiny_model import CHAT_TEMPLATE, make_tokenizer

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
QUESTION = {"role": "user", "content": "What is 1 + 2?"}
DROPS_THINKING = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}{{ HEADER }}"
    "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ FOOTER }}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > last.user and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QUOTES_ARGUMENTS = (
    "{% if tools %}[TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    '{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def call_of(name="add", arguments='{"a": 1}', id="1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def message_of(answer):
    message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [call_of(call.name, call.arguments, call.id) for call in answer.tool_calls]
    return message


def odd_ids(renderer, text):
    """Ids of `text` that no tokenizer would choose: each character alone, but tags that are one token stay one."""
    pieces = [[tag] if len(renderer.encode(tag)) == 1 else tag for tag in re.split("(</?tool_call>)", text)]
    ids = [id for piece in pieces for character in piece for id in renderer.encode(character)]
    assert ids != renderer.encode(text) and renderer.decode(ids) == text
    return ids


@pytest.fixture(scope="module")
def smol_path():
    try:
        return resolve_model(ModelConfig())
    except ModelError as missing:
        pytest.skip(f"SmolLM2 cannot be had here: {missing}")


@pytest.fixture(scope="module")
def smol(smol_path):
    return load_renderer(smol_path, RendererConfig())


@pytest.fixture(scope="module")
def qwen_path(tmp_path_factory):
    """A byte-level BPE with some merges, Qwen3's tokens, and a template that drops the thinking of earlier rounds as Qwen3's does."""
    from renderers.qwen3 import _TOOLS_FOOTER, _TOOLS_HEADER
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["assistant user system tool the answer is three, I think; one and two", DROPS_THINKING] * 3, trainer)
    tags = [f"<{slash}{name}>" for name in ("think", "tool_call", "tool_response") for slash in ("", "/")]
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = DROPS_THINKING.replace("HEADER", json.dumps(_TOOLS_HEADER)).replace("FOOTER", json.dumps(_TOOLS_FOOTER))
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


@pytest.fixture(scope="module")
def plain_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    make_tokenizer().save_pretrained(path)
    return str(path)


# What is chosen


def test_a_chatml_template_that_drops_tools_is_found_out(smol_path, smol, plain_path):
    assert type(smol).__name__ == "ChatMLRenderer" and smol.supports_tools and smol.stop_token_ids == [2]
    assert type(load_renderer(plain_path, RendererConfig())).__name__ == "ChatMLRenderer"
    own = load_renderer(smol_path, RendererConfig(name="template"))
    assert not own.supports_tools
    for ask in (lambda: own.prompt_ids([QUESTION], [ADD]), lambda: own.next_prompt_ids([1, 2], [QUESTION, QUESTION], 1, [ADD])):
        with pytest.raises(RendererError, match=r'renderer\.name = "chatml"'):
            ask()
    assert own.prompt_ids([QUESTION]) == smol.prompt_ids([QUESTION])


def test_a_local_copy_of_qwen3_is_known_by_its_template(qwen, qwen_path, caplog):
    caplog.set_level("INFO", "rl.renderer")
    renderer = load_renderer(qwen_path, RendererConfig())
    assert renderer.name == "qwen3" and renderer.supports_tools
    assert "equals the model's template on 6 conversations" in caplog.text and caplog.text.count("\n") == 1


def test_a_changed_template_is_not_taken_for_qwen3(qwen):
    changed = qwen().tokenizer.chat_template.replace("<tool_response>\n{{", "<tool_response>\nResult: {{")
    assert changed != qwen().tokenizer.chat_template
    renderer = load_renderer(qwen().tokenizer.name_or_path, RendererConfig(), changed)
    assert type(renderer).__name__ == "TemplateRenderer" and renderer.supports_tools
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call_of()]}, {"role": "tool", "content": "3"}]
    assert "<tool_response>\nResult: 3\n" in renderer.text(renderer.prompt_ids(messages, [ADD]))


def test_a_published_name_is_read_off_the_hubs_cache(smol):
    path = "/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de"
    assert published_names(smol.tokenizer, path) == ("Qwen/Qwen3-0.6B", "")


def test_a_template_that_is_not_chatml(plain_path, tmp_path):
    silent = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    file = tmp_path / "silent.jinja"
    file.write_text(silent)
    assert not load_renderer(plain_path, RendererConfig(), str(file)).supports_tools
    told = load_renderer(plain_path, RendererConfig(name="chatml"), silent)  # where the user insists: tools as text in this template
    assert told.text(told.prompt_ids([QUESTION], [ADD])).startswith("[system]# Tools") and told.supports_tools
    quoting = load_renderer(plain_path, RendererConfig(), QUOTES_ARGUMENTS)
    assert type(quoting).__name__ == "TemplateRenderer" and quoting.supports_tools
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call_of()]}]
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>' in quoting.render(messages, [ADD])


def test_errors_name_the_remedy(tmp_path, plain_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RendererError, match=r"model\.chat_template = file\.jinja"):
        load_renderer(str(tmp_path), RendererConfig())
    assert load_renderer(str(tmp_path), RendererConfig(), CHAT_TEMPLATE).supports_tools
    for name in ("nonsense", "qwen3"):  # no such renderer; one whose tokens this model lacks
        with pytest.raises(RendererError, match=rf'renderer\.name = "{name}" does not fit.*"auto"'):
            load_renderer(plain_path, RendererConfig(name=name))
    strict = load_renderer(
        plain_path, RendererConfig(), CHAT_TEMPLATE + "{% if messages|length > 2 %}{{ raise_exception('long') }}{% endif %}"
    )
    with pytest.raises(RendererError, match=r"user, assistant, user: long; .*model\.chat_template"):
        strict.prompt_ids([QUESTION, {"role": "assistant", "content": "3"}, QUESTION])
    with pytest.raises(RendererError, match="a user message has content of type image_url"):
        strict.prompt_ids([{"role": "user", "content": [{"type": "image_url"}]}])


def test_importing_is_light():
    code = "import rl.renderer, sys; print([m for m in ('torch', 'transformers', 'renderers', 'jinja2', 'verifiers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# SmolLM2: tools as text


@pytest.mark.parametrize(
    "messages",
    [
        [QUESTION],
        [{"role": "system", "content": "Be brief."}, QUESTION],
        [QUESTION, {"role": "assistant", "content": "3"}, {"role": "user", "content": " Sure? \n"}],
    ],
)
def test_without_tools_the_ids_are_those_of_the_models_template(smol, messages):
    expected = smol.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert smol.prompt_ids(messages) == expected
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert smol.prompt_ids(parts, tools=[]) == expected


def test_tools_calls_and_results_are_text(smol):
    called = {"role": "assistant", "content": None, "tool_calls": [call_of(), call_of("add", '{"a":2}', "2")]}
    results = [{"role": "tool", "tool_call_id": "1", "content": "one"}, {"role": "tool", "tool_call_id": "2", "content": "two"}]
    text = smol.text(smol.prompt_ids([QUESTION, called, *results], [ADD]))
    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n\n# Tools\n\n")
    assert f"\n<tools>\n{json.dumps(ADD['function'])}\n</tools>\n" in system
    assert rest == (
        "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a":2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own = smol.text(smol.prompt_ids([{"role": "system", "content": "Be brief."}, QUESTION], [ADD]))
    assert own.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n") and "SmolLM" not in own


def three_turns(renderer, end):
    """Plays call, call cut off, question; returns the last prompt, and checks at every turn that nothing old has changed."""
    spoken = [
        'I add.\n<tool_call>\n{"arguments":{"a":1},  "name":"add"}\n</tool_call>',
        'Again <tool_call>\n{"name": "add", "ar',
        "It is three.",
    ]
    additions = [
        {"role": "tool", "tool_call_id": "1", "content": "1"},
        {"role": "user", "content": "Go on."},
        {"role": "user", "content": "Sure?"},
    ]
    messages, ids = [QUESTION], renderer.prompt_ids([QUESTION], [ADD])
    for turn, (text, addition) in enumerate(zip(spoken, additions, strict=True)):
        completion = odd_ids(renderer, text) + ([] if turn == 1 else [end])
        messages.append(message_of(renderer.parse(completion, [ADD], ids)))
        num_old, before = len(messages), ids + completion
        messages.append(addition)
        ids = renderer.next_prompt_ids(before, messages, num_old, [ADD])
        assert ids[: len(before)] == before
        assert ids[len(before)] == end if turn == 1 else ids[len(before)] != end
        role = "user\n<tool_response>\n1\n</tool_response>" if turn == 0 else f"user\n{addition['content']}"
        closed = "<|im_end|>" if turn == 1 else ""
        assert renderer.text(ids[len(before) :]) == f"{closed}\n<|im_start|>{role}<|im_end|>\n<|im_start|>assistant\n"
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    return messages, ids


def test_three_turns_are_append_only_whatever_was_sampled(smol, qwen):
    three_turns(smol, 2)
    for settings in ({}, {"name": "template"}):
        renderer = qwen(**settings)
        messages, ids = three_turns(renderer, renderer.tokenizer.eos_token_id)
        assert ids != renderer.prompt_ids(messages, [ADD]) and renderer.text(ids).count("<|im_start|>") == 9


def test_a_canonical_answer_gives_the_ids_of_the_whole_conversation(smol):
    called = {"role": "assistant", "content": "I add.", "tool_calls": [call_of()]}
    messages = [QUESTION, called, {"role": "tool", "tool_call_id": "1", "content": "3"}]
    spoken = smol.encode('I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>')
    assert smol.next_prompt_ids(smol.prompt_ids([QUESTION], [ADD]) + spoken, messages, 2, [ADD]) == smol.prompt_ids(messages, [ADD])


def test_an_end_of_turn_spelled_by_the_answer_or_its_call_ends_nothing(smol):
    end = "<|im_end|>"
    said = {"role": "assistant", "content": f"a{end}b", "tool_calls": [call_of(f"f{end}", json.dumps({"a": end}))]}
    before = [*smol.prompt_ids([QUESTION], [ADD]), 5, 2]
    ids = smol.next_prompt_ids(before, [QUESTION, said, {"role": "tool", "tool_call_id": "1", "content": "no"}], 2, [ADD])
    tail = "\n<|im_start|>user\n<tool_response>\nno\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert ids[: len(before)] == before and smol.text(ids[len(before) :]) == tail


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}",
        "{{ messages | length }}" + CHAT_TEMPLATE,
    ],
)
def test_a_template_that_rewrites_history_is_rendered_anew(plain_path, template):
    renderer = load_renderer(plain_path, RendererConfig(name="template"), template)
    history = [QUESTION, {"role": "assistant", "content": "3"}, {"role": "user", "content": "Sure?"}]
    assert renderer.next_prompt_ids([*renderer.prompt_ids(history[:1]), 5, 2], history, 2) is None
    assert renderer.next_prompt_ids([5, 2], history, 1) is None  # the last old message is not an answer


# Answers


GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARSED = [
    ("Just text. ", "Just text. ", [], []),
    (GOOD, "", [("add", '{"a": 1}')], []),
    (f"Both:\n{GOOD}\n{GOOD}", "Both:", [("add", '{"a": 1}')] * 2, []),
    ('<tool_call>{"arguments":{"s":"é"},"name":"other"}</tool_call>', "", [("other", '{"s": "é"}')], []),  # unknown tools are calls
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")], []),
    ("<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", [], ["<tool_call>add(1)</tool_call>"]),
    (
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        [],
        ['<tool_call>{"arguments": {}}</tool_call>'],
    ),
    ('x <tool_call>\n{"name": "add", "a', 'x <tool_call>\n{"name": "add", "a', [], ['<tool_call>\n{"name": "add", "a']),
]
STRICT = [
    ('<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>', "", [("add", '{"a": "</tool_call>"}')], []),
    (r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>', "", [("add", r'{"a": "\ud83d"}')], []),
    (f"<tool_call>{GOOD} end", "<tool_call> end", [("add", '{"a": 1}')], ["<tool_call>"]),
    (f"<tool_call>no</tool_call>\n{GOOD}", "<tool_call>no</tool_call>", [("add", '{"a": 1}')], ["<tool_call>no</tool_call>"]),
]
BAD_ARGUMENTS = ["[1]", '"{}"', "NaN", '{"a": NaN}', '{"a": ' + "9" * 5000 + "}", '{"a":' * 20000, r'"\ud83d"']


@pytest.mark.parametrize(("text", "content", "calls", "bad"), PARSED + STRICT)
def test_calls_are_read_and_bad_ones_stay_visible(smol, text, content, calls, bad):
    answer = smol.parse([*smol.encode(text), 2], [ADD], [1, 5])
    assert (answer.content, answer.reasoning, answer.bad_tool_calls) == (content, None, bad)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == calls
    assert smol.parse([*smol.encode(text), 2]).content == text  # without tools nothing is a call


@pytest.mark.parametrize(("text", "content", "calls", "bad"), PARSED)
@pytest.mark.parametrize("name", ["auto", "template"])
def test_a_renderer_of_the_package_and_ours_read_alike(qwen, name, text, content, calls, bad):
    renderer = qwen(name=name)
    answer = renderer.parse(renderer.encode(f"<think>\nHm.\n</think>\n\n{text}<|im_end|>"), [ADD])
    assert (answer.reasoning, answer.bad_tool_calls) == ("Hm.", bad)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == calls
    assert answer.content.split() == content.split()
    untold = renderer.parse(renderer.encode(f"{text}<|im_end|>"))
    assert untold.tool_calls == untold.bad_tool_calls == [] and untold.content.split() == text.split()


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_what_json_readers_refuse_is_no_call(smol, qwen, arguments):
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    for renderer in (smol, qwen()):
        answer = renderer.parse(renderer.encode(text), [ADD])
        assert answer.tool_calls == [] and [len(bad) for bad in answer.bad_tool_calls] == [len(text)] and text in answer.content


def test_ids_of_calls_are_unique_in_a_conversation_and_the_same_in_a_repetition(smol):
    said = smol.encode(GOOD + GOOD)
    ids = [[call.id for call in smol.parse(said, [ADD], prompt).tool_calls] for prompt in ([1], [1], [1, 2])]
    assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 4


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "Three, I think."},
        {"role": "assistant", "content": "I add.", "tool_calls": [call_of(), call_of("add", '{"a": {"b": [1, "é\\n\\""]}}')]},
        {"role": "assistant", "content": "", "tool_calls": [call_of()]},
        {"role": "assistant", "content": "Three.", "reasoning_content": "One and\ntwo."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call_of()]},
    ],
)
def test_a_rendered_message_is_read_back(smol, qwen, message):
    thinks = "reasoning_content" in message
    for renderer in (qwen(), qwen(name="template")) if thinks else (smol, qwen(), qwen(name="template")):
        prompt = renderer.render([QUESTION], [ADD])
        whole = renderer.render([QUESTION, message], [ADD], header=False)
        ids = whole[len(prompt) :] if isinstance(whole, list) else renderer.encode(whole[len(prompt) :])
        back = message_of(renderer.parse(ids, [ADD]))
        for call in back.get("tool_calls", []):
            call["id"] = "1"
        assert back == message


# Thinking


@pytest.mark.parametrize("name", ["auto", "template"])
def test_thinking_is_kept_or_dropped_as_set(qwen, name):
    ask = [QUESTION, {"role": "assistant", "content": "3", "reasoning_content": "Hm."}, {"role": "user", "content": "Sure?"}]
    call = [QUESTION, {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call_of()]}]
    call.append({"role": "tool", "tool_call_id": "1", "content": "3"})
    extended = {}
    for retention in ("all", "tool_cycle", "template"):
        renderer = qwen(name=name, thinking_retention=retention)
        for messages, said in ((ask, "3"), (call, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')):
            spoken = renderer.encode(f"<think>\nHm.\n</think>\n\n{said}<|im_end|>")
            before = renderer.prompt_ids([QUESTION], [ADD]) + spoken
            ids = renderer.next_prompt_ids(before, messages, 2, [ADD])
            extended[retention, messages[-1]["role"]] = ids is not None
            if ids:
                tail = "user\nSure?" if messages is ask else "user\n<tool_response>\n3\n</tool_response>"
                assert ids[: len(before)] == before
                assert renderer.text(ids[len(before) :]) == f"\n<|im_start|>{tail}<|im_end|>\n<|im_start|>assistant\n"
            if messages is call:
                assert ids == renderer.prompt_ids(messages, [ADD])
    asked = {"all": True, "tool_cycle": False, "template": False}
    assert extended == {(key, role): role == "tool" or keeps for key, keeps in asked.items() for role in ("user", "tool")}


@pytest.mark.parametrize(("name", "close"), [("auto", "</think>"), ("template", "\n</think>\n\n")])
def test_thinking_that_was_cut_off_is_closed(qwen, name, close):
    renderer = qwen(name=name)
    spoken = renderer.encode("<think>\nHm, one and")
    answer = renderer.parse(spoken, [ADD])
    assert (answer.content, answer.reasoning.strip(), answer.tool_calls) == ("", "Hm, one and", [])
    before = renderer.prompt_ids([QUESTION]) + spoken
    ids = renderer.next_prompt_ids(before, [QUESTION, message_of(answer), {"role": "user", "content": "Go on."}], 2)
    assert ids[: len(before)] == before
    assert renderer.text(ids[len(before) :]) == f"{close}<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    faithful = qwen(name=name, thinking_retention="template")
    assert faithful.next_prompt_ids(before, [QUESTION, message_of(answer), {"role": "user", "content": "Go on."}], 2) is None


@pytest.mark.parametrize("name", ["auto", "template"])
def test_thinking_can_be_switched_off(qwen, name):
    renderer = qwen(name=name, enable_thinking=False)
    prompt = renderer.prompt_ids([QUESTION])
    assert renderer.text(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    before = prompt + renderer.encode("3<|im_end|>")
    ids = renderer.next_prompt_ids(before, [QUESTION, {"role": "assistant", "content": "3"}, {"role": "user", "content": "Sure?"}], 2)
    assert ids[: len(before)] == before and renderer.text(ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert renderer.parse(renderer.encode("3<|im_end|>"), prompt_ids=prompt).content == "3"


def test_a_prompt_that_opens_the_thinking(qwen):
    own = qwen().tokenizer.chat_template
    opens = own.replace("<|im_start|>assistant\n{% if enable_thinking", "<|im_start|>assistant\n<think>\n{% if enable_thinking")
    assert opens != own
    renderer = load_renderer(qwen().tokenizer.name_or_path, RendererConfig(), opens)
    prompt, spoken = renderer.prompt_ids([QUESTION]), renderer.encode("Hm.\n</think>\n\n3<|im_end|>")
    answer = renderer.parse(spoken, prompt_ids=prompt)
    assert type(renderer).__name__ == "TemplateRenderer" and (answer.reasoning, answer.content) == ("Hm.", "3")
    ids = renderer.next_prompt_ids(prompt + spoken, [QUESTION, message_of(answer), {"role": "user", "content": "Sure?"}], 2)
    assert ids[: len(prompt + spoken)] == prompt + spoken and renderer.text(ids).endswith(
        "Sure?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
