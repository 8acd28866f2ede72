"""Tiny models of random weights of every family: what scripts/models.py measures."""

import copy
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

MOST_PARAMETERS = 20e6
MAX_LEN = 256
VOCAB = 160
SIZES = {
    64: """hidden_size n_embd d_model dim embedding_size word_embed_proj_dim attention_hidden_size linear_attn_hidden_size lru_width
        time_step_rank qk_rope_head_dim sliding_window sliding_window_size window_size attention_window_size attention_chunk_size""",
    128: """intermediate_size n_inner ffn_dim d_ff ffn_hidden_size dff decoder_ffn_dim encoder_ffn_dim block_ff_dim mamba_d_ssm
        shared_intermediate_size mlp_hidden_size index_head_dim""",
    96: """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size
        intermediate_size_mlp""",
    2: """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads encoder_layers num_key_value_heads
        n_kv_heads num_kv_heads num_experts_per_tok moe_topk moe_k top_k_experts experts_per_token n_layer n_layers num_layers
        decoder_layers num_hidden_layers global_num_key_value_heads num_global_key_value_heads swa_num_key_value_heads mamba_n_groups
        n_groups num_linear_key_value_heads linear_num_key_heads linear_num_value_heads swa_num_attention_heads index_n_heads""",
    32: """head_dim attention_head_dim q_lora_rank qk_nope_head_dim v_head_dim d_kv kv_channels global_head_dim swa_head_dim
        linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim hidden_size_per_layer_input
        swa_v_head_dim rotary_dim""",
    16: "mamba_d_state ssm_state_size state_size chunk_size mamba_chunk_size mamba_dt_rank",
    512: "kv_lora_rank",
    4: """mamba_num_heads mamba_n_heads n_mamba_heads num_experts n_routed_experts num_local_experts moe_num_experts mamba_d_conv
        conv_kernel""",
    1: """n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace moe_layer_start_index num_dense_layers
        moe_num_shared_experts""",
    MAX_LEN: "max_position_embeddings n_positions max_seq_len max_seq_length max_sequence_length "
    "context_length n_ctx",
    VOCAB: "vocab_size vocab_size_per_layer_input",
}
"""Sizes by what configurations call them. vLLM's attention on CPUs takes heads of 32 and more,
and latent attention of 512 + 64."""
LATENT = {"head_dim": 64}
SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
MIXED = {
    "layer_types": ["conv", "full_attention"],
    "num_hidden_layers": 2,
    "conv_dim": 64,
    "block_dim": 64,
}
GATED = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
NORMALIZED = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
"""Of a choice of experts: what transformers does always, and vLLM is told by published
configurations."""
FAMILIES: dict[str, dict[str, object]] = {
    "afmoe": NORMALIZED,
    "axk1": LATENT | {"first_k_dense_replace": 0},
    "codegen": {"n_head": 4, "num_attention_heads": 4, "rotary_dim": 8},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "gemma3n_text": SHARED
    | {
        "intermediate_size": 128,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "laurel_rank": 16,
    },
    "falcon": {"num_kv_heads": 1, "ffn_hidden_size": 256},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": LATENT | {"first_k_dense_replace": 1},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "granitemoehybrid": {
        "mamba_n_groups": 1,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "hy_v3": NORMALIZED | {"first_k_dense_replace": 1, "expert_hidden_dim": 96, "qk_norm": True},
    "laguna": {"num_attention_heads_per_layer": [2, 4]},
    "lfm2": MIXED,
    "lfm2_moe": MIXED,
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": LATENT
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "sliding_window": None,
    },
    "phi": {"intermediate_size": 256},
    "qwen3_5_moe_text": GATED,
    "qwen3_5_text": GATED,
    "qwen3_next": GATED,
    "youtu": LATENT,
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 64},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 64},
}
"""What a family needs beside SIZES. Mamba-2 has one group, as most published models: with more,
the norm behind its states is of all of them at once in Hugging Face's mamba2 and
granitemoehybrid, of each in vLLM and in the code that came with the models."""
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}
WHOLE: dict[str, dict[str, object]] = {
    "gemma4_text": SMALL
    | SHARED
    | {
        "intermediate_size": 128,
        "head_dim": 32,
        "global_head_dim": 64,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 32,
        "sliding_window": 64,
    },
}
"""All fields of families whose default configuration cannot be asked for them."""
TRAINED_LEN = 64
"""Tokens of a model whose rotary embedding is stretched to MAX_LEN."""
STRETCHED = {
    "rope_theta": 1e4,
    "factor": MAX_LEN / TRAINED_LEN,
    "original_max_position_embeddings": TRAINED_LEN,
}
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, **STRETCHED}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": TRAINED_LEN,
} | {
    f"{kind}_factor": [first + n * step for n in range(16)]
    for kind, first, step in (("short", 1.0, 1 / 16), ("long", 2.0, 1.0))
}
ROPES: dict[str, tuple[str, dict[str, object]]] = {
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "dynamic with alpha": (
        "hunyuan_v1_dense",
        {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
    ),
    "llama3": (
        "llama",
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCHED},
    ),
    "yarn": ("qwen3", YARN),
    "yarn with mscale": ("deepseek_v3", YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn without truncation": ("gpt_oss", YARN | {"truncate": False}),
    "longrope": ("phi3", LONGROPE),
    "longrope with mscale": ("phi3", LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}),
}
"""Rotary embeddings for more tokens than a model was trained on, as `rope_parameters` of a
family."""


def tiny_config(family: str, rope: dict[str, object] | None) -> PreTrainedConfig:
    """The family's configuration in small, with this rotary embedding: as many layers as it
    takes to have one of each kind."""
    config_class = CONFIG_MAPPING[family]
    if family in WHOLE:
        return config_class(**WHOLE[family])
    default = config_class()
    wanted: dict[str, object] = {}
    for size, names in SIZES.items():
        wanted |= {
            name: size
            for name in names.split()
            if isinstance(getattr(default, name, None), int) or hasattr(config_class, name)
        }
    wanted = {
        name: value
        for name, value in wanted.items()
        if hasattr(default, name) and not is_derived(default, name)
    }
    count = getattr(default, "num_hidden_layers", 0)
    lists = {
        name: value
        for name, value in vars(default).items()
        if isinstance(value, list | tuple)
        and len(value) == count
        and not name.startswith("_")
        and all(isinstance(x, str | int | bool) for x in value)
    }
    if lists:
        kinds = list(dict.fromkeys(zip(*lists.values(), strict=True)))[:6]
        kinds *= 1 if len(kinds) > 1 else 2
        wanted |= {
            name: list(column) for name, column in zip(lists, zip(*kinds, strict=True), strict=True)
        }
        wanted["num_hidden_layers"] = len(kinds)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True}
    wanted |= {
        name: value for name, value in special.items() if hasattr(default, name)
    } | FAMILIES.get(family, {})
    if rope:
        wanted |= {"rope_parameters": rope}
        if "original_max_position_embeddings" in rope and hasattr(
            default, "original_max_position_embeddings"
        ):
            wanted["original_max_position_embeddings"] = TRAINED_LEN
    return config_class(**wanted)


def is_derived(config: PreTrainedConfig, name: str) -> bool:
    """Whether the attribute follows from others."""
    return isinstance(getattr(type(config), name, None), property)


def make(family: str, rope: dict[str, object] | None, folder: Path) -> None:
    """Writes a tiny model whose weights are all random, biases and norms too, large enough that
    every part counts, and as exact as those that are published: in bfloat16, which is what vLLM
    rounds some to (the activation of Apertus)."""
    config = tiny_config(family, rope)
    with torch.device("meta"):
        size = sum(
            p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters()
        )
    if size > MOST_PARAMETERS:
        raise ValueError(
            f"{size / 1e6:.0f} million parameters are not tiny; FAMILIES in "
            "scripts/models.py has to say how it gets so"
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim == 1:
            parameter.data += 0.1 * noise
        else:
            parameter.data = parameter.data + 1.5 * noise / parameter.shape[-1] ** 0.5
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder)
