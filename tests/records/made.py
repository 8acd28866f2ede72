"""Run directories as the processes write them, without the processes."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.orchestrator.evals.eval_metrics import write_eval
from rl.orchestrator.groups.group_credit import Rules, credit_group
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.numbers import write_token_log
from rl.run_dir.paths import RunDir
from rl.run_dir.spans import Event, EventKind, Start, append_event
from rl.wire.batch_file import write_batch, write_rollouts
from rl.wire.messages import TrainBatch, TrainedSpan, TrainingSample, VersionSpan
from rl.wire.rollouts import Group, Rollout, rollout_lines
from rl.wire.turns import Turn
from tests.wire.samples import aligned_sample

RULES = {"sums": Rules(), "words": Rules()}


def make_run(root: Path, **more) -> RunDir:
    """A directory with nothing but its configuration."""
    place = {"name": root.name, "output_dir": str(root.parent)}
    config = RLConfig.model_validate(
        place
        | {"model": {"name": "none"}, "max_steps": 9}
        | {"orchestrator": {"environment": [{"id": "sums"}]}}
        | more
    )
    write_config(config.run_dir.config, config)
    return config.run_dir


def write_lines(path: Path, *lines: msgspec.Struct, tail: bytes = b"") -> None:
    """Appends JSON lines, and perhaps the beginning of another one."""
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + tail)


def clock(process: str, time: float = 1000.0, monotonic: float = 0.0) -> Start:
    """The first line of a file of spans."""
    return Start(process=process, pid=1, host="h", place="", time=time, monotonic=monotonic)


def note(run_dir: RunDir, time: float, event: EventKind, process: str = "rl", **more) -> None:
    append_event(run_dir.events, Event(time=time, event=event, process=process, **more))


def rollout(reward: float, version: int = 0, text: str = "four", **more) -> Rollout:
    """One answer of three tokens."""
    spans = [VersionSpan(version, 3)]
    turn = Turn.of([1, 2], [3, 4, 5], [-0.5, -1.0, -0.25], spans)
    messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": text}]
    fields = {"turns": [turn], "text": more.pop("messages", messages), "stop": "stop"}
    return Rollout(**fields | {"reward": reward, "metrics": {"exact": reward}} | more)


def group(
    group_id: int, rewards: list[float], env: str = "sums", task: int = 0, version: int = 0, **more
) -> Group:
    """A judged group."""
    rollouts = [rollout(reward, version, episode=i, **more) for i, reward in enumerate(rewards)]
    return credit_group(Group(group_id=group_id, env=env, task=task, rollouts=rollouts), RULES[env])


def write_step(run_dir: RunDir, step: int, groups: list[Group]) -> None:
    """The rollouts of a step, as its batch settles them."""
    write_rollouts(run_dir.rollouts(step), rollout_lines(groups, step, False))


def write_eval_of(run_dir: RunDir, version: int, rewards: list[float]) -> None:
    """An evaluation `held-out` of a version, an example for each reward."""
    results = [(i, [rollout(reward, version)]) for i, reward in enumerate(rewards)]
    write_eval(run_dir.eval(version, "held-out"), version, "held-out", results)
    mean = sum(rewards) / len(rewards)
    MetricsLog(run_dir.metrics, "eval").write(version, {"eval/held-out/reward_mean": mean})
    best = {"held-out": {"policy_version": version, "reward_mean": 0.0}}
    (run_dir.evals / "best.json").write_text(json.dumps(best))


def sample(
    group_id: int, rollout_id: int, tokens: int = 3, version: int = 0, teacher: bool = False
) -> TrainingSample:
    """Two tokens of a prompt, then the trained ones."""
    return aligned_sample(
        token_ids=[1, 2, *range(3, 3 + tokens)],
        loss_mask=[False, False, *[True] * tokens],
        logprobs=[0.0, 0.0, *[-0.5] * tokens],
        advantages=[0.0, 0.0, *[1.0] * tokens],
        policy_versions=[VersionSpan(version, tokens)],
        env="sums",
        group_id=group_id,
        rollout_id=rollout_id,
        teacher_logprobs=[0.0, 0.0, *[-0.25] * tokens] if teacher else None,
    )


def write_samples(run_dir: RunDir, step: int, samples: list[TrainingSample]) -> None:
    """A batch of these samples."""
    write_batch(run_dir.batch(step), TrainBatch(step=step, samples=samples), {})


def write_noisy(
    run_dir: RunDir,
    step: int,
    turns: list[list[tuple[int, int]]],
    scale: Callable[[np.ndarray, int, int], np.ndarray | float],
    seed: int = 0,
    version: int | None = None,
) -> None:
    """A batch and its token log, whose log-probabilities differ as if logits had been rounded.

    turns: for each sample the tokens of each turn's prompt and answer. scale: (depths, turn from 0,
    tokens before the answer) -> standard deviation of the difference at an uncertain token, nats.
    """
    rng, samples, differences = np.random.default_rng([seed, step]), [], []
    for number, of_sample in enumerate(turns):
        spans, end = [], 0
        for turn, (prompt, answer) in enumerate(of_sample):
            start, end = end + prompt, end + prompt + answer
            spans.append(TrainedSpan(start, end, step - 1 if version is None else version, 1.0))
            sizes = np.broadcast_to(scale(np.arange(start, end), turn, start), answer)
            differences.append(rng.normal(0.0, 1.0, answer) * sizes)
        logprobs = np.full(sum(answer for _, answer in of_sample), -1.0, np.float32)
        names = {"env": "sums", "group_id": number // 4, "rollout_id": number % 4}
        ids, packed = bytes(4 * end), logprobs.tobytes()
        samples.append(TrainingSample(packed_ids=ids, spans=spans, packed_logprobs=packed, **names))
    all_differences = np.concatenate(differences)
    entropies = rng.gamma(0.4, 1.0, len(all_differences))  # most tokens are nearly certain
    all_differences *= np.sqrt(np.minimum(entropies, 1.0))
    write_samples(run_dir, step, samples)
    columns = {
        "trainer_logprobs": (all_differences - 1.0).astype(np.float32),
        "entropies": entropies.astype(np.float16),
        "flags": np.zeros(len(all_differences), np.uint8),
    }
    write_token_log(run_dir.tokens(step), columns)
