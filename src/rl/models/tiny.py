"""Random models with a byte tokenizer, for trying out a machine or the code: a Llama of 100
thousand weights, or any architecture."""

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""
HIDDEN, HEADS, LAYERS, MAX_LEN = 64, 2, 2, 1024
"""vLLM's attention on CPUs needs a head size of at least 32."""
STD = 0.2
"""Ten times the usual value, so that logits differ visibly from token to token."""


def make_tiny_model(folder: Path, config: dict[str, object] | None = None, seed: int = 0) -> Path:
    """Writes a random float32 model and its tokenizer; the same arguments give the same bytes.
    Returns the folder.

    `config`: `model_type` and other fields of config.json. With it the model has that architecture
    and transformers initialises it, which needs torch and takes seconds; without it the model is
    the plain Llama. The head is the embedding unless `config` says otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = write_tokenizer(folder) | {"tie_word_embeddings": True, "initializer_range": STD}
    if config is None:
        write_llama(folder, fields, seed)
    else:
        write_architecture(folder, fields | config, seed)
    return folder


def write_tokenizer(folder: Path) -> dict[str, object]:
    """Writes `byte_tokenizer` with ChatML's template in transformers' format. Returns the fields
    of config.json that depend on it."""
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "model_max_length": MAX_LEN,
    }
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | named))
    return {
        "vocab_size": tokenizer.get_vocab_size(),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def byte_tokenizer() -> "Tokenizer":
    """A byte-level BPE without merges: every byte is a token, so any text survives encode and
    decode; 259 tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [character for character in string.printable if not character.isspace()]
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(printable))
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *printable, *others])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def write_architecture(folder: Path, fields: dict[str, Any], seed: int) -> None:
    """Writes a model of any architecture; `fields` are those of its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)


def write_llama(folder: Path, fields: dict[str, Any], seed: int) -> None:
    """Writes the plain Llama as transformers would, but without torch and in milliseconds."""
    from safetensors.numpy import save_file

    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(sizes | fields))
    save_file(
        random_weights(fields["vocab_size"], seed),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def random_weights(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """The Llama's float32 tensors by name: normal with standard deviation STD; norms are ones."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (STD * rng.standard_normal((rows, columns))).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.self_attn.{name}_proj.weight": matrix(HIDDEN, HIDDEN) for name in "qkvo"
        }
        tensors |= {
            f"{layer}.mlp.{name}_proj.weight": matrix(2 * HIDDEN, HIDDEN) for name in ("gate", "up")
        }
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, 2 * HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return tensors
