"""The tiny model is a model: always the same, and transformers and its tokenizer load it."""

from rl.models.tiny import CHAT_TEMPLATE, byte_tokenizer, make_tiny_model
from tests.tiny_model import make_tokenizer


def test_the_tiny_model_is_always_the_same(tmp_path):
    one, other = (make_tiny_model(tmp_path / name) for name in "ab")
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {path.name: path.read_bytes() for path in other.iterdir()}


def test_transformers_loads_its_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "tiny"))
    assert tokenizer.chat_template == CHAT_TEMPLATE and len(tokenizer) == 259
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()


def test_every_byte_is_a_token():
    tokenizer, text = byte_tokenizer(), "Añ 1\t<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len("Añ 1\t".encode()) + 1 and ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
