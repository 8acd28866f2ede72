"""Policy versions as one to four ranks publish them; what is written of them is read in
tests/trainer/test_export.py, too."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from rl.config.run import ModelConfig
from rl.config.trainer import LoraConfig
from rl.models.folder import resolve_model
from rl.models.tiny import make_tiny_model
from rl.run_dir.checksums import DIGESTS, check_record, read_digests, readable, verify_version
from rl.run_dir.files import CorruptFileError
from rl.trainer import export
from rl.trainer.model import lora
from rl.trainer.model.dither import dither
from rl.trainer.model.head import score
from rl.trainer.store import versions
from rl.trainer.store.image import image_of
from rl.trainer.store.threads import RankThreads
from rl.wire.messages import TrainBatch
from tests.families import CONFIGS
from tests.ports import free_ports
from tests.trainer.parallel.test_experts import MODELS as WITH_EXPERTS
from tests.trainer.parallel.test_sharding import run_ranks
from tests.trainer.policies import learner
from tests.trainer.samples import FLOAT32, assert_equal, make_batch, pack_alone, with_float32
from tests.trainer.store.publishes import LAYOUTS

RANKS = 4
MODELS: dict[str, dict] = {
    name: {} for name in ("llama", "qwen3_moe", "gpt2", "gpt_oss", "hrm_text")
}
"""A plain one; experts that files hold one by one, as views of a part of a parameter; matrices
the other way round; fused experts; projections that files join, so that no rank has a part of
the file by itself."""
DEEPSEEK_V3 = WITH_EXPERTS["deepseek_v3"] | {"n_routed_experts": 8}
OTHERS = {"llama": ("hosts",)}
"""What publishes.py publishes of a family beside its layouts."""
ADAPTED = {"adapters": {"lora": {"rank": 4}}}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The versions, and what each rank has found."""
    folder = tmp_path_factory.mktemp("versions")
    for name in MODELS:
        make_tiny_model(folder / name, CONFIGS[name])
    (folder / "plan.json").write_text(
        json.dumps(
            {
                "models": MODELS | ADAPTED,
                "bases": {"adapters": "llama"},
                "ports": free_ports(len(LAYOUTS)),
            }
        )
    )
    run_ranks("tests.trainer.store.publishes", folder, RANKS)
    return folder, [
        json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(RANKS)
    ]


def expected(folder: Path, factor: int, target: Path) -> tuple[bytes, dict[str, torch.Tensor]]:
    """What one process writes of a model's weights, times `factor`: a file of the tensors in the
    files' form, by the safetensors library, and what transformers saves."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(factor)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    persistent = model.state_dict().keys()
    named = {
        **dict(model.named_parameters()),
        **{name: buffer for name, buffer in model.named_buffers() if name in persistent},
    }
    tensors = revert_weight_conversion(
        model, {name: tensor.detach() for name, tensor in named.items()}
    )
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        target / "plain",
        metadata={"format": "pt"},
    )
    model.save_pretrained(target / "saved")
    return (target / "plain").read_bytes(), load_file(target / "saved" / "model.safetensors")


def test_a_base_model_that_is_given_chatml_is_published_and_exported_with_its_end(
    tmp_path, monkeypatch
):
    """It is trained to end with <|im_end|>, and other programs stop where its files say."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = make_tiny_model(tmp_path / "model")
    for name, fields in (
        ("config.json", {"eos_token_id": 0}),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
    ):
        told = json.loads((base / name).read_text()) | fields
        (base / name).write_text(json.dumps(told | {"chat_template": None}))
    folder = Path(resolve_model(ModelConfig(name=str(base), chat_template="chatml")))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    versions.snapshot(model, folder, torch.float32, {}).write(tmp_path / "000001")
    for kind in ("exported", "adapter"):
        (tmp_path / kind).mkdir()
        if kind == "adapter":
            lora.add_adapters(model, LoraConfig(rank=2))
        export.write(tmp_path / kind, model, folder, torch.float32)
    for path in (tmp_path / "000001", tmp_path / "exported", tmp_path / "adapter"):
        assert AutoTokenizer.from_pretrained(path).eos_token == "<|im_end|>", path
        if path.name != "adapter":
            assert json.loads((path / "config.json").read_text())["eos_token_id"] == [2, 0]
            assert AutoModelForCausalLM.from_pretrained(path).generation_config.eos_token_id == [
                2,
                0,
            ]


def test_a_head_is_tied_as_it_was_when_the_version_was_copied(tmp_path):
    """On one rank copies of the weights take their places module by module while training
    continues, so that head and embedding differ for a moment."""
    folder = make_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    version = versions.snapshot(model, folder, torch.float32, {})
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone())
    version.write(tmp_path / "000001")
    told = json.loads((tmp_path / "000001" / "config.json").read_text())
    assert told["tie_word_embeddings"] is True


def test_router_biases_are_published_and_exported_as_they_are_computed_with(tmp_path):
    """In bfloat16 half of these eight are the same number, so servers chose other experts than
    the trainer."""
    folder = make_tiny_model(tmp_path / "model", DEEPSEEK_V3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    name, bias = next(
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    )
    bias.copy_(7 + 0.003 * torch.arange(len(bias)))
    versions.snapshot(model, folder, torch.bfloat16, {}).write(tmp_path / "000001")
    (tmp_path / "exported").mkdir()
    export.write(tmp_path / "exported", model, folder, torch.bfloat16)
    for path in (tmp_path / "000001", tmp_path / "exported"):
        tensors = load_file(path / "model.safetensors")
        assert tensors[name].equal(7 + 0.003 * torch.arange(len(bias))), path
        assert {tensor.dtype for key, tensor in tensors.items() if not key.endswith("bias")} == {
            torch.bfloat16
        }


@pytest.mark.parametrize("family", ["gpt_oss", "falcon_h1"])
def test_what_the_files_hold_in_float32_stays_so(family, world, tmp_path):
    """Rounded, a router chose other experts: 0.3 nats between the base and the version that was
    published before any step."""
    folder = with_float32(make_tiny_model(tmp_path / "model", CONFIGS[family]))
    attention = {"attention": "eager" if family == "gpt_oss" else "auto"}
    base, (model, _, _) = (
        load_file(folder / "model.safetensors"),
        learner(folder, world, "bfloat16", **attention),
    )
    assert {str(tensor.dtype) for tensor in base.values()} == {"torch.float32", "torch.bfloat16"}
    dither(model, seed=0)
    versions.snapshot(model, folder, torch.bfloat16, {}).write(tmp_path / "000001")
    export.export(
        export.Origin(folder, None, version=tmp_path / "000001"),
        tmp_path / "exported",
        False,
        "bfloat16",
    )
    for path in (tmp_path / "000001", tmp_path / "exported"):
        tensors = load_file(path / "model.safetensors")
        assert tensors.keys() == base.keys()
        for name, tensor in base.items():
            assert tensors[name].dtype == tensor.dtype and tensors[name].equal(tensor), name
    (row,) = pack_alone(TrainBatch(step=1, samples=make_batch(1).samples[:1])).micro_batches
    score(model, row, world).trainer_logprobs.sum().backward()
    gradients = {
        name: parameter.grad for name, parameter in model.named_parameters() if FLOAT32.search(name)
    }
    assert len(gradients) >= 4 and all(
        gradient is not None and gradient.norm() > 0 for gradient in gradients.values()
    )
    frozen, _, _ = learner(folder, world, "bfloat16", lora={"targets": ["q_proj"]}, **attention)
    for name in gradients:
        assert frozen.get_parameter(name).equal(base[name]), name


def content(file: bytes) -> tuple[dict, bytes]:
    """The header of a safetensors file, without the spaces that fill its last page, and its
    data."""
    end = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:end]), file[end:]


@pytest.mark.parametrize("family", MODELS)
def test_any_number_of_ranks_writes_what_one_process_writes(results, family, tmp_path):
    folder, _ = results
    for factor, version in ((1, "000001"), (2, "000002")):
        whole, saved = expected(folder / family, factor, tmp_path)
        for name in LAYOUTS:
            path = folder / name / family / "weights" / version
            assert content((path / "model.safetensors").read_bytes()) == content(whole), (
                name,
                version,
            )
            verify_version(path)
        assert_equal(load_file(path / "model.safetensors"), saved)
        for kind in OTHERS.get(family, ()):
            assert content(
                (folder / kind / "weights" / version / "model.safetensors").read_bytes()
            ) == content(whole), kind


@pytest.mark.parametrize("family", MODELS)
def test_deltas_of_any_number_of_ranks_give_what_one_process_writes(results, family, tmp_path):
    folder, _ = results
    written, _ = expected(folder / family, 4, tmp_path)
    layouts = [*(f"{name}/{family}" for name in LAYOUTS), *OTHERS.get(family, ())]
    for published in (folder / name / "weights" for name in layouts):
        with readable(published / "000003") as place:
            data = (place / "model.safetensors").read_bytes()
        assert content(data)[1] == content(written)[1] and not place.exists(), published
        assert {path.suffix for path in (published / "000003").iterdir()} == {".json", ".zst"}


def test_adapters_are_the_same_on_any_number_of_ranks(results):
    folder, _ = results
    for version in ("000001", "000002"):
        files = [
            folder / name / "adapters" / "weights" / version / "adapter_model.safetensors"
            for name in ("1", "2", "3")
        ]
        assert len({file.read_bytes() for file in files}) == 1 and len(load_file(files[0])) == 28
        assert (files[0].parent / "adapter_config.json").exists()


def test_each_rank_holds_its_share_in_one_memory_that_is_used_again(results):
    _, found = results
    for name, (size, replicas) in LAYOUTS.items():
        for family in (*MODELS, *ADAPTED) if replicas == 1 else MODELS:
            each = [one[f"{name} {family}"] for one in found[:size]]
            assert sum(one["held"] for one in each) == each[0]["size"]
            assert all(one["again"] for one in each) and all(
                one["shared"] == (family not in ADAPTED) for one in each
            )
            assert family in ADAPTED or each[0]["same"] is None
            if family == "llama":  # its rows divide nearly evenly
                assert max(one["held"] for one in each) < 1.3 * each[0]["size"] * replicas / size
    assert [one["hosts"]["shared"] for one in found[:2]] == [False, False]


def test_records_name_slices_only_where_several_ranks_hold_a_tensor(results):
    folder, _ = results
    one, two = (
        read_digests(folder / name / "llama" / "digests" / "000002.json")["tensors"]
        for name in ("1", "2")
    )
    assert all(isinstance(value, str) for value in one.values()) and one.keys() == two.keys()
    name = "model.embed_tokens.weight"  # 259 rows of 64 bfloat16 numbers
    assert [part[:2] for part in two[name]] == [[0, 130 * 128], [130 * 128, 259 * 128]]
    for name in LAYOUTS:
        check_record(
            folder / name / "llama" / "digests" / "000002.json",
            folder / "1" / "llama" / "weights" / "000002",
        )
    with pytest.raises(CorruptFileError):
        check_record(
            folder / "2" / "llama" / "digests" / "000002.json",
            folder / "1" / "llama" / "weights" / "000001",
        )


def test_a_replay_on_another_number_of_ranks_compares_the_same_bytes(results):
    _, found = results
    for name, (size, _) in LAYOUTS.items():
        for family in MODELS if name != "1" else ():
            for one in found[:size]:
                same = one[f"{name} {family} as 1"]
                assert (same["tensor"], same["fault"], same["kept"]) == (
                    None,
                    None,
                    ["digests", "weights"],
                )


def test_a_disk_that_is_full_for_one_rank_leaves_nothing(results):
    folder, found = results
    for rank, said in enumerate(one["full"] for one in found[:2]):
        assert (
            "No space left on device" in said
            and "model.safetensors" in said
            and ("(on rank 1)" in said) == (rank == 0)
        ), said
    assert list((folder / "full").iterdir()) == []


def test_bytes_that_no_rank_holds_are_found(tmp_path):
    base = make_tiny_model(tmp_path / "model", CONFIGS["llama"])
    version = versions.snapshot(
        AutoModelForCausalLM.from_pretrained(base), base, torch.bfloat16, {}
    )
    version.image.slices.pop()
    with pytest.raises(versions.RunError, match=r"its \d+ bytes are held as"):
        version.write(tmp_path / "x")
    assert not (tmp_path / "x" / DIGESTS).exists()


class Copies(TorchDispatchMode):
    """Notes (type, type) of each copy from a GPU to the CPU."""

    def __init__(self):
        super().__init__()
        self.types = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[1].is_cuda and not args[0].is_cuda:
            self.types.append((args[1].dtype, args[0].dtype))
        return function(*args, **(kwargs or {}))


def test_weights_are_cast_before_they_leave_a_gpu():
    """Float32 crossed, into a tensor of its own, and was cast on the CPU while training stood
    still."""
    model = torch.nn.Linear(3, 5)
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    image = image_of(model, torch.bfloat16, RankThreads())
    with FakeTensorMode(), Copies() as copies:
        image.memory = torch.empty(image.size, dtype=torch.uint8)
        model = torch.nn.Linear(3, 5, device="cuda")
        model.register_buffer("count", torch.zeros(2, dtype=torch.int64, device="cuda"))
        image.fill(model, torch.bfloat16)
    assert sorted(copies.types, key=str) == [(torch.bfloat16, torch.bfloat16)] * 2 + [
        (torch.int64, torch.int64)
    ]


def test_a_version_announces_only_what_it_has(tmp_path):
    """Regression: the config of a base with layers that draft, or saved as another class, stayed
    beside weights without them, and of a causal model. The user is told."""
    base = make_tiny_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    changes = {"num_nextn_predict_layers": 1, "architectures": ["LlamaForSequenceClassification"]}
    (base / "config.json").write_text(json.dumps(config | changes))
    assert versions.drafting_layers(base) == "num_nextn_predict_layers = 1"
    model = AutoModelForCausalLM.from_pretrained(base)
    versions.snapshot(model, base, torch.float32, {}).write(tmp_path / "000001")
    written = json.loads((tmp_path / "000001" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0
    assert written["architectures"] == [type(model).__name__]
