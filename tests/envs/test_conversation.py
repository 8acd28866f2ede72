"""What a conversation keeps: every turn exactly as it was sent and sampled, and nothing twice."""

import asyncio
import random

import msgspec
import pytest

from rl.envs.classic.client import TextConversation
from rl.envs.policy import Conversation, RolloutError
from rl.models import probes
from rl.models.chat import RendererError
from rl.wire.turns import Turns
from tests.envs.stub_policy import StubPolicy, text
from tests.models.conversations import assistant, user

SAMPLING = {"max_tokens": 64, "temperature": 1.0}


def answer(chat, prompt, **overrides):
    return asyncio.run(chat.answer(prompt, None, overrides))


def sent(policy):
    return [call["token_ids"] for call in policy.servers.asked]


def test_a_long_chat_is_kept_once():
    policy = StubPolicy(lambda prompt: "answer", max_model_len=100_000)
    chat, messages = Conversation(policy, 0, SAMPLING), []
    for number in range(200):
        messages.append(user(f"question {number}"))
        answer(chat, messages)
        messages.append(assistant("answer"))
    assert len(chat.history[-1].messages) == 400
    assert len({id(message) for past in chat.history for message in past.messages}) == 400
    assert [turn.prompt_ids for turn in chat.turns] == sent(policy)
    assert len(chat.turns.chains) == 1
    assert len(msgspec.msgpack.encode(chat.turns)) < 12 * chat.turns.chains[0].num_tokens + 30 * 200


def test_a_teacher_is_compared_on_a_chat_that_the_template_renders(monkeypatch):
    policy = StubPolicy(lambda prompt: "answer")
    chat = policy.chat_for_teachers()
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert probes.TEXT in text(chat.token_ids) and chat.special_ids == policy.renderer.special_ids
    render = policy.renderer.prompt_ids

    def without_system(messages):
        if messages[0]["role"] == "system":
            raise RendererError("no system role")
        return render(messages)

    monkeypatch.setattr(policy.renderer, "prompt_ids", without_system)
    assert policy.chat_for_teachers().token_ids == render(probes.CHAT[1:])
    policy.endpoint = object()
    assert policy.chat_for_teachers() is None


def test_routes_are_kept_once_for_each_token():
    policy = StubPolicy(lambda prompt: "answer")
    chats = [Conversation(policy, 0, SAMPLING) for _ in range(2)]
    messages = [user("question")]
    answer(chats[0], messages)
    policy.spec.routes = True
    for _ in range(3):
        content = answer(chats[1], messages)[1].content
        messages += [assistant(content), user("next")]
    asked = [call["sampling"].get("routes") for call in policy.servers.asked]
    assert asked == [None, True, True, True] and not chats[0].turns[0].routes
    (chain,) = chats[1].turns.chains
    assert len(chain.routes) == 2 * (chain.num_tokens - 1)


def test_kept_ids_are_asked_for_where_turns_are_trained():
    """An evaluation may truncate although training does not; a GPU's server refuses it then."""
    policy = StubPolicy(lambda prompt: "answer")
    policy.spec.max_kept = 9
    for seed in (None, 5):
        answer(Conversation(policy, 0, SAMPLING, seed=seed), [user("question")])
    assert [call["sampling"].get("max_kept") for call in policy.servers.asked] == [9, None]


def test_words_that_the_assistant_has_begun_are_not_closed():
    """Regression: a second answer was sampled behind them, as if they were a whole turn."""
    chat = Conversation(StubPolicy(lambda prompt: "answer"), 0, SAMPLING)
    refused = "end with the assistant's words, which are not continued"
    with pytest.raises(RolloutError, match=refused) as raised:
        answer(chat, [user("question"), assistant("The answer is")])
    assert raised.value.cause == "environment"


@pytest.mark.parametrize("seed", range(10))
def test_branches_continue_the_turn_that_they_leave(seed):
    """Two chats with common turns: each prompt is that of the newest conversation that it
    extends."""
    draw, turns = random.Random(seed), Turns()
    policy = StubPolicy(lambda prompt: random.Random(prompt).choice(["yes", "no"]))
    chats = [Conversation(policy, 0, SAMPLING, turns) for _ in range(2)]
    told = [[[user("begin")]] for _ in chats]
    for _ in range(20):
        i = draw.randrange(2)
        messages = draw.choice(told[i])
        content = answer(chats[i], messages)[1].content
        told[i].append([*messages, assistant(content), user(draw.choice("ab"))])
    assert [turn.prompt_ids for turn in turns] == sent(policy)
    for asked in map(text, sent(policy)):
        assert asked.endswith("assistant: ") and asked.count("begin") == 1


def test_a_text_continues_the_ids_of_its_earlier_answers():
    policy, turns = StubPolicy(lambda prompt: "answer", max_model_len=100_000), Turns()
    talk, text = TextConversation(policy, 0, SAMPLING, turns), ""
    for _ in range(50):
        text += "question "
        text += answer(talk, text)[1].content
    assert "".join(talk.history[-1].messages) == text
    assert [turn.prompt_ids for turn in turns] == sent(policy) and len(turns.chains) == 1


@pytest.mark.parametrize(
    ("overrides", "content"),
    [({}, "<a>3"), ({"stop": "3"}, "<a>"), ({"stop": ["x", "/"]}, "<a>3<"), ({"stop": []}, "<a>3")],
)
def test_a_stop_string_is_left_out_of_the_content_and_kept_in_the_turn(overrides, content):
    """As OpenAI's servers do. The last token may have more than the stop string."""
    policy = StubPolicy(lambda prompt: "<a>3</a>;")
    chat, talk = (
        kind(policy, 0, SAMPLING | {"stop": ["</a>", "</b>"]})
        for kind in (Conversation, TextConversation)
    )

    asked = [user("q")]
    turns = []
    for one, prompt in ((chat, asked), (talk, "q")):
        turn, answered = answer(one, prompt, **overrides)
        assert answered.content == content and text(turn.completion_ids) == "<a>3</a>;\x03"
        turns.append(turn)
    after, _ = answer(chat, [*asked, assistant(content), *asked], **overrides)
    assert after.prompt_ids[: len(turns[0].token_ids)] == turns[0].token_ids
    turn, _ = answer(talk, f"q{content}!", **overrides)
    assert text(turn.prompt_ids) == f"q{content}!", "a text that was not sampled is encoded"
    assert policy.servers.asked[0]["sampling"]["stop"] == (
        overrides.get("stop") or ["</a>", "</b>"]
    )


@pytest.mark.parametrize("kind", [Conversation, TextConversation])
def test_each_turn_of_a_seeded_conversation_has_a_seed_of_its_own_and_again_the_same(kind):
    def seeds(seed):
        policy = StubPolicy(lambda prompt: "yes")
        chat = kind(policy, 0, SAMPLING, Turns(), seed=seed)

        for turn in range(3):
            text = "a" + "yesa" * turn
            answer(chat, text if kind is TextConversation else [user(text)])
        return [call["sampling"].get("seed") for call in policy.servers.asked]

    assert seeds(7) == seeds(7) and len({*seeds(7), *seeds(8)}) == 6
    assert seeds(None) == [None] * 3


@pytest.mark.parametrize("kind", [Conversation, TextConversation])
def test_requests_of_one_conversation_at_once_have_seeds_of_their_own(kind):
    """They had the same, so that an evaluation by a vote of five answers had one answer five
    times."""

    async def later():
        await asyncio.sleep(0.01)
        return "yes"

    policy = StubPolicy(lambda prompt: later())
    chat = kind(policy, 0, SAMPLING, Turns(), seed=7)
    prompt = "a" if kind is TextConversation else [user("a")]

    async def vote():
        await asyncio.gather(*(chat.answer(prompt, None, {}) for _ in range(5)))

    asyncio.run(vote())
    assert len({call["sampling"]["seed"] for call in policy.servers.asked}) == 5
