"""A random Llama of 90 thousand weights with a tokenizer of bytes, to try a machine or the code with. Needs no torch and milliseconds."""

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""
HIDDEN, HEADS, LAYERS, MAX_LEN = 64, 2, 2, 512
"""vLLM's attention on CPUs takes heads of 32 and more."""


def make_tiny_model(folder: Path) -> Path:
    """Writes the model and its tokenizer, always the same bytes. Returns the folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN, "model_max_length": MAX_LEN}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | named))
    vocab_size = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(llama_config(vocab_size)))
    save_file(random_weights(vocab_size), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def byte_tokenizer() -> "Tokenizer":
    """A byte-level BPE without merges: every byte is a token, so any text survives encode and decode; 259 tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [character for character in string.printable if not character.isspace()]
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(printable))
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *printable, *others])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def llama_config(vocab_size: int) -> dict[str, object]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def random_weights(vocab_size: int) -> dict[str, np.ndarray]:
    """float32 tensors by name: normal with standard deviation 0.2, so that logits differ from token to token; norms are ones."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (0.2 * rng.standard_normal((rows, columns))).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab_size, HIDDEN), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        tensors |= {f"{layer}.self_attn.{name}_proj.weight": matrix(HIDDEN, HIDDEN) for name in "qkvo"}
        tensors |= {f"{layer}.mlp.{name}_proj.weight": matrix(2 * HIDDEN, HIDDEN) for name in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, 2 * HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return tensors
