"""The real trainer process on the real wire: end to end, resumed, and on two ranks."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

import rl.trainer.main
import rl.trainer.train
from rl.commands import serve
from rl.config.run import RLConfig
from rl.launch.repair import repair
from rl.records.run import Run
from rl.run_dir.checksums import verify_version
from rl.run_dir.lease import hold_role
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import numbered
from rl.run_dir.status import Phase, read_status
from rl.system.errors import CANNOT_WRITE, DAMAGED, GIVE_UP, WRONG_SETTINGS
from rl.trainer.measure import statistics
from rl.trainer.store import checkpoint
from rl.trainer.store.publisher import Publisher
from tests.ports import free_ports
from tests.trainer.samples import (
    assert_alike,
    assert_same_files,
    make_batch,
    run_config,
    write_config,
)
from tests.trainer.stub_orchestrator import StubOrchestrator
from tests.zygote import Forked, trainer_zygote

STEPS = 5
TWO_RANKS = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "rl.trainer.main",
]


def test_a_gpu_that_is_not_there_ends_it_without_another_start(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        rl.trainer.main.uses_gpus(
            RLConfig(name="r", trainer={"gpus": 1}, orchestrator={"environment": [{"id": "e"}]})
        )
    assert ended.value.code == WRONG_SETTINGS


@pytest.mark.parametrize("main", [rl.trainer.main.main, serve.process], ids=["trainer", "serve"])
@pytest.mark.parametrize("users", ["PYTORCH_CUDA_ALLOC_CONF", ""])
def test_the_allocator_of_gpus_leaves_no_holes_unless_the_user_says_so(monkeypatch, users, main):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that it is restored
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if users:
        monkeypatch.setenv(users, "max_split_size_mb:128")
    monkeypatch.setattr("rl.trainer.main.leave", lambda _: sys.exit(7))
    monkeypatch.setattr(serve, "load_config_or_exit", lambda *_, **__: sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        main()
    expected = None if users else "expandable_segments:True"
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


def make_config(root, model, **trainer) -> RLConfig:
    settings = {
        "optim": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2},
        "weights": {"keep_last": 10},
        "batch_timeout_s": 60,
    }
    return run_config(root, model, STEPS, "float32", **settings | trainer)


def batches(last=STEPS):
    """Batch 2 has a single group: fewer trees than ranks."""
    return [make_batch(step, groups=1 if step == 2 else 4) for step in range(1, last + 1)]


def start_trainer(config, setup="", **env) -> Forked:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
    } | env
    log = config.run_dir.root / f"output-{env.get('RANK', 0)}"
    return trainer_zygote().fork(
        "trainer", f"@{config.run_dir.config}", log=log, env=environment, setup=setup
    )


def run_trainer(config, code=0, setup="", ranks=1) -> str:
    """What rank 0 prints; `code` is the exit code of every rank."""
    return wait_for([start_trainer(config, setup, **env) for env in ranks_of(ranks)], code)


def wait_for(processes: list[Forked], code: int) -> str:
    try:
        for process in processes:
            assert process.wait(120) == code, process.log.read_text()
    finally:
        for process in processes:
            process.kill()
    return processes[0].log.read_text()


def ranks_of(count: int) -> list[dict[str, str]]:
    """What torchrun puts into the environment of each rank; nothing for one that is alone."""
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "WORLD_SIZE": str(count),
    }
    return [world | {"RANK": str(rank)} for rank in range(count)] if count > 1 else [{}]


def test_end_to_end(straight):
    run_dir, orchestrator = straight
    assert orchestrator.published == [(v, str(run_dir.weights(v))) for v in range(1, STEPS + 1)]
    assert list(numbered(run_dir.weights_dir)) == [1, 2, 3, 4, 5]
    assert list(numbered(run_dir.checkpoints)) == [4, 5]  # every 2 and the last; keep_last = 2
    assert not run_dir.status("trainer").exists()
    lines = read_metrics(run_dir.metrics)
    assert list(lines) == [(step, "trainer") for step in range(1, STEPS + 1)]
    for (step, _), line in lines.items():
        # all are sampled by version 0
        fresh = "mismatch_kl/mean mismatch_kl/max" if step == 1 else "lag_kl/mean"
        expected = (
            "loss/mean entropy/mean masked_fraction optim/grad_norm optim/lr optim/steps "
            f"perf/tokens_per_s {fresh} perf/peak_memory_gib perf/shared_token_fraction time/step "
            "time/wait_for_batch time/forward_backward time/optimizer time/publish_weights "
            "time/checkpoint ratio/p50 ratio/test/p99 entropy/test/mean masked_fraction/test"
        )
        assert {*expected.split()} <= {key for key, value in line.items() if value is not None}
    rates = [line["optim/lr"] for line in lines.values()]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 2.5e-4])


def test_every_token_and_every_part_of_a_step_is_on_record(straight):
    run_dir, _ = straight
    run = Run(run_dir.root)
    for step in (1, STEPS):
        samples = run.tokens(step)
        assert not run.batch(step).fault

        def mean(values, samples=samples):
            return np.mean(np.concatenate([values(one)[one.loss_mask] for one in samples]))

        means = {
            name: run.curve(name, "trainer")[1][step - 1]
            for name in ("entropy/mean", "ratio/mean", "masked_fraction")
        }
        # they are float16
        assert mean(lambda one: one.entropies) == pytest.approx(means["entropy/mean"], rel=1e-3)
        assert mean(lambda one: one.ratio) == pytest.approx(means["ratio/mean"], rel=1e-5)
        stopped = mean(lambda one: one.clipped | one.masked)
        assert stopped == pytest.approx(means["masked_fraction"], rel=1e-6)
    spans = [done for done in run.timeline().spans if done.process == "trainer"]
    lanes = {"phase", "step", "prefetch", "publisher", "saver", "token_files"}
    assert {done.lane for done in spans} == lanes
    written = [done.step for done in spans if done.name == "write_version"]
    assert written == list(range(1, STEPS + 1))
    for step, seconds in zip(*run.curve("time/forward_backward"), strict=True):
        passes = [done for done in spans if (done.name, done.step) == ("forward_backward", step)]
        # what is shorter than a millisecond is no span
        assert sum(done.end - done.begin for done in passes) == pytest.approx(seconds, abs=2e-3)


def test_a_resumed_run_equals_a_straight_one_bit_for_bit(straight, tied_folder, tmp_path):
    """Ended after step 3, resumed after its weights are lost and its newest checkpoint is
    damaged: steps 3 to 5 are done (again)."""
    config = make_config(tmp_path, tied_folder)
    run_dir = config.run_dir
    with StubOrchestrator(run_dir, batches(3)):
        assert "the run has ended: no more batches" in run_trainer(config)
    assert list(numbered(run_dir.checkpoints)) == [2, 3]  # 3: saved when the run ended
    damaged = run_dir.checkpoint(3) / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for version in (2, 3):
        (run_dir.weights(version) / "model.safetensors").unlink()
        run_dir.weights(version).rename(run_dir.weights(version).with_suffix(".gone"))
    with StubOrchestrator(run_dir, batches()) as orchestrator:
        assert f"{damaged}: damaged" in run_trainer(config, DAMAGED)
        assert orchestrator.asked == []
        assert repair(run_dir)  # as `rl` does
        run_trainer(config)
    assert [version for version, _ in orchestrator.published] == [2, 3, 4, 5]
    assert orchestrator.asked == [3, 4, 5]
    assert_same_files(run_dir, straight[0], *range(1, STEPS + 1))
    for version in range(1, STEPS + 1):
        ours, theirs = (d.tokens(version) for d in (run_dir, straight[0]))
        assert ours.read_bytes() == theirs.read_bytes(), version


def killed_beside_the_line_of_step_2():
    """The process is killed where it would write the line, once a checkpoint of the step is
    there, if one is being written; otherwise after that line."""
    log = rl.trainer.train.Trainer.log

    def slow(trainer, *args):
        if trainer.step == 2:
            trainer.saver.finish()
            if trainer.saver.step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        log(trainer, *args)
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    rl.trainer.train.Trainer.log = slow


def test_no_checkpoint_comes_before_its_line_of_metrics(tied_folder, tmp_path):
    """A run resumed from it does not train its step again, so the line would be lost."""
    config = make_config(tmp_path, tied_folder)
    with StubOrchestrator(config.run_dir, batches()):
        hook = "tests.trainer.test_main:killed_beside_the_line_of_step_2"
        run_trainer(config, -signal.SIGKILL, hook)
        run_trainer(config)
    assert {step for step, _ in read_metrics(config.run_dir.metrics)} == set(range(1, STEPS + 1))


def test_a_rank_that_is_killed_while_it_writes_leaves_no_version(straight, tied_folder, tmp_path):
    """The other one ends at once, and the next start makes the version that was begun."""
    config = make_config(tmp_path, tied_folder)
    command, faults = f"@{config.run_dir.config}", ("", "trainer:weights.saved:2")
    with StubOrchestrator(config.run_dir, batches()):
        ranks = [
            trainer_zygote().fork(
                "trainer", command, log=tmp_path / f"log-{fault}", env=os.environ | env, fault=fault
            )
            for env, fault in zip(ranks_of(2), faults, strict=True)
        ]
        try:
            assert ranks[1].wait(120) == -signal.SIGKILL and ranks[0].wait(60) not in (None, 0)
        finally:
            ranks[0].kill()
        assert list(numbered(config.run_dir.weights_dir)) == [1]
        run_trainer(config, ranks=2)
    assert_alike(config.run_dir, straight[0], STEPS)
    for version in range(1, STEPS + 1):
        verify_version(config.run_dir.weights(version))
    assert not [path for path in config.run_dir.weights_dir.iterdir() if path.name.startswith(".")]


def test_nothing_waits_for_itself_when_each_batch_needs_the_version_before(
    straight, tied_folder, tmp_path
):
    config = make_config(tmp_path, tied_folder)
    orchestrator = StubOrchestrator(config.run_dir, batches(3))
    orchestrator.lockstep = True
    with orchestrator:
        assert "the run has ended: no more batches" in run_trainer(config)
    assert [version for version, _ in orchestrator.published] == [1, 2, 3]
    assert_same_files(config.run_dir, straight[0], 1, 3)
    latencies = [
        line.get("time/publish_latency") for line in read_metrics(config.run_dir.metrics).values()
    ]
    # of the version before the step's
    assert latencies[0] is None and all(0 < latency < 10 for latency in latencies[1:])


def test_it_ends_before_it_trains_on_what_another_model_has_sampled(tied_folder, tmp_path):
    config = make_config(tmp_path, tied_folder, strict_parity=None)
    with StubOrchestrator(config.run_dir, batches()):
        output = run_trainer(config, GIVE_UP)
    assert "the two compute different models" in output
    assert "trainer.strict_parity = false trains anyway" in output
    assert not numbered(config.run_dir.weights_dir) and not numbered(config.run_dir.checkpoints)
    assert not read_metrics(config.run_dir.metrics), "no step was made"
    # then its log-probabilities are others, and the user was told
    config.orchestrator.sampling.top_p, config.max_steps = 0.5, 1
    config.trainer.max_kept = 0
    write_config(config)
    with StubOrchestrator(config.run_dir, batches(1)):
        run_trainer(config)
    assert read_metrics(config.run_dir.metrics)[1, "trainer"]["parity/agrees"] == 0.0


def fill_disk():
    shutil.disk_usage = lambda _: shutil._ntuple_diskusage(9, 9, 9)


def test_a_full_disk_ends_it_while_it_waits_for_a_batch(tied_folder, tmp_path):
    config = make_config(tmp_path, tied_folder)
    orchestrator = StubOrchestrator(config.run_dir, batches())
    orchestrator.missing = 2
    with orchestrator:
        output = run_trainer(config, GIVE_UP, "tests.trainer.test_main:fill_disk")
    said = (
        r"trainer: \[Errno 28\] no space left: [\d,]+ bytes are needed, [\d,]+ are free: "
        r"'/.*then start again: the run resumes"
    )
    assert re.search(said, output)
    assert orchestrator.published == [] and not list(numbered(config.run_dir.weights_dir))


def fail_a_thread():
    """Of those that write: the one that RL_TEST_FAILS names."""

    def fails(*_):
        raise ValueError("of the test")

    if os.environ["RL_TEST_FAILS"] == "saver":
        checkpoint.write = fails
    elif os.environ["RL_TEST_FAILS"] == "token log":
        statistics.write_token_log = fails
    else:
        Publisher._compare = fails


@pytest.mark.parametrize(
    ("thread", "phase", "step"),
    [
        ("saver", Phase.CHECKPOINTING, 2),
        ("publisher", Phase.PUBLISHING, 1),
        ("token log", Phase.WRITING_TOKEN_LOG, 1),
    ],
)
def test_the_error_of_a_thread_that_writes_is_not_the_batchs(
    tied_folder, tmp_path, monkeypatch, thread, phase, step
):
    """Nobody that reads the last status takes the trainer for one that its batch has killed."""
    monkeypatch.setenv("RL_TEST_FAILS", thread)
    config = make_config(tmp_path, tied_folder)
    with StubOrchestrator(config.run_dir, batches()):
        assert "ValueError: of the test" in run_trainer(
            config, 1, "tests.trainer.test_main:fail_a_thread"
        )
    status = read_status(config.run_dir.status("trainer"))
    assert (status.phase, status.step) == (phase, step)


def test_a_disk_that_fails_ends_it_as_a_full_one_does():
    assert {errno.EFBIG, errno.EROFS, errno.ENOSPC} <= {*CANNOT_WRITE}


def test_a_damaged_batch_ends_it_after_the_step_before(tied_folder, tmp_path):
    """On two ranks: torchrun ends with 1, and the rank's own code is in a file."""
    config = make_config(tmp_path, tied_folder)
    with StubOrchestrator(config.run_dir, batches()) as orchestrator:
        orchestrator.batches[2] = orchestrator.batches[2][:-1]
        command = [sys.executable, *TWO_RANKS, f"@{config.run_dir.config}"]
        done = subprocess.run(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert "000002.batch: damaged, its checksum does not match" in done.stdout + done.stderr
    assert config.run_dir.exit_code("trainer").read_text() == str(DAMAGED)
    assert list(read_metrics(config.run_dir.metrics)) == [(1, "trainer")]
    assert {path.stem for path in config.run_dir.status("").parent.glob("trainer*.json")} == {
        "trainer",
        "trainer-1",
    }


def test_a_batch_that_does_not_come_ends_it_with_a_diagnosis(tied_folder, tmp_path):
    config = make_config(tmp_path, tied_folder, batch_timeout_s=2)
    orchestrator = StubOrchestrator(config.run_dir, batches())
    orchestrator.missing = 2
    with orchestrator:
        output = run_trainer(config, 1)
    assert "trainer: waited 2 s for batch 2 (filling batch 2), first asked at" in output
    assert "Traceback" not in output.partition("waited 2 s")[0]


def wait_briefly():
    rl.trainer.main.ROLE_WAIT_S = 0.5


def test_faults_end_it_at_once_with_a_remedy(tmp_path, tied_folder):
    config = make_config(tmp_path, tmp_path / "nowhere")
    assert "nowhere': no such folder; give" in run_trainer(config, GIVE_UP)
    config = make_config(tmp_path, tied_folder)
    lock = hold_role(config.run_dir.lock("trainer"))
    assert "trainer of this run is already running" in run_trainer(
        config, 1, "tests.trainer.test_main:wait_briefly"
    )
    lock.close()


def test_fake_data_measures_the_trainer_alone(tied_folder, tmp_path):
    # without max_model_len a line says that this is the model's own
    flags = (
        "--trainer.data.fake.samples 6 --trainer.data.fake.group_size 3 --name bench --max_steps 3 "
        f"--trainer.gpus 0 --model.max_model_len 1024 --model.name {tied_folder} "
        f"--output_dir {tmp_path}"
    ).split()
    logs = [tmp_path / "rank-0.log", tmp_path / "rank-1.log"]
    ranks = [
        trainer_zygote().fork("trainer", *flags, log=log, env=os.environ | env)
        for log, env in zip(logs, ranks_of(2), strict=True)
    ]
    said = r"\d+ tokens/s, .* forward and backward [\d.]+ s, optimizer [\d.]+ s, .* peak memory "
    choice, *lines = wait_for(ranks, 0).splitlines()
    assert choice.startswith("trainer.attention: blocks for ") and len(lines) == 4
    for begin, line in zip(("step 1", "step 2", "step 3", "median of 2 steps"), lines, strict=True):
        assert re.match(f"{begin}: {said}[\\d.]+ GiB$", line), line
    written = " ".join(sorted(path.name for path in (tmp_path / "bench").iterdir()))
    assert written == "metrics metrics.jsonl status"
