"""Examples to ids and masks: rows of every form, and answers exactly as rollouts would sample
them."""

import contextlib
import json
import os
import re
import subprocess
import sys
import unicodedata
from functools import partial
from itertools import count
from types import SimpleNamespace

import datasets
import pytest
from tokenizers import normalizers, processors
from transformers import AutoTokenizer

from rl.config.run import RendererConfig, RLConfig
from rl.launch.run import manifest_lines
from rl.models.renderer import load_renderer
from rl.models.tiny import write_tokenizer
from rl.trainer.sft import rows
from rl.trainer.sft.tokens import Tokenizer, open_examples, prepare_data, read_manifest
from rl.wire.batch_file import compress_rollouts
from tests import jsonl
from tests.models.conftest import DROPS_THINKING
from tests.models.conversations import ADD, assistant, system, user
from tests.raised import run_error

TWO_TURNS = [user("What is 1 + 1?"), assistant("2"), user("Sure?"), assistant("Yes, 2.")]
THINKS = [
    message | ({"reasoning_content": "Hm, so."} if message["role"] == "assistant" else {})
    for message in TWO_TURNS
]
CALLS = [
    TWO_TURNS[0],
    assistant(
        "",
        tool_calls=[
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        ],
    ),
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    assistant("It is 2."),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tokenizers, one token a byte: ChatML; with a template that thinks, in the manner of Qwen3;
    and without any template."""
    from renderers.qwen3 import _TOOLS_FOOTER, _TOOLS_HEADER

    root = tmp_path_factory.mktemp("models")
    write_tokenizer(root)
    chatml, thinks, base = (AutoTokenizer.from_pretrained(root) for _ in range(3))
    thinks.add_tokens(
        [
            f"<{slash}{name}>"
            for name in ("think", "tool_call", "tool_response")
            for slash in ("", "/")
        ]
    )
    thinks.chat_template = DROPS_THINKING.replace("HEADER", json.dumps(_TOOLS_HEADER)).replace(
        "FOOTER", json.dumps(_TOOLS_FOOTER)
    )
    base.chat_template = None
    for name, tokenizer in (("chatml", chatml), ("thinks", thinks), ("base", base)):
        tokenizer.save_pretrained(root / name)
    return root


def make_config(tmp_path, renderer=None, max_model_len=1024, **sft) -> RLConfig:
    values = {"dataset": str(tmp_path / "data.jsonl")} | sft
    model = {"max_model_len": max_model_len}
    return RLConfig.model_validate(
        {
            "name": "r",
            "output_dir": str(tmp_path),
            "model": model,
            "renderer": renderer or {},
            "sft": values,
        }
    )


def write_rows(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(jsonl.text(*rows))


def prepared(tmp_path, folder, *rows, renderer=None, max_model_len=1024, **sft):
    """(examples, manifest) of rows."""
    write_rows(tmp_path / "data.jsonl", *rows)
    config = make_config(tmp_path, renderer, max_model_len, **sft)
    prepare_data(config, str(folder), lambda *_: None)
    manifest = read_manifest(config.run_dir.data)
    examples = open_examples(config.run_dir.data / "train.arrow").to_pylist()
    return [(example["tokens"], example["trained"]) for example in examples], manifest


@pytest.fixture
def chatml(folders, tmp_path):
    """`prepared` with ChatML, each time in a folder of its own."""
    numbers = count()
    return lambda *rows, **settings: prepared(
        tmp_path / f"made {next(numbers)}", folders / "chatml", *rows, **settings
    )


@pytest.fixture(scope="module")
def renderer(folders):
    return load_renderer(str(folders / "chatml"), RendererConfig())


def as_text(renderer, sample):
    """The runs of trained and untrained text."""
    runs: list[tuple[bool, list[int]]] = []
    for id, trained in zip(*sample, strict=True):
        if not runs or runs[-1][0] != trained:
            runs.append((trained, []))
        runs[-1][1].append(id)
    return [(trained, renderer.text(ids)) for trained, ids in runs]


def played(renderer, messages, tools=None):
    """Ids and mask of a rollout whose policy says what the messages say: prompts as the
    orchestrator asks, answers of the right text."""
    ids, mask, said = [], [], 0
    for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        prompt = (
            renderer.next_prompt_ids(ids, messages[:i], said, tools)
            if ids
            else renderer.prompt_ids(messages[:i], tools)
        )
        message = messages[i]
        think = (
            f"<think>\n{message.get('reasoning_content', '')}\n</think>\n\n"
            if renderer_thinks(renderer)
            else ""
        )
        calls = "".join(
            f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": '
            f"{json.dumps(call['function']['arguments'])}}}\n</tool_call>"
            for call in message.get("tool_calls", [])
        )
        answer = [
            *renderer.encode(think + message["content"] + calls),
            *renderer.encode("<|im_end|>"),
        ]
        mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids, said = prompt + answer, i + 1
    return ids, mask


def renderer_thinks(renderer):
    return "<think>" in renderer.tokenizer.chat_template


@pytest.mark.parametrize(
    ("folder", "name", "messages", "tools"),
    [
        ("chatml", "auto", TWO_TURNS, None),
        ("chatml", "template", TWO_TURNS, None),
        ("chatml", "auto", CALLS, [ADD]),
        ("thinks", "template", THINKS, None),
        ("thinks", "qwen3", THINKS, None),
        ("thinks", "template", TWO_TURNS, None),
        ("thinks", "template", CALLS, [ADD]),
        ("thinks", "qwen3", CALLS, [ADD]),
    ],
)
def test_ids_are_those_of_a_rollout_that_says_the_same(
    folders, tmp_path, folder, name, messages, tools
):
    samples, _ = prepared(
        tmp_path, folders / folder, {"messages": messages, "tools": tools}, renderer={"name": name}
    )
    renderer = load_renderer(str(folders / folder), RendererConfig(name=name))
    # the template writes an empty thinking where there is none
    if messages is TWO_TURNS and folder == "thinks":
        messages = [
            message | ({"reasoning_content": ""} if message["role"] == "assistant" else {})
            for message in messages
        ]
    assert samples == [played(renderer, messages, tools)]


def test_what_is_trained_in_words(chatml, renderer, folders, tmp_path):
    (sample,), _ = chatml({"messages": TWO_TURNS})
    assert as_text(renderer, sample) == [
        (False, "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "2<|im_end|>"),
        (False, "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Yes, 2.<|im_end|>"),
    ]
    (last,), _ = chatml({"messages": TWO_TURNS}, train="last")
    assert last[0] == sample[0] and as_text(renderer, last)[1:] == [(True, "Yes, 2.<|im_end|>")]
    split = {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}
    assert chatml(split)[0] == [last]
    text = {"prompt": "What is 1 + 1?", "completion": "2"}
    (short,), _ = chatml(text)
    assert short == tuple(part[: len(short[0])] for part in sample)
    wanted = prepared(tmp_path / "b", folders / "thinks", {"messages": CALLS, "tools": [ADD]})[0]
    # the last is verifiers' form
    for at, tools in enumerate((json.dumps([ADD]), [json.dumps(ADD)], [ADD["function"]])):
        assert (
            prepared(
                tmp_path / f"tools {at}", folders / "thinks", {"messages": CALLS, "tools": tools}
            )[0]
            == wanted
        )


def test_a_template_that_drops_earlier_thinking_gives_a_sample_a_turn(folders, tmp_path):
    renderer = load_renderer(
        str(folders / "thinks"), RendererConfig(name="template", thinking_retention="template")
    )
    settings = {"name": "template", "thinking_retention": "template"}
    (first, second), _ = prepared(
        tmp_path, folders / "thinks", {"messages": THINKS}, renderer=settings
    )
    assert as_text(renderer, first)[1:] == [(True, "<think>\nHm, so.\n</think>\n\n2<|im_end|>")]
    assert as_text(renderer, second)[1:] == [
        (True, "<think>\nHm, so.\n</think>\n\nYes, 2.<|im_end|>")
    ]
    assert second[0][: len(renderer.prompt_ids(THINKS[:3]))] == renderer.prompt_ids(THINKS[:3])


def test_a_template_that_opens_the_thinking_and_leaves_it_out_of_history(folders, tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] "
        "}}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    tokenizer = AutoTokenizer.from_pretrained(folders / "chatml")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "opens")
    renderer = load_renderer(str(tmp_path / "opens"), RendererConfig())
    (sample,), _ = prepared(tmp_path, tmp_path / "opens", {"messages": THINKS})
    assert [text for trained, text in as_text(renderer, sample) if trained] == [
        "Hm, so.\n</think>\n\n2<|im_end|>",
        "Hm, so.\n</think>\n\nYes, 2.<|im_end|>",
    ]
    inline = [TWO_TURNS[0], assistant("<think>\nHm\n</think>\n\n2")]
    with run_error("leaves out a part of an answer's content"):
        prepared(tmp_path / "inline", tmp_path / "opens", {"messages": inline})


@pytest.mark.parametrize(
    ("folder", "messages", "settings", "said"),
    [
        (
            "chatml",
            THINKS,
            {},
            r"data.jsonl:1: the chat template leaves out the reasoning_content .* "
            r"sft.drop_reasoning = true",
        ),
        ("chatml", [TWO_TURNS[0], assistant("2", thinking="Hm")], {}, "leaves out the thinking"),
        (
            "thinks",
            THINKS,
            {"renderer": {"enable_thinking": False, "name": "template"}},
            "directly after its prompt.* renderer.enable_thinking",
        ),
        (
            "chatml",
            [TWO_TURNS[0], assistant("say <|im_end|> now")],
            {},
            "the template's special tokens",
        ),
        (
            "base",
            TWO_TURNS,
            {},
            "needs a chat template, .* --model.chat_template chatml, or a file",
        ),
    ],
)
def test_trained_text_is_never_lost_in_silence(folders, tmp_path, folder, messages, settings, said):
    with run_error(said):
        prepared(tmp_path, folders / folder, {"messages": messages}, **settings)


def test_a_users_own_special_tokens_are_trained(folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folders / "chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    tokenizer.save_pretrained(tmp_path / "tags")
    ((ids, trained),), _ = prepared(
        tmp_path, tmp_path / "tags", {"prompt": "2 + 2?", "completion": "<answer>4</answer>"}
    )
    assert [
        tokenizer.decode(id) for id, is_trained in zip(ids, trained, strict=True) if is_trained
    ] == [*("<answer>", "4", "</answer>", "<|im_end|>")]
    with run_error("the template's special tokens"):
        prepared(
            tmp_path / "own", tmp_path / "tags", {"prompt": "2 + 2?", "completion": "4<|im_start|>"}
        )


def test_a_tokenizer_may_write_accents_in_one_form(folders, tmp_path):
    """Regression: text with accents apart, as macOS writes it, was refused for tokenizers that
    bring them together, such as Qwen's."""
    composed, apart = (unicodedata.normalize(form, "Malmö") for form in ("NFC", "NFD"))
    tokenizer = AutoTokenizer.from_pretrained(folders / "chatml")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.save_pretrained(tmp_path / "nfc")

    def says(text):
        call = {"function": {"name": "add", "arguments": {"a": text}}}
        return {"messages": [TWO_TURNS[0], assistant(text, tool_calls=[call])], "tools": [ADD]}

    assert composed != apart
    assert (
        prepared(tmp_path / "a", tmp_path / "nfc", says(apart))[0]
        == prepared(tmp_path / "c", tmp_path / "nfc", says(composed))[0]
    )


def test_a_base_model_needs_no_template_for_text(chatml, folders, tmp_path):
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    (sample,), manifest = prepared(tmp_path / "base", folders / "base", row)
    encode = AutoTokenizer.from_pretrained(folders / "chatml").encode
    assert sample == (
        encode("1 + 1 =") + encode(" 2") + encode("<|im_end|>"),
        [False] * 7 + [True] * 3,
    )
    assert manifest["style"] == "completion"
    assert chatml(row, style="completion")[0] == [sample]
    (alone,), _ = prepared(tmp_path / "alone", folders / "base", {"prompt": "", "completion": "ab"})
    assert alone == (encode("ab<|im_end|>"), [False, True, True])
    with run_error("needs a chat template"):
        prepared(tmp_path / "asked", folders / "base", row, style="chat")


def test_the_first_token_is_not_trained_if_the_prompt_has_none():
    """Regression: it was, and its predictor was the row's last token."""
    tokenizer = SimpleNamespace(
        eos_token_id=9,
        bos_token_id=None,
        encode=lambda text, **_: [ord(letter) for letter in text.strip()],
    )
    plain = partial(Tokenizer.plain_text, SimpleNamespace(tokenizer=tokenizer))
    assert plain(" ", "ab") == ([97, 98, 9], [False, True, True])
    assert plain("x", "ab") == ([120, 97, 98, 9], [False, True, True, True])


def test_a_plain_text_begins_with_the_bos_token_of_its_tokenizer(folders, tmp_path):
    """As the prompts of rollouts in completion style do. It is never trained."""
    without, tokenizer = (AutoTokenizer.from_pretrained(folders / "base") for _ in range(2))
    token, bos, encode = tokenizer.bos_token, tokenizer.bos_token_id, without.encode
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, bos)]
    )
    tokenizer.save_pretrained(tmp_path / "begins")
    rows = [{"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "", "completion": "ab"}]
    samples, _ = prepared(tmp_path, tmp_path / "begins", *rows)
    assert samples == [
        ([bos, *encode("1 + 1 = 2<|im_end|>")], [False] * 8 + [True] * 3),
        ([bos, *encode("ab<|im_end|>")], [False] + [True] * 3),
    ]


def test_too_long_and_empty_examples_are_counted(folders, tmp_path):
    rows = [{"prompt": "ab", "completion": "c" * n} for n in (1, 5, 9, 0)] + [
        {"prompt": "x" * 20, "completion": "c"}
    ]
    long, empty = "longer than model.max_model_len", "without an answer to train"

    def made(name, *rows, **settings):
        samples, manifest = prepared(
            tmp_path / name, folders / "base", *rows, max_model_len=8, **settings
        )
        return [len(ids) for ids, _ in samples], manifest

    lengths, manifest = made("skip", *rows)
    assert lengths == [4, 8] and manifest["train"]["left_out"] == {long: 2, empty: 1}
    lengths, manifest = made("cut", *rows, too_long="truncate")
    cut = {"cut to model.max_model_len": 1, empty: 1, long: 1}
    assert lengths == [4, 8, 8] and manifest["train"]["left_out"] == cut
    (line,) = manifest_lines(manifest)
    assert (
        "5 rows -> 3 examples, 20 tokens, 14 trained; 1 cut to model.max_model_len; 1 "
        "without an answer" in line
    )
    with run_error(rf"nothing is left of 1 rows: 1 {long}"):
        made("none", rows[2])
    with run_error("nothing is left of 0 rows: there are no rows"):
        made("no-rows")


def test_a_task_without_an_example_is_none_to_hold_out(folders, tmp_path):
    """Numbers of tasks that were left out could be held out: then nothing was, or nothing was
    left to train."""
    rows = [{"prompt": f"{n:02}", "completion": "c" * (9 if n % 2 else 1)} for n in range(10)]
    prepared(tmp_path, folders / "base", *rows, max_model_len=8)
    groups = open_examples(make_config(tmp_path, None, 8).run_dir.data / "train.arrow")[
        "group"
    ].to_pylist()
    assert groups == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "data.jsonl:2: not JSON"),
        ("[1]", "data.jsonl:2: a list; write one object a line"),
        (
            '{"question": "q"}',
            "data.jsonl:2: has neither messages nor prompt and completion, but question; "
            "name the columns with",
        ),
        ('{"messages": "hello"}', "data.jsonl:2: messages: a text; give a list of messages"),
        ('{"messages": []}', "data.jsonl:2: messages: an empty list"),
        (
            '{"messages": [{"from": "human", "value": "x"}]}',
            r"data.jsonl:2: messages\[0\]: not a chat message: it needs a role",
        ),
        (
            '{"messages": [{"role": "user", "content": 5}]}',
            r"messages\[0\].content: a number; give text",
        ),
        (
            r'{"prompt": "a", "completion": "[{\"content\": \"b\"}]"}',
            "2: completion: a text that spells a list of messages",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]}',
            r"2: messages\[0\].function_call: is not read; write the call into tool_calls",
        ),
        (
            '{"messages": [{"role": "user", "content": ["a"]}]}',
            r"messages\[0\].content: a list with 'a'",
        ),
        ('{"prompt": 7, "completion": "b"}', "data.jsonl:2: prompt: a number; give text or a list"),
        (
            '{"messages": [{"role": "assistant", "content": "Hi"}]}',
            "2: begins with the assistant, whose",
        ),
        (
            '{"prompt": "x", "messages": [{"role": "user", "content": "a"}]}',
            "messages: says other things than prompt or completion",
        ),
        (
            '{"prompt": "a", "completion": "b", "system": 5}',
            "data.jsonl:2: system: a text before a chat",
        ),
        (
            '{"system": "s", "messages": [{"role": "system", "content": "t"}]}',
            "system: a text before a chat that has no system",
        ),
        *(
            (
                f'{{"prompt": "a", "completion": "b", "{name}": [0, 1]}}',
                f"data.jsonl:2: {name}: a column that is not read",
            )
            for name in ("assistant_masks", "loss_mask", "weight")
        ),
        *(
            (
                f'{{"messages": [{{"role": "user", "content": "a", "{name}": false}}]}}',
                rf"messages\[0\].{name}: is not read",
            )
            for name in ("trainable", "mask", "training")
        ),
        (
            '{"messages": [{"role": "user", "content": "a", "weight": 1}]}',
            r"messages\[0\]: weight or train is 1; give 0 or 1, and 1 to",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}',
            r"messages\[0\]: weight or train is 0.5; give 0 or 1",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"nam": "f"}]}]}',
            r"messages\[0\].tool_calls: a tool call must be",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": '
            '"It"}], "completion": " is"}',
            "2: prompt: ends with the assistant's words, which are not continued; move them "
            "to the answer",
        ),
        (
            '{"prompt": "a", "completion": "b", "tools": ["x"]}',
            "data.jsonl:2: tools: text that is not JSON",
        ),
    ],
)
def test_a_row_of_the_wrong_shape_is_named_with_its_line(folders, tmp_path, row, said):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' + row + "\n")
    with run_error(said):
        prepare_data(make_config(tmp_path), str(folders / "chatml"), lambda *_: None)
    assert not make_config(tmp_path).run_dir.data.exists()


def test_what_a_row_says_about_training_is_done(chatml, renderer):
    """Regression: weight and train of a message, a system text and a greeting were dropped, or
    refused without a place."""
    marked = [
        message | mark
        for message, mark in zip(
            TWO_TURNS, ({}, {"weight": 0}, {"weight": 0}, {"weight": 1}), strict=True
        )
    ]
    (last,), _ = chatml({"messages": TWO_TURNS}, train="last")
    for name, row in (
        ("weight", {"messages": marked}),
        ("train", {"messages": [TWO_TURNS[0], TWO_TURNS[1] | {"train": False}, *TWO_TURNS[2:]]}),
        ("both", {"messages": marked, "prompt": TWO_TURNS[:3], "completion": [TWO_TURNS[3]]}),
    ):
        assert chatml(row)[0] == [last], name
    greeting = [assistant("Hello!", weight=0), *TWO_TURNS[:2]]
    (greeted,), _ = chatml({"messages": greeting})
    assert as_text(renderer, greeted) == [
        (
            False,
            "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nWhat is 1 + "
            "1?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "2<|im_end|>"),
    ]
    pair = {"prompt": "What is 1 + 1?", "completion": "2"}
    chat = {"messages": [system("Be short."), *TWO_TURNS[:2]]}
    (with_system,), _ = chatml(pair | {"system": "Be short."})
    assert chatml(chat)[0] == [with_system]
    none = chatml(
        {"messages": TWO_TURNS[:2]},
        {"messages": [TWO_TURNS[0], marked[1]]},
    )
    assert len(none[0]) == 1 and none[1]["train"]["left_out"] == {"without an answer to train": 1}


def test_a_part_of_the_prompt_that_is_not_read_is_refused_by_name(chatml):
    """Regression: of Alpaca's rows the input was dropped in silence, and of rows with images the
    images."""
    columns = {"prompt": "instruction", "completion": "output"}
    row = {"instruction": "Translate", "input": "", "output": "Hund", "images": [], "history": None}
    assert len(chatml(row, columns=columns)[0]) == 1
    for name, value in {"input": "dog", "images": ["dog.png"], "history": [["Hi", "Hi!"]]}.items():
        with run_error(
            rf"data.jsonl:1: {name}: a column that is not read; write it into the messages "
            r".*, or remove it"
        ):
            chatml(row | {name: value}, columns=columns)
    assert len(
        chatml(
            {"input": "dog", "output": "Hund"},
            columns=columns | {"prompt": "input"},
        )[0]
    )


def test_cells_of_csv_are_text(folders, tmp_path):
    """Regression: None, NA, 02108 and True were a missing value, numbers and a truth value."""
    (tmp_path / "data.csv").write_text(
        'prompt,completion\na,None\nb,02108\nc,True\n"d, e","f\ng"\n'
    )
    samples, _ = prepared(tmp_path, folders / "base", dataset=str(tmp_path / "data.csv"))
    tokenizer = AutoTokenizer.from_pretrained(folders / "base")
    assert [tokenizer.decode(ids) for ids, _ in samples] == [
        f"{text}<|im_end|>" for text in ("aNone", "b02108", "cTrue", "d, ef\ng")
    ]
    (tmp_path / "data.csv").write_text("prompt,completion\na,b,c\n")
    with run_error(r"data.csv:2: not 2 cells, as in the first line; correct it"):
        prepared(tmp_path / "wide", folders / "base", dataset=str(tmp_path / "data.csv"))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            b"prompt,completion,completion\na,b,c\n",
            "data.csv: the key 'completion' twice.*; give CSV .* a name of its own",
        ),
        (
            "prompt,completion\nMalmö,b\n".encode("latin-1"),
            "data.csv: 'utf-8' .* 0xf6 .*; give CSV in UTF-8",
        ),
        (b"prompt,completion,,\na,b,,\n", ""),
        (b"prompt,completion\na," + b"b" * 200_000 + b"\n", "1 longer than model.max_model_len"),
    ],
    ids=["a column twice", "another encoding", "columns without a name", "a long cell"],
)
def test_a_csv_file_is_read_whole_or_refused(folders, tmp_path, written, said):
    """Regression: of two columns with one name the last was trained in silence, and a long cell
    ended in a traceback."""
    (tmp_path / "data.csv").write_bytes(written)
    with run_error(said) if said else contextlib.nullcontext():
        prepared(tmp_path, folders / "base", dataset=str(tmp_path / "data.csv"))


def rollout(task, reward, answer, **more):
    messages = [user(f"task {task}"), assistant(answer)]
    return {
        "env": "e",
        "task": task,
        "messages": messages,
        "reward": reward,
        "outcome": "finished",
        "trained": True,
    } | more


def test_the_name_of_a_run_is_no_pattern(chatml, tmp_path):
    """Regression: nothing was found in a run whose name has brackets."""
    run = tmp_path / "runs [1]" / "lr=1e-5,x[2]*"
    write_rows(run / "rollouts" / "000001.jsonl", rollout(1, 1.0, "a"))
    assert len(chatml(dataset=str(run))[0]) == 1
    write_rows(tmp_path / "data [1]" / "train.jsonl", {"prompt": "a", "completion": "b"})
    files = tmp_path / "data [1]" / "*.jsonl"
    with run_error(f"rename it, or give {re.escape(str(files))}$"):
        chatml(dataset=str(files.parent))
    assert len(chatml(dataset=str(files))[0]) == 1


def test_rollouts_are_chosen_by_reward(chatml, renderer, tmp_path, monkeypatch):
    run = tmp_path / "outputs" / "x"
    write_rows(
        run / "rollouts" / "000001.jsonl",
        rollout(1, 0.2, "a"),
        rollout(1, 0.9, "b"),
        rollout(1, 0.9, "c"),
        rollout(2, 0.4, "d"),
    )
    bad = [
        rollout(2, 1.0, "e", outcome="failed", error="boom"),
        rollout(2, 1.0, "f", outcome="truncated"),
        rollout(2, 1.0, "g", why="not_trainable"),
        rollout(2, 1.0, "g", why="stale", trainable=False),
    ]
    write_rows(
        run / "rollouts" / "000002.jsonl",
        *bad,
        rollout(2, 0.5, "h"),
        rollout(3, 0.1, "i", trained=False),
    )

    def answers(**settings):
        samples, manifest = chatml(
            dataset=str(run),
            **settings,
        )
        return "".join(as_text(renderer, sample)[1][1][0] for sample in samples), manifest["train"][
            "left_out"
        ]

    never = {
        "failed rollouts": 1,
        "truncated rollouts": 1,
        "rollouts of agents that are not trained": 2,
    }
    below, beyond = "rollouts with a reward below 0.5", "rollouts beyond the best 1 of their task"
    assert answers() == ("abcdhi", never)
    assert answers(min_reward=0.5) == ("bch", never | {below: 3})
    assert answers(max_per_task=1) == ("bhi", never | {beyond: 3})
    assert answers(max_per_task=2, min_reward=0.3)[0] == "bcdh"
    datasets.Dataset.from_list([rollout(5, 0.25, "e"), rollout(6, 1.0, "g")]).to_parquet(
        run / "x.parquet"
    )
    saved = chatml(dataset=str(run / "x.parquet"), min_reward=0.5)
    assert saved[1]["train"]["left_out"] == {"rollouts with a reward below 0.5": 1}
    with run_error("the reward is nan, but a rollout's reward must be a number"):
        chatml(rollout(7, float("nan"), "i"), min_reward=0.5)
    best = rows.best_rollouts

    def then_compressed(*args):
        chosen = best(*args)
        compress_rollouts(run / "rollouts" / "000001.jsonl")  # as a run does with old files
        return chosen

    monkeypatch.setattr(rows, "best_rollouts", then_compressed)
    assert answers(max_per_task=1)[0] == "bhi"
    other = {"messages": TWO_TURNS, "reward": 1}
    with run_error(r"1: sft.min_reward and sft.max_per_task .* lacks outcome"):
        chatml(other, min_reward=0.5)


WORKED = [user("1 + 1?"), assistant("2"), *TWO_TURNS]
"""A worked example, and two turns of the policy."""


def test_worked_examples_of_a_rollouts_prompt_are_never_trained(chatml, renderer):

    def trained(settings=None, **line):
        row = rollout(1, 1.0, "") | {"messages": WORKED, "num_turns": 2} | line
        samples, manifest = chatml(row, **settings or {})
        return "".join(
            text
            for sample in samples
            for was_trained, text in as_text(renderer, sample)
            if was_trained
        ), manifest["warnings"]

    own = ("2<|im_end|>Yes, 2.<|im_end|>", [])
    assert trained(num_prompt_messages=3) == trained(num_prompt_messages=3, num_turns=0) == own
    assert trained(num_prompt_messages=2) == own, (
        "the messages before the policy's first are no answers"
    )
    assert trained(num_turns=3) == ("2<|im_end|>" + own[0], []), "every answer was sampled"
    with run_error(
        r"data.jsonl:1: the policy sampled 2 of its 3 answers, and the environment wrote the "
        r"others.*last"
    ):
        trained()
    with run_error("the policy sampled 1 of its 2 answers, and the environment wrote the others"):
        trained(num_prompt_messages=3, num_turns=1)
    with run_error("num_prompt_messages is 7; it must be a number from 0 to 6"):
        trained(num_prompt_messages=7)
    assert trained({"train": "last"}) == ("Yes, 2.<|im_end|>", [])


def test_csv_is_read_by_a_process_that_hides_torch(tmp_path):
    (tmp_path / "x.csv").write_text("prompt,completion\nWhat is 1 + 1?,two\n")
    code = (
        "import sys; from rl.models.tokenizer import hide_torch; hide_torch()\n"
        "from rl.config.kinds import SftConfig; from rl.trainer.sft.rows import DataSource, hub_rows\n"
        "config = SftConfig(dataset=sys.argv[1])\n"
        "print(list(hub_rows(DataSource(config.dataset, '', 'sft.dataset'), config)))\n"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.csv"],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
    )
    assert done.stdout == "[{'prompt': 'What is 1 + 1?', 'completion': 'two'}]\n", done.stderr


def test_hugging_face_datasets(folders, tmp_path):
    rows = [{"messages": [*THINKS[:3], THINKS[3] | {"tool_calls": None}]}, {"messages": TWO_TURNS}]
    saved, parquet, empty = tmp_path / "saved", tmp_path / "x.parquet", tmp_path / "empty"
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(str(saved))
    datasets.Dataset.from_list([{"question": "q", "answer": "a"}]).to_parquet(parquet)
    empty.mkdir()
    written = {"split": "test", "drop_reasoning": True}
    samples, manifest = prepared(tmp_path / "a", folders / "chatml", dataset=str(saved), **written)
    assert manifest["train"]["rows"] == 2
    direct, _ = prepared(tmp_path / "b", folders / "chatml", {"messages": TWO_TURNS})
    assert samples == direct * 2
    columns = {"prompt": "question", "completion": "answer"}
    table = {"dataset": str(parquet), "columns": columns}
    assert len(prepared(tmp_path / "c", folders / "chatml", **table)[0]) == 1
    lines = str(tmp_path / "b" / "data.jsonl")
    for dataset, settings, said in (
        (saved, {"split": "train"}, "no such split; there are test; check name, sft.split"),
        (empty, {}, "sft.dataset = "),
        (tmp_path / "*.jsonl", {}, "no file matches"),
        (parquet, {"split": "test"}, "sft.split = 'test': .*x.parquet has no splits; name the"),
        (parquet, {"subset": "s"}, "sft.subset = 's': .*x.parquet has no subsets; leave it out"),
        (lines, {"validation_split": "test"}, "sft.validation_split = 'test': .* has no splits"),
    ):
        with run_error(said):
            prepared(tmp_path / "d", folders / "chatml", dataset=str(dataset), **settings)


def test_tools_that_are_called_but_not_defined_are_a_warning(chatml):
    _, manifest = chatml({"messages": CALLS})
    assert manifest_lines(manifest)[-1].startswith(
        "warning: examples call tools, but have no tool definitions"
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": "b<new>"},
        {"messages": [TWO_TURNS[0] | {"content": "<new>"}, TWO_TURNS[1]]},
    ],
)
def test_a_token_without_a_row_of_the_embedding_is_named(folders, tmp_path, row):
    """Regression: the trainer died of it three times, and good batches were set aside."""
    tokenizer = AutoTokenizer.from_pretrained(folders / "chatml")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({"text_config": {"vocab_size": 259}}))
    good = {"prompt": "a", "completion": "b"}
    with run_error(
        r"data.jsonl:2: '<new>' is token 259, the model's embedding has 259 rows; give it "
        r"one .*resize_token"
    ):
        prepared(tmp_path, tmp_path / "model", good, row)
    config.write_text(json.dumps({"vocab_size": 260}))
    assert len(prepared(tmp_path, tmp_path / "model", good, row)[0]) == 2
