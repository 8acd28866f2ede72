"""A random Llama of 90 thousand weights with a tokenizer of bytes, to try a machine with. Written without torch, in milliseconds."""

import json
from pathlib import Path

import numpy as np

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, HEADS, LAYERS, MAX_LEN = 64, 2, 2, 512
"""vLLM's attention on CPUs takes heads of 32 and more."""


def make_tiny_model(folder: Path) -> Path:
    """Writes the model; always the same bytes."""
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "model_max_length": MAX_LEN}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | named))
    (folder / "config.json").write_text(json.dumps(llama(len(vocabulary))))
    save_file(weights(len(vocabulary)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def llama(vocab_size: int) -> dict[str, object]:
    """The config.json."""
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


def weights(vocab_size: int) -> dict[str, np.ndarray]:
    """Normal ones of standard deviation 0.2: logits that differ from token to token. Norms are ones."""
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
