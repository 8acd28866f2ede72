"""What replay stands on: digests, quarantine, and training the same batches again in another
directory."""

import json
import shutil
from types import SimpleNamespace

import msgspec
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

from rl.commands.branch import make
from rl.config.run import RLConfig
from rl.run_dir.checksums import first_difference, read_digests, verify_version
from rl.run_dir.files import write_file
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import BranchOrigin, RunDir, numbered
from rl.run_dir.safetensors import HASH
from rl.run_dir.status import Status
from rl.system.errors import RunError
from rl.trainer.departure import Departure
from rl.trainer.determinism import ARITHMETIC, differing_conditions
from rl.trainer.replay import LINES, compare
from rl.trainer.store.threads import RankThreads
from rl.trainer.train import start, train
from rl.wire.batch_file import decode_batch, write_batch
from tests.trainer.samples import in_bfloat16, make_batch, run_config
from tests.trainer.stub_orchestrator import StubOrchestrator

STEPS, QUARANTINED = 4, 3


def make_config(root, model, **trainer) -> RLConfig:
    settings = {"optim": {"lr": 1e-3, "schedule": "cosine"}, "weights": {"keep_last": 2}}
    return run_config(root, model, STEPS, "bfloat16", **settings | trainer)


def train_here(config, world):
    """The trainer's life in this process."""
    status = Status(config.run_dir.status("trainer"), "trainer")
    trainer = start(config, world, config.model.name, status, Departure())
    train(trainer)
    status.close()
    return trainer


def record(config, world, batches):
    """A run with its log, and what it asked for."""
    for batch in batches:
        write_batch(config.run_dir.batch(batch.step), batch, {})
    with StubOrchestrator(config.run_dir, batches) as orchestrator:
        trainer = train_here(config, world)
    return trainer, orchestrator


def replay(run_dir, config, root, world, **more):
    """What a replay finds: its lines for the versions, and those for the checkpoints."""
    settings = {
        "run": str(run_dir.root),
        "weights": str(run_dir.weights_dir),
        "start": 0,
        "until": STEPS,
    } | more
    config = make_config(
        root, config.model.name, **config.trainer.model_dump() | {"data": {"replay": settings}}
    )
    trainer = train_here(config, world)
    lines = [json.loads(line) for line in (config.run_dir.root / LINES).read_text().splitlines()]
    return (
        trainer,
        [line for line in lines if "version" in line],
        [line for line in lines if "checkpoint" in line],
    )


@pytest.fixture(scope="module")
def batches():
    return [make_batch(step) for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module", params=["whole", "lora, several optimizer steps"])
def recorded(request, batches, tied_folder, world, tmp_path_factory):
    several = {"minibatches": 2, "epochs": 2, "loss": {"type": "clip"}}
    more = (
        {"lora": {"rank": 4}, **several} if request.param == "lora, several optimizer steps" else {}
    )
    # whose masters begin with dither
    model = in_bfloat16(tied_folder, tmp_path_factory.mktemp("model") / "bfloat16")
    config = make_config(tmp_path_factory.mktemp(request.param), model, **more)
    write_file(config.run_dir.quarantined(QUARANTINED), b"{}")
    return config, *record(config, world, batches)


def test_a_quarantined_step_changes_nothing(recorded):
    config, trainer, orchestrator = recorded
    run_dir = config.run_dir
    assert [version for version, _ in orchestrator.published] == [*range(1, STEPS + 1)]
    assert QUARANTINED not in orchestrator.asked
    of = {step: read_digests(run_dir.digests(step))["tensors"] for step in range(1, STEPS + 1)}
    assert of[2] == of[3] and first_difference(of[1], of[2]) and first_difference(of[3], of[4])
    assert list(numbered(run_dir.weights_dir)) == [2, 3, 4]  # 2 is a checkpoint's
    assert verify_version(run_dir.weights(3))["tensors"] == of[2]
    lines = read_metrics(run_dir.metrics)
    assert [step for (step, _), line in lines.items() if line.get("quarantined")] == [QUARANTINED]
    steps = {int(values["step"]) for values in trainer.context.optimizer.state.values()}
    each = trainer.context.settings.minibatches * trainer.context.settings.epochs
    assert steps == {(STEPS - 1) * each} and lines[STEPS, "trainer"]["optim/steps"] == each


def test_digests_are_those_of_the_bytes_in_the_file(recorded):
    folder = recorded[0].run_dir.weights(STEPS)
    tensors = load_file(next(folder.glob("*.safetensors")))
    content = read_digests(folder / "digests.json")
    assert content["hash"] == HASH == "blake3"
    assert content["tensors"] == {
        name: blake3(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    known = {"threads": 1, "ranks": 1, "deterministic": True, "torch": torch.__version__}
    known |= {"attention": "blocks", "compiled": False}
    assert content["made_by"] | known == content["made_by"]
    assert "files" in content and "files" not in read_digests(recorded[0].run_dir.digests(STEPS))


def test_a_replay_is_equal_and_writes_nothing_into_the_run(recorded, world, tmp_path):
    config = recorded[0]
    before = {path: path.stat().st_mtime_ns for path in config.run_dir.root.rglob("*")}
    _, versions, checkpoints = replay(config.run_dir, config, tmp_path, world)
    assert [line["version"] for line in versions] == [1, 2, 3, 4] and [
        line["checkpoint"] for line in checkpoints
    ] == [2, 4]
    assert not any(line["tensor"] or line["fault"] or line["unlike"] for line in versions)
    assert [line["kept"] for line in versions] == [["digests"], *[["digests", "weights"]] * 3]
    assert not any(line["ranks"] or line["fault"] for line in checkpoints)
    assert before == {path: path.stat().st_mtime_ns for path in config.run_dir.root.rglob("*")}


def test_conditions_that_differ_are_named(recorded):
    made_by = read_digests(recorded[0].run_dir.digests(STEPS))["made_by"]
    assert not differing_conditions(made_by, made_by)
    assert (
        differing_conditions(made_by | {"bfloat16": "avx9_bf16"}, made_by)
        == f"bfloat16 avx9_bf16 there and {made_by['bfloat16']} here"
    )
    other = made_by | {"arithmetic": "1 (block by block)", "threads": 64}
    expected = (
        f"threads 64 there and {made_by['threads']} here, arithmetic 1 (block by block) there "
        f"and {ARITHMETIC} here"
    )
    assert differing_conditions(other, made_by) == expected


def test_a_branch_goes_on_as_its_parent_did_bit_for_bit_and_replays_from_where_it_begins(
    recorded, batches, world, tmp_path
):
    """With its settings, and its optimizer state; with another learning rate the next version is
    another one."""
    parent = recorded[0]

    def digests(run_dir):
        return [read_digests(run_dir.digests(step))["tensors"] for step in (2, 3, 4)]

    for name, lr, until in (("same", 1e-3, 4), ("other", 2e-3, 3)):
        config = make_config(tmp_path, parent.model.name, **parent.trainer.model_dump())
        config.name, config.trainer.optim.lr, config.trainer.checkpoint.interval = name, lr, 1
        make(
            config, parent.run_dir, BranchOrigin(str(parent.run_dir.root), 2, 0.0, []), clean=False
        )
        write_file(config.run_dir.quarantined(QUARANTINED), b"{}")
        for batch in batches[2:]:
            write_batch(config.run_dir.batch(batch.step), batch, {})
        with StubOrchestrator(config.run_dir, batches) as orchestrator:
            train_here(config, world)
        assert [version for version, _ in orchestrator.published] == [2, 3, 4]
        assert orchestrator.asked == [4]
        # keep_last = 2, and where it begins
        assert list(numbered(config.run_dir.checkpoints)) == [2, 3, 4]
        ours, theirs = digests(config.run_dir), digests(parent.run_dir)
        assert ours[:2] == theirs[:2] and (ours[2] == theirs[2]) == (name == "same")
        trainer, lines, checkpoints = replay(
            config.run_dir, config, tmp_path / "again", world, start=2, until=until
        )
        assert trainer.step == until
        assert [line["version"] for line in lines] == [2, 3, 4][: until - 1]
        assert not any(line["tensor"] or line["fault"] for line in lines)
        assert [line["checkpoint"] for line in checkpoints] == [3, 4][: until - 2]
        shutil.rmtree(tmp_path / "again")
    shutil.rmtree(config.run_dir.checkpoints)
    with pytest.raises(
        RunError,
        match=r"is empty, but this run starts at step 2 \(branch of .* at step 2\): branch it "
        r"again",
    ):
        train_here(config, world)


def copy_of(run_dir, root) -> RunDir:
    shutil.copytree(run_dir.root, root)
    return RunDir(root, root / "weights")


def test_another_batch_is_found_at_its_step(recorded, world, tmp_path):
    config = recorded[0]
    run_dir = copy_of(config.run_dir, tmp_path / "copy")
    batch = decode_batch(run_dir.batch(4).read_bytes(), "").batch
    for sample in batch.samples:
        sample.spans = [
            msgspec.structs.replace(span, advantage=-span.advantage) for span in sample.spans
        ]
    run_dir.batch(4).unlink()
    write_batch(run_dir.batch(4), batch, {})
    _, versions, checkpoints = replay(run_dir, config, tmp_path, world)
    assert [bool(line["tensor"]) for line in versions] == [False, False, False, True]
    assert 0 < versions[3]["max_difference"] < 0.01 and versions[3]["fault"] is None
    assert [bool(line["ranks"]) for line in checkpoints] == [False, True] and checkpoints[1][
        "tensor"
    ]


def test_damage_is_told_from_difference(recorded, world, tmp_path):
    """A flipped bit of the weights, and half a record."""
    config, *_ = recorded
    digests = read_digests(config.run_dir.digests(STEPS))["tensors"]
    version = SimpleNamespace(
        image=SimpleNamespace(tensors=[]), made_by={}, digests_like=lambda _: digests
    )

    def found(name, change):
        run_dir = copy_of(config.run_dir, tmp_path / name)
        change(run_dir)
        return compare(run_dir, STEPS, version, RankThreads())

    first = next(iter(digests))

    def change(path):
        content = json.loads(path.read_text())
        content["tensors"][first] = "0" * 64
        path.write_text(json.dumps(content))

    def flip(run_dir):
        path = next(run_dir.weights(STEPS).glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    assert found("whole", lambda run_dir: None)["fault"] is None
    flipped = found("flipped", flip)
    assert flipped["tensor"] is None
    assert "safetensors: tensor " in flipped["fault"]
    assert flipped["fault"].endswith("is not what was written")
    both = found("both", lambda run_dir: (change(run_dir.digests(STEPS)), flip(run_dir)))
    assert both["kept"] == ["digests"], "Regression: what is damaged was compared with"
    assert both["tensor"] == first and both["max_difference"] is None
    cut = found("cut", lambda run_dir: run_dir.digests(STEPS).write_text("{"))
    assert cut["tensor"] is None and "damaged" in cut["fault"]


def test_what_is_trained_again_is_compared_with_its_record(
    recorded, batches, world, tmp_path, capsys, monkeypatch
):
    """After the loss of the newest checkpoint: version 3 is there, 4 is damaged; then a run whose
    record says something else.

    What is wrong is said by `rl`, too.
    """
    config, warned = recorded[0], []
    monkeypatch.setattr(
        Status, "warn", lambda _, warning: warned.append((warning.about, warning.text))
    )
    run_dir = copy_of(config.run_dir, tmp_path / "run")
    config = make_config(tmp_path, config.model.name, **config.trainer.model_dump())
    shutil.rmtree(run_dir.checkpoint(4))
    (run_dir.weights(4) / "digests.json").write_text("{")
    with StubOrchestrator(run_dir, batches) as orchestrator:
        train_here(config, world)
    assert [version for version, _ in orchestrator.published] == [2, 3, 4]
    assert (
        verify_version(run_dir.weights(4))["tensors"]
        == read_digests(recorded[0].run_dir.digests(4))["tensors"]
    )
    assert not warned, "what is damaged was mended"
    for name in ("checkpoints/000004", "weights"):
        shutil.rmtree(run_dir.root / name)
    content = read_digests(run_dir.digests(3))
    content["tensors"] = dict.fromkeys(content["tensors"], "0" * 64)
    content["made_by"]["threads"] = 7
    run_dir.digests(3).write_text(json.dumps(content))
    with StubOrchestrator(run_dir, batches):
        train_here(config, world)
    ((about, text),) = warned
    said = capsys.readouterr().err
    assert about == "inexact" and said.count("WARNING") == 1 and f"WARNING: {text}\n" in said
    assert (
        "version 3 was trained again and differs from before, first in "
        f"{next(iter(content['tensors']))} (threads 7 there" in text
    )
    assert (
        read_digests(run_dir.digests(3))["tensors"] == verify_version(run_dir.weights(3))["tensors"]
    )
