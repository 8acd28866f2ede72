"""The estimate against what torch really keeps, and what the message says."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from rl.config.run import RLConfig
from rl.config.trainer import OptimConfig
from rl.system.errors import RunError
from rl.trainer.balance import Layout
from rl.trainer.fake import full_batch
from rl.trainer.measure.memory import GIB, Case, Sizes, advice, estimate, explain_out_of_memory, keep_to_share, remedies, sizes_of
from rl.trainer.model import load_policy, score
from rl.trainer.optim import make_optimizer
from rl.trainer.packing import pack

SMOL = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
SMALL = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MOE = SMALL | {"moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 4}
CONFIGS = {
    "SmolLM2-135M, 12 of 30 layers": LlamaConfig(**SMOL, num_hidden_layers=12, tie_word_embeddings=True),
    "Qwen3": Qwen3Config(**SMALL, num_hidden_layers=12),
    "Qwen3-MoE": Qwen3MoeConfig(**MOE, num_hidden_layers=12),
    "Gemma3": Gemma3TextConfig(**SMALL, num_hidden_layers=12),
}
ONE = Case(1000, 100, 500, 1, 1, "none", False, 2, "cpu")


def kept_bytes(model, forward) -> int:
    """Bytes of all tensors that autograd keeps for the backward pass, but for the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # held: an address is not given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for address, storage in kept.items() if address not in weights)


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_and_logits_within_a_factor_of_one_and_a_half(name):
    config = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="eager").train()
    ids, sizes, tokens = torch.randint(0, config.vocab_size, (1, 256)), sizes_of(model), 256
    measured = kept_bytes(model, lambda: model(input_ids=ids, logits_to_keep=1, use_cache=False))
    assert measured / 1.5 < estimate(sizes, Case(tokens, tokens, 0, 1, 1, "none", False, 2, "cpu"))["activations"] < measured * 1.5
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    measured = kept_bytes(model, lambda: model(input_ids=ids, logits_to_keep=1, use_cache=False))
    one_layer = estimate(sizes, Case(tokens, tokens, 0, 1, 1, "none", False, 2, "cpu"))["activations"] / 12
    full = estimate(sizes, Case(tokens, tokens, 0, 1, 1, "full", False, 2, "cpu"))["activations"]
    assert measured / 1.5 < full - one_layer < measured * 1.5  # the layer that is recomputed comes with the backward pass


def test_what_is_there_all_the_time_is_exact(tied_folder, world):
    config = RLConfig.model_validate({"model": {"dtype": "float32"}})
    model = load_policy(str(tied_folder), config.model, config.trainer, world)
    optimizer = make_optimizer(model, OptimConfig())
    moments = sum(v[key].numel() * 4 for v in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    memory = estimate(sizes_of(model), Case(1, 1, 1, 1, 1, "none", False, 4, "cpu"))
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert memory["optimizer"] == moments == 2 * weights and memory["parameters"] == 2 * weights  # masters, and what is computed with


def test_literal_estimate_and_remedies():
    sizes = Sizes(trained=1000, frozen=0, layer=300, layers=2, hidden=8, vocab=50, widths=40, outputs=18)
    memory = estimate(sizes, ONE)
    assert memory["parameters"] == 4 * 1000 + 2 * 1000 and memory["gradients"] == 4 * 1000 + 6 * 300 and memory["optimizer"] == 8000
    assert memory["activations"] == 2 * 64 * 1000 and memory["logits"] == 4 * 500 * 50 + 12 * 500 * 50
    sharded = estimate(Sizes(1000, 0, 300, 2, 8, 50, 40, 18), Case(1000, 100, 500, 4, 2, "selective", False, 2, "cpu"))
    assert sharded["parameters"] == 1000 + 2 * (400 + 600) and sharded["optimizer"] == 2000
    assert sharded["activations"] == 2 * (18 + 16 + 32) * 500
    freed = remedies(sizes, ONE, micro_batch_tokens=1000)
    assert freed["trainer.micro_batch_tokens = 500"] == (128_000 + 400_000) / 2
    assert freed['trainer.activation_checkpointing = "full"'] == 128_000 - 2 * (16 + 32) * 1000
    assert list(freed) == [
        "trainer.micro_batch_tokens = 500",
        'trainer.activation_checkpointing = "full"',
    ]  # the rest would free less than 2 %
    long = remedies(sizes, Case(1000, 1000, 500, 1, 1, "none", False, 2, "cpu"), micro_batch_tokens=500)
    assert long["trainer.context_parallel = 2"] == (128_000 + 400_000) / 2 and "trainer.micro_batch_tokens = 250" not in long
    assert advice(sizes, ONE, 1000).startswith("A rank needs about 0.00 GiB (parameters 0.00, gradients 0.00, optimizer 0.00,")


def test_a_large_model_is_told_of_offload_shards_and_adapters():
    sizes = Sizes(8 * 10**9, 0, 220 * 10**6, 32, 4096, 128256, 32 * 80_000, 32 * 45_000)
    freed = remedies(sizes, Case(4096, 2048, 1024, 1, 1, "full", False, 2, "cuda"), 4096)
    assert list(freed)[:3] == [
        "trainer.lora = true",
        "the model sharded over 2 ranks (more of them, or a smaller trainer.dp_replicate)",
        "trainer.optim.offload = true",
    ]
    assert freed["trainer.optim.offload = true"] == 8 * 8e9
    assert freed["trainer.lora = true"] / GIB == pytest.approx(14 * 8e9 / 2**30, rel=0.1)  # masters, gradients, moments; - a frozen copy


def test_what_offload_takes_of_the_hosts_memory_is_told():
    sizes = Sizes(8 * 2**30, 0, 220 * 10**6, 32, 4096, 128256, 32 * 80_000, 32 * 45_000)
    case = Case(4096, 2048, 1024, 2, 1, "full", False, 2, "cuda")
    assert "trainer.optim.offload = true: 32.00 GiB (for 32.00 GiB of the host's memory)" in advice(sizes, case, 4096)
    said = advice(sizes, replace(case, offload=True), 4096)
    assert "optimizer 0.00, " in said and " and 32.00 GiB of the host's memory. Each of these" in said


@pytest.mark.parametrize(("trainer", "inference", "share"), [([0], [0], 0.5875), ([0], [1], None), ([0], 0, None), (None, None, None)])
def test_on_a_shared_gpu_the_trainer_leaves_alone_what_is_vllms(monkeypatch, trainer, inference, share):
    """80 GiB, of which vLLM has 40 % and a GiB is no tensor's."""
    limits = []
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda fraction, _: limits.append(fraction))
    settings = {"inference": {"gpus": inference, "vllm": {"gpu-memory-utilization": 0.4}}, "trainer": {"gpus": trainer}}
    keep_to_share(RLConfig.model_validate(settings), torch.device("cuda", 0))
    keep_to_share(RLConfig.model_validate(settings), torch.device("cpu"))
    settings["trainer"]["data"] = {"fake": {}}
    keep_to_share(RLConfig.model_validate(settings), torch.device("cuda", 0))
    assert limits == ([] if share is None else [pytest.approx(share)])


def test_the_error_of_the_allocator_is_explained_and_others_are_not(tied_folder, world):
    config = RLConfig.model_validate({"model": {"dtype": "float32"}, "trainer": {"micro_batch_tokens": 128}})
    model = load_policy(str(tied_folder), config.model, config.trainer, world)
    rows = pack(full_batch(1, 128, 65, 259), [1.0] * 2, Layout(0, 1, 128, 64)).micro_batches
    assert score(model, rows[0], world).logprobs.shape == (128,)
    with pytest.raises(RunError) as error, explain_out_of_memory(model, rows, config, world):
        torch.empty(1 << 50)
    said = str(error.value)
    assert said.startswith("out of memory on rank 0 with a micro batch of 128 tokens, its longest sequence 64 (")
    assert "can't allocate memory" in said and "trainer.micro_batch_tokens = 64: " in said and "trainer.optim.offload" not in said
    with pytest.raises(RunError, match=r"CUDA out of memory\. Tried"), explain_out_of_memory(model, rows, config, world):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    with pytest.raises(RuntimeError, match="mat1 and mat2"), explain_out_of_memory(model, rows, config, world):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
