"""Router replay against plain transformers, whose routers are replaced by the formula of each
family."""

from dataclasses import replace

import msgspec
import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from rl.models.tiny import make_tiny_model
from rl.system.errors import ConfigError
from rl.trainer.data.micro_batch import fill_blocks
from rl.trainer.model.head import keep_old, score
from rl.trainer.model.routes import Routers
from rl.trainer.parallel.experts import experts_of
from rl.wire.messages import TrainBatch
from tests.families import CONFIGS
from tests.flags import made
from tests.raised import run_error
from tests.trainer.layouts import give_routes, gradients_of
from tests.trainer.parallel.loads import load
from tests.trainer.parallel.test_experts import GEMMA4, MODELS
from tests.trainer.samples import (
    assert_equal,
    branching_batch,
    make_batch,
    pack_alone,
    plain_scores,
)
from tests.trainer.test_replay import STEPS, make_config, record, replay

CHECKED = MODELS | {
    # their loss wants plain masks
    "qwen3_moe": MODELS["qwen3_moe"] | {"output_router_logits": False},
    "gemma4": GEMMA4 | {"initializer_range": 0.05},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny model by family and seed."""
    root = tmp_path_factory.mktemp("routes")
    return lambda kind, seed=0: str(make_tiny_model(root / f"{kind} {seed}", CHECKED[kind], seed))


def routers_of(model) -> Routers | None:
    return model.get_output_embeddings().forward.routers


def scored(model, batch, world):
    """Log-probabilities, the gradient of their weighted sum, and the routes that were taken."""
    model.zero_grad()
    logprobs = score(model, batch, world).trainer_logprobs
    (logprobs * batch.advantages).sum().backward()
    routers = routers_of(model)
    return logprobs.detach(), gradients_of(model), routers and routers.taken()


def route_plain(model, routes: torch.Tensor, kind: str) -> None:
    """Replaces the routers of plain transformers: each layer's experts are `routes` [T, layers,
    2], weighted by the family's formula."""

    def qwen3_moe(gate, hidden, route):
        weights = linear(hidden, gate.weight).softmax(-1).gather(1, route)
        return None, weights / weights.sum(-1, keepdim=True), route

    def gpt_oss(gate, hidden, route):
        return None, linear(hidden, gate.weight, gate.bias).gather(1, route).softmax(-1), route

    def deepseek_v3(gate, hidden, route):
        weights = linear(hidden.view(-1, hidden.shape[-1]), gate.weight).sigmoid().gather(1, route)
        return None, weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor, route

    def gemma4(gate, hidden, route):
        normed = gate.norm(hidden) * gate.scale * gate.scalar_root_size
        weights = gate.proj(normed).softmax(-1).gather(1, route)
        return None, weights / weights.sum(-1, keepdim=True) * gate.per_expert_scale[route], route

    formula = locals()[kind]
    for number, layer in enumerate(model.model.layers):
        block = getattr(layer, "mlp", layer) if kind != "gemma4" else layer
        if gate := getattr(block, "gate", None) or getattr(block, "router", None):
            gate.forward = lambda hidden, gate=gate, number=number: formula(
                gate, hidden, routes[:, number].long()
            )


@torch.no_grad()
def chosen_by_plain(folder: str, ids: list[int]) -> torch.Tensor:
    """The experts that plain transformers sends each token to, ascending: [T, layers with
    experts, 2]."""
    model, chosen = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), []
    for experts in experts_of(model).values():
        experts.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1]))
    model(torch.tensor([ids]), use_cache=False)
    return torch.stack(chosen, 1).sort().values.to(torch.uint8)


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "gpt_oss", "deepseek_v3", pytest.param("gemma4", marks=pytest.mark.proof)]
)
def test_routes_of_another_model_give_what_plain_transformers_gives_with_them(folder, world, kind):
    sample = make_batch(1, groups=1, group_size=1).samples[0]
    (batch,) = pack_alone(TrainBatch(step=1, samples=[sample])).micro_batches
    other, model = (load(folder(kind, seed), world, router_replay="engine") for seed in (1, 0))
    routes = scored(other, batch, world)[2]
    assert chosen_by_plain(folder(kind, 1), sample.token_ids[:-1]).equal(
        routes.view(len(routes), -1, 2)[:, routers_of(other).numbers].sort().values
    )
    free, found = scored(model, batch, world), scored(model, replace(batch, routes=routes), world)
    assert found[2].equal(routes) and not free[2].equal(routes)
    plain = AutoModelForCausalLM.from_pretrained(
        folder(kind), attn_implementation="eager", experts_implementation="eager"
    )
    logprobs = []
    for given in (free, found):
        plain.zero_grad()
        width = (
            sample.num_tokens,
            *given[2].view(len(given[2]), routers_of(model).layers, -1).shape[1:],
        )
        # the last token is no input of ours
        padded = torch.arange(2, dtype=torch.uint8).expand(width).clone()
        padded[: len(given[2])] = given[2].view(len(given[2]), *width[1:])
        route_plain(plain, padded, kind)
        logprobs.append(plain_scores(plain, sample)[0])
        (logprobs[-1] * batch.advantages).sum().backward()
        torch.testing.assert_close(given[0], logprobs[-1].detach(), rtol=1e-6, atol=1e-5)
        for name, parameter in plain.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            ours = given[1].get(name, torch.zeros_like(expected))
            assert (ours - expected).norm() <= 1e-5 * expected.norm().clamp(min=1e-4), name
    assert (logprobs[0] - logprobs[1]).abs().max() > 0.01  # the routes matter


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": "full"}])
def test_own_routes_give_the_same_bits(folder, world, settings):
    """As the routers choose freely, with and without replay; and routes that are given are also
    those of recomputed layers."""
    (batch,) = pack_alone(branching_batch()).micro_batches
    model = load(folder("qwen3_moe"), world, router_replay="trainer", **settings)
    off = load(folder("qwen3_moe"), world, **settings)
    free = scored(model, batch, world)
    with torch.no_grad():
        keep_old(model, batch, score(model, batch, world))
    again = scored(model, batch, world)
    without = scored(off, batch, world)
    assert free[0].equal(again[0]) and free[0].equal(without[0]) and batch.routes.equal(again[2])
    assert_equal(free[1], again[1])
    assert_equal(free[1], without[1])


@pytest.mark.timeout(900)
@pytest.mark.proof
def test_compiled_layers_take_the_routes(folder, world):
    """Their experts and routers stay out of the graph; recomputation takes the routes, too."""
    plain, ours = (
        load(folder("qwen3_moe"), world, router_replay="engine", **more)
        for more in ({}, {"compile": True, "activation_checkpointing": "full"})
    )
    batch = branching_batch()
    give_routes(batch)
    for samples in (batch.samples, batch.samples[:9]):
        for rows in (
            pack_alone(TrainBatch(step=5, samples=samples)),
            pack_alone(TrainBatch(step=5, samples=make_batch(2).samples)),
        ):
            found, expected = (
                scored(model, rows.micro_batches[0], world) for model in (ours, plain)
            )
            torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
            assert found[2].equal(expected[2])
            for name, gradient in expected[1].items():
                assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm().clamp(
                    min=1e-4
                ), name


def test_samples_share_a_prefix_only_where_they_share_its_routes(folder, world):
    model = load(folder("qwen3_moe"), world, router_replay="engine")
    batch = branching_batch()
    give_routes(batch)
    plain, shared = (
        pack_alone(TrainBatch(step=5, samples=samples))
        for samples in (branching_batch().samples, batch.samples)
    )
    assert len(shared.micro_batches[0].input_ids) == len(plain.micro_batches[0].input_ids)
    changed = msgspec.convert(msgspec.to_builtins(batch), TrainBatch)
    sample = next(sample for sample in changed.samples if sample.group_id == 11)
    # of its first token
    sample.routes = bytes([*((expert + 1) % 8 for expert in sample.routes[:4]), *sample.routes[4:]])
    apart = pack_alone(changed)
    assert len(apart.micro_batches[0].input_ids) == len(shared.micro_batches[0].input_ids) + 41
    rows = [*apart.micro_batches, *shared.micro_batches]
    found = [
        scores.new_zeros(changed.num_loss_tokens).index_copy(0, row.token_index, scores)
        for row in rows
        for scores in [score(model, row, world).trainer_logprobs.detach()]
    ]
    alone = torch.cat(
        [
            score(model, row, world).trainer_logprobs.detach()
            for one in changed.samples
            for row in pack_alone(TrainBatch(step=5, samples=[one])).micro_batches
        ]
    )
    torch.testing.assert_close(found[0], alone, rtol=1e-5, atol=1e-5)
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_a_token_costs_a_byte_for_each_layer_and_chosen_expert(folder, world):
    """Two with more than 256 experts; in the batch file there is nothing else, and a wrong
    number of bytes is refused."""
    model = load(folder("qwen3_moe"), world, router_replay="engine")
    assert routers_of(model).width == 2 * 2
    batch, without = make_batch(1), make_batch(1)
    give_routes(batch)
    tokens = sum(len(sample.token_ids) - 1 for sample in batch.samples)
    size = len(msgspec.msgpack.encode(batch)) - len(msgspec.msgpack.encode(without))
    # a length of up to three bytes in place of None
    assert 4 * tokens <= size <= 4 * tokens + 2 * len(batch.samples)
    wide = Routers(
        AutoModelForCausalLM.from_config(
            model.config.__class__(**CONFIGS["qwen3_moe"] | {"num_experts": 300})
        )
    )
    assert wide.width == 2 * 2 * 2
    with pytest.raises(ValueError, match="routes do not cover"):
        msgspec.structs.replace(batch.samples[0], routes=batch.samples[0].routes[:-1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda routes: routes[:, :2],
            "gave routes of 2 bytes a token, but .* has 2 layers and 2 of 8 experts a token, "
            "4 bytes",
        ),
        (lambda routes: routes.clone().fill_(3), "not 2 different ones of 8 experts"),
        (lambda routes: routes + 8, "not 2 different ones of 8 experts"),
    ],
)
def test_routes_of_another_model_are_refused(folder, world, change, said):
    routers = routers_of(load(folder("qwen3_moe"), world, router_replay="engine"))
    batch = make_batch(1)
    give_routes(batch)
    routes = pack_alone(batch).micro_batches[0].routes
    routers.check(routes)
    with run_error(said):
        routers.check(change(routes))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            CONFIGS["llama"],
            "LlamaForCausalLM has no experts whose choice could be replayed; set it to off",
        ),
        (
            CONFIGS["phimoe"],
            "PhimoeForCausalLM chooses experts in a way of its own, which cannot be replayed",
        ),
    ],
)
def test_models_whose_choice_cannot_be_replayed_are_refused(tmp_path, world, config, said):
    (batch,) = pack_alone(make_batch(1)).micro_batches
    with run_error(said):
        score(
            load(str(make_tiny_model(tmp_path, config)), world, router_replay="trainer"),
            batch,
            world,
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("--inference.gpus 0", "vLLM gives none on CPUs"),
        ("--trainer.data.fake.samples 8", "nothing is sampled here"),
    ],
)
def test_settings_without_effect_are_refused(settings, said):
    flags = f"--trainer.router_replay engine --orchestrator.environment.id e {settings}"
    with pytest.raises(ConfigError, match=said):
        made(flags)


@pytest.mark.parametrize(
    "settings",
    [
        "--orchestrator.inference_urls http://h:1",
        "--trainer.data.replay.run o --trainer.data.replay.weights w --trainer.data.replay.until 1",
    ],
)
def test_routes_that_are_not_made_here_need_no_gpu_of_inference(settings):
    """Regression: `rl` and `rl replay` say --inference.gpus 0 to such a trainer, which refused
    it."""
    flags = "--trainer.router_replay engine --orchestrator.environment.id e --inference.gpus 0"
    made(f"{flags} {settings}")


@pytest.mark.parametrize("given", ["engine", "trainer"])
def test_a_run_with_routes_is_replayed_bit_for_bit(folder, world, tmp_path, given):
    batches = [make_batch(step) for step in range(1, STEPS + 1)]
    for batch in batches:
        give_routes(batch)
    config = make_config(
        tmp_path / "run", folder("qwen3_moe"), router_replay=given, epochs=2, loss={"type": "clip"}
    )
    record(config, world, batches)
    _, versions, checkpoints = replay(config.run_dir, config, tmp_path / "again", world)
    assert [line["version"] for line in versions] == [*range(1, STEPS + 1)] and checkpoints
    assert not any(line["tensor"] or line["fault"] for line in [*versions, *checkpoints])


def test_padding_goes_where_the_last_token_goes():
    """All of it went to expert 0 of every layer."""
    row = pack_alone(make_batch(1)).micro_batches[0]
    routes = torch.arange(4 * len(row.input_ids), dtype=torch.uint8).view(-1, 4)
    filled = fill_blocks(replace(row, routes=routes), 1)
    assert len(filled.routes) == len(filled.input_ids) == 256 and filled.padding == 256 - len(
        routes
    )
    assert torch.equal(filled.routes[: len(routes)], routes)
    assert (filled.routes[len(routes) :] == routes[-1]).all()


def test_a_batch_without_routes_ends_a_run_that_replays_them(folder, world, tmp_path):
    config = make_config(tmp_path, folder("qwen3_moe"), router_replay="engine")
    with run_error("batch 1 has tokens without routes"):
        record(config, world, [make_batch(1)])
