"""Write a review as a happy or an unhappy guest would. The reward is a judge model's probability
that the review has that mood."""

import math
import re

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

HELD_OUT_EVERY = 5
PLACES = (
    "hotel",
    "pizza place",
    "dentist",
    "zoo",
    "museum",
    "campsite",
    "swimming pool",
    "hairdresser",
    "bus tour",
    "language school",
    "garage",
    "cooking class",
    "ferry",
    "library",
    "ski resort",
    "coffee shop",
    "gym",
    "toy shop",
    "concert hall",
    "travel agency",
    "car rental",
    "yoga studio",
    "steak house",
    "water park",
    "bike shop",
    "boat trip",
    "castle",
    "night train",
    "shoe shop",
    "farm",
    "spa",
    "bookshop",
    "ice rink",
    "taxi",
    "vet",
    "youth hostel",
    "theatre",
    "sushi bar",
    "flower shop",
    "golf course",
)
MOODS = ("happy", "unhappy")
EXAMPLES = (
    ("cinema", "unhappy", "The seats were hard and the film was too loud."),
    ("bakery", "happy", "Fresh bread every morning, and always a smile."),
)
JUDGED = (
    ("The soup was cold and the waiter ignored us.", "negative"),
    ("What a lovely place, I felt at home at once.", "positive"),
    ("They lost my order and did not even apologise.", "negative"),
    ("Friendly people and a very good breakfast.", "positive"),
)
VERDICTS = {"happy": "positive", "unhappy": "negative"}
LIKELIEST = 20
"""So many of the judge's next words are looked at; a server of vLLM gives no more."""
WORDS = {
    "happy": "amazing awesome beautiful best clean comfortable delicious delightful enjoy enjoyed "
    "excellent fantastic favorite fresh "
    "friendly fun good great happy helpful kind love loved lovely nice perfect pleasant "
    "polite recommend wonderful",
    "unhappy": "angry annoying awful bad bland boring broken broke cold crowded dirty disappointed "
    "disappointing disappointment "
    "disgusting dull expensive hate hated horrible ignored late lost mess noisy poor refund "
    "rude sad slow smelled terrible unfriendly "
    "unhappy unpleasant upset waste worse worst wrong",
}
"""A second opinion, which no model gives: words that tell a mood without the rest of the
sentence."""
TELLING = {word: mood for mood, words in WORDS.items() for word in words.split()}


def question(place: str, mood: str) -> str:
    article = "an" if mood[0] in "aeiou" else "a"
    return f"Write a review of a {place}, as {article} {mood} guest would. One short sentence."


def examples() -> list[dict[str, str]]:
    """Solved tasks as turns of the prompt, one of each mood."""
    turns = [
        (("user", question(place, mood)), ("assistant", review)) for place, mood, review in EXAMPLES
    ]
    return [{"role": role, "content": content} for turn in turns for role, content in turn]


def rows(held_out: bool) -> list[dict[str, str]]:
    """Each place with both moods, so that one review for all of them gets half of the reward.
    Every fifth place is held out."""
    places = [place for i, place in enumerate(PLACES) if (i % HELD_OUT_EVERY == 0) == held_out]
    return [
        {"question": question(place, mood), "answer": mood} for place in places for mood in MOODS
    ]


def judge_prompt(review: str) -> str:
    """A text that the judge continues. Small models cannot answer yes or no, but they can
    continue a list."""
    judged = "".join(f"Review: {text}\nSentiment: {verdict}\n\n" for text, verdict in JUDGED)
    return f"{judged}Review: {' '.join(review.split())}\nSentiment:"


def probability(logprobs: dict[str, float], verdict: str) -> float:
    """How much likelier this verdict is than the other one. A word that is not among the
    likeliest is as unlikely as the last of them."""
    least = min(logprobs.values())
    given = {word: logprobs.get(f" {word}", least) for word in VERDICTS.values()}
    return math.exp(given[verdict]) / sum(math.exp(value) for value in given.values())


def text_of(completion: list) -> str:
    return (completion[-1]["content"] or "") if completion else ""


def words_agree(completion: list, answer: str) -> float:
    """1.0 if more words tell this mood than the other one."""
    moods = [
        TELLING[word]
        for word in re.findall(r"[a-z]+", text_of(completion).lower())
        if word in TELLING
    ]
    return float(moods.count(answer) > len(moods) / 2)


def one_sentence(completion: list) -> float:
    """1.0 if the reply has 3 to 20 words and one end of a sentence, at its end."""
    text = text_of(completion).strip()
    return float(3 <= len(text.split()) <= 20 and bool(re.fullmatch(r"[^.!?\n]+[.!?]+", text)))


def load_environment(judge_url: str, judge_model: str, judge_key: str = "none") -> vf.Environment:
    """Reward `judged`, the judge's probability of the mood that was asked for; metrics without a
    model: `words_agree`, `one_sentence`.

    Args:
        judge_url: address of a server with the completions of OpenAI's API, with log-probabilities, such as http://127.0.0.1:8000/v1.
        judge_model: the model's name there.
        judge_key: its key; a reference such as env:NAME. env:RL_TOKEN is that of the run's own server.
    """
    client = AsyncOpenAI(base_url=judge_url, api_key=judge_key)

    async def judged(completion: list, answer: str) -> float:
        prompt = judge_prompt(text_of(completion))
        reply = await client.completions.create(
            model=judge_model, prompt=prompt, max_tokens=1, temperature=1.0, logprobs=LIKELIEST
        )
        return probability(reply.choices[0].logprobs.top_logprobs[0], VERDICTS[answer])

    rubric = vf.Rubric(funcs=[judged])
    rubric.add_metric(words_agree)
    rubric.add_metric(one_sentence)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows(held_out=False)),
        eval_dataset=Dataset.from_list(rows(held_out=True)),
        rubric=rubric,
        few_shot=examples(),
    )
