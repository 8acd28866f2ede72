"""What is read of recorded rollouts, and what is refused, by file, line and field."""

import json
import math

import pytest

from rl.models.renderer import conversation_ids, load_renderer
from rl.orchestrator.recorded.lines import Converter, RecordedTurn
from rl.orchestrator.recorded.run import read
from rl.system.errors import RunError
from rl.wire.rollouts import Group, Rollout, rollout_lines
from rl.wire.turns import unpack_kept
from tests.models.conversations import assistant, user
from tests.orchestrator.recorded.lines import config, line, turn, write
from tests.raised import run_error

VOCABULARY = 259
CHAT = [
    user("1 + 1?"),
    assistant("2"),
    user("sure?"),
    assistant("yes"),
]


def answer(parent, message, ids, *logprobs):
    """A node of a trace, whose last tokens were sampled."""
    mask = [False] * (len(ids) - len(logprobs)) + [True] * len(logprobs)
    said = {"message": message, "token_ids": ids, "mask": mask, "logprobs": [*logprobs]}
    return {"parent": parent, "sampled": True} | said


NODES = [
    {"message": CHAT[0], "token_ids": [5, 6], "mask": [False, False], "logprobs": []},
    answer(0, CHAT[1], [3, 7, 8], -1.0, -2.0),
    {"parent": 1, "message": CHAT[2], "token_ids": [9], "mask": [False]},
    answer(2, CHAT[3], [3, 4], -3.0),
]


def of(*prompt, **changes):
    return {"turns": [turn(*prompt, **changes)]}


def groups(tmp_path, model, *lines, **settings):
    return read(config(write(tmp_path / "r.jsonl", *lines), model, **settings), str(model), 10)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"reward": ...}, "Object missing required field `reward`"),
        ({"reward": None}, "reward: null, but the rollout did not fail"),
        ({"reward": "1"}, "Expected `float | null`, got `str` - at `$.reward`"),
        ({"reward": math.nan}, "the reward is nan"),
        ({"metrics": {"": 1.0}}, "'' is not a valid name"),
        (
            {"turns": [turn(), turn(completion=(7, VOCABULARY))]},
            r"turns[1].completion_ids[1]: 259 is not in the model's vocabulary of 259",
        ),
        (
            of(prompt=(-1,)),
            "turns[0].prompt_ids[0]: -1 is not in the model's vocabulary",
        ),
        (
            of(prompt=(1.5,)),
            "Expected `int`, got `float` - at `$.turns[0].prompt_ids[0]`",
        ),
        (of(kept=[[7], [9]]), "turns[0].kept[1]: lacks the token 8 itself, or has ids of another"),
        (of(kept=[[7, VOCABULARY], []]), "turns[0].kept[0]: lacks the token 7 itself, or has ids"),
        (of(kept=[[7], [8, 9, 9]]), "turns[0].kept[1]: has an id twice"),
        (of(kept=[[7]]), "policy versions and kept tokens differ in number: [1, 2]"),
        (of(prompt=()), "turns[0]: an answer to an empty prompt cannot be trained"),
        (
            of(prompt=(5,) * 127),
            "turns[0].completion_ids: ends after 129 tokens, but model.max_model_len = 128",
        ),
        (
            of(logprobs=[-0.5]),
            "turns[0]: an answer's tokens, logprobs, policy versions and kept tokens differ in number: [1, 2]",
        ),
        (of(policy_versions=[[0, 3]]), "differ in number: [2, 3]"),
        (
            of(logprobs=[-0.5, math.nan]),
            "turns[0].logprobs[1]: nan is not the logarithm of a probability",
        ),
        (of(logprobs=[0.5, -1.0]), "turns[0].logprobs[0]: 0.5 is not the logarithm"),
        (
            of(logprobs=[-0.5, -math.inf]),
            "turns[0].logprobs[1]: -inf is not the logarithm",
        ),
        (
            of(logprobs=[-0.5, None]),
            "Expected `float`, got `null` - at `$.turns[0].logprobs[1]`",
        ),
        (
            of(version=-1),
            "turns[0].policy_versions: a version is 0, the model that the run begins with, or more",
        ),
        (
            of(logprobs=None),
            "turns[0].logprobs: missing, and trainer.loss.type = policy_gradient weighs "
            "tokens by them",
        ),
        ({"turns": None}, "neither turns nor messages"),
        (
            {"turns": None, "messages": CHAT},
            "trainer.loss.importance = none, or trainer.loss.type = cross_entropy",
        ),
        ({"temperature": 0.5}, "temperature: not that of"),
        *(
            ({"temperature": heat}, f"temperature: {heat} is not a finite number above 0")
            for heat in (0.0, -1.0, math.nan, math.inf)
        ),
        (
            of(completion=(7, 1 << 31)),
            "turns[0].completion_ids[1]: 2147483648 is not in the model's vocabulary",
        ),
        (
            {"messages": [user("\ud83d")]},
            r"messages: \ud83d is half of a character and cannot be written",
        ),
        ({"env": "\ud83d"}, r"env: \ud83d is half of a character and cannot be written"),
        (
            {
                "example_id": 1,
                "prompt": [],
                "completion": [{"role": "assistant", "tool_calls": ["{"]}],
                "reward": 1.0,
            },
            "(JSONDecodeError: ",
        ),
    ],
)
def test_a_faulty_line_is_refused_by_its_number_and_field(tmp_path, model, broken, message):
    second = {key: value for key, value in (line() | broken).items() if value is not ...}
    with pytest.raises(RunError) as refused:
        groups(tmp_path, model, line(), second, model__max_model_len=128)
    assert str(refused.value).startswith(f"{tmp_path / 'r.jsonl'}:2: ") and message in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.jsonl: has no rollouts; write one a line"),
        ("\n\n", "r.jsonl: has no rollouts"),
        ("{}\n", "r.jsonl:1: Object missing required field `reward`"),
        ("[1]\n", "r.jsonl:1: a list; write one object a line"),
        ('{"reward": 1', "r.jsonl:1: not JSON"),
    ],
)
def test_a_file_of_something_else(tmp_path, model, text, message):
    (tmp_path / "r.jsonl").write_text(text)
    with run_error(message):
        read(config(tmp_path / "r.jsonl", model), str(model), 0)
    with run_error("there is no such file"):
        read(config(tmp_path / "other.jsonl", model), str(model), 0)


def test_ids_fit_also_a_model_that_does_not_tell_its_vocabulary(tmp_path, model):
    convert = Converter(config(tmp_path / "r.jsonl", model), str(model), 0)
    faults = [
        convert.fault(RecordedTurn(prompt_ids=[5], completion_ids=[7, id], logprobs=[-1.0] * 2))
        for id in (1 << 31, -1)
    ]
    assert [fault.partition(" is not")[0] for fault in faults] == [
        "completion_ids[1]: 2147483648",
        "completion_ids[1]: -1",
    ]


@pytest.mark.parametrize(("limit", "expected"), [(2, [[], None]), (3, [[], [8, 9, 3]]), (0, None)])
def test_kept_ids_are_read_up_to_the_limit_of_the_run(tmp_path, model, limit, expected):
    """With trainer.max_kept = 0 all ids count, whatever was recorded."""
    recorded = line(turns=[turn(kept=[[], [8, 9, 3]])])
    recording = groups(tmp_path, model, recorded, line(), **{"trainer.max_kept": limit})
    (first, _) = recording.groups[0].rollouts
    kept = first.turns.answers[0].kept
    assert (kept and unpack_kept(kept)) == expected


def test_sets_are_missed_only_where_the_run_truncates(tmp_path, model):
    """Regression: files of a version that recorded none were trained over all ids in silence."""
    lines = line(turns=[turn(kept=[[7], [8, 9]])]), line(), line(turns=None, messages=CHAT)
    loss = {"trainer__loss": "cross_entropy"}
    for top_k, limit, told in ((9, 512, [1]), (VOCABULARY, 512, []), (9, 0, [])):
        cut = {"orchestrator.sampling.top_k": top_k, "trainer.max_kept": limit}
        counts = groups(tmp_path, model, *lines, **cut, **loss).counts
        assert [
            n for what, n in counts.items() if "which ids top_p, top_k or min_p kept" in what
        ] == told


def test_versions_are_needed_only_on_policy(tmp_path, model):
    without = line(turns=[turn(policy_versions=None)])
    recording = groups(tmp_path, model, line(), without)
    assert [one.versions for one in recording.groups[0].rollouts] == [[0], []]
    lacking, uncompared = recording.counts
    assert recording.counts[lacking] == 1 and lacking.startswith(
        "do not say which version sampled them"
    )
    assert recording.counts[uncompared] == 1
    assert "nothing compares them with the trainer's" in uncompared
    with run_error(r"r.jsonl:2: turns\[0\].policy_versions: missing, and max_lag = 0"):
        groups(tmp_path, model, line(), without, max_lag=0)


@pytest.mark.parametrize(
    "loss", [{"trainer__loss": "cross_entropy"}, {"trainer__loss__importance": "none"}]
)
def test_logprobs_are_needed_only_by_losses_that_read_them(tmp_path, model, loss):
    recording = groups(
        tmp_path, model, line(turns=[turn(logprobs=None)]), line(messages=CHAT, turns=None), **loss
    )
    assert all(
        math.isnan(value)
        for one in recording.groups[0].rollouts
        for played in one.turns
        for value in played.logprobs
    )
    assert sum("no log-probabilities" in what for what in recording.counts) == 1
    with run_error("weighs tokens by them"):
        groups(tmp_path, model, line(turns=[turn(logprobs=None)]), trainer__loss="dppo")


def test_text_has_the_ids_of_a_rollout_with_that_text(tmp_path, model):
    chat = line(turns=None, messages=CHAT, num_prompt_messages=1)
    recording = groups(
        tmp_path, model, chat, chat | {"truncated": True}, trainer__loss="cross_entropy"
    )
    whole, cut = recording.groups[0].rollouts
    renderer = load_renderer(str(model), config(tmp_path / "r.jsonl", model).renderer)
    expected = [
        (prompt, answer) for _, _, prompt, answer in conversation_ids(renderer, CHAT, [1, 3], None)
    ]
    assert [(played.prompt_ids, played.completion_ids) for played in whole.turns] == expected
    assert len(whole.turns.chains) == 1 and renderer.decode(expected[1][1]) == "yes"
    assert not cut.turns and cut.truncated and cut.outcome == "truncated"
    with run_error(r"r.jsonl:1: the policy sampled 1 of its 2 answers, and nothing says which"):
        groups(tmp_path, model, chat | {"num_turns": 1}, trainer__loss="cross_entropy")


def test_rollouts_of_a_task_are_a_group(tmp_path, model):
    lines = [
        line(0),
        line(1),
        line(0, 1.0, sample=4),
        line(0, sample=4, agent="judge", why="not_trainable"),
        line(0, group_id=3),
    ]
    recording = groups(tmp_path, model, *lines, line(0, env="f", reward=None, error="broken"))
    found = [
        (group.group_id, group.env, group.task, [one.episode for one in group.rollouts])
        for group in recording.groups
    ]
    assert found == [
        (10, "e", 0, [0, 1, 1]),
        (11, "e", 1, [0]),
        (12, "e", 0, [0]),
        (13, "f", 0, [0]),
    ]
    assert recording.places[10] == [f"{tmp_path / 'r.jsonl'}:{number}" for number in (1, 3, 4)]
    assert [one.trainable for one in recording.groups[0].rollouts] == [True, True, False]
    assert recording.groups[3].rollouts[0].outcome == "failed" and recording.size == 6


def test_a_rollout_is_in_a_file_once(tmp_path, model):
    two = [line(0, sample=4, agents=2), line(0, sample=4, agents=2)]
    assert [
        one.episode for one in groups(tmp_path, model, *two, line(0, sample=5)).groups[0].rollouts
    ] == [0, 0, 1]
    for lines in ([line(0, sample=4), line(1, sample=4), line(0, sample=4)], [*two, two[0]]):
        with run_error(
            r"r.jsonl:3: sample: 4 of agent 'agent' is in .*r.jsonl:1 already; did two "
            r"programs write"
        ):
            groups(tmp_path, model, *lines)


def test_the_rollouts_of_a_run(tmp_path, model):
    """Regression: a stale opponent was trained, and its episode was two."""
    played = [
        Rollout(reward=1.0, episode=i // 2, agent="ab"[i % 2], trainable=i % 2 == 0)
        for i in range(4)
    ]
    stale = Group(group_id=3, env="e", task=0, rollouts=played, why="stale")
    lines = [json.loads(text) for text in rollout_lines([stale], 1, False).splitlines()]
    (group,) = groups(tmp_path, model, *(one | of() for one in lines)).groups
    found = [(one.episode, one.agent, one.trainable) for one in group.rollouts]
    assert found == [(0, "a", True), (0, "b", False), (1, "a", True), (1, "b", False)]


def test_the_temperature_is_that_of_the_trained(tmp_path, model):
    lines = [
        line(0, trainable=False),
        line(0, reward=None, error="broken"),
        line(0, temperature=0.5),
    ]
    assert groups(tmp_path, model, *lines).groups[0].temperature == 0.5


def test_without_a_task_equal_prompts_are_one(tmp_path, model):
    lines = [line() | {"task": None, "messages": [user(text), CHAT[1]]} for text in ("a", "b", "a")]
    lines += [line() | {"task": None, "turns": [turn(prompt)]} for prompt in ((1,), (2,), (1,))]
    assert [len(group.rollouts) for group in groups(tmp_path, model, *lines).groups] == [2, 1, 2, 1]
    named = groups(tmp_path, model, line("x"), line("y"), line("x")).groups
    assert [(group.task, len(group.rollouts)) for group in named] == [(0, 2), (1, 1)]


def test_several_files_have_samples_of_their_own(tmp_path, model):
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", line(0, sample=0), line(1, sample=0))
    recording = read(config(tmp_path / "*.jsonl", model), str(model), 0)
    assert [[one.episode for one in group.rollouts] for group in recording.groups] == [
        [0, 1],
        [0, 1],
    ]
    assert [place.split("/")[-1] for place in recording.places[0]] == ["a.jsonl:1", "b.jsonl:1"]


def test_results_of_the_classic_api(tmp_path, model):
    tokens = {
        "prompt_ids": [5],
        "prompt_mask": [0],
        "completion_ids": [7, 8],
        "completion_mask": [1, 1],
        "completion_logprobs": [-1.0, -2.0],
    }
    row = {
        "example_id": 4,
        "prompt": CHAT[:1],
        "completion": CHAT[1:],
        "reward": 1.0,
        "metrics": {"right": 1.0},
        "is_truncated": False,
    }
    with_ids = row | {
        "trajectory": [
            {"tokens": tokens},
            {"tokens": tokens | {"prompt_ids": [5, 7, 8, 9], "is_truncated": True}},
        ]
    }
    failed = row | {"error": {"error_chain_repr": "Boom()"}, "trajectory": None}
    recording = groups(tmp_path, model, with_ids, row, failed, trainer__loss="cross_entropy")
    assert [(group.task, len(group.rollouts)) for group in recording.groups] == [(4, 3)]
    first, second, third = recording.groups[0].rollouts
    assert [played.token_ids for played in first.turns] == [
        [5, 7, 8],
        [5, 7, 8, 9, 7, 8],
    ] and first.turns[1].logprobs == [-1.0, -2.0]
    assert first.metrics == {"right": 1.0}
    assert first.num_prompt_messages == 1
    assert first.truncated
    assert not first.versions
    assert len(second.turns) == 2 and math.isnan(second.turns[0].logprobs[0])
    assert third.error == "Boom()"
    text = row | {"prompt": "1 + 1", "completion": "2"}
    with run_error(r"r.jsonl:1: completion: is text without token ids; save them, with trajectory"):
        groups(tmp_path, model, text, trainer__loss="cross_entropy")
    with run_error(r"r.jsonl:1: trajectory: an answer has masked tokens"):
        groups(
            tmp_path,
            model,
            row | {"trajectory": [{"tokens": tokens | {"completion_mask": [1, 0]}}]},
        )
    with run_error(r"r.jsonl:1: not as verifiers writes it \(KeyError: 'prompt'\)"):
        groups(tmp_path, model, {"example_id": 4, "completion": []})


def test_traces_of_the_v1_api(tmp_path, model):
    rewards = {"right": {"score": 1.0, "weight": 0.5}, "short": {"score": 0.25}, "judge": None}
    trace = {
        "nodes": NODES,
        "agent": {"name": "solver"},
        "rewards": rewards,
        "metrics": {"n": 2.0, "m": None},
        "ok": True,
    }
    episode = {
        "id": "x",
        "env": {"id": "sums"},
        "task": {"key": "t1"},
        "ok": True,
        "traces": [trace, trace | {"agent": {"trainable": False}}],
    }
    bare = [
        {key: node[key] for key in node if key not in ("token_ids", "mask", "logprobs")}
        for node in NODES
    ]
    without = episode | {"traces": [trace | {"nodes": bare}], "id": "y"}
    broken = episode | {
        "ok": False,
        "errors": [{"message": "no answer"}],
        "traces": [trace],
        "id": "z",
    }
    recording = groups(tmp_path, model, episode, without, broken, trainer__loss="cross_entropy")
    (group,) = recording.groups
    assert (group.env, [one.episode for one in group.rollouts]) == ("sums", [0, 0, 1, 2])
    solver, other, text, failed = group.rollouts
    assert [(played.prompt_ids, played.completion_ids) for played in solver.turns] == [
        ([5, 6, 3], [7, 8]),
        ([5, 6, 3, 7, 8, 9, 3], [4]),
    ]
    assert solver.turns[1].logprobs == [-3.0]
    assert solver.reward == 0.75
    assert solver.metrics == {"right": 1.0, "short": 0.25, "n": 2.0}
    assert solver.messages == CHAT
    assert solver.num_prompt_messages == 1
    assert solver.agent == "solver"
    assert not other.trainable
    assert len(text.turns) == 2 and math.isnan(text.turns[0].logprobs[0])
    assert failed.error == "no answer" and json.dumps(failed.messages)


@pytest.mark.parametrize(
    ("heats", "expected"),
    [((0.7, 0.7), 0.7), ((None, None), 1.0), ((), 1.0), ((0.7, 0.9), None), ((0.7, None), None)],
)
def test_the_temperature_of_a_trace(tmp_path, model, heats, expected):
    nodes = [NODES[0], answer(0, CHAT[1], [3, 7], -1.0), answer(1, CHAT[1], [3])]
    calls = [{"sampling": {"temperature": heat}} for heat in heats] + [
        {"sampling": {"temperature": 9.0}, "error": {"message": "x"}}
    ]
    trace = {"nodes": nodes, "agent": {}, "ok": True, "calls": calls}
    row = {
        "id": "x",
        "task": {"key": "t"},
        "ok": True,
        "traces": [trace, trace | {"agent": {"trainable": False}, "calls": []}],
    }
    if expected is None:
        with run_error(r"r.jsonl:1: calls: sampled at several temperatures \(0.7, "):
            groups(tmp_path, model, row)
        return
    recording = groups(tmp_path, model, row)
    (group,) = recording.groups
    assert group.temperature == expected and [
        len(played.logprobs) for played in group.rollouts[0].turns
    ] == [1, 0]
    told = [
        count
        for what, count in recording.counts.items()
        if "nothing compares them with the trainer's" in what
    ]
    assert told == ([] if expected == 0.7 else [1])


def test_rows_of_two_environments_are_told_apart_or_told(tmp_path, model):
    """Regression: two environments number their tasks alike, and were compared with each other."""
    asked = [user(text) for text in ("1 + 1?", "the capital of France?")]
    rows = [
        {
            "example_id": 0,
            "prompt": [one],
            "completion": [CHAT[1]],
            "reward": float(i),
            "metrics": {},
        }
        for i, one in enumerate(asked)
    ]
    named = [
        row | {"info": {"env_id": name}}
        for row, name in zip(rows, ("sums", ["facts", "europe"]), strict=True)
    ]
    apart = groups(tmp_path, model, *named, trainer__loss="cross_entropy")
    assert [(group.env, len(group.rollouts)) for group in apart.groups] == [
        ("sums", 1),
        ("facts/europe", 1),
    ]
    one = groups(tmp_path, model, *rows, rows[0], trainer__loss="cross_entropy")
    told = {
        what: count
        for what, count in one.counts.items()
        if "another prompt than the first of their task" in what
    }
    assert len(one.groups) == 1 and list(told.values()) == [1]
