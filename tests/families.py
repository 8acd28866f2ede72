"""What tests try of each architecture: fields of config.json for `make_tiny_model`, the Llama as
plain as possible, the others with what is special about them."""

from pathlib import Path
from typing import Any

from rl.models.tiny import MAX_LEN, make_tiny_model, write_tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}
GROUPED = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
"""Two heads a key, together wider than the hidden state."""
OPENAI_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": MAX_LEN}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + n / 16 for n in range(16)],
    "long_factor": [2.0 + n for n in range(16)],
}
"""One set of frequencies up to 64 tokens, another beyond."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen3": {"model_type": "qwen3", **GROUPED},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "output_router_logits": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **GROUPED,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
    },
    "gpt2": {
        "model_type": "gpt2",
        **OPENAI_SIZES,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    },
    "phi3": {
        "model_type": "phi3",
        **SIZES,
        "original_max_position_embeddings": 64,
        "rope_parameters": LONGROPE,
    },
    "llama_dynamic": {
        "model_type": "llama",
        **SIZES,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 4.0,
            "max_trained_positions": 128,
        },
    },
    "hunyuan_alpha": {
        "model_type": "hunyuan_v1_dense",
        **SIZES,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "alpha": 1000.0,
            "factor": 1.0,
        },
    },
    # a cap on the scores of attention
    "gemma2": {
        "model_type": "gemma2",
        **GROUPED,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 32,
    },
    # a sink in the softmax of each head
    "gpt_oss": {
        "model_type": "gpt_oss",
        **GROUPED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    # experts that are drawn at random in training, and a threshold called jitter that counts in
    # evaluation, too
    "phimoe": {
        "model_type": "phimoe",
        **SIZES,
        "num_local_experts": 4,
        "sliding_window": 16,
        "router_jitter_noise": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    # an embedding in a module that transformers would not split, tied to the head
    "bert": {"model_type": "bert", **SIZES, "is_decoder": True},
    # attention of its own
    "gptj": {"model_type": "gptj", **OPENAI_SIZES, "rotary_dim": 16},
    # short convolutions between layers with attention
    "lfm2": {
        "model_type": "lfm2",
        **SIZES,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    # the states of Mamba-2 beside attention, in each layer
    "falcon_h1": {
        "model_type": "falcon_h1",
        **SIZES,
        "head_dim": 32,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    # projections that files join
    "hrm_text": {"model_type": "hrm_text", **SIZES},
    # no attention at all
    "xlstm": {
        "model_type": "xlstm",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "qk_dim_factor": 0.5,
    },
}
UNTIED = CONFIGS["llama"] | {"tie_word_embeddings": False}
"""A Llama with a head of its own."""
WIDE = CONFIGS["llama"] | {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
PACKED = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt2")
LENGTH_DEPENDENT = ("phi3", "llama_dynamic", "hunyuan_alpha")
"""Families whose rotary embedding depends on the longest sequence."""
STATES = ("falcon_h1",)
"""Families with states of sequences, and a kernel for them in vLLM's build for CPUs that takes
float32."""


def make_seeing_model(folder: Path) -> Path:
    """A Qwen3.5 that sees images, which is trained as text: its files hold `model.visual` and,
    as published ones, a layer that drafts."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder.mkdir(parents=True)
    linear = {
        f"linear_{name}": 2 if "num" in name else 16
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    }
    sizes = (
        SIZES
        | {"head_dim": 32, "layer_types": ["full_attention", "linear_attention"]}
        | linear
        | write_tokenizer(folder)
    )
    config = AutoConfig.for_model("qwen3_5")
    for name, value in sizes.items():
        setattr(config.text_config, name, value)
    vision = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32}
    for name, value in (vision | {"out_hidden_size": 64}).items():
        setattr(config.vision_config, name, value)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.ones(64, 128)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_old_model(folder: Path, family: str) -> Path:
    """A GPT-2 or a Pythia with the names and the masks that their published files have."""
    import torch
    from safetensors.torch import load_file, save_file

    make_tiny_model(folder, OLD[family])
    weights = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    for layer in (
        ("h.0.attn", "h.1.attn")
        if family == "gpt2"
        else ("gpt_neox.layers.0.attention", "gpt_neox.layers.1.attention")
    ):
        weights |= {
            f"{layer}.bias": torch.ones(1, 1, 8, 8).tril(),
            f"{layer}.masked_bias": torch.tensor(-1e9),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


OLD = {
    "gpt2": CONFIGS["gpt2"],
    "gpt_neox": {"model_type": "gpt_neox", **SIZES, "tie_word_embeddings": False},
}
