"""Random models of several architectures, of 115 thousand parameters and more, with the tokenizer of rl.models.tiny."""

from pathlib import Path

from rl.models.tiny import BOS_TOKEN, CHAT_TEMPLATE, EOS_TOKEN, PAD_TOKEN, byte_tokenizer

MAX_LEN = 1024
FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt2")
LENGTH_DEPENDENT = ("phi3", "llama_dynamic")
"""Families whose rotary embedding depends on the longest sequence."""


def make_tiny_model(
    path: str | Path, *, seed: int = 0, tied: bool = True, hidden: int = 64, layers: int = 2, family: str = "llama", **more: object
) -> Path:
    """Writes a float32 causal LM and a one-token-per-byte tokenizer with ChatML template; the same seed gives the same bytes.

    `hidden` is a multiple of 32: vLLM's CPU attention takes heads of 32 and more. `tied`: the head is the embedding. `more` goes into
    the model's config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(path)
    tokenizer = make_tokenizer()
    config = make_config(family, hidden, layers)
    config.update(
        {
            "vocab_size": len(tokenizer),
            "tie_word_embeddings": tied,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "initializer_range": 0.2,  # ten times the default: logits that differ visibly from token to token
            **more,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_config(family: str, hidden: int, layers: int):
    """The architecture: Llama as plain as possible, the others with what is special about them."""
    import transformers

    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "max_position_embeddings": MAX_LEN,
    }
    grouped = sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # two heads a key, wider than hidden
    match family:
        case "llama":
            return transformers.LlamaConfig(**sizes)
        case "qwen3":
            return transformers.Qwen3Config(**grouped)
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
            return transformers.Qwen3MoeConfig(**grouped, **experts, norm_topk_prob=True, output_router_logits=True)
        case "gemma3":
            kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
            return transformers.Gemma3TextConfig(**grouped, sliding_window=4, layer_types=kinds, query_pre_attn_scalar=32)
        case "phi3":  # longrope: one set of frequencies up to 64 tokens, another beyond
            factors = {"short_factor": [1.0 + n / 16 for n in range(16)], "long_factor": [2.0 + n for n in range(16)]}
            rope = {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "original_max_position_embeddings": 64,
                **factors,
            }
            return transformers.Phi3Config(**sizes, original_max_position_embeddings=64, rope_parameters=rope)
        case "llama_dynamic":
            rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "max_trained_positions": 128}
            return transformers.LlamaConfig(**sizes, rope_parameters=rope)
        case "gemma2":  # a cap on the scores of attention
            return transformers.Gemma2Config(**grouped, attn_logit_softcapping=2.0, query_pre_attn_scalar=32)
        case "gpt_oss":  # a sink in the softmax of each head
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
            return transformers.GptOssConfig(**grouped, **experts, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
        case "gptj":  # attention of its own
            return transformers.GPTJConfig(n_embd=hidden, n_layer=layers, n_head=hidden // 32, n_positions=MAX_LEN, rotary_dim=16)
        case "lfm2":  # short convolutions between layers with attention
            return transformers.Lfm2Config(**sizes, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
        case "xlstm":  # no attention at all
            return transformers.xLSTMConfig(hidden_size=hidden, num_hidden_layers=layers, num_heads=2, qk_dim_factor=0.5)
        case "gpt2":
            dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
            return transformers.GPT2Config(n_embd=hidden, n_layer=layers, n_head=hidden // 32, n_positions=MAX_LEN, **dropout)
    raise ValueError(family)


def make_tokenizer():
    """The tokenizer of src's tiny model, as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LEN,
    )
