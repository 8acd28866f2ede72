"""The teacher's client against a real HTTP server."""

import asyncio

import pytest
from aiohttp import web
from tokenizers import Tokenizer

from rl.config.orchestrator import EnvConfig, OrchestratorConfig, TeacherConfig
from rl.config.run import RLConfig
from rl.models import probes
from rl.orchestrator.batches.contents import group_samples
from rl.orchestrator.groups.teacher import Teacher, make_teachers
from rl.wire.rollouts import Group, Rollout
from rl.wire.worker_messages import Ready, RenderedChat
from tests.orchestrator.made import turn
from tests.orchestrator.stub_teacher import StubTeacher, logprob
from tests.raised import run_error


def against(stub, act, **options):
    """Runs `act(teacher, stub)` with a stub server."""

    async def main():
        async with stub:
            teacher = Teacher(
                TeacherConfig(base_url=stub.url + "/", **{"timeout_s": 20.0, **options})
            )
            try:
                return await act(teacher, stub)
            finally:
                await teacher.close()

    return asyncio.run(main())


def nonsense(text="{}"):
    return web.Response(text=text, content_type="application/json")


def test_a_chain_of_turns_is_one_request_and_every_sampled_token_gets_its_own_number():
    rollouts = [
        Rollout(turns=[turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9], [7]), turn([5], [6])]),
        Rollout(turns=[turn([1], [2])], error="boom"),
        Rollout(turns=[turn([1], [2])], trainable=False),
        Rollout(turns=[turn([1], [2])], truncated=True),
        Rollout(turns=[turn([1], [])]),
    ]

    async def act(teacher, stub):
        teacher.model = "big"
        await teacher.score_group(
            Group(group_id=0, env="e", task=0, rollouts=rollouts), mask_truncated=True
        )
        return stub.requests

    assert sorted(against(StubTeacher(), act)) == [[1, 2, 3, 4, 9, 7], [5, 6]]
    samples = group_samples(
        Group(group_id=0, env="e", task=0, rollouts=rollouts[:1], advantages=[0.0])
    )
    for sample in samples:
        expected = [logprob(sample.token_ids.tolist(), place) for place in sample.trained.tolist()]
        assert sample.teacher_logprobs.tolist() == pytest.approx(expected)
    assert all(
        answer.teacher_logprobs is None
        for rollout in rollouts[1:]
        for answer in rollout.turns.answers
    )


def test_what_passes_is_repeated_and_what_does_not_fails_the_rollout():
    trouble = [
        web.Response(status=503),
        nonsense(),
        nonsense("oops"),
        nonsense('{"choices": [{"prompt_logprobs": [null, {"9": {"logprob": 0}}]}]}'),
    ]
    rollouts = [Rollout(turns=[turn([1], [2])]), Rollout(turns=[turn([3], [4])])]

    async def act(teacher, stub):
        teacher.model, teacher.checked = "big", True
        stub.answers = trouble
        first = await teacher.score([1, 2])
        stub.answers = [
            web.json_response({"error": {"message": "Token id 2 is out of vocabulary"}}, status=400)
        ]
        await teacher._score_rollout(rollouts[0])
        await teacher._score_rollout(rollouts[1])
        return first

    assert against(StubTeacher(), act) == [0.0, logprob([1, 2], 1)]
    assert rollouts[0].cause == "teacher" and rollouts[1].error is None
    for text in (
        "/v1/completions",
        "400",
        "Token id 2 is out of vocabulary",
        "must have the tokenizer of the trained model",
    ):
        assert text in rollouts[0].error


@pytest.mark.parametrize("answer", [None, "away"])
def test_a_teacher_that_is_down_fails_at_its_deadline(answer):
    async def act(teacher, stub):
        teacher.model = "big"
        stub.answers = [None]
        if answer == "away":
            await stub.runner.cleanup()
        with run_error(
            r"waited 1 s for the teacher at http://127.*completions.*teacher\.timeout_s"
        ) as caught:
            await teacher.score([1, 2])
        assert ("Connect" if answer == "away" else "no answer yet") in str(caught.value)

    against(StubTeacher(), act, timeout_s=1.0)


OURS = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"


@pytest.fixture
def ours(model):
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture
def check(model, ours):
    """Checks the teacher behind a stub. Returns (its model, warnings)."""
    chat = RenderedChat(probes.CHAT, ours.encode(OURS.format(probes.TEXT)).ids, {0, 1, 2})

    def check(stub, answers=(), renderer=None, **options):
        config = RLConfig(model={"max_model_len": 256}, renderer=renderer or {})

        async def act(teacher, stub):
            stub.answers = list(answers)
            warnings = await teacher.check(config, str(model), {"e": Ready(1, 1, chat=chat)})
            return teacher.model, warnings

        return against(stub, act, **options)

    return check


def test_the_check_at_the_start(check, ours, monkeypatch):

    assert check(StubTeacher(tokenizer=ours)) == ("big", [])
    assert check(StubTeacher()) == ("big", [])  # no /detokenize: trusted
    with run_error("serves big, not small"):
        check(StubTeacher(), model="small")
    with run_error(r"sequences of 256 tokens.*max_model_len = 256 needs 257"):
        check(StubTeacher(max_model_len=256))
    with run_error("no prompt_logprobs"):
        check(StubTeacher(), [nonsense('{"choices": [{"text": ""}]}')])

    class Shorter:
        def decode(self, ids, **_):
            return (
                ""
                if max(ids) == ours.get_vocab_size() - 1
                else ours.decode(ids, skip_special_tokens=False)
            )

    with run_error("has another tokenizer"):
        check(StubTeacher(tokenizer=Shorter()))
    with run_error(r"wrong key.*environment variable SOME_KEY"):
        check(StubTeacher(key="secret"), api_key_var="SOME_KEY")
    monkeypatch.setenv("SOME_KEY", "secret")
    assert check(StubTeacher(key="secret"), api_key_var="SOME_KEY") == ("big", [])


def test_a_teacher_whose_log_probabilities_mean_nothing_is_refused(check):
    """Random weights find text as likely as its tokens in disorder. vLLM 0.32 has modes in which
    it gives logits."""
    with run_error("-2.0 nats on average, 0.29 more than in disorder.*lower teacher.least_gain = "):
        check(StubTeacher(sense=0.29))
    assert check(StubTeacher(sense=0.31)) == ("big", [])
    assert check(StubTeacher(sense=0.0), least_gain=-0.5) == ("big", [])  # it knows other texts
    assert "plain text -5.0 nats on average" in check(StubTeacher(shift=-3.0))[1][0]
    with run_error("which is no log-probability.*--logprobs-mode"):
        check(StubTeacher(shift=8.0))


def test_the_teachers_chat_template_is_compared_with_the_runs(check, ours):
    def against_template(text, **options):
        rendered = ours.encode(text.format(probes.TEXT)).ids
        stub = StubTeacher(tokenizer=ours, rendered=rendered)
        return check(stub, **options)[1], stub.tokenized[0]

    body = {"model": "big", "messages": probes.CHAT, "chat_template_kwargs": {}}
    assert against_template(OURS) == ([], body)
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    assert against_template(OURS, renderer={"enable_thinking": False}) == ([], body | switch)
    dated = OURS.replace("Be brief", "Today is 1 May. Be brief")
    [warning], _ = against_template(dated)
    assert repr(dated.format("...")) in warning and repr(OURS.format("...")) in warning
    with run_error(r"another chat template: it writes .*<\|endoftext\|>user.*--chat-template"):
        against_template(OURS.replace("<|im_start|>", "<|endoftext|>"))
    fault = web.json_response({"error": {"message": "no default chat template"}}, status=400)
    assert "not known: teacher" in check(StubTeacher(rendered=fault))[1][0]


@pytest.mark.parametrize(
    ("url", "settings", "sent"),
    [
        ("https://far.example/v1", {}, True),
        ("http://localhost:8000/v1", {}, True),
        ("http://[::1]:8000/v1", {}, True),
        ("http://far.example/v1", {}, False),
        ("http://10.0.0.7:8000/v1", {}, False),
        ("http://10.0.0.7:8000/v1", {"key_over_http": True}, True),
    ],
)
def test_a_key_is_not_sent_where_others_can_read_it(monkeypatch, url, settings, sent):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    teacher = Teacher(TeacherConfig(base_url=url, **settings))
    assert ("Authorization" in teacher.headers) == sent
    assert sent == ("is not sent over plain http" not in teacher._remedy(401))


def test_environments_share_a_teacher_or_have_their_own():
    default, other = TeacherConfig(base_url="http://a/v1"), TeacherConfig(base_url="http://b/v1")
    again = TeacherConfig(base_url="http://a/v1")
    envs = [
        EnvConfig(id="e", name=name, teacher=teacher)
        for name, teacher in {"x": None, "y": other, "z": again}.items()
    ]
    teachers = make_teachers(OrchestratorConfig(environment=envs, teacher=default))
    assert teachers["x"] is teachers["z"] and teachers["y"].url == "http://b/v1"
    assert list(make_teachers(OrchestratorConfig(environment=envs[:2]))) == ["y"]
