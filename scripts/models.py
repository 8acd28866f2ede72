"""How every causal language model of the installed transformers is trained: `uv run scripts/models.py` writes docs/models.md.

Each family is made as a tiny model of random weights, with one layer of each kind that its configuration knows. The test at the start
(rl/trainer/selftest.py) chooses its mode; then log-probabilities and gradients of training, in float32, are compared with those of plain
Hugging Face, one sample after another. With families as arguments only these are measured, and nothing is written.
"""

import argparse
import copy
import importlib.metadata
import io
import os
import tempfile
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.system.errors import RunError
from rl.trainer.balance import Layout
from rl.trainer.fake import make_sample
from rl.trainer.lora import target_layers
from rl.trainer.model import is_packed, load_policy, score
from rl.trainer.packing import pack
from rl.trainer.parallel.world import World, start_world
from rl.trainer.selftest import MODEL_ERRORS, choose_mode, describe
from rl.wire.messages import TrainBatch

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MOST_PARAMETERS = 20e6
MAX_LEN = 256
VOCAB = 160
MOST_DIFFERENCE = 1e-3
"""Nats, and relative norm of a gradient, beyond which a model would be trained wrong in silence."""
SIZES = {
    64: """hidden_size n_embd d_model dim embedding_size word_embed_proj_dim attention_hidden_size linear_attn_hidden_size lru_width
        time_step_rank""",
    128: """intermediate_size n_inner ffn_dim d_ff ffn_hidden_size dff decoder_ffn_dim encoder_ffn_dim block_ff_dim mamba_d_ssm
        shared_intermediate_size mlp_hidden_size""",
    96: """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size
        intermediate_size_mlp""",
    2: """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads encoder_layers num_key_value_heads
        n_kv_heads num_kv_heads num_experts_per_tok moe_topk moe_k top_k_experts experts_per_token n_layer n_layers num_layers
        decoder_layers num_hidden_layers global_num_key_value_heads num_global_key_value_heads swa_num_key_value_heads mamba_n_groups
        n_groups num_linear_key_value_heads linear_num_key_heads linear_num_value_heads swa_num_attention_heads index_n_heads""",
    32: """head_dim attention_head_dim kv_lora_rank q_lora_rank v_head_dim d_kv kv_channels global_head_dim swa_head_dim linear_key_head_dim
        linear_value_head_dim mamba_d_head mamba_head_dim index_head_dim hidden_size_per_layer_input swa_v_head_dim rotary_dim""",
    16: "qk_nope_head_dim qk_rope_head_dim mamba_d_state ssm_state_size state_size chunk_size mamba_chunk_size mamba_dt_rank",
    4: """mamba_num_heads mamba_n_heads n_mamba_heads num_experts n_routed_experts num_local_experts moe_num_experts mamba_d_conv
        conv_kernel""",
    1: """n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace moe_layer_start_index num_dense_layers
        moe_num_shared_experts""",
    MAX_LEN: "max_position_embeddings n_positions max_seq_len max_seq_length max_sequence_length context_length n_ctx",
    VOCAB: "vocab_size vocab_size_per_layer_input",
}
"""Sizes by what configurations call them."""
LATENT = {"head_dim": 16}
MIXED = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
FAMILIES: dict[str, dict[str, object]] = {
    "axk1": LATENT,
    "codegen": {"n_head": 4, "num_attention_heads": 4, "rotary_dim": 8},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "lfm2": MIXED,
    "lfm2_moe": MIXED,
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 4},
    "youtu": LATENT,
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 64},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 64},
}
"""What a family needs beside SIZES."""


@dataclass
class Row:
    """A line of the page."""

    family: str
    mode: str
    """`blocks`, `eager`, `unpacked`, `refused`; `-` where no tiny model could be made."""
    logprobs: float | None = None
    """Largest difference to plain Hugging Face, nats."""
    gradient: float | None = None
    """Largest norm of a parameter's difference, relative to that of its gradient or, if that is more, a thousandth of the whole one's."""
    targets: str = ""
    reason: str = ""

    @property
    def is_wrong(self) -> bool:
        worst = max(self.logprobs or 0.0, self.gradient or 0.0)
        return self.mode in ("blocks", "eager", "unpacked") and not worst <= MOST_DIFFERENCE


def tiny_config(family: str) -> PreTrainedConfig:
    """The family's configuration in small: as many layers as it takes to have one of each kind."""
    config_class = CONFIG_MAPPING[family]
    default = config_class()
    wanted: dict[str, object] = {}
    for size, names in SIZES.items():
        wanted |= {name: size for name in names.split() if isinstance(getattr(default, name, None), int) or hasattr(config_class, name)}
    wanted = {name: value for name, value in wanted.items() if hasattr(default, name) and not is_derived(default, name)}
    count = getattr(default, "num_hidden_layers", 0)
    lists = {
        name: value
        for name, value in vars(default).items()
        if isinstance(value, list | tuple)
        and len(value) == count
        and not name.startswith("_")
        and all(isinstance(x, str | int | bool) for x in value)
    }
    if lists:
        kinds = list(dict.fromkeys(zip(*lists.values(), strict=True)))[:6]
        kinds *= 1 if len(kinds) > 1 else 2
        wanted |= {name: list(column) for name, column in zip(lists, zip(*kinds, strict=True), strict=True)}
        wanted["num_hidden_layers"] = len(kinds)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True, "tie_word_embeddings": False}
    wanted |= {name: value for name, value in special.items() if hasattr(default, name)} | FAMILIES.get(family, {})
    return config_class(**wanted)


def is_derived(config: PreTrainedConfig, name: str) -> bool:
    """Whether the attribute follows from others."""
    return isinstance(getattr(type(config), name, None), property)


def make(family: str, folder: Path) -> None:
    """Writes a tiny model whose weights are all random, biases and norms too, and large enough that every part counts."""
    config = tiny_config(family)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters are not tiny; FAMILIES in scripts/models.py has to say how it gets so")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim == 1:
            parameter.data += 0.1 * noise
        else:
            parameter.data = parameter.data + 1.5 * noise / parameter.shape[-1] ** 0.5
    model.save_pretrained(folder)


def samples() -> TrainBatch:
    """Two groups: three samples that branch off one prompt, and one alone."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    prompt = draw(21)
    branches = [make_sample(prompt, draw(length), 1.0 - i, VOCAB, 1, 0, i) for i, length in enumerate((9, 13, 6))]
    return TrainBatch(step=1, samples=[*branches, make_sample(draw(7), draw(17), 0.5, VOCAB, 1, 1, 0)])


def plain(folder: str, batch: TrainBatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities of each sample's answer, and the gradient of their weighted sum: Hugging Face, one sample a call."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for sample in batch.samples:
        logits = model(input_ids=torch.tensor([sample.token_ids]), use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids[1:])[:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask[1:])
        (logprobs * torch.tensor(sample.advantages[1:]))[mask].sum().backward()
        found.append(logprobs[mask].detach())
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(model: PreTrainedModel, batch: TrainBatch, world: World) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same as the trainer computes it."""
    layout = Layout(0, 1, 4096 * is_packed(model), 64)
    found: list[list[tuple[int, float]]] = [[] for _ in batch.samples]
    for row in pack(batch, [1.0] * len(batch.samples), layout).micro_batches:
        logprobs = score(model, row, world).logprobs
        (logprobs * row.advantages).sum().backward()
        depths = row.position_ids[row.predictors][row.rows].tolist()
        for sample, depth, value in zip(row.sequences.tolist(), depths, logprobs.tolist(), strict=True):
            found[sample].append((depth, value))
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return [torch.tensor([value for _, value in sorted(values)]) for values in found], gradients


def differences(folder: str, config: ModelConfig, world: World) -> tuple[float, float, str]:
    """Largest difference of log-probabilities and of gradients, and the kinds of layers that adapters go on."""
    batch = samples()
    logprobs, gradients = plain(folder, batch)
    model = load_policy(folder, config, TrainerConfig(), world)
    targets = sorted({name.rpartition(".")[2] for name in target_layers(model, "all-linear")})
    own_logprobs, own = trained(model, batch, world)
    worst = max(float((a - b).abs().max()) for a, b in zip(logprobs, own_logprobs, strict=True))
    whole = torch.stack([g.norm() for g in gradients.values()]).norm()
    names = gradients.keys() | own.keys()
    zero = torch.zeros(())
    off = [float((gradients.get(n, zero) - own.get(n, zero)).norm() / gradients.get(n, zero).norm().clamp(min=1e-3 * whole)) for n in names]
    return worst, max(off), ", ".join(targets)


def measure(family: str, world: World) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        try:
            make(family, Path(folder))
        except (*MODEL_ERRORS, OSError, StrictDataclassError) as error:
            return Row(family, "-", reason=describe(error))
        config = ModelConfig(name=family, dtype="float32", max_model_len=MAX_LEN)
        try:
            choice = choose_mode(folder, config, TrainerConfig(), world)
        except RunError as error:
            return Row(family, "-" if "cannot be computed alone" in str(error) else "refused", reason=str(error))
        because = choice.note.partition("because of ")[2].rpartition("; differs")[0]
        try:
            return Row(family, choice.mode, *differences(folder, config, world), because)
        except MODEL_ERRORS as error:
            return Row(family, "fails", reason=f"{choice.mode}: {describe(error)}")


def served() -> set[str]:
    """The architectures that vLLM serves; none without vLLM."""
    try:
        from vllm.model_executor.models.registry import ModelRegistry
    except ImportError:
        return set()
    return set(ModelRegistry.get_supported_archs())


HEAD = """# Models

Every causal language model of transformers {transformers} (torch {torch}), as a tiny model of random weights, and how the trainer computes
it: `uv run scripts/models.py` writes this page. The test that each start makes (`trainer/selftest.py`) has chosen the way; the
columns behind it are measured apart from that, on other samples, against plain Hugging Face, one sample after another, in float32: the
largest difference of a log-probability (nats), and of a gradient (the norm of the difference, relative to that of the parameter's
gradient).

{counts}

| way | what it means |
|---|---|
| blocks | packed: a group's prompt and an agent's history are computed once; on GPUs FlexAttention (flex) takes the place of blocks |
| eager | packed, with the model's own attention and a dense mask: time and memory grow with the square of `trainer.micro_batch_tokens` |
| unpacked | one sample a pass: for models with state (linear attention, convolutions), positions of their own, or sparse attention |
| refused | no way gives the numbers that the model has alone; the run ends at its start, and says so |
| fails | an error when it is loaded or trained |
| - | no tiny model could be made of its configuration: not measured |

What no list can know, the start finds out: a model that is not here, or code that comes with it, is tested in the same way, on its own
weights. Sinks (gpt-oss) and caps on scores (Gemma 2) are part of blocks and flex. Rotary embeddings that depend on length (longrope,
dynamic NTK) are frozen as vLLM has them. Models that see images or sound are too large here, their text models are families of their own.
"vLLM": whether the installed one serves the architecture; log-probabilities are compared with it in
`tests/trainer/measure/test_agreement.py` (Llama, Qwen3, Qwen3-MoE, Gemma 3, GPT-2, Phi-3 with longrope, Llama with dynamic NTK) and in
every run.

| family | way | log-probability | gradient | vLLM | adapters on (`trainer.lora`) | why |
|---|---|---|---|---|---|---|
"""


def page(rows: list[Row]) -> str:
    """The text of docs/models.md."""
    archs, counts = served(), Counter(row.mode for row in rows)
    lines = []
    for row in rows:
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[row.family]
        names = architecture if isinstance(architecture, tuple) else (architecture,)
        numbers = ["" if value is None else f"{value:.0e}" for value in (row.logprobs, row.gradient)]
        reason = " ".join(row.reason.split()).replace("|", "/")[:160]
        cells = [row.family, row.mode, *numbers, "yes" if archs & set(names) else "", row.targets, reason]
        lines.append("| " + " | ".join(cells) + " |\n")
    summary = ", ".join(f"{name} {count}" for name, count in counts.most_common() if name != "-")
    text = f"{len(rows) - counts['-']} families measured: {summary}; {counts['-']} not measured; trained wrong without a word: none."
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    return HEAD.format(counts=text, **versions) + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="what a config.json calls model_type, e.g. qwen3")
    families = parser.parse_args().families
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    world = start_world(use_gpus=False, timeout_s=60)
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # models are tested anew
        for family in families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                rows.append(measure(family, world))
            print(rows[-1], "WRONG" if rows[-1].is_wrong else "", flush=True)
    torch.distributed.destroy_process_group()
    if wrong := [row.family for row in rows if row.is_wrong]:
        raise SystemExit(f"trained wrong without a word: {', '.join(wrong)}")
    if not families:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
