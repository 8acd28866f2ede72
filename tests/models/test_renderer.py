"""Rendering and parsing on SmolLM2's own tokenizer, and on a small trained one with a template
in the manner of Qwen3."""

import json
import shutil
import subprocess
import sys

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rl.config.run import RendererConfig, RLConfig
from rl.envs.policy import Policy
from rl.models.chat import RendererError, assistant_message
from rl.models.renderer import published_names
from rl.models.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_tokenizer
from rl.orchestrator.workers.setups import policy_spec
from tests.models.conftest import load_renderer
from tests.models.conversations import (
    ADD,
    PARSED,
    QUESTION,
    SURE,
    THREE,
    added,
    assistant,
    call_of,
    odd_ids,
    tool,
    user,
)

# What is chosen


def test_a_chatml_template_that_drops_tools_is_found_out(smol_path, smol, plain_path):
    assert (
        type(smol).__name__ == "ChatMLRenderer"
        and smol.supports_tools
        and smol.stop_token_ids == [2]
    )
    assert type(load_renderer(plain_path, RendererConfig())).__name__ == "ChatMLRenderer"
    own = load_renderer(smol_path, RendererConfig(name="template"))
    assert not own.supports_tools
    for ask in (
        lambda: own.prompt_ids([QUESTION], [ADD]),
        lambda: own.next_prompt_ids([1, 2], [QUESTION, QUESTION], 1, [ADD]),
    ):
        with pytest.raises(RendererError, match=r'renderer\.name = "chatml"'):
            ask()
    assert own.prompt_ids([QUESTION]) == smol.prompt_ids([QUESTION])


def test_a_local_copy_of_qwen3_is_known_by_its_template(qwen_path, caplog):
    caplog.set_level("INFO", "rl.models.renderer")
    renderer = load_renderer(qwen_path, RendererConfig())
    assert renderer.name == "qwen3" and renderer.supports_tools
    assert (
        "equals the model's template on 6 conversations" in caplog.text
        and caplog.text.count("\n") == 1
    )


def test_a_changed_template_is_not_taken_for_qwen3(qwen, qwen_path, templated):
    changed = qwen().tokenizer.chat_template.replace(
        "<tool_response>\n{{", "<tool_response>\nResult: {{"
    )
    assert changed != qwen().tokenizer.chat_template
    renderer = templated(qwen_path, changed)
    assert type(renderer).__name__ == "TemplateRenderer" and renderer.supports_tools
    messages = [QUESTION, assistant(None, tool_calls=[call_of()]), tool("3")]
    assert "<tool_response>\nResult: 3\n" in renderer.text(renderer.prompt_ids(messages, [ADD]))


def test_a_published_name_is_read_off_the_hubs_cache(smol):
    path = "/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de"
    assert published_names(smol.tokenizer, path) == ("Qwen/Qwen3-0.6B", "")


def test_errors_name_the_remedy(tmp_path, plain_path, templated):
    tokenizer = AutoTokenizer.from_pretrained(plain_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    with pytest.raises(RendererError, match=r"model\.chat_template to chatml or a file"):
        load_renderer(str(tmp_path / "bare"), RendererConfig())
    assert templated(tmp_path / "bare", CHAT_TEMPLATE).supports_tools
    for name in ("nonsense", "qwen3"):  # no such renderer; one whose tokens this model lacks
        with pytest.raises(RendererError, match=rf'renderer\.name = "{name}" does not fit.*"auto"'):
            load_renderer(plain_path, RendererConfig(name=name))
    strict = templated(
        plain_path,
        CHAT_TEMPLATE + "{% if messages|length > 2 %}{{ raise_exception('long') }}{% endif %}",
    )
    with pytest.raises(RendererError, match=r"user, assistant, user: long; .*model\.chat_template"):
        strict.prompt_ids([QUESTION, THREE, QUESTION])
    with pytest.raises(RendererError, match="a user message has content of type image_url"):
        strict.prompt_ids([user([{"type": "image_url"}])])


def test_importing_is_light():
    heavy = "('torch', 'transformers', 'renderers', 'jinja2', 'verifiers')"
    code = f"import rl.models.renderer, sys; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


# Where answers end


GLM = [
    *SPECIAL_TOKENS,
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
]


@pytest.mark.parametrize(("name", "thinks"), [("glm-4.5", None), ("glm-5", False)])
def test_an_answer_of_glm_ends_with_the_token_that_begins_the_next_turn(tmp_path, name, thinks):
    """GLM's template writes nothing after an answer: the model ends it with the role of whoever
    speaks next."""
    backend = byte_tokenizer()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in GLM[3:]]
    )
    tags = [
        f"<{slash}{tag}>"
        for tag in ("think", "tool_call", "arg_key", "arg_value", "tool_response")
        for slash in ("", "/")
    ]
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    renderer = load_renderer(str(tmp_path), RendererConfig(name=name, enable_thinking=thinks))
    assert renderer.stop_token_ids == ids
    plain = renderer.answer_ids([QUESTION, THREE])
    assert plain[-1] == ids[1] and renderer.until_stop(plain) == plain[:-1]
    talk = [QUESTION, THREE, QUESTION]
    assert (
        renderer.next_prompt_ids(renderer.prompt_ids([QUESTION]) + plain, talk, 2).count(ids[1])
        == 2
    )
    calls = [QUESTION, assistant("", tool_calls=[call_of()])]
    called = renderer.answer_ids(calls)
    assert called[-1] == ids[2] and "<tool_call>add" in renderer.text(called)


# Over turns


def three_turns(renderer, end):
    """Plays call, call cut off, question; returns the last prompt, and checks at every turn that
    nothing old has changed."""
    spoken = [
        'I add.\n<tool_call>\n{"arguments":{"a":1},  "name":"add"}\n</tool_call>',
        'Again <tool_call>\n{"name": "add", "ar',
        "It is three.",
    ]
    additions = [tool("1", "1"), user("Go on."), SURE]
    messages, ids = [QUESTION], renderer.prompt_ids([QUESTION], [ADD])
    for turn, (text, addition) in enumerate(zip(spoken, additions, strict=True)):
        completion = odd_ids(renderer, text) + ([] if turn == 1 else [end])
        messages.append(assistant_message(renderer.parse(completion, [ADD], ids)))
        num_old, before = len(messages), ids + completion
        messages.append(addition)
        ids = renderer.next_prompt_ids(before, messages, num_old, [ADD])
        assert (ids[len(before)] == end) == (turn == 1)
        said = addition["content"] if turn else "<tool_response>\n1\n</tool_response>"
        closed = "<|im_end|>" if turn == 1 else ""
        assert (
            added(renderer, before, messages, num_old, [ADD])
            == f"{closed}\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        )
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    return messages, ids


def test_three_turns_are_append_only_whatever_was_sampled(smol, qwen):
    three_turns(smol, 2)
    for settings in ({}, {"name": "template"}):
        renderer = qwen(**settings)
        messages, ids = three_turns(renderer, renderer.tokenizer.eos_token_id)
        assert (
            ids != renderer.prompt_ids(messages, [ADD])
            and renderer.text(ids).count("<|im_start|>") == 9
        )


# Answers


@pytest.mark.parametrize(("text", "content", "calls", "bad"), PARSED)
@pytest.mark.parametrize("name", ["auto", "template"])
def test_a_renderer_of_the_package_and_ours_read_alike(qwen, name, text, content, calls, bad):
    renderer = qwen(name=name)
    answer = renderer.parse(renderer.encode(f"<think>\nHm.\n</think>\n\n{text}<|im_end|>"), [ADD])
    assert (answer.reasoning, answer.bad_tool_calls) == ("Hm.", bad)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == calls
    assert answer.content.split() == content.split()
    untold = renderer.parse(renderer.encode(f"{text}<|im_end|>"))
    assert (
        untold.tool_calls == untold.bad_tool_calls == [] and untold.content.split() == text.split()
    )


@pytest.mark.parametrize(
    "message",
    [
        assistant("Three, I think."),
        assistant("I add.", tool_calls=[call_of(), call_of("add", '{"a": {"b": [1, "é\\n\\""]}}')]),
        assistant("", tool_calls=[call_of()]),
        assistant("Three.", reasoning_content="One and\ntwo."),
        assistant("", reasoning_content="Hm.", tool_calls=[call_of()]),
    ],
)
def test_a_rendered_message_is_read_back(smol, qwen, message):
    thinks = "reasoning_content" in message
    for renderer in (
        (qwen(), qwen(name="template")) if thinks else (smol, qwen(), qwen(name="template"))
    ):
        prompt = renderer.render([QUESTION], [ADD])
        whole = renderer.render([QUESTION, message], [ADD], header=False)
        ids = (
            whole[len(prompt) :]
            if isinstance(whole, list)
            else renderer.encode(whole[len(prompt) :])
        )
        back = assistant_message(renderer.parse(ids, [ADD]))
        for call in back.get("tool_calls", []):
            call["id"] = "1"
        assert back == message


# Thinking


@pytest.mark.parametrize("name", ["auto", "template"])
def test_thinking_is_kept_or_dropped_as_set(qwen, name):
    ask = [QUESTION, assistant("3", reasoning_content="Hm."), SURE]
    call = [QUESTION, assistant("", reasoning_content="Hm.", tool_calls=[call_of()])]
    call.append(tool("3", "1"))
    extended = {}
    for retention in ("all", "tool_cycle", "template"):
        renderer = qwen(name=name, thinking_retention=retention)
        for messages, said in (
            (ask, "3"),
            (call, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        ):
            spoken = renderer.encode(f"<think>\nHm.\n</think>\n\n{said}<|im_end|>")
            before = renderer.prompt_ids([QUESTION], [ADD]) + spoken
            ids = renderer.next_prompt_ids(before, messages, 2, [ADD])
            extended[retention, messages[-1]["role"]] = ids is not None
            if ids:
                tail = "Sure?" if messages is ask else "<tool_response>\n3\n</tool_response>"
                assert (
                    added(renderer, before, messages, tools=[ADD])
                    == f"\n<|im_start|>user\n{tail}<|im_end|>\n<|im_start|>assistant\n"
                )
            if messages is call:
                assert ids == renderer.prompt_ids(messages, [ADD])
    asked = {"all": True, "tool_cycle": False, "template": False}
    assert extended == {
        (key, role): role == "tool" or keeps
        for key, keeps in asked.items()
        for role in ("user", "tool")
    }


@pytest.mark.parametrize(("name", "close"), [("auto", "</think>"), ("template", "\n</think>\n\n")])
def test_thinking_that_was_cut_off_is_closed(qwen, name, close):
    renderer = qwen(name=name)
    spoken = renderer.encode("<think>\nHm, one and")
    answer = renderer.parse(spoken, [ADD])
    assert (answer.content, answer.reasoning.strip(), answer.tool_calls) == ("", "Hm, one and", [])
    before = renderer.prompt_ids([QUESTION]) + spoken
    talk = [QUESTION, assistant_message(answer), user("Go on.")]
    assert (
        added(renderer, before, talk)
        == f"{close}<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )
    faithful = qwen(name=name, thinking_retention="template")
    assert faithful.next_prompt_ids(before, talk, 2) is None


@pytest.mark.parametrize("name", ["auto", "template"])
def test_thinking_can_be_switched_off(qwen, name):
    renderer = qwen(name=name, enable_thinking=False)
    prompt = renderer.prompt_ids([QUESTION])
    assert renderer.text(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    before = prompt + renderer.encode("3<|im_end|>")
    tail = added(renderer, before, [QUESTION, THREE, SURE])
    assert tail.endswith("assistant\n<think>\n\n</think>\n\n")
    assert renderer.parse(renderer.encode("3<|im_end|>"), prompt_ids=prompt).content == "3"


def test_a_tokenizer_that_brings_its_own_code_is_loaded_where_that_is_trusted(
    plain_path, tmp_path, monkeypatch
):
    """model.trust_remote_code holds for the renderer as it does for the model."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = tmp_path / "own"
    shutil.copytree(plain_path, folder)
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass "
        "Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | own))
    settings = RLConfig.model_validate({"model": {"name": str(folder), "trust_remote_code": True}})
    policy = Policy(policy_spec(settings, str(folder)), 60.0)
    assert type(policy.renderer.tokenizer).__name__ == "Own"
