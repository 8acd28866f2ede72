"""The orchestrator's loops with real workers, real environments and the real transport; only
model and trainer are stubs."""

import asyncio
import json
import os
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rl.homes.resolve import homes_of
from rl.orchestrator.batches.batch_files import BatchFiles
from rl.orchestrator.evals.evaluator import Evaluator
from rl.orchestrator.main import run
from rl.orchestrator.orchestrator import Orchestrator
from rl.run_dir.files import write_directory
from rl.run_dir.metrics import read_metrics
from rl.run_dir.status import Status
from rl.system.errors import GIVE_UP, RunError
from rl.wire.batch_file import batch_head, decode_batch
from rl.wire.messages import RunEnded, WeightVersion
from rl.wire.rollouts import Group, read_records, waiting_lines
from rl.wire.transport import OrchestratorClient, Wait
from tests.orchestrator.made import run_config
from tests.orchestrator.stub_inference import StubInference
from tests.orchestrator.stub_teacher import StubTeacher, logprob


@pytest.fixture(autouse=True)
def environments(monkeypatch, tmp_path):
    tests = Path(__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", str(tests / "environments"))
    monkeypatch.setenv("EXIT_ONCE_MARK", str(tmp_path / "exited"))


def make_config(tmp_path, *flags):
    base = (
        "--max_steps 3 --orchestrator.batch_size 8 --orchestrator.group_size 4 "
        "--orchestrator.sampling.max_tokens 8 --model.max_model_len 256 "
        "--orchestrator.rollout_retries 1"
    )
    return run_config(tmp_path, base, *flags, env="say-digit")


def train(config, steps, step_s=0.0):
    """A trainer without a model: asks for batches and publishes empty versions. Returns the
    batches it got."""
    client, wait = OrchestratorClient(config.run_dir), Wait(150.0, lambda *_: None)
    given = []
    for step in steps:
        with wait:
            data = client.get_batch(step, wait)
        if isinstance(data, RunEnded):
            return [*given, data]
        given.append(decode_batch(data, "wire").batch)
        time.sleep(step_s)
        write_directory(config.run_dir.weights(step), lambda path: (path / "x").write_text(""))
        with wait:
            client.published(WeightVersion(step, str(config.run_dir.weights(step))), wait)
    return given


def play(config, model, *, steps=None, stub_options=None, during=None, step_s=0.0):
    """Runs the orchestrator with the stubs to its end. Returns (why it ended, batches, stub)."""

    async def main():
        status = Status(config.run_dir.status("orchestrator"), "orchestrator")
        stub = StubInference(model, config.run_dir.status("inference"), **(stub_options or {}))
        newest = config.run_dir.newest_weights()
        stub.version = newest[0] if newest else 0
        async with stub:
            steps_wanted = range(1, config.max_steps + 1) if steps is None else steps
            trainer = asyncio.create_task(asyncio.to_thread(train, config, steps_wanted, step_s))
            runner = asyncio.create_task(
                run(config, status, str(model), homes_of(config, print, recorded=True))
            )
            if during:
                await during(stub, runner)
            try:
                ended = await asyncio.wait_for(runner, 180)
                stub.warnings = [one.text for one in status.current.warnings if one.about == "died"]
                return ended.reason, await trainer, stub
            finally:
                status.close()

    return asyncio.run(main())


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_three_steps_on_policy(tmp_path, model, monkeypatch):
    config = make_config(
        tmp_path,
        "--max_lag 0 --orchestrator.eval.interval 2 --orchestrator.eval.samples 2",
    )
    answered, had_it = threading.Event(), []

    def answer(path):
        answered.set()
        return batch_head(path)

    def put_away(files, step):
        """Files derived from a batch are written later, when the trainer already has the batch."""
        had_it.append(answered.wait(30))
        answered.clear()
        write(files, step)

    async def evaluate(evaluator, entry, version, reconcile):
        evaluated_after.append((version, config.run_dir.newest_batch()))
        await play_eval(evaluator, entry, version, reconcile)

    write, play_eval, evaluated_after = BatchFiles.put_away, Evaluator.evaluate, []
    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    monkeypatch.setattr("rl.orchestrator.policy.trainer_requests.batch_head", answer)
    monkeypatch.setattr(BatchFiles, "put_away", put_away)
    ended, given, stub = play(config, model)
    assert ended == "3 steps done" and had_it == [True] * 3
    # during the training of the version's batch, not before its sampling
    assert evaluated_after == [(0, 1), (2, 3), (3, 3)]
    assert [batch.step for batch in given] == [1, 2, 3]
    for batch in given:
        assert {version for sample in batch.samples for version in sample.versions} == {
            batch.step - 1
        }
        for sample in batch.samples:
            assert stub.tokenizer.decode(sample.token_ids).startswith("<|im_start|>user\nsay ")
            # a digit and the end of turn
            assert sample.trained.tolist() == [sample.num_tokens - 2, sample.num_tokens - 1]
            assert sample.logprobs.tolist() == [-0.5, -0.5]
        by_group = {}
        for sample in batch.samples:
            by_group.setdefault(sample.group_id, []).append(float(sample.advantages[-1]))
        assert all(
            len(group) == 4 and sum(group) == pytest.approx(0) and any(group)
            for group in by_group.values()
        )
    metrics = read_metrics(config.run_dir.metrics)
    assert metrics[2, "orchestrator"]["lag/max"] == 0
    assert 0 < metrics[2, "orchestrator"]["reward/mean"] < 1
    assert [key for key in metrics if key[1] == "eval"] == [(0, "eval"), (2, "eval"), (3, "eval")]
    assert len(lines(config.run_dir.eval(2, "say-digit"))) == 4
    prompts = {
        (body["session"], tuple(body["token_ids"]))
        for route, body in stub.log
        if "token_ids" in body and "seed" not in body["sampling"]
    }
    # a group is a session, which stays on one of several servers
    assert len(prompts) == len({session for session, _ in prompts})
    rollouts = [line for step in (1, 2, 3) for line in lines(config.run_dir.rollouts(step))]
    assert sum(line["trained"] for line in rollouts) == sum(len(batch.samples) for batch in given)
    assert {None, "no_signal"} <= {line["why"] for line in rollouts} <= {
        None,
        "no_signal",
        "surplus",
    } and len({(r["group_id"], r["rollout_id"]) for r in rollouts}) == len(rollouts)
    assert metrics[1, "orchestrator"]["rollouts/finished"] == len(lines(config.run_dir.rollouts(1)))


def test_weights_hold_and_a_slow_environment_does_not_hold_up_the_other(tmp_path, model):
    """A slow rollout takes three steps. Batches do not wait for it, and its environment still
    gets its share, only later."""
    envs = (
        '[{id = "say-digit", name = "fast"}, {id = "say-digit", name = "slow", group_size = 2, '
        "args = {delay = 1.5}}]"
    )
    config = make_config(tmp_path, "--orchestrator.environment", envs, "--max_steps 16 --max_lag 1")
    _, given, _ = play(config, model, step_s=0.5)
    rollouts = [line for step in range(3, 17) for line in lines(config.run_dir.rollouts(step))]
    # A half in the end. Of fourteen steps it may still lack the three that each of its rollouts takes,
    # and on a busy machine as many again.
    assert 3 / 14 < sum(line["env"] == "slow" for line in rollouts) / len(rollouts) < 0.7
    metrics = read_metrics(config.run_dir.metrics)
    waited = sorted(metrics[step, "orchestrator"]["time/batch"] for step in range(2, 17))
    # the trainer takes 0.5 s, a slow rollout 1.5 s
    assert waited[7] < 0.9 and sum(waited) < 15 * 1.2, waited
    lags = [batch.step - 1 - sample.versions[0] for batch in given for sample in batch.samples]
    # The slow half may be the three steps old that it takes, the fast half as old as max_lag: 2 on
    # average is the bound.
    assert sum(lags) / len(lags) <= 2 and max(lags) <= config.orchestrator.max_off_policy_steps


def test_inference_dies_in_every_phase_and_comes_back_with_any_version(
    tmp_path, model, monkeypatch
):
    monkeypatch.setattr("rl.orchestrator.orchestrator.RECONCILE_EVERY_S", 0.1)
    flags = ["--max_steps 5 --max_lag 1 --orchestrator.max_off_policy_steps 2"]
    config = make_config(
        tmp_path, *flags, "--orchestrator.eval.interval 2 --orchestrator.eval.samples 4"
    )

    async def kill(stub, runner):
        """During the eval of version 0, while groups are played, before and after a load, and
        while the versions are polled."""
        stub.deaths = {
            ("/generate", 3): 7,
            ("/generate", 25): 0,
            ("/generate", 60): 1,
            ("/status", 9): 0,
        }
        stub.deaths |= {("/load_weights", 1): 0, ("/load_weights", 3): 2, ("/load_weights", 5): 0}

    ended, given, stub = play(config, model, during=kill, step_s=0.4)
    assert ended == "5 steps done" and [batch.step for batch in given] == [1, 2, 3, 4, 5]
    assert stub.counts["/load_weights"] >= 6 and stub.counts["/generate"] > 60
    lags = [
        batch.step - 1 - span.policy_version
        for batch in given
        for sample in batch.samples
        for span in sample.spans
    ]
    assert max(lags) <= 2
    for version in (0, 2, 4, 5):
        rows = lines(config.run_dir.eval(version, "say-digit"))
        assert len(rows) == 8 and all(
            row["versions"] == [version] and "error" not in row for row in rows
        )
    rollouts = [line for step in range(1, 6) for line in lines(config.run_dir.rollouts(step))]
    assert len({(r["group_id"], r["rollout_id"]) for r in rollouts}) == len(rollouts) and not any(
        "error" in r for r in rollouts
    )


DEATH = "it ended with code 7 (its output"


@pytest.mark.parametrize("fail", ["first", "exit_once", "block"])
def test_environment_trouble_costs_a_retry(tmp_path, model, fail):
    config = make_config(tmp_path, "--orchestrator.environment.args.fail", fail, "--max_steps 1")
    _, given, stub = play(config, model)
    assert len(given[0].samples) == 8
    assert not any("error" in line for line in lines(config.run_dir.rollouts(1)))
    assert fail != "exit_once" or os.path.exists(tmp_path / "exited")
    assert [one.split(": ")[:2] for one in stub.warnings] == [
        ["worker say-digit-0 is restarted", DEATH]
    ] * (fail == "exit_once")


def beside_teacher(teacher, tmp_path, model, *flags, **options):
    """A run with a teacher, which answers from another thread's event loop."""
    with asyncio.Runner() as runner:
        runner.run(teacher.__aenter__())
        serving = threading.Thread(target=runner.get_loop().run_forever)
        serving.start()
        try:
            config = make_config(tmp_path, "--orchestrator.teacher.base_url", teacher.url, *flags)
            return config, play(config, model, **options)
        finally:
            runner.get_loop().call_soon_threadsafe(runner.get_loop().stop)
            serving.join()
            runner.run(teacher.__aexit__())


NO_CREDIT = """
def none(group, config):
    with open(config.args["log"], "a") as file:
        file.write(f"{group.group_id} ")
    return [0.0] * len(group.rollouts)
"""


def test_a_teacher_scores_what_is_trained_and_groups_without_signal_are_trained_too(
    tmp_path, model
):
    flags = [
        "--orchestrator.environment.args.constant 1.0 --orchestrator.environment.args.turns 2",
        "--max_steps 2",
    ]
    teacher = StubTeacher(tokenizer=Tokenizer.from_file(str(model / "tokenizer.json")))
    (tmp_path / "own.py").write_text(NO_CREDIT)
    credit = [
        "--orchestrator.credit.function",
        f"{tmp_path}/own.py:none",
        "--orchestrator.credit.args.log",
        f"{tmp_path}/log",
    ]
    config, (_, given, _) = beside_teacher(teacher, tmp_path, model, *flags, *credit)
    judged = (tmp_path / "log").read_text().split()
    assert len(judged) == len({*judged}) >= 4  # each group once, not before and after its teacher
    for batch in given:
        assert len(batch.samples) == 8
        for sample in batch.samples:
            ids = sample.token_ids.tolist()
            assert sample.teacher_logprobs.tolist() == pytest.approx(
                [logprob(ids, t) for t in sample.trained.tolist()]
            )
            assert ids in teacher.requests and not any(sample.advantages)
    metrics = read_metrics(config.run_dir.metrics)[1, "orchestrator"]
    assert metrics["rollouts/replaced_groups"] == 0 and metrics["reward/mean"] == 1.0
    gaps = [
        gap
        for sample in given[0].samples
        for gap in (sample.logprobs - sample.teacher_logprobs).tolist()
    ]
    assert metrics["teacher_kl/say-digit/mean"] == pytest.approx(sum(gaps) / len(gaps))


class KilledError(Exception):
    """Ends an orchestrator at once."""


class SilentTeacher(StubTeacher):
    """Answers nothing after the requests at its start."""

    async def completions(self, request):
        if len(self.requests) == 2:
            await asyncio.sleep(20)
        return await super().completions(request)


def test_what_is_played_is_kept_while_a_teacher_is_asked(tmp_path, model):
    """The last episodes of a group were in memory alone until its teacher had answered, which
    may take ten minutes."""
    silent, kept = SilentTeacher(), {}

    async def kill(stub, runner):
        pending = tmp_path / "r/batches/pending.log"
        deadline = time.monotonic() + 60
        while not kept and time.monotonic() < deadline and not runner.done():
            await asyncio.sleep(0.05)
            for record in read_records(pending)[0]:
                if isinstance(record, Group):
                    assert not record.finished
                    kept.setdefault(record.group_id, []).extend(
                        rollout.turns.token_ids(0) for rollout in record.rollouts
                    )
            for group in [group for group, members in kept.items() if len(members) < 4]:
                del kept[group]
        raise KilledError

    with pytest.raises(KilledError):
        beside_teacher(silent, tmp_path, model, steps=[], during=kill)
    assert kept and len(silent.requests) == 2
    teacher = StubTeacher()
    _, (_, given, _) = beside_teacher(teacher, tmp_path, model, "--max_steps 1")
    scored = {tuple(ids) for ids in teacher.requests}
    assert len(given) == 1 and all(
        scored & {tuple(ids) for ids in members} for members in kept.values()
    )


def unwrap(error):
    return unwrap(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ["--orchestrator.environment.args.fail load"],
            "load_environment raised KeyError: 'SOME_DATA_PATH'",
        ),
        (
            ["--orchestrator.environment.args.tasks 0"],
            "has no training examples; check its arguments",
        ),
        (
            ["--model.max_model_len 30"],
            "exceed model.max_model_len = 30; raise model.max_model_len to",
        ),
        (
            ["--orchestrator.environment.args.fail always"],
            "ZeroDivisionError: broken environment",
        ),
        (["--orchestrator.environment.args.constant 0.0"], "without any signal"),
    ],
)
def test_what_cannot_work_ends_with_a_remedy(tmp_path, model, flags, text):
    config = make_config(tmp_path, "--orchestrator.rollout_retries 0", *flags)
    with pytest.raises((RunError, BaseExceptionGroup)) as caught:
        play(config, model, steps=[])
    error = unwrap(caught.value)
    assert isinstance(error, RunError) and error.exit_code == GIVE_UP and text in str(error)
    # of what was played until then
    lines = [json.loads(line) for line in waiting_lines(config.run_dir.pending).splitlines()]
    assert {line["why"] for line in lines} == {"always": {"environment"}, "0.0": {"no_signal"}}.get(
        flags[0].split()[1], set()
    )
    assert not lines or f"`rl show {config.run_dir.root}` shows them" in str(error)


def test_a_solved_task_ends_the_run(tmp_path, model):
    config = make_config(tmp_path, "--max_steps 50 --max_lag 0 --orchestrator.eval.interval 100")

    async def learn(stub, runner):
        while config.run_dir.newest_batch() < 2:
            await asyncio.sleep(0.02)
        stub.skill = 1.0

    # A group of wrong answers alone that is still in flight when the task is learned would count as
    # a task that is too hard.
    ended, given, _ = play(config, model, stub_options={"skill": 0.9}, during=learn)
    assert ended.startswith("solved: the last ") and given[-1] == RunEnded(ended)
    last = given[-2].step
    assert (
        config.run_dir.eval(last, "say-digit").exists()
        and config.run_dir.eval(0, "say-digit").exists()
    )


def test_an_eval_that_reaches_its_target_ends_the_run_and_the_best_version_is_kept(
    tmp_path, model, monkeypatch
):
    flags = [
        "--orchestrator.eval.interval 1 --orchestrator.eval.samples 4",
        "--orchestrator.eval.target 0.95",
    ]
    config = make_config(tmp_path, "--max_steps 50 --max_lag 0", *flags)

    async def learn(stub, runner):
        while config.run_dir.newest_batch() < 3:
            await asyncio.sleep(0.02)
        stub.skill = 1.0

    def start_group(orchestrator, ref, num_episodes):
        sampled.add(orchestrator.policy.loaded)
        start(orchestrator, ref, num_episodes)

    async def evaluate(evaluator, entry, version, reconcile):
        await play_eval(evaluator, entry, version, reconcile)
        evaluated.append((version, version in sampled))

    start, play_eval, sampled, evaluated = (
        Orchestrator.start_group,
        Evaluator.evaluate,
        set[int](),
        list[tuple[int, bool]](),
    )
    monkeypatch.setattr(Orchestrator, "start_group", start_group)
    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    ended, given, _ = play(config, model, during=learn)
    assert evaluated == [(version, False) for version in range(len(evaluated))]
    metrics = read_metrics(config.run_dir.metrics)
    rewards = {
        step: values["eval/say-digit/reward_mean"]
        for (step, source), values in metrics.items()
        if source == "eval"
    }
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert ended == f"eval say-digit reached 1.000 at version {best}; its target is 0.95" and given[
        -1
    ] == RunEnded(ended)
    assert config.run_dir.newest_batch() == best, (
        "a batch was sampled before the target was checked"
    )
    assert len(given) < 12 and rewards[best] == 1.0 > max(
        reward for step, reward in rewards.items() if step < best
    )
    assert json.loads((config.run_dir.evals / "best.json").read_text()) == {
        "say-digit": {"policy_version": best, "reward_mean": 1.0}
    }
    assert {
        f"eval/say-digit/{name}"
        for name in ("pass@1", "pass@4", "pass@4_stderr", "avg@4", "reward_mean_stderr")
    } <= set(metrics[0, "eval"])
