"""Policy versions of a run: which there are, and which one is loaded. tests/trainer/test_main.py
loads one for real."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rl.records import run as run_module
from rl.records.run import Run
from rl.system.errors import RunError
from tests.records.made import make_run, sample, write_eval_of, write_samples


def test_versions_are_loaded_by_number_or_as_the_best(tmp_path, monkeypatch):
    loads = SimpleNamespace(from_pretrained=lambda folder, **options: (str(folder), options))
    transformers = SimpleNamespace(AutoModelForCausalLM=loads, AutoTokenizer=loads)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setattr(run_module, "resolve_model", lambda model, needs_template: model.name)
    run_dir = make_run(tmp_path / "x")
    for version in (1, 2):
        run_dir.weights(version).mkdir(parents=True)
        (run_dir.weights(version) / "model.safetensors").touch()
    write_eval_of(run_dir, 1, [1.0])
    run = Run(run_dir.root)
    assert [(one.number, one.weights, one.best_of) for one in run.versions] == [
        (0, None, ()),
        (1, run_dir.weights(1), ("held-out",)),
        (2, run_dir.weights(2), ()),
    ]
    one, two = str(run_dir.weights(1)), str(run_dir.weights(2))
    for which, folder in (
        (None, two),
        (0, "none"),
        (1, one),
        ("best", one),
        ("best:held-out", one),
    ):
        assert run.load_model(which)[0] == folder
    assert run.load_model(1, dtype="float32")[1] == {"dtype": "float32"}
    with pytest.raises(
        RunError,
        match=r"the tokenizer of none is neither on this machine nor in .*weights: copy it there",
    ):
        _ = run.tokenizer
    (run_dir.weights(1) / "tokenizer.json").touch()
    assert run.tokenizer == (one, {})
    with pytest.raises(
        RunError, match=r"version 3 is not in .*; there are: 1, 2 \(and 0, the base model\)"
    ):
        run.load_model(3)
    with pytest.raises(
        RunError,
        match=r"give a number, or best:NAME; evaluations and their best versions: \{'held-out': "
        r"1\}",
    ):
        run.load_model("best:other")
    (run_dir.weights(2) / "model.safetensors").unlink()  # as copied without
    with pytest.raises(RunError, match=r"000002 has no weights, \*.safetensors: copy them there"):
        run.load_model()


def test_tokens_of_a_batch_without_a_log(tmp_path):
    run_dir = make_run(tmp_path / "x")
    run = Run(run_dir.root)
    write_samples(run_dir, 1, [sample(0, 0), sample(0, 1, teacher=True)])
    first, second = run.tokens(1)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.versions.tolist() == [-1, -1, 0, 0, 0]
    assert np.isnan(first.columns()["ratio"]).all() and not first.clipped.any()
    assert not first.has_log and "000001.safetensors: does not exist" in run.batch(1).fault
    assert run.tokens(1, group=0, rollout=1)[0].place == second.place == 1
    assert repr(run.batch(1)) == "<BatchTokens: step 1, 2 samples>"
    with pytest.raises(RunError, match="batch 1 has no sample of group 0, rollout 9"):
        run.tokens(1, group=0, rollout=9)
    with pytest.raises(RunError, match="no such batch"):
        run.tokens(2)
