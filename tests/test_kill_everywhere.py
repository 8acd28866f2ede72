"""Kills orchestrator, trainer and `rl`'s preparation at every fault point that they come by, one
death after the other, and resumes.

A chain of lives: each is killed at the next point, and the next one goes on from what it left. At
the end nothing is lost, nothing is there twice, and what the trainer made equals a run without any
death, bit for bit.
"""

import itertools
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web

from rl.config.command_line import build, parse_args, to_toml
from rl.run_dir.files import write_directory, write_file
from rl.run_dir.metrics import Merger, MetricsLog, read_metrics
from rl.run_dir.paths import numbered
from rl.wire.batch_file import decode_batch, write_batch
from rl.wire.messages import RunEnded, WeightVersion
from rl.wire.rollouts import Group
from rl.wire.transport import OrchestratorClient, Wait
from tests.proofs import promises
from tests.stub_server import StubServer, turn_bytes
from tests.trainer.samples import make_batch
from tests.trainer.stub_orchestrator import StubOrchestrator
from tests.web import serving
from tests.zygote import ORCHESTRATOR, TRAINER, Zygote

pytestmark = [pytest.mark.proof, pytest.mark.timeout(300)]
KILLED = -9
SILENT = ("ask.GetProbe", "answer.Probe", "token.", "environments.")
"""Needs no chain of its own: nothing durable hangs on it, or it comes once in a run."""


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    temporary = str(tmp_path_factory.mktemp("t"))  # of what a killed one leaves there
    zygote = Zygote(
        *TRAINER,
        *ORCHESTRATOR,
        TMPDIR=temporary,
        PYTHONPATH=str(Path(__file__).parent / "environments"),
        HF_HUB_OFFLINE="1",
    )
    yield zygote
    zygote.close()


def make_config(root, model, *flags):
    base = (
        f"--name r --output_dir {root} --model.name {model} --model.dtype float32 "
        "--model.max_model_len 128 --max_lag 0 "
    )
    base += (
        "--orchestrator.environment.id say-digit --orchestrator.batch_size 8 "
        "--orchestrator.group_size 4 --learning_rate 1e-3 "
    )
    # the stub's log-probabilities are no model's
    base += "--orchestrator.sampling.max_tokens 8 --trainer.strict_parity false"
    config = build(parse_args([*base.split(), *flags]))
    write_file(config.run_dir.config, to_toml(config).encode())
    return config


def end_at(config, step):
    """Sets the last step, now that the deaths are over."""
    config.max_steps = step
    write_file(config.run_dir.config, to_toml(config).encode())


def points_of(trace):
    """Distinct points in the order in which a process first came by, with how often it did."""
    names = [line.split()[1] for line in trace.read_text().splitlines()]
    return [(name, count) for name, count in Counter(names).items() if not name.startswith(SILENT)]


WRITTEN = "write torn fsync rename fsync_dir done"
"""The points of a file that is written."""


def check_points(trace, **kinds):
    """A process came by all of these points."""
    expected = {f"{kind}.{point}" for kind, points in kinds.items() for point in points.split()}
    assert expected <= {name for name, _ in points_of(trace)}


def chain_of(trace):
    """(point, which time) to die at: each point at its first time, and then those next to a
    commit, if they come again, at their second."""
    points = points_of(trace)
    return [(name, 1) for name, _ in points] + [
        (name, 2) for name, count in points if count > 2 and name.endswith(("rename", "done"))
    ]


def leftovers(root):
    return [path for path in root.rglob(".*") if path.name.endswith(("tmp", "old", "replaced"))]


# The orchestrator ---------------------------------------------------------------------------------


class Inference(StubServer):
    """What it samples is a function of the prompt and the version alone."""

    async def generate(self, request):
        ids = (await request.json())["token_ids"]
        said = [(7 * sum(ids) + self.version + i) % 200 + 10 for i in range(3)]
        spans = [[self.version, 3]]
        return web.Response(body=turn_bytes(said, [-1.0] * 3, spans))


def train(config):
    """A trainer without a model: asks for one batch after the other, publishes versions without
    content."""
    client, wait = OrchestratorClient(config.run_dir), Wait(120.0, lambda *_: None)
    for step in itertools.count(1):
        with wait:
            answer = client.get_batch(step, wait)
        if isinstance(answer, RunEnded):
            return
        assert decode_batch(answer, "wire").batch.step == step
        if not config.run_dir.weights(step).exists():
            write_directory(
                config.run_dir.weights(step), lambda folder: (folder / "x").write_text("")
            )
        with wait:
            client.published(WeightVersion(step, str(config.run_dir.weights(step))), wait)


def orchestrate(zygote, config, lives, trace=""):
    """The orchestrator, killed at each point in turn and then left alone. Returns every group,
    and every member of another, that was ever seen finished."""
    log, finished, members = config.run_dir.root / "orchestrator.log", {}, {}
    trainer = threading.Thread(target=train, args=(config,), daemon=True)
    with serving(
        Inference(status=config.run_dir.status("inference"), served_model="tiny", max_model_len=128)
    ):
        trainer.start()
        for name, count in lives:
            code = zygote.live(
                "orchestrator", config.run_dir.config, log, f"orchestrator:{name}:{count}"
            )
            assert code == KILLED, (
                f"{name} was not reached for the {count}. time: code "
                f"{code}\n{log.read_text()[-3000:]}"
            )
            config.run_dir.status("orchestrator").unlink(missing_ok=True)  # as the keeper does
            for record in promises.pending_records(config.run_dir.pending):
                if isinstance(record, Group) and record.finished:
                    finished[record.group_id] = record
                elif isinstance(record, Group):
                    members |= {
                        (record.group_id, rollout.episode): rollout.reward
                        for rollout in record.rollouts
                    }
        if lives:
            end_at(config, config.run_dir.newest_batch() + 2)
        assert zygote.live("orchestrator", config.run_dir.config, log, trace=trace) == 0, (
            log.read_text()[-3000:]
        )
        trainer.join(30)
    return finished, members


def check_exactly_once(config, finished, members):
    """Every group in one place with the members that it had, every batch complete, nothing half
    left."""
    run_dir, steps = config.run_dir, range(1, config.max_steps + 1)
    assert promises.exactly_once(run_dir, {*finished}) == ([], 0)
    assert promises.lag(run_dir, config)[0] == []
    rollouts = promises.rollout_lines(run_dir)
    assert list(rollouts) == list(steps)
    for lines in rollouts.values():
        assert sum(line["trained"] for line in lines) == 8
        for line in lines:
            if line["group_id"] in finished:
                assert (
                    line["reward"] == finished[line["group_id"]].rollouts[line["rollout_id"]].reward
                )
            assert line["reward"] == members.get(
                (line["group_id"], line["episode"]), line["reward"]
            )
    metrics = read_metrics(run_dir.metrics)
    assert [step for step, source in sorted(metrics) if source == "orchestrator"] == list(steps)
    for version in [
        version for version in (0, *steps) if version % 2 == 0 or version == config.max_steps
    ]:
        assert len(run_dir.eval(version, "say-digit").read_bytes().splitlines()) == 2 * 2
    assert leftovers(run_dir.root) == []


def test_the_orchestrator_killed_at_every_point(tmp_path, model, zygote, monkeypatch):
    monkeypatch.setattr("rl.wire.transport.ATTEMPT_S", 0.5)
    flags = ["--orchestrator.eval.interval", "2", "--orchestrator.eval.samples", "2"]
    traced = make_config(tmp_path / "traced", model, "--max_steps", "4", *flags)
    orchestrate(zygote, traced, [], str(tmp_path / "trace"))
    check_exactly_once(traced, {}, {})
    check_points(
        tmp_path / "trace",
        **dict.fromkeys(("pending", "rollouts", "eval", "best"), WRITTEN),
        batch=f"{WRITTEN} linked",
        lease="linked",
        **dict.fromkeys(("merged", "metrics"), "write torn done"),
        answer="BatchReady Acknowledged",
        answered="BatchReady RunEnded",
    )
    names = {name for name, _ in points_of(tmp_path / "trace")}
    assert {"http/load_weights", "http/load_weights.answered", "http/status"} <= names
    # What comes at the end of a run, `orchestrator.end` too, is not reached in one that goes on.
    chain = chain_of(tmp_path / "trace")
    lives = [
        (name, count)
        for name, count in chain
        if not name.endswith(".RunEnded") and not name.startswith("orchestrator.")
    ]
    config = make_config(tmp_path / "killed", model, "--max_steps", "1000", *flags)
    finished, members = orchestrate(zygote, config, lives)
    assert members
    check_exactly_once(config, finished, members)


# The trainer --------------------------------------------------------------------------------------


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_trainer_killed_at_every_point(tmp_path, model, zygote):
    given = "--trainer.checkpoint.interval 2 --trainer.weights.keep_last 1000"
    flags = f"{given} --trainer.micro_batch_tokens 128".split()
    traced = make_config(tmp_path / "traced", model, "--max_steps", "6", *flags)
    with StubOrchestrator(traced.run_dir, [make_batch(step) for step in range(1, 7)]):
        log = tmp_path / "log"
        assert (
            zygote.live("trainer", traced.run_dir.config, log, trace=str(tmp_path / "trace")) == 0
        ), log.read_text()[-3000:]
    check_points(
        tmp_path / "trace",
        weights="fill saved fsync rename fsync_dir done cast in_memory",
        checkpoint="saved manifest fsync rename done remove removed",
        digests=WRITTEN,
        metrics="torn",
        ask="GetBatch Published",
        asked="GetBatch Published",
    )
    lives = chain_of(tmp_path / "trace")
    batches = [make_batch(step) for step in range(1, 2 * len(lives))]
    killed, straight = (
        make_config(tmp_path / name, model, "--max_steps", "1000", *flags)
        for name in ("killed", "straight")
    )
    with StubOrchestrator(killed.run_dir, batches):
        for name, count in lives:
            code = zygote.live("trainer", killed.run_dir.config, log, f"trainer:{name}:{count}")
            assert code == KILLED, (
                f"{name} was not reached for the {count}. time: code "
                f"{code}\n{log.read_text()[-3000:]}"
            )
        steps = max(numbered(killed.run_dir.weights_dir)) + 1
        for config in (killed, straight):
            end_at(config, steps)
        assert zygote.live("trainer", killed.run_dir.config, log) == 0, log.read_text()[-3000:]
    with StubOrchestrator(straight.run_dir, batches):
        assert zygote.live("trainer", straight.run_dir.config, log) == 0, log.read_text()[-3000:]
    for version in range(1, steps + 1):
        ours, theirs = (contents(config.run_dir.weights(version)) for config in (killed, straight))
        assert ours == theirs, f"version {version}"
    ours, theirs = (contents(config.run_dir.checkpoint(steps)) for config in (killed, straight))
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours if name.endswith(".distcp"))
    assert list(read_metrics(killed.run_dir.metrics)) == [
        (step, "trainer") for step in range(1, steps + 1)
    ]
    assert leftovers(killed.run_dir.root) == []


# `rl` ---------------------------------------------------------------------------------------------


def test_the_preparation_of_a_resume_killed_at_every_point(tmp_path, model, zygote):
    """`--resume 2` of a run with 4 steps: whatever it is killed at, the same command again ends
    where it would have ended at once."""
    made = make_config(tmp_path / "made", model, "--max_steps", "4").run_dir
    for step in range(1, 5):
        write_batch(made.batch(step), make_batch(step), {})
        write_file(made.rollouts(step), b"{}\n")
        write_directory(made.weights(step), lambda folder: (folder / "x").write_text("x"))
        write_file(made.eval(step, "say-digit"), b"{}\n")
    log = MetricsLog(made.metrics, "trainer")
    for step in range(1, 5):
        log.write(step, {"a": 1.0})
        if step < 4:  # the last line was not merged before the death of `rl`
            Merger(made.metrics).merge()
    write_file(made.pending, b"")

    def resume(name, fault="", trace=""):
        return zygote.live(
            "prepare", tmp_path / name / "wanted.toml", tmp_path / "log", fault, trace
        ), tmp_path / name / "r"

    def copy(name):
        shutil.copytree(made.root, tmp_path / name / "r")
        # and one change
        wanted = build(
            parse_args(
                ["@", str(made.config), "--output_dir", str(tmp_path / name), "--max_steps", "5"]
            )
        )
        write_file(tmp_path / name / "wanted.toml", to_toml(wanted).encode())

    def state(root):
        return {
            name: data
            for name, data in contents(root).items()
            if not name.startswith(("discarded", "status", "changes", "config"))
        }

    copy("straight")
    code, straight = resume("straight", trace=str(tmp_path / "trace"))
    assert code == 0, (tmp_path / "log").read_text()
    lives = [
        (name, nth + 1) for name, count in points_of(tmp_path / "trace") for nth in range(count)
    ]
    assert {"config.rename", "metrics.rename", "merged.torn", "merged.rename", "lease.linked"} <= {
        name for name, _ in lives
    }
    for i, (name, count) in enumerate(lives):
        copy(str(i))
        code, root = resume(str(i), f"prepare:{name}:{count}")
        assert code == KILLED, name
        assert resume(str(i))[0] == 0, (tmp_path / "log").read_text()
        assert state(root) == state(straight), f"{name} {count}"
        assert leftovers(root) == []
