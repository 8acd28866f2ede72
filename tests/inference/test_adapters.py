"""Adapters as policy versions, merged and side by side, on two real servers: every token is
rescored with transformers and peft."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rl.inference.weight_files import check_adapter, read_adapter, read_tensors, trained_names
from rl.models.tiny import make_tiny_model
from tests.families import CONFIGS, WIDE, make_old_model, make_seeing_model
from tests.inference.servers import HELD, Server, assert_logprobs, start_server, until_ended
from tests.raised import run_error
from tests.waiting import until

TOLERANCE = 1e-4  # nats; fp32
PROMPT = list(range(10, 40))


def make_adapter(
    base: Path, folder: Path, seed: int, targets: list[str] | str = "all-linear", **settings: object
) -> Path:
    """A random adapter that changes what the model says, saved by peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, **settings)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.15 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> list[Path]:
    """Version 0 is the model, the others are adapters of it."""
    folder = tmp_path_factory.mktemp("versions")
    base = make_tiny_model(folder / "000000")
    return [
        base,
        *(make_adapter(base, folder / f"{version:06d}", version) for version in (1, 2, 3)),
    ]


@pytest.fixture(scope="module")
def servers(versions, tmp_path_factory):
    """By how they serve adapters. The first begins with the base model, the second with version
    1 in its run directory."""
    root = tmp_path_factory.mktemp("servers")
    weights = root / "hot/out/run/weights"
    weights.mkdir(parents=True)
    (weights / "000001").symlink_to(versions[1])
    settings = {"trainer__lora__rank": 4, "orchestrator__max_off_policy_steps": 1}  # three slots
    started = {
        way: start_server(root / way, versions, inference__adapters=way, **settings)
        for way in ("auto", "hot")
    }
    yield from until_ended(started)


def answers_during(server: Server, load: list[int]) -> list[dict]:
    """Ten answers that are in flight while versions are loaded; then one more of the last
    version."""
    with ThreadPoolExecutor(10) as pool:
        wanted = {"max_tokens": 850, "temperature": 1.0, "stop_token_ids": []}
        with server.held():
            asked = [
                pool.submit(server.generate, [10 + i, *PROMPT], seed=i, **wanted) for i in range(10)
            ]
            until(lambda: server.status()["num_running"] == 10)
        for version in load:
            loaded = server.load(version)
            assert loaded.status_code == 200, loaded.text
            assert server.status()["policy_version"] == version
        answers = [answer.result() for answer in asked]
    for i, answer in enumerate(answers):
        assert_logprobs(server, [10 + i, *PROMPT], answer, tolerance=TOLERANCE)
    # its prompt may be in a cache, by another version
    again = server.generate([10, *PROMPT], max_tokens=30, temperature=1.0)
    assert {version for version, _ in again["policy_versions"]} == {load[-1]}
    assert_logprobs(server, [10, *PROMPT], again, tolerance=TOLERANCE)
    return answers


def test_two_servers_of_a_run_draw_other_numbers(servers):
    """They had the run's seed: a group that both had answered held the same answers twice."""
    servers["auto"].load(1)
    first, second = (
        {tuple(server.generate([10, *PROMPT], max_tokens=8)["token_ids"]) for _ in range(8)}
        for server in servers.values()
    )
    assert not first & second and len(first) == len(second) == 8
    servers["auto"].load(0)


def test_merged_adapters_have_the_logprobs_of_peft(servers):
    server = servers["auto"]
    answers = answers_during(server, [1, 2])
    for _ in range(4):
        if max(len(answer["policy_versions"]) for answer in answers) > 1:
            break
        server.load(0)  # on a busy machine all may end before a version is loaded
        answers = answers_during(server, [1, 2])
    assert max(len(answer["policy_versions"]) for answer in answers) >= 2
    server.load(0)  # whole weights and adapters may follow each other
    base = server.generate(PROMPT, max_tokens=30, temperature=1.0)
    assert_logprobs(server, PROMPT, base, tolerance=TOLERANCE)


def test_adapters_side_by_side_are_loaded_without_a_pause(servers):
    server = servers["hot"]
    assert server.status()["policy_version"] == 1
    answers = answers_during(server, [2, 3])
    # each keeps the one it began with
    assert {tuple(version for version, _ in answer["policy_versions"]) for answer in answers} == {
        (1,)
    }
    assert server.load(1).json() == HELD | {"policy_version": 1}
    greedy = {"max_tokens": 8, "temperature": 0.0}
    chat = server.post(
        "/v1/completions",
        model=str(server.weights[0]),
        prompt=PROMPT,
        return_token_ids=True,
        **greedy,
    ).json()
    # other routes get the adapter as well
    assert chat["choices"][0]["token_ids"] == server.generate(PROMPT, **greedy)["token_ids"]
    refused = server.load(0)
    assert (refused.status_code, server.status()["policy_version"]) == (422, 1)
    assert "is a whole model" in refused.json()["error"]["message"]


def test_more_versions_than_slots_wait_for_the_oldest_requests(servers):
    server = servers["hot"]
    server.load(3)
    with ThreadPoolExecutor(24) as pool:
        asked = {version: [] for version in (1, 2, 3)}
        for version in asked:
            assert server.load(version).status_code == 200
            with server.held():
                before = server.status()["num_running"]
                for i in range(8):
                    wanted = {"max_tokens": 300, "temperature": 1.0, "seed": i}
                    answer = pool.submit(server.generate, [20 + i, *PROMPT], **wanted)
                    asked[version].append(answer)
                until(lambda before=before: server.status()["num_running"] == before + 8)
        # three slots, and answers of three versions are in flight: one of them has ended by now
        assert server.load(1).status_code == 200
        assert server.status()["num_running"] <= 16
        for version, answers in asked.items():
            for i, answer in enumerate(answers):
                assert [stamp for stamp, _ in answer.result()["policy_versions"]] == [version]
                assert_logprobs(server, [20 + i, *PROMPT], answer.result(), tolerance=TOLERANCE)


def damaged(adapter: Path, folder: Path, change) -> Path:
    """A copy of an adapter with something wrong."""
    shutil.copytree(adapter, folder)
    change(folder)
    return folder


def edit(**fields: object):
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def test_adapters_that_do_not_fit_are_refused_and_the_old_version_goes_on(
    servers, versions, tmp_path
):
    server = servers["auto"]
    server.load(1)
    other = make_tiny_model(tmp_path / "other", seed=9)
    wide = make_tiny_model(tmp_path / "wide", WIDE)
    moved = damaged(
        make_adapter(wide, tmp_path / "of-wide", 5),
        tmp_path / "moved",
        edit(base_model_name_or_path="/no/such/model"),
    )
    for path, reason in [
        (make_adapter(other, tmp_path / "of-other", 5), "is an adapter of"),
        (moved, "has factors"),
        (damaged(versions[2], tmp_path / "cut", cut), "its header says"),
        (damaged(versions[2], tmp_path / "dora", edit(use_dora=True)), "use_dora = True"),
        (damaged(versions[2], tmp_path / "no-rank", edit(r=None)), "not readable as the settings"),
    ]:
        refused = server.load(9, path)
        assert (refused.status_code, refused.json()["error"]["type"]) == (422, "bad_weights")
        assert reason in refused.json()["error"]["message"]
    assert server.status()["policy_version"] == 1
    answer = server.generate(PROMPT, max_tokens=30, temperature=1.0)
    assert [version for version, _ in answer["policy_versions"]] == [1]
    assert_logprobs(server, PROMPT, answer, tolerance=TOLERANCE)


def test_merging_is_what_peft_merges(versions, tmp_path):
    """Also root-scaled ones, GPT-2's matrices, which are stored the other way round, and those
    that files name otherwise than the model."""
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    from rl.inference.weight_files import merge

    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=1, n_positions=64)
    )
    gpt2.save_pretrained(tmp_path / "gpt2")
    old, seeing = make_old_model(tmp_path / "old", "gpt2"), make_seeing_model(tmp_path / "seeing")
    turned, rooted = {"fan_in_fan_out": True}, {"use_rslora": True}
    for base, targets, settings in [
        (old, ["c_attn"], turned),
        (seeing, ["q_proj", "out_proj"], {}),
        (versions[0], ["q_proj", "down_proj"], rooted),
        (tmp_path / "gpt2", ["c_attn", "c_proj"], turned),
    ]:
        adapter = make_adapter(base, tmp_path / f"on-{base.name}", 3, targets, **settings)
        read = read_adapter(adapter)
        check_adapter(read, base, read_tensors(base))
        merged = dict(merge(read, load_file(base / "model.safetensors").items(), base))
        expected = (
            AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
            .merge_and_unload()
            .state_dict()
        )
        names = trained_names(base, merged)
        assert all((merged[name] - expected[own]).abs().max() < 1e-6 for name, own in names.items())
        changed = {
            name
            for name, tensor in load_file(base / "model.safetensors").items()
            if not torch.equal(tensor, merged[name])
        }
        assert (
            {names[name] for name in changed}
            == {f"{layer}.weight" for layer in read.layers}
            != set()
        )
    with run_error("is not in the model"):
        check_adapter(read, tmp_path / "gpt2", {})


# one file has a tensor for each expert, the other all in one, transposed
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_are_merged_as_peft_merges_them(family, tmp_path):
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file

    from rl.inference.weight_files import merge

    base = make_tiny_model(tmp_path / "base", CONFIGS[family])
    stacked = {
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "lora_dropout": 0.0,
    }
    adapter = make_adapter(base, tmp_path / "adapter", 1, ["q_proj"], **stacked)
    read, files = read_adapter(adapter), load_file(base / "model.safetensors")
    check_adapter(read, base, read_tensors(base))
    AutoPeftModelForCausalLM.from_pretrained(
        adapter, dtype=torch.float32
    ).merge_and_unload().save_pretrained(tmp_path / "merged")
    expected, merged = (
        load_file(tmp_path / "merged/model.safetensors"),
        dict(merge(read, files.items(), base)),
    )
    assert merged.keys() == expected.keys()
    assert all((merged[name] - expected[name]).abs().max() < 1e-6 for name in merged)
    changed = {name for name, tensor in files.items() if not torch.equal(tensor, merged[name])}
    assert changed == {
        name
        for name in files
        if "q_proj.weight" in name or (".experts." in name and "bias" not in name)
    }
    tensors = read_tensors(base)
    fewer = {name: tensors[name] for name in tensors if "layers.1.mlp" not in name}
    with run_error("has no experts' matrix for an update"):
        check_adapter(read, base, fewer)
