"""The test at the start: what it chooses for models of every kind, what it refuses, and that what it chooses is exact."""

import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.models.tiny import make_tiny_model
from rl.system.errors import RunError
from rl.trainer.measure.performance import work_of
from rl.trainer.model import head, selftest
from rl.trainer.model.policy import mode_of
from rl.trainer.model.selftest import choose_mode, examine, keep_layers
from tests.families import CONFIGS, UNTIED
from tests.trainer.model.test_policy import assert_same, backward, policy, reference
from tests.trainer.samples import branching_batch

CPU = torch.device("cpu")
MODES = ["blocks", "eager", "unpacked"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rl" / "attention"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A function from the name of a family to the folder of a model."""
    root, configs = tmp_path_factory.mktemp("models"), CONFIGS | {"untied": UNTIED}
    return functools.cache(lambda family: make_tiny_model(root / family, configs[family]))


@pytest.mark.parametrize(
    ("family", "mode", "because"),
    [
        *((family, "blocks", "") for family in ("llama", "untied", "qwen3", "qwen3_moe", "gpt2", "gemma3", "gemma2", "gpt_oss")),
        ("phimoe", "eager", "does not pass its window of 8 tokens to its attention function"),
        ("gptj", "eager", "cannot be replaced"),
        ("lfm2", "unpacked", "nats off"),
        ("xlstm", "unpacked", "nats off"),
    ],
)
def test_each_kind_of_model_is_trained_with_the_numbers_that_it_has_alone(family, mode, because, folder, world, capfd):
    """Log-probabilities, entropies and gradients, packed if possible, are those of plain transformers: with tied and untied heads, grouped
    keys, experts, windows shorter than the samples, absolute positions, caps and sinks."""
    model = policy(folder(family), world)
    said = "".join(capfd.readouterr())
    assert f"trainer.attention: {mode} for " in said and because in said and ("WARNING" in said) == (mode != "blocks")
    assert mode_of(model) == mode and work_of(model).per_token > 0
    found = backward(model, world, branching_batch(), max_tokens=4096 * (mode != "unpacked"))
    assert len(found[1]) > 100
    assert_same(found, reference(folder(family), branching_batch()))


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_the_head_that_training_puts_in_is_tested(family, folder, world, monkeypatch):
    """The test was of the model's own head, and passed whatever ours computed."""
    right = head.head_logprobs
    monkeypatch.setattr(head, "head_logprobs", lambda *args: tuple(1.01 * found for found in right(*args)))
    with pytest.raises(RunError, match=r"cannot be trained: no mode matches each sample computed alone \(.*unpacked: 0\.0\d+ nats off"):
        choose_mode(str(folder(family)), ModelConfig(name=str(folder(family))), TrainerConfig(), world)


def test_a_mode_that_is_set_is_tested_too(folder, world):
    """With eager set, xLSTM was 2.2 nats off without a word."""
    for attention, family in (("blocks", "gptj"), ("eager", "lfm2"), ("eager", "xlstm")):
        with pytest.raises(
            RunError, match=r"cannot be trained: no mode matches each sample computed alone .* set trainer.attention = auto"
        ):
            policy(folder(family), world, attention=attention)
    assert mode_of(policy(folder("llama"), world, attention="unpacked")) == "unpacked"


def test_models_that_are_not_causal_or_not_whole_are_refused(folder, world, monkeypatch):
    config = ModelConfig(name="it")
    eager = selftest.load_part(str(folder("llama")), config, CPU)
    monkeypatch.setattr(selftest, "load_part", lambda *_: eager)
    forward = LlamaForCausalLM.forward

    def looks_ahead(self, input_ids=None, **kwargs):
        out = forward(self, input_ids=input_ids, **kwargs)
        out.logits = out.logits + torch.arange(out.logits.shape[-1]) * input_ids[0, -1] / 1e3
        return out

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", looks_ahead)
        assert "choose a causal language model" in examine(str(folder("llama")), config, MODES, CPU).fault
    eager.lm_head.weight.data[0] = float("nan")
    assert "not finite" in examine(str(folder("llama")), config, MODES, CPU).fault


def test_state_that_stays_from_call_to_call_is_refused(folder, monkeypatch):
    forward, calls = LlamaForCausalLM.forward, []

    def remembers(self, input_ids=None, **kwargs):
        out = forward(self, input_ids=input_ids, **kwargs)
        calls.append(0)
        out.logits = out.logits * (1 + len(calls) * self.training / 100)
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", remembers)
    choice = examine(str(folder("llama")), ModelConfig(name="it"), MODES, CPU)
    assert "cannot be trained" in choice.fault and all(f"{mode}: " in choice.fault for mode in MODES)


def test_windows_longer_than_the_probes_are_seen(tmp_path):
    """A window of 300 tokens that the attention function is not told of makes no difference to samples of 30."""
    folder = make_tiny_model(tmp_path / "mistral", CONFIGS["llama"])
    config = ModelConfig(name="it", max_model_len=512)
    test = selftest.Test(selftest.load_part(str(folder), config, CPU), config)
    assert test.why_not("blocks") == ""
    folder = make_tiny_model(tmp_path / "gemma3", CONFIGS["gemma3"] | {"sliding_window": 300})
    model = selftest.load_part(str(folder), config, CPU)
    assert model.config.sliding_window == selftest.NARROW
    assert AutoModelForCausalLM.from_pretrained(folder).config.sliding_window == 300


def test_the_result_is_cached_by_model_and_settings(folder, world, cache, monkeypatch):
    config, tried = ModelConfig(name="it", dtype="float32"), []
    monkeypatch.setattr(selftest, "examine", lambda *args: tried.append(args) or examine(*args))
    first = choose_mode(str(folder("llama")), config, TrainerConfig(), world)
    assert choose_mode(str(folder("llama")), config, TrainerConfig(), world) == first and len(tried) == 1
    (file,) = cache.iterdir()
    file.write_bytes(b"{")  # a damaged cache is none
    choose_mode(str(folder("llama")), config, TrainerConfig(attention="eager"), world)
    assert choose_mode(str(folder("llama")), config, TrainerConfig(), world) == first and len(tried) == 3
    choose_mode(str(folder("gemma3")), config, TrainerConfig(), world)
    assert len(tried) == 4


@pytest.mark.parametrize("place", ["load_part", "LossHead", "ReferenceLogprobs"])
def test_out_of_memory_is_no_fault_of_the_model(folder, world, cache, monkeypatch, place):
    """A mode for which there was no memory was "not exact", a slower one was taken and cached, or another model recommended."""

    def raising(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(selftest, place, raising)
    with pytest.raises(RunError, match=r"too little memory to test how to train it.*\(CUDA out of memory. Tried .*\); free memory"):
        choose_mode(str(folder("llama")), ModelConfig(name="it"), TrainerConfig(), world)
    assert not list(cache.glob("*"))


def test_as_many_layers_are_tested_as_a_gpu_has_memory_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (48 << 30, 80 << 30))
    gib, gpu = 2.0**30, torch.device("cuda", 0)
    assert [selftest.fitting_layers(size * gib, gpu) for size in (0.5, 1, 2, 4, 40)] == [8, 8, 4, 2, 1]
    assert selftest.fitting_layers(40 * gib, CPU) == 8


def test_a_large_model_is_tested_on_its_first_layers_of_every_kind():
    kinds = ["sliding_attention"] * 11 + ["full_attention"] + ["sliding_attention"] * 28
    config = AutoConfig.for_model(**CONFIGS["gemma3"] | {"num_hidden_layers": 40, "layer_types": kinds})
    keep_layers(config)
    assert config.num_hidden_layers == len(config.layer_types) == 12
    config = AutoConfig.for_model(**CONFIGS["llama"] | {"num_hidden_layers": 40})
    keep_layers(config)
    assert config.num_hidden_layers == selftest.LEAST_LAYERS
