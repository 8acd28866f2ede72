"""The test at the start: what it chooses for models of every kind, what it refuses, and that
what it chooses is exact."""

import functools
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.models.tiny import make_tiny_model
from rl.system.errors import RunError
from rl.trainer.measure.performance import work_of
from rl.trainer.model import alone, head, rope, selftest
from rl.trainer.model import policy as policy_module
from rl.trainer.model.alone import keep_layers
from rl.trainer.model.compiled import CompilerError
from rl.trainer.model.policy import assemble, mode_of, score
from rl.trainer.model.selftest import Candidate, Test, choose_mode
from tests.families import CONFIGS, UNTIED
from tests.trainer.model.test_policy import assert_same, backward, policy, reference
from tests.trainer.parallel.test_experts import MODELS
from tests.trainer.samples import branching_batch

CPU = torch.device("cpu")
MODES = ["blocks", "eager", "unpacked"]


def candidate(folder, world, config=None, **settings):
    config = config or ModelConfig(name=str(folder))
    return Candidate(str(folder), config, TrainerConfig(**settings), world, False, assemble, score)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rl" / "attention"


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """As in a trainer that was forked from a copy: what is imported is not looked at."""
    gc.freeze()
    yield
    gc.unfreeze()


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
    assert (
        f"trainer.attention: {mode} for " in said
        and because in said
        and ("WARNING" in said) == (mode != "blocks")
    )
    assert mode_of(model) == mode and work_of(model).per_token > 0
    found = backward(model, world, branching_batch(), max_tokens=4096 * (mode != "unpacked"))
    assert len(found[1]) > 100
    assert_same(found, reference(folder(family), branching_batch()))


REFUSED = (
    r"cannot be trained: no mode matches each sample computed alone \(.*unpacked: [\d.]+ nats off"
)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_the_head_that_training_puts_in_is_tested(family, folder, world, monkeypatch):
    """The test was of the model's own head, and passed whatever ours computed."""
    right = head.head_logprobs
    monkeypatch.setattr(
        head, "head_logprobs", lambda *args: tuple(1.01 * found for found in right(*args))
    )
    with pytest.raises(RunError, match=REFUSED):
        choose_mode(candidate(folder(family), world))


def scaled(forward, *_, **__):
    """Returns a layer's or a norm's forward pass whose result is a tenth too large."""

    def call(*args, **kwargs):
        out = forward(*args, **kwargs)
        return (1.1 * out[0], *out[1:]) if isinstance(out, tuple) else 1.1 * out

    return call


def other_frequencies(model):
    model.model.rotary_emb.inv_freq *= 1.1


def other_norms(model):
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = scaled(module.forward)


def other_weights(model):
    for weight in model.parameters():
        weight.detach().mul_(1.1)


@pytest.mark.parametrize(
    ("name", "planted", "settings"),
    [
        ("compiled", scaled, {"compile": True}),
        ("freeze_rope", other_frequencies, {}),
        ("turn_off_randomness", other_norms, {}),
        ("shard_model", other_weights, {}),
    ],
)
def test_what_is_put_in_for_training_is_tested(name, planted, settings, folder, world, monkeypatch):
    """Layers were compiled, norms, frequencies and shards put in after the test, which passed
    whatever these computed."""
    right = getattr(policy_module, name)
    if name == "compiled":
        monkeypatch.setattr(policy_module, name, planted)
    else:
        monkeypatch.setattr(
            policy_module, name, lambda model, *args: (planted(model), right(model, *args))
        )
    with pytest.raises(RunError, match=REFUSED) as refused:
        policy(folder("llama"), world, **settings)
    assert ("set trainer.compile = false, or choose" in str(refused.value)) == (name == "compiled")


def test_frozen_frequencies_are_tested_against_those_that_transformers_has_for_the_longest_sequence(
    folder, world, monkeypatch
):
    """Both sides had the frozen ones, so any were right."""
    config, right = ModelConfig(name="it", dtype="float32", max_model_len=512), rope.longrope
    assert choose_mode(candidate(folder("phi3"), world, config)).mode == "blocks"
    monkeypatch.setattr(rope, "longrope", lambda *args: (1.1 * right(*args)[0], right(*args)[1]))
    config.max_model_len = 500  # another entry of the cache
    with pytest.raises(RunError, match=REFUSED):
        choose_mode(candidate(folder("phi3"), world, config))


def test_no_rank_holds_two_models(folder, world, monkeypatch):
    """What computes the samples alone is gone when the policy is made, and one mode's policy
    when the next one's is."""
    made, plain = [], alone.load_plain

    def kept(make, *args):
        assert not [model for model in made if model()]
        made.append(weakref.ref(model := make(*args)))
        return model

    monkeypatch.setattr(alone, "load_plain", lambda *args: kept(plain, *args))
    monkeypatch.setattr(head, "head_logprobs", lambda *args: [torch.zeros(1)] * 2)
    wrong = replace(candidate(folder("llama"), world), assemble=lambda *args: kept(assemble, *args))
    with pytest.raises(RunError, match="cannot be trained"):
        choose_mode(wrong)
    assert len(made) == 1 + len(MODES)


def test_a_mode_that_is_set_is_tested_too(folder, world):
    """With eager set, xLSTM was 2.2 nats off without a word."""
    for attention, family in (("blocks", "gptj"), ("eager", "lfm2"), ("eager", "xlstm")):
        with pytest.raises(
            RunError,
            match=r"cannot be trained: no mode matches each sample computed alone .* set "
            r"trainer.attention = auto",
        ):
            policy(folder(family), world, attention=attention)
    assert mode_of(policy(folder("llama"), world, attention="unpacked")) == "unpacked"


def test_models_that_are_not_causal_or_not_whole_are_refused(folder, world, monkeypatch):
    it, load = candidate(folder("llama"), world), alone.load_plain
    forward = LlamaForCausalLM.forward

    def looks_ahead(self, input_ids=None, **kwargs):
        out = forward(self, input_ids=input_ids, **kwargs)
        out.logits = out.logits + torch.arange(out.logits.shape[-1]) * input_ids[0, -1] / 1e3
        return out

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", looks_ahead)
        with pytest.raises(RunError, match="choose a causal language model"):
            choose_mode(it)

    def broken(*args):
        model = load(*args)
        model.lm_head.weight[0] = float("nan")
        return model

    monkeypatch.setattr(alone, "load_plain", broken)
    with pytest.raises(RunError, match="not finite"):
        choose_mode(it)


def test_state_that_stays_from_call_to_call_is_refused(folder, world, monkeypatch):
    forward, calls = LlamaForCausalLM.forward, []

    def remembers(self, input_ids=None, **kwargs):
        out = forward(self, input_ids=input_ids, **kwargs)
        calls.append(0)
        out.logits = out.logits * (1 + len(calls) * self.training / 100)
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", remembers)
    with pytest.raises(
        RunError, match="cannot be trained.*" + ".*".join(f"{mode}: " for mode in MODES)
    ):
        choose_mode(candidate(folder("llama"), world))


def test_windows_longer_than_the_probes_are_seen(tmp_path, world):
    """A window of 300 tokens that the attention function is not told of makes no difference to
    samples of 30."""
    folder = make_tiny_model(tmp_path / "mistral", CONFIGS["llama"])
    config = ModelConfig(name="it", max_model_len=512)
    assert Test(candidate(folder, world, config)).why_not("blocks") == ""
    folder = make_tiny_model(tmp_path / "gemma3", CONFIGS["gemma3"] | {"sliding_window": 300})
    assert alone.part_of(str(folder), config, world).sliding_window == alone.NARROW
    assert AutoModelForCausalLM.from_pretrained(folder).config.sliding_window == 300


def test_the_result_is_cached_by_model_and_settings(folder, world, cache, monkeypatch):
    config, tried = ModelConfig(name="it", dtype="float32"), []
    examine = selftest.examine
    monkeypatch.setattr(selftest, "examine", lambda *args: tried.append(args) or examine(*args))
    first = choose_mode(candidate(folder("llama"), world, config))
    assert choose_mode(candidate(folder("llama"), world, config)) == first and len(tried) == 1
    (file,) = cache.iterdir()
    file.write_bytes(b"{")  # a damaged cache is none
    choose_mode(candidate(folder("llama"), world, config, attention="eager"))
    assert choose_mode(candidate(folder("llama"), world, config)) == first and len(tried) == 3
    choose_mode(candidate(folder("gemma3"), world, config))
    assert (
        choose_mode(candidate(folder("llama"), world, config, activation_checkpointing="full"))
        == first
        and len(tried) == 5
    )
    divided = replace(world, experts=SimpleNamespace(shape=(1, 1)))
    assert selftest.digest(candidate(folder("llama"), world), []) != selftest.digest(
        candidate(folder("llama"), divided), []
    )
    names = iter(["NVIDIA H200", "NVIDIA L40S", "NVIDIA H200"])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: next(names))
    on_gpu = replace(world, device=torch.device("cuda", 0))
    first, second, third = (
        selftest.digest(candidate(folder("llama"), on_gpu), []) for _ in range(3)
    )
    assert first == third != second


@pytest.mark.parametrize(
    "place",
    [
        (alone, "load_plain"),
        (alone, "measure"),
        (policy_module, "load_rows"),
        (policy_module, "LossHead"),
    ],
)
def test_out_of_memory_is_no_fault_of_the_model(folder, world, cache, monkeypatch, place):
    """A mode for which there was no memory was "not exact", a slower one was taken and cached,
    or another model recommended."""

    def raising(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(*place, raising)
    with pytest.raises(
        RunError,
        match=r"too little memory to test how to train it.*\(CUDA out of memory. Tried .*\); free "
        r"memory",
    ):
        choose_mode(candidate(folder("llama"), world))
    assert not list(cache.glob("*"))


@pytest.mark.parametrize("kind", [torch.distributed.DistBackendError, torch.AcceleratorError])
@pytest.mark.parametrize(
    "place",
    [
        (alone, "load_plain"),
        (alone, "measure"),
        (policy_module, "load_rows"),
        (policy_module, "LossHead"),
    ],
)
def test_a_lost_rank_or_a_broken_gpu_is_no_fault_of_the_model(
    folder, world, cache, monkeypatch, place, kind
):
    """Another model was recommended, or a slower mode taken and cached."""

    def raising(*_, **__):
        raise kind("of the test")

    monkeypatch.setattr(*place, raising)
    with pytest.raises(kind, match="of the test"):
        choose_mode(candidate(folder("llama"), world))
    assert not list(cache.glob("*"))


def test_a_mode_whose_compiler_failed_is_tried_again_at_the_next_start(
    folder, world, cache, monkeypatch, capsys
):
    """A full disk at one start made all later ones slow."""

    def head(inner, mode, routers):
        if mode == "blocks":
            raise CompilerError("torch cannot compile it (OSError: no space left)")
        return real(inner, mode, routers)

    real = policy_module.LossHead
    with monkeypatch.context() as broken:
        broken.setattr(policy_module, "LossHead", head)
        assert choose_mode(candidate(folder("llama"), world)).mode == "eager"
    assert (
        "after rejecting blocks: torch cannot compile it" in capsys.readouterr().err
        and not list(cache.glob("*"))
    )
    assert (
        choose_mode(candidate(folder("llama"), world)).mode == "blocks"
        and len(list(cache.glob("*"))) == 1
    )


def test_as_many_layers_are_tested_as_a_gpu_has_memory_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (48 << 30, 80 << 30))
    gib, gpu = 2.0**30, torch.device("cuda", 0)
    assert [alone.fitting_layers(size * gib, gpu) for size in (0.5, 1, 2, 4, 40)] == [8, 8, 6, 3, 1]
    assert alone.fitting_layers(40 * gib, CPU) == 8


@pytest.mark.parametrize(("kind", "expected"), [("deepseek_v3", 2), ("qwen3_moe", 1), ("llama", 0)])
def test_a_large_mixture_is_tested_up_to_its_first_layer_with_experts(
    tmp_path, world, monkeypatch, kind, expected
):
    """Of one with dense layers before, experts were not tested, and with router replay the run
    was refused."""
    folder = make_tiny_model(tmp_path / kind, MODELS[kind] if kind in MODELS else CONFIGS[kind])
    assert alone.first_with_experts(AutoConfig.from_pretrained(folder), False) == expected
    monkeypatch.setattr(alone, "WHOLE_BYTES", 0)
    monkeypatch.setattr(alone, "fitting_layers", lambda *_: 1)
    assert alone.part_of(str(folder), ModelConfig(name="it"), world).num_hidden_layers == max(
        1, expected
    )


def test_a_large_model_is_tested_on_its_first_layers_of_every_kind():
    kinds = ["sliding_attention"] * 11 + ["full_attention"] + ["sliding_attention"] * 28
    config = AutoConfig.for_model(
        **CONFIGS["gemma3"] | {"num_hidden_layers": 40, "layer_types": kinds}
    )
    keep_layers(config)
    assert config.num_hidden_layers == len(config.layer_types) == 12
    config = AutoConfig.for_model(**CONFIGS["llama"] | {"num_hidden_layers": 40})
    keep_layers(config)
    assert config.num_hidden_layers == alone.LEAST_LAYERS
