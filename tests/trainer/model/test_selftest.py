"""The test at the start: what it chooses for models of every kind, what it refuses, and that
what it chooses is exact."""

import functools

import pytest
import torch
from transformers import LlamaForCausalLM

from rl.models.tiny import make_tiny_model
from rl.trainer.measure.performance import work_of
from rl.trainer.model import head, modes, selftest
from rl.trainer.model import policy as policy_module
from rl.trainer.model.flex import CompilerError
from rl.trainer.model.head import mode_of
from tests.families import CONFIGS, UNTIED
from tests.raised import run_error
from tests.trainer.model.test_policy import assert_same, backward, policy, reference
from tests.trainer.samples import branching_batch

MODES = ["blocks", "eager", "unpacked"]
REFUSED = (
    r"cannot be trained: no mode matches each sample computed alone \(.*unpacked: [\d.]+ nats off"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A function from the name of a family to the folder of a model."""
    root, configs = tmp_path_factory.mktemp("models"), CONFIGS | {"untied": UNTIED}
    return functools.cache(lambda family: make_tiny_model(root / family, configs[family]))


@pytest.mark.parametrize(
    ("family", "mode", "because"),
    [
        *(
            (family, "blocks", "")
            for family in (
                "llama",
                "untied",
                "qwen3",
                "qwen3_moe",
                "gpt2",
                "gemma3",
                "gemma2",
                "gpt_oss",
            )
        ),
        ("phimoe", "eager", "does not pass its window of 8 tokens to its attention function"),
        ("gptj", "eager", "cannot be replaced"),
        ("lfm2", "unpacked", "nats off"),
        ("xlstm", "unpacked", "nats off"),
    ],
)
def test_each_kind_of_model_is_trained_with_the_numbers_that_it_has_alone(
    family, mode, because, folder, world, capfd
):
    """Log-probabilities, entropies and gradients, packed if possible, are those of plain
    transformers: with tied and untied heads, grouped keys, experts, windows shorter than the
    samples, absolute positions, caps and sinks."""
    model = policy(folder(family), world)
    said = "".join(capfd.readouterr())
    assert f"trainer.attention: {mode} for " in said
    assert because in said
    assert ("WARNING" in said) == (mode != "blocks")
    assert mode_of(model) == mode and work_of(model).per_token > 0
    found = backward(model, world, branching_batch(), max_tokens=4096 * (mode != "unpacked"))
    assert len(found[1]) > 100
    assert_same(found, reference(folder(family), branching_batch()))


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_the_head_that_training_puts_in_is_tested(family, folder, world, monkeypatch):
    """The test was of the model's own head, and passed whatever ours computed."""
    right = head.head_logprobs
    monkeypatch.setattr(
        head, "head_logprobs", lambda *args: tuple(1.01 * values for values in right(*args))
    )
    with run_error(REFUSED):
        policy(folder(family), world)


def test_compiled_layers_are_tested(folder, world, monkeypatch):
    monkeypatch.setattr(
        modes, "compiled", lambda forward, _: lambda *a, **k: 1.1 * forward(*a, **k)
    )
    with run_error(REFUSED) as refused:
        policy(folder("llama"), world, compile=True)
    assert "set trainer.compile = false, or choose" in str(refused.value)


def test_randomness_that_stays_in_training_is_refused(folder, world, monkeypatch):
    for module in (selftest, policy_module):
        monkeypatch.setattr(module, "turn_off_randomness", lambda model: model.train())
    assert mode_of(policy(folder("llama"), world)) == "blocks"
    with run_error(REFUSED):
        policy(folder("gpt2"), world)


def test_a_mode_that_is_set_is_tested_too(folder, world):
    """With eager set, xLSTM was 2.2 nats off without a word."""
    for attention, family in (("blocks", "gptj"), ("eager", "lfm2"), ("eager", "xlstm")):
        with run_error(
            r"cannot be trained: no mode matches each sample computed alone .* set "
            r"trainer.attention = auto"
        ):
            policy(folder(family), world, attention=attention)
    assert mode_of(policy(folder("llama"), world, attention="unpacked")) == "unpacked"


def test_models_that_are_not_causal_or_not_whole_are_refused(folder, world, monkeypatch):
    forward = LlamaForCausalLM.forward

    def change(how):
        def changed(self, input_ids=None, **kwargs):
            out = forward(self, input_ids=input_ids, **kwargs)
            out.logits = how(out.logits, input_ids)
            return out

        monkeypatch.setattr(LlamaForCausalLM, "forward", changed)

    change(lambda logits, ids: logits + torch.arange(logits.shape[-1]) * ids[0, -1] / 1e3)
    with run_error("choose a causal language model"):
        policy(folder("llama"), world)
    change(lambda logits, ids: logits * float("nan"))
    with run_error("not finite"):
        policy(folder("llama"), world)


def test_state_that_stays_from_call_to_call_is_refused(folder, world, monkeypatch):
    forward, calls = LlamaForCausalLM.forward, []

    def remembers(self, input_ids=None, **kwargs):
        out = forward(self, input_ids=input_ids, **kwargs)
        calls.append(0)
        out.logits = out.logits * (1 + len(calls) * self.training / 100)
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", remembers)
    with run_error("cannot be trained.*" + ".*".join(f"{mode}: " for mode in MODES)):
        policy(folder("llama"), world)


def test_windows_longer_than_the_samples_are_seen(tmp_path, world, monkeypatch, capfd):
    """A window of 300 tokens that a mask leaves out makes no difference to samples of 30."""
    folder = make_tiny_model(tmp_path / "gemma3", CONFIGS["gemma3"] | {"sliding_window": 300})
    model = policy(folder, world)
    windows = {getattr(module, "sliding_window", None) for module in model.modules()}
    assert mode_of(model) == "blocks" and model.config.sliding_window == 300
    assert windows == {None, 300}
    with monkeypatch.context() as patch:
        patch.setattr(modes, "layer_windows", lambda model: [None] * 2)
        with run_error(r"eager: .* nats off"):
            policy(folder, world, attention="eager")


def raising(error):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize("place", [(selftest, "call"), (selftest, "score")])
def test_what_is_no_fault_of_the_model_ends_the_test(folder, world, monkeypatch, place):
    """A mode for which there was no memory was "not exact", a slower one was taken, or another
    model recommended; so it was after a lost rank or a broken GPU."""
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    monkeypatch.setattr(*place, raising(memory))
    with run_error(r"too little memory to test .*\(CUDA out of.*\); free memory"):
        policy(folder("llama"), world)
    for kind in (torch.distributed.DistBackendError, torch.AcceleratorError):
        monkeypatch.setattr(*place, raising(kind("of the test")))
        with pytest.raises(kind, match="of the test"):
            policy(folder("llama"), world)


@pytest.mark.parametrize("attention", ["auto", "blocks"])
def test_an_error_in_every_mode_is_told_as_such(folder, world, monkeypatch, capsys, attention):
    """Regression: it was told as a model without an exact mode."""
    monkeypatch.setattr(selftest, "score", raising(TypeError("no such keyword")))
    with run_error(r"an error ended the test of each mode.*blocks: TypeErr"):
        policy(folder("llama"), world, attention=attention)
    assert "Traceback" in (said := capsys.readouterr().err) and "no such keyword" in said


def test_a_mode_whose_compiler_fails_is_not_used(folder, world, monkeypatch, capsys):
    def broken(model, batch, *_, **__):
        if mode_of(model) == "blocks":
            raise CompilerError("torch cannot compile it (OSError: no space left)")
        return right(model, batch, *_, **__)

    right = selftest.score
    monkeypatch.setattr(selftest, "score", broken)
    assert mode_of(policy(folder("llama"), world)) == "eager"
    assert "rejected blocks: torch cannot compile it" in capsys.readouterr().err
