"""`rl collect`: which tasks, what is in the file, and going on where an earlier start ended."""

import json
from itertools import islice

import pytest

from rl.commands.collect import Collection, jobs_left, only_writer, read_present, task_order
from rl.config.command_line import build, parse_args
from rl.config.kinds import SftConfig
from rl.orchestrator.recorded.lines import parse
from rl.system.errors import RunError
from rl.trainer.sft.rows import why_unused
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import Ready
from tests import jsonl
from tests.commands.driver import rl, with_server
from tests.commands.servers import Endpoint
from tests.orchestrator.made import turn
from tests.web import serving


def line(env="e", task=0, sample=0, agents=1):
    return json.dumps({"env": env, "task": task, "sample": sample, "agents": agents}) + "\n"


def test_tasks_come_from_the_environments_in_turn():
    assert list(task_order({"a": 3, "b": 1})) == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    assert list(islice(task_order({"a": None, "b": 1}), 4)) == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("a", 2),
    ]
    assert list(task_order({"a": 0})) == []


def test_only_what_is_missing_is_played():
    flags = ["--orchestrator.environment.id", "a"]
    config, values = build(parse_args(flags)), {"limit": 3, "samples": 2}
    ready = {"a": Ready(num_train=None, num_eval=0)}
    jobs = jobs_left(config, ready, {("a", 0): {0, 1}, ("a", 1): {1}}, values)
    assert [(job.env, job.task, job.num_episodes) for job in jobs] == [("a", 1, 1), ("a", 2, 2)]


def test_a_line_that_was_not_finished_is_cut_with_its_episode(tmp_path):
    path = tmp_path / "r.jsonl"
    assert read_present(path) == {}
    whole = line() + line(sample=1) + line("f", 4)
    path.write_text(whole)
    assert read_present(path) == {("e", 0): {0, 1}, ("f", 4): {0}} and path.read_text() == whole
    for left in (line()[:9], line(task=1, agents=2), line(task=1, agents=3) * 2 + line()[:20]):
        path.write_text(whole + left)
        assert read_present(path) == {("e", 0): {0, 1}, ("f", 4): {0}} and path.read_text() == whole
    path.write_text(line(agents=2) * 2)
    assert read_present(path) == {("e", 0): {0}}
    path.write_text(line()[:9])
    assert read_present(path) == {} and path.read_text() == ""
    assert read_present(path) == {}


def test_a_file_of_something_else(tmp_path):
    path = tmp_path / "r.jsonl"
    for content in ('{"messages": []}\n', '{"accuracy": 0.5}', line() + '{"messages"'):
        path.write_text(content)
        with pytest.raises(RunError, match=r"line [12] was not written by `rl collect`"):
            read_present(path)
        assert path.read_text() == content


def test_a_file_has_one_writer(tmp_path):
    path = tmp_path / "r.jsonl"
    with only_writer(path):
        path.write_text(line())
        with pytest.raises(RunError, match="another `rl collect`"), only_writer(path):
            pass
    with only_writer(path), only_writer(tmp_path / "new.jsonl"):
        pass
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_is_filled_in_two_starts(tmp_path, model):
    path = tmp_path / "r.jsonl"
    flags = (f"--orchestrator.environment.id say-digit --output {path} --samples 2",)
    with serving(Endpoint("good")) as server:
        code, out, err = rl(tmp_path, "collect", *flags, "--policy", server.url, "--limit 1")
        assert code == 0 and f"rollouts written to {path}: 2 finished; mean reward 1.000" in out, (
            err
        )
        path.write_text(path.read_text() + '{"env": "say-di')
        code, out, err = rl(tmp_path, "collect", *flags, "--policy", server.url, "--limit 3")
        assert code == 0 and len(server.asked) == 6, err
    flags = (
        *flags,
        f"--model.name {model} --model.max_model_len 256 --orchestrator.sampling.max_tokens 8",
    )
    code, out, err = rl(
        tmp_path,
        "collect",
        *flags,
        "--limit 3",
        code=with_server("import sys; sys.exit('no server')"),
    )
    # and no server was waited for
    assert code == 0 and f"all 6 rollouts are in {path}; nothing is left to play" in out, err
    assert not list(tmp_path.glob("outputs/*/server"))
    folders = {path.name for path in (tmp_path / "outputs").iterdir()}  # named by what was played
    assert folders == {"collect-say-digit-good", f"collect-say-digit-{model.name}"}
    lines = jsonl.read(path)
    assert sorted((one["task"], one["sample"]) for one in lines) == [
        (task, sample) for task in (0, 1, 2) for sample in (0, 1)
    ]
    keys = "env task sample policy agent messages reward metrics outcome stop"
    assert set(keys.split()) <= set(lines[0])
    assert (lines[0]["policy"], lines[0]["reward"], lines[0]["outcome"]) == (
        "good",
        1.0,
        "finished",
    )
    assert "turns" not in lines[0]


def test_lines_say_which_agents_are_not_trained(tmp_path):
    path = tmp_path / "r.jsonl"
    told = Collection("p", {}, path, tokens=False)
    told.write("e", 0, [Rollout(agent="solver"), Rollout(agent="judge", trainable=False)], 1.0)
    lines = jsonl.read(path)
    assert [(line["agent"], line.get("why")) for line in lines] == [
        ("solver", None),
        ("judge", "not_trainable"),
    ]
    assert [
        why_unused({**line, "outcome": "finished"}, "r.jsonl:1", SftConfig(dataset="d"))
        for line in lines
    ] == [
        None,
        "rollouts of agents that are not trained",
    ]


def test_what_is_collected_with_tokens_can_be_trained(tmp_path):
    path = tmp_path / "r.jsonl"
    told = Collection("p", {}, path, tokens=True)
    told.write(
        "e",
        3,
        [Rollout(turns=[turn((1, 2), (3,))], reward=1.0), Rollout(error="broken", episode=1)],
        0.7,
    )
    first, failed = (parse(line, "line") for line in jsonl.read(path))
    assert (first.task, first.reward, first.temperature, first.turns[0].completion_ids) == (
        3,
        1.0,
        0.7,
        [3],
    )
    assert first.turns[0].policy_versions[0].num_tokens == 1
    assert failed.error == "broken"
    assert failed.reward is None
