"""Makes the folder from which workers load a model's tokenizer, once for each model: `python -m rl.models.tokenizer_files MODEL FOLDER`.

transformers loads the tokenizer, so that whatever it changes while loading is in what it writes, and a model without a tokenizer.json is
converted on the way. What comes out is compared with it on texts and conversations; a tokenizer that differs is left to transformers.
"""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from rl.models import probes
from rl.models.folder import cache_root, make_once, read_json
from rl.models.tokenizer import FACTS, VOCABULARY, Facts, Probe, SlimTokenizer

SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
"""Files of a model folder that a tokenizer may be read from."""
TIME_LIMIT_S = 300.0
TEXTS = (
    "",
    " ",
    "The quick brown fox; 3.14159 and 1,000,000? It's  two   spaces\n\n\tand a tab. don't",
    "  leading, trailing  ",
    "Gr\u00fc\u00dfe \u4f60\u597d\uff0c\u4e16\u754c \u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600\U0001f469\u200d\U0001f680 \u200b",
    "cafe\u0301 \ufb01ne \u00a0nbsp\r\nCRLF \x00\x07",
    "def f(x):\n    return {\"a\": [1, 2.5e-3], 'b': None}  # \u2264\n",
    "<tool_call>\n{}\n</tool_call><think>\n</think><|im_start|>user\nhi<|im_end|>",
)
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "so"}
NUM_TOKENS = 512
"""Tokens of the vocabulary that are decoded each for itself."""


def slim_tokenizer(model_path: str, *, trust_remote_code: bool = False) -> tuple[str, str]:
    """(folder, "") for `tokenizer.load_tokenizer`, or ("", why only transformers can load the tokenizer of this model)."""
    folder = Path(model_path)
    if trust_remote_code and "auto_map" in tokenizer_config(folder):
        return "", "it is made by code of the model's own"
    target = cache_root().parent / "tokenizers" / f"{folder.name}-{digest(folder)}"
    try:
        make_once(target, lambda temporary: run(folder, temporary))
    except (subprocess.SubprocessError, OSError) as error:
        output = (getattr(error, "stderr", None) or "").strip().splitlines()
        return "", output[-1] if output else str(error)
    unfit = msgspec.json.decode((target / FACTS).read_bytes(), type=Facts).unfit
    return ("", unfit) if unfit else (str(target), "")


def tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def digest(folder: Path) -> str:
    """What the result depends on: the files, and the packages that read them."""
    packages = [version(package) for package in ("transformers", "tokenizers", "jinja2")]
    hashed = hashlib.blake2b(repr((packages, msgspec.json.encode(TEXTS))).encode(), digest_size=8)
    for file in sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file()):
        hashed.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
        hashed.update(file.read_bytes())
    return hashed.hexdigest()


def run(model: Path, folder: Path) -> None:
    """Fills `folder`, in a process of its own: nobody else needs transformers. Raises subprocess.SubprocessError."""
    command = [sys.executable, "-m", "rl.models.tokenizer_files", str(model), str(folder)]
    subprocess.run(command, check=True, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=TIME_LIMIT_S)


def write(model: Path, folder: Path) -> None:
    """Writes the tokenizer of the folder `model` to `folder`, or why that is not possible."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(model))
    facts = facts_of(theirs)
    if not facts.unfit:
        (folder / VOCABULARY).write_text(theirs.backend_tokenizer.to_str())
        (folder / FACTS).write_bytes(msgspec.json.encode(facts))
        facts.unfit = difference(theirs, SlimTokenizer(folder, str(model)))
    (folder / FACTS).write_bytes(msgspec.json.encode(Facts(unfit=facts.unfit) if facts.unfit else facts))


def facts_of(theirs: Any) -> Facts:
    if getattr(theirs, "backend_tokenizer", None) is None:
        return Facts(unfit=f"{type(theirs).__name__} is not built on the tokenizers package")
    is_bpe = type(theirs.backend_tokenizer.model).__name__ == "BPE"
    forced = getattr(theirs, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return Facts(
        named=dict(theirs.special_tokens_map),
        special=list(theirs.all_special_tokens),
        template=theirs.chat_template or None,
        cleans_up=bool(theirs.clean_up_tokenization_spaces and (forced or not is_bpe)),
        splits_special=bool(theirs.split_special_tokens),
        names_thinking=theirs.apply_chat_template([THOUGHT], chat_template="{{ messages[0].thinking }}", tokenize=False) != "",
        probes=[probe(theirs, text) for text in texts(theirs)],
    )


def texts(theirs: Any) -> Iterator[str]:
    """Texts to compare: what tokenizers differ in, every added token between words, and conversations."""
    yield from TEXTS
    yield " x".join(str(token) for token in theirs.added_tokens_decoder.values())[:100_000]
    for conversation in range(len(probes.CONVERSATIONS)):
        if text := rendered(theirs, conversation, True):
            yield text


def probe(tokenizer: Any, text: str) -> Probe:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Probe(text, ids, tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True))


def rendered(tokenizer: Any, conversation: int, header: bool) -> str | None:
    """A probe conversation as text; None where the template cannot show it, or there is none."""
    from jinja2 import TemplateError

    messages, tools = probes.CONVERSATIONS[conversation]
    try:
        return tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=header)
    except (TemplateError, TypeError, ValueError):
        return None


def difference(theirs: Any, ours: SlimTokenizer) -> str:
    """The first thing in which the tokenizers differ; empty when there is none."""
    if found := ours.disagreement():
        return found
    size = len(theirs)
    for id in range(0, size, max(1, size // NUM_TOKENS)):
        if ours.convert_ids_to_tokens(id) is not None and ours.decode([id]) != theirs.decode([id]):
            return f"the token {id} is decoded differently"
    for name in ("eos_token_id", "unk_token_id", "all_special_ids"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} is {getattr(ours, name)}, transformers has {getattr(theirs, name)}"
    for conversation in range(len(probes.CONVERSATIONS) if theirs.chat_template else 0):
        for header in (True, False):
            before, wanted, after = (rendered(one, conversation, header) for one in (ours, theirs, ours))
            if wanted not in (before, after):  # two, for a template may write the time of day
                return f"its chat template gives {(before or 'an error')[:80]!r}, with transformers {(wanted or 'an error')[:80]!r}"
    return ""


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers imports it wherever it finds it; a tokenizer needs none
    write(Path(sys.argv[1]), Path(sys.argv[2]))
