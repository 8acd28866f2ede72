"""`rl export` out of real checkpoints and versions: what transformers and peft load is what the
trainer had."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl.config.run import RLConfig
from rl.inference.weight_files import trained_names
from rl.launch.children import Children
from rl.main import subcommand
from rl.models.folder import weights_digest
from rl.models.tiny import make_tiny_model
from rl.trainer.model.policy import DTYPES, load_policy
from rl.trainer.optim import make_optimizer
from rl.trainer.store import versions
from tests.families import UNTIED, make_seeing_model
from tests.models.hub_stub import TOKEN, HubStub
from tests.trainer.layouts import weights_of
from tests.trainer.samples import assert_equal, save_checkpoint, toy_step, write_config
from tests.web import serving

IDS = torch.tensor([[5, 6, 7, 8, 9, 200]])


def make_run(root, model_folder, world, dtype="bfloat16", **trainer):
    """A run with checkpoint and version 2, version 3 and checkpoint 4; returns its root and the
    model after step 4."""
    settings = {
        "name": "r",
        "output_dir": str(root),
        "model": {"name": str(model_folder), "dtype": dtype},
    }
    settings |= {
        "orchestrator": {"environment": [{"id": "e"}]},
        "trainer": {"optim": {"lr": 1e-2}, "attention": "eager"} | trainer,
    }
    config = RLConfig.model_validate(settings)
    write_config(config)
    torch.manual_seed(0)
    model = load_policy(str(model_folder), config.model, config.trainer, world)
    optimizer = make_optimizer(model, config.trainer.optim)
    for step in range(1, 5):
        toy_step(model, optimizer)
        if step in (2, 4):
            base = weights_digest(model_folder) if config.trainer.lora else ""
            save_checkpoint(config.run_dir.checkpoint(step), step, model, optimizer, world, base)
        if step in (2, 3):
            version = versions.snapshot(model, model_folder, DTYPES[dtype], {})
            version.write_record(config.run_dir.digests(step))
            version.write(config.run_dir.weights(step))
    return config.run_dir, model


@pytest.fixture(scope="module")
def adapted(tied_folder, world, tmp_path_factory):
    return make_run(
        tmp_path_factory.mktemp("adapted"), tied_folder, world, dtype="float32", lora={"rank": 4}
    )


def export(*args, code=0):
    assert subcommand("export", [*map(str, args)], Children()) == code


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def load(folder, dtype="float32"):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])


def test_a_checkpoint_gives_the_masters_and_what_was_published(model_folder, world, tmp_path):
    run_dir, model = make_run(tmp_path, model_folder, world)
    export(run_dir.root, "--to", tmp_path / "masters", "--dtype", "float32")
    assert_equal(dict(load(tmp_path / "masters").named_parameters()), weights_of(model))
    for step in (2, 3):  # out of a checkpoint, and out of a version
        export(f"{run_dir.root}@{step}", "--to", tmp_path / str(step))
        assert_equal(
            *(
                load_file(f / "model.safetensors")
                for f in (tmp_path / str(step), run_dir.weights(step))
            )
        )
        configs = [
            json.loads((folder / "config.json").read_text())
            for folder in (tmp_path / str(step), run_dir.weights(step))
        ]
        assert configs[0] == configs[1] and configs[0]["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(tmp_path / "3").chat_template


def test_the_hub_gets_what_a_directory_gets(adapted, tmp_path, monkeypatch, capsys):
    run_dir, _ = adapted
    with serving(HubStub()) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        export(f"{run_dir.root}@4", "--push", "me/adapter", "--to", tmp_path / "adapter")
        export(f"{run_dir.root}@4", "--push", "me/merged", "--merge", "--public")
        export(f"{run_dir.root}@4", "--push", "me/merged", code=1)
    assert stub.files["me/adapter"] == {
        file.name: file.read_bytes() for file in (tmp_path / "adapter").iterdir()
    }
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(stub.files["me/merged"])
    assert (
        stub.private == {"me/adapter": True, "me/merged": False}
        and stub.commits == ["Step 4 of r"] * 2
    )
    out, err = capsys.readouterr()
    assert (
        f"{stub.url}/me/adapter: the adapters of step 4, private" in out
        and f"{stub.url}/me/merged: the model of step 4, seen by" in out
    )
    assert "rl export: --push me/merged: there is a model already" in err


def test_adapters_and_merged_compute_what_the_trainer_computes(adapted, tied_folder, tmp_path):
    run_dir, model = adapted
    export(run_dir.root, "--to", tmp_path / "adapter")
    export(run_dir.root, "--to", tmp_path / "merged", "--merge")
    assert (
        not (tmp_path / "adapter" / "model.safetensors").exists()
        and not (tmp_path / "merged" / "adapter_config.json").exists()
    )
    ours, base = logits_of(model), load(tied_folder)
    assert (ours - logits_of(base)).abs().max() > 0.1
    assert torch.allclose(logits_of(load(tmp_path / "merged")), ours, rtol=0, atol=1e-5)
    assert torch.allclose(
        logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter")), ours, rtol=0, atol=1e-5
    )
    assert (
        load_file(tmp_path / "merged" / "model.safetensors").keys()
        == load_file(tied_folder / "model.safetensors").keys()
    )
    for name in ("adapter", "merged"):
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template


def test_exported_adapters_name_their_base_as_the_run_does(
    adapted, tied_folder, tmp_path, monkeypatch
):
    """Regression: they named the folder in this machine's cache."""
    monkeypatch.setattr("rl.commands.export.resolve_model", lambda *_, **__: str(tied_folder))
    export(adapted[0].root, "--to", tmp_path / "adapter", "--model.name", "owner/base")
    written = (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert (
        json.loads(written)["base_model_name_or_path"] == "owner/base"
        and str(tied_folder) not in written
    )


def test_a_version_of_adapters_is_exported_and_merged(adapted, tied_folder, tmp_path):
    run_dir, _ = adapted
    (tied_folder / "README.md").write_text("the base's card")
    export(f"{run_dir.root}@3", "--to", tmp_path / "adapter")
    (tied_folder / "README.md").unlink()
    assert not (tmp_path / "adapter" / "README.md").exists()
    assert_equal(
        *(
            load_file(f / "adapter_model.safetensors")
            for f in (tmp_path / "adapter", run_dir.weights(3))
        )
    )
    export(f"{run_dir.root}@3", "--to", tmp_path / "merged", "--merge", "--dtype", "bfloat16")
    expected = (
        PeftModel.from_pretrained(load(tied_folder), run_dir.weights(3))
        .merge_and_unload()
        .to(torch.bfloat16)
    )
    ours, theirs = load_file(tmp_path / "merged" / "model.safetensors"), expected.state_dict()
    assert ours and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_damaged_checkpoint_is_passed_over_for_the_version_or_refused(adapted, tmp_path, capsys):
    run_dir, _ = adapted
    for step in (2, 4):
        file = run_dir.checkpoint(step) / "__0_0.distcp"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        export(f"{run_dir.root}@{step}", "--to", tmp_path / str(step), code=0 if step == 2 else 1)
        file.write_bytes(whole)
    said = capsys.readouterr().err
    assert (
        "WARNING: the checkpoint is damaged" in said
        and f"the version {run_dir.weights(2)} is used instead" in said
    )
    assert (
        "000004/__0_0.distcp: damaged; no version of this step was kept either; give another step"
        in said
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2"]


def test_a_damaged_version_and_a_checkpoint_of_a_newer_rl_are_refused(adapted, tmp_path, capsys):
    run_dir, _ = adapted
    file, manifest = (
        next(run_dir.weights(3).glob("*.safetensors")),
        run_dir.checkpoint(2) / "manifest.json",
    )
    for path, changed in (
        (file, file.read_bytes()[:-1] + b"\xff"),
        (manifest, manifest.read_bytes().replace(b"blake3", b"blake9")),
    ):
        whole = path.read_bytes()
        path.write_bytes(changed)
        export(f"{run_dir.root}@{3 if path == file else 2}", "--to", tmp_path / "x", code=1)
        path.write_bytes(whole)
    first, second = (
        line for line in capsys.readouterr().err.splitlines() if ": reading" not in line
    )
    assert first.startswith(f"rl export: {file}: tensor ") and first.endswith(
        "is not what was written; give another step, RUN@STEP"
    )
    assert (
        f"{manifest}: its hash is 'blake9', which this rl does not know: a newer rl wrote it"
        in second
    )
    assert not list(tmp_path.iterdir())


def test_the_base_model_may_have_moved_but_not_changed(adapted, tmp_path, tied_folder, capsys):
    run_dir, _ = adapted
    export(run_dir.root, "--to", tmp_path / "a", "--model.name", tmp_path / "gone", code=1)
    assert f"{tmp_path}/gone': no such folder" in capsys.readouterr().err
    (tmp_path / "moved").symlink_to(tied_folder)
    export(run_dir.root, "--to", tmp_path / "b", "--model.name", tmp_path / "moved")


def test_a_full_disk(adapted, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(
        OSError, match=r"no space left: [\d,]+ bytes are needed, [\d,]+ are free"
    ) as error:
        export(adapted[0].root, "--to", tmp_path / "full")
    assert error.value.filename.startswith(str(tmp_path)) and not list(tmp_path.iterdir())


def test_a_base_whose_generation_config_is_invalid_is_exported_with_it(
    model_folder, world, tmp_path
):
    """Llama 2's has a temperature without do_sample."""
    base = shutil.copytree(model_folder, tmp_path / "base")
    text = json.dumps({"temperature": 0.6, "top_p": 0.9, "do_sample": False})
    (base / "generation_config.json").write_text(text)
    run_dir, _ = make_run(tmp_path / "outputs", base, world)
    export(run_dir.root, "--to", tmp_path / "exported")
    assert (tmp_path / "exported" / "generation_config.json").read_text() == text


@pytest.mark.parametrize("kind", ["another head", "sees images"])
def test_what_is_written_is_by_its_config_alone_the_model_that_was_trained(kind, world, tmp_path):
    """Regression: a config tied the head although the files hold another one, and named a class
    that exists in the trainer alone."""
    if kind == "another head":
        base = make_tiny_model(tmp_path / "base", UNTIED)
        fields = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    else:
        base = make_seeing_model(tmp_path / "base")
    run, model = make_run(
        tmp_path,
        base,
        world,
        dtype="float32",
        attention="eager" if kind == "another head" else "auto",
    )
    export(run.root, "--to", tmp_path / "exported")
    for folder in (run.weights(3), tmp_path / "exported"):
        written = json.loads((folder / "config.json").read_text())
        alone = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
        assert written["architectures"] == [type(alone).__name__] and str(
            tmp_path
        ) not in json.dumps(written)
        weights = load_file(folder / "model.safetensors")
        names = trained_names(folder, weights)
        alone.load_state_dict(
            {names[name]: weight for name, weight in weights.items()}, strict=False
        )
        alone.tie_weights()
        assert torch.equal(
            logits_of(alone),
            logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)),
        )
    assert torch.equal(alone.get_output_embeddings().weight, model.get_output_embeddings().weight)
