"""What a conversation keeps: every turn exactly as it was sent and sampled, and nothing twice."""

import asyncio
import random

import msgspec
import pytest

from rl.envs.classic.client import TextConversation
from rl.envs.policy import Conversation, RolloutError
from rl.wire.turns import Turns
from tests.envs.stub_policy import StubPolicy, text

SAMPLING = {"max_tokens": 64, "temperature": 1.0}


def sent(policy):
    return [call["token_ids"] for call in policy.servers.asked]


def test_a_long_chat_is_kept_once():
    policy = StubPolicy(lambda prompt: "answer", max_model_len=100_000)
    chat = Conversation(policy, 0, SAMPLING)

    async def talk():
        messages = []
        for number in range(200):
            messages.append({"role": "user", "content": f"question {number}"})
            await chat.answer(messages, None, {})
            messages.append({"role": "assistant", "content": "answer"})

    asyncio.run(talk())
    assert len(chat.history[-1].messages) == 400
    assert len({id(message) for past in chat.history for message in past.messages}) == 400
    assert [turn.prompt_ids for turn in chat.turns] == sent(policy)
    assert len(chat.turns.chains) == 1
    assert len(msgspec.msgpack.encode(chat.turns)) < 12 * chat.turns.chains[0].num_tokens + 30 * 200


def test_routes_are_kept_once_for_each_token():
    policy = StubPolicy(lambda prompt: "answer")
    chats = [Conversation(policy, 0, SAMPLING) for _ in range(2)]

    async def talk():
        messages = [{"role": "user", "content": "question"}]
        await chats[0].answer(messages, None, {})
        policy.spec.routes = True
        for _ in range(3):
            _, answer = await chats[1].answer(messages, None, {})
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": "next"},
            ]

    asyncio.run(talk())
    asked = [call["sampling"].get("routes") for call in policy.servers.asked]
    assert asked == [None, True, True, True] and not chats[0].turns[0].routes
    (chain,) = chats[1].turns.chains
    assert len(chain.routes) == 2 * (chain.num_tokens - 1)


def test_words_that_the_assistant_has_begun_are_not_closed():
    """Regression: a second answer was sampled behind them, as if they were a whole turn."""
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "The answer is"},
    ]
    with pytest.raises(
        RolloutError, match="end with the assistant's words, which are not continued"
    ) as raised:
        asyncio.run(
            Conversation(StubPolicy(lambda prompt: "answer"), 0, SAMPLING).answer(
                messages, None, {}
            )
        )
    assert raised.value.cause == "environment"


@pytest.mark.parametrize("seed", range(10))
def test_branches_continue_the_turn_that_they_leave(seed):
    """Two chats with common turns: each prompt is that of the newest conversation that it
    extends."""
    draw, policy = (
        random.Random(seed),
        StubPolicy(lambda prompt: random.Random(prompt).choice(["yes", "no"])),
    )
    turns = Turns()
    chats = [Conversation(policy, 0, SAMPLING, turns) for _ in range(2)]
    told = [[[{"role": "user", "content": "begin"}]] for _ in chats]

    async def talk():
        for _ in range(20):
            i = draw.randrange(2)
            messages = draw.choice(told[i])
            _, answer = await chats[i].answer(messages, None, {})
            told[i].append(
                [
                    *messages,
                    {"role": "assistant", "content": answer.content},
                    {"role": "user", "content": draw.choice("ab")},
                ]
            )

    asyncio.run(talk())
    assert [turn.prompt_ids for turn in turns] == sent(policy)
    for asked in map(text, sent(policy)):
        assert asked.endswith("assistant: ") and asked.count("begin") == 1


def test_a_text_continues_the_ids_of_its_earlier_answers():
    policy, turns = StubPolicy(lambda prompt: "answer", max_model_len=100_000), Turns()
    talk = TextConversation(policy, 0, SAMPLING, turns)

    async def go():
        text = ""
        for _ in range(50):
            text += "question "
            text += (await talk.answer(text, None, {}))[1].content
        return text

    text = asyncio.run(go())
    assert "".join(talk.history[-1].messages) == text
    assert [turn.prompt_ids for turn in turns] == sent(policy) and len(turns.chains) == 1


@pytest.mark.parametrize(
    ("overrides", "content"),
    [({}, "<a>3"), ({"stop": "3"}, "<a>"), ({"stop": ["x", "/"]}, "<a>3<"), ({"stop": []}, "<a>3")],
)
def test_a_stop_string_is_left_out_of_the_content_and_kept_in_the_turn(overrides, content):
    """As OpenAI's servers do. The last token may have more than the stop string."""
    policy, said = StubPolicy(lambda prompt: "<a>3</a>;"), "<a>3</a>;\x03"
    chat, talk = (
        kind(policy, 0, SAMPLING | {"stop": ["</a>", "</b>"]})
        for kind in (Conversation, TextConversation)
    )

    async def go():
        ask = {"role": "user", "content": "q"}
        turn, answer = await chat.answer([ask], None, overrides)
        assert answer.content == content and text(turn.completion_ids) == said
        after, _ = await chat.answer(
            [ask, {"role": "assistant", "content": content}, ask], None, overrides
        )
        assert after.prompt_ids[: len(turn.token_ids)] == turn.token_ids
        turn, answer = await talk.answer("q", None, overrides)
        assert answer.content == content and text(turn.completion_ids) == said
        turn, _ = await talk.answer(f"q{content}!", None, overrides)
        assert text(turn.prompt_ids) == f"q{content}!", "a text that was not sampled is encoded"

    asyncio.run(go())
    assert policy.servers.asked[0]["sampling"]["stop"] == (
        overrides.get("stop") or ["</a>", "</b>"]
    )


def test_a_text_begins_with_the_bos_token_of_its_tokenizer():
    policy, turns = StubPolicy(lambda prompt: "b"), Turns()
    policy.renderer.bos = "^"
    talk = TextConversation(policy, 0, SAMPLING, turns)

    async def go():
        for asked in ("a", "abc", "another"):  # the second one continues the first
            await talk.answer(asked, None, {})

    asyncio.run(go())
    assert [text(ids) for ids in sent(policy)] == [
        "^a",
        "^ab\x03c",
        "^another",
    ] and len(turns.chains) == 2


@pytest.mark.parametrize("kind", [Conversation, TextConversation])
def test_each_turn_of_a_seeded_conversation_has_a_seed_of_its_own_and_again_the_same(kind):
    def seeds(seed):
        policy = StubPolicy(lambda prompt: "yes")
        chat = kind(policy, 0, SAMPLING, Turns(), seed=seed)

        async def talk():
            for turn in range(3):
                text = "a" + "yesa" * turn
                prompt = text if kind is TextConversation else [{"role": "user", "content": text}]
                await chat.answer(prompt, None, {})

        asyncio.run(talk())
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
    prompt = "a" if kind is TextConversation else [{"role": "user", "content": "a"}]

    async def vote():
        await asyncio.gather(*(chat.answer(prompt, None, {}) for _ in range(5)))

    asyncio.run(vote())
    assert len({call["sampling"]["seed"] for call in policy.servers.asked}) == 5
