import pytest

from rl.orchestrator.chat import ChatRenderer
from tests.tiny_model import make_tiny_model

HISTORY = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "uno"}, {"role": "user", "content": "two"}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatRenderer(str(make_tiny_model(tmp_path_factory.mktemp("model"))))


def test_next_prompt_equals_the_template_when_the_answer_is_canonical(chat):
    answer = [*chat.encode("uno"), chat.tokenizer.eos_token_id]
    before = chat.prompt_ids(HISTORY[:1]) + answer
    assert chat.next_prompt_ids(before, HISTORY, 2) == chat.prompt_ids(HISTORY)


def test_sampled_ids_stay_even_if_text_would_encode_otherwise(chat):
    odd = [chat.tokenizer.bos_token_id, 7, 8]  # ids that no tokenizer makes of "uno", and no end of turn: the answer was cut off
    before = chat.prompt_ids(HISTORY[:1]) + odd
    after = chat.next_prompt_ids(before, HISTORY, 2)
    assert after[: len(before) + 1] == [*before, chat.tokenizer.eos_token_id]
    assert chat.tokenizer.decode(after[len(before) :]) == "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_rewrites_history_is_rendered_anew(chat, monkeypatch):
    drops = (
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(chat.tokenizer, "chat_template", drops)
    assert chat.next_prompt_ids([1, 2], HISTORY, 2) is None


def test_no_template_is_an_error_with_a_remedy(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "m"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"model\.chat_template"):
        ChatRenderer(str(tmp_path / "plain"))
