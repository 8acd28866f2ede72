"""Write a short text backwards. One turn; the reward grows smoothly with the likeness of the
reply to the reversed text."""

import random
from pathlib import Path

import verifiers as vf
from datasets import Dataset

WORD_LIST = """
air ant arm art bag bat bed bee big box boy bus cat cow cup day dog ear egg eye fan fig fly fox fun
gas hat hen hot ice ink jam jar key kid leg lip log man map net nut oak oil owl pan pen pet pie pig
pot rat red sea sky sun tea toe top toy van war web win zoo baby ball bank bear bird blue boat book
cake card city coat cold corn desk door duck farm fire fish food frog game gate girl goat gold hair
hand home hope horn king kite lake lamp leaf lion luck milk moon nest nose park pear rain ring road
rock roof rose salt sand seed shoe snow song star swim tail time tree wall wind wolf wood apple
beach bread chair cloud dance dream earth flame glass grape green heart horse house juice lemon
light money mouse night ocean paper plant queen river sheep smile spoon stone storm sugar table
tiger train water whale white basket bridge butter candle castle cheese circle coffee copper dragon
flower forest garden hammer island jacket kitten ladder market mirror monkey orange pencil planet
rabbit rocket school shadow silver spider spring summer turtle valley window winter
"""
WORDS = WORD_LIST.split()
MORE_WORDS = Path(__file__).with_name("more_words.txt")
ATTEMPTS_PER_TEXT = 200
EXAMPLES = ("tab", "grid", "lunch")


def random_text(rng: random.Random, words: list[str], min_length: int) -> str:
    """As many random words, joined by spaces, as the length needs."""
    text = rng.choice(words)
    while len(text) < min_length:
        text += " " + rng.choice(words)
    return text


def distinct_texts(
    words: list[str], number: int, min_length: int, max_length: int, seed: int
) -> list[str]:
    """So many different texts of these words. Raises ValueError when the lengths do not allow as
    many."""
    rng = random.Random(seed)
    texts: dict[str, None] = {}
    for _ in range(number * ATTEMPTS_PER_TEXT):
        text = random_text(rng, words, min_length)
        if len(text) <= max_length:
            texts[text] = None
        if len(texts) == number:
            return list(texts)
    raise ValueError(
        f"only {len(texts)} of {number} different texts of {min_length} to {max_length} "
        "characters were found; "
        "lower count or eval_count, or raise max_length"
    )


def question(text: str) -> str:
    return f"Reverse the letters: {text}"


def solved(number: int) -> list[dict[str, str]]:
    """So many solved tasks as turns of the prompt."""
    turns = [(("user", question(text)), ("assistant", text[::-1])) for text in EXAMPLES[:number]]
    return [{"role": role, "content": content} for turn in turns for role, content in turn]


def rows(texts: list[str]) -> list[dict[str, str]]:
    return [{"question": question(text), "answer": text[::-1]} for text in texts]


def common_length(first: str, second: str) -> int:
    """Length of the longest subsequence of characters that both have."""
    lengths = [0] * (len(second) + 1)
    for char in first:
        above_left = 0
        for i, other in enumerate(second, start=1):
            above = lengths[i]
            lengths[i] = above_left + 1 if char == other else max(above, lengths[i - 1])
            above_left = above
    return lengths[-1]


def reply_text(completion: list) -> str:
    return (completion[-1]["content"] or "").strip().lower() if completion else ""


def likeness(completion: list, answer: str) -> float:
    """1.0 for the answer itself, 0.0 for a reply that shares no character with it; text around
    the answer costs."""
    reply = reply_text(completion)
    return 2 * common_length(answer, reply) / (len(answer) + len(reply))


def exact(completion: list, answer: str) -> float:
    return float(reply_text(completion) == answer)


def load_environment(
    min_length: int = 3,
    max_length: int = 5,
    count: int = 120,
    eval_count: int = 30,
    seed: int = 0,
    examples: int = 3,
    more_words: bool = False,
) -> vf.Environment:
    """Reverse a text; reward `likeness` (0 to 1), metric `exact`.

    Args:
        min_length: fewest characters of a text.
        max_length: most characters of a text; longer texts have several words.
        count: number of texts to train on.
        eval_count: number of texts held out for evaluation; the same ones whatever `count` is.
        seed: another seed gives other texts.
        examples: solved examples in the prompt, 0 to 3; 0 for a model that knows the task from supervised fine-tuning.
        more_words: train on texts of the 1600 words of more_words.txt, too; the texts held out stay the same.
    """
    if examples not in range(len(EXAMPLES) + 1):
        raise ValueError(f"examples = {examples}; use 0 to {len(EXAMPLES)}")
    held_out = distinct_texts(WORDS, eval_count, min_length, max_length, seed)
    words = WORDS + (MORE_WORDS.read_text(encoding="utf-8").split() if more_words else [])
    texts = distinct_texts(words, eval_count + count, min_length, max_length, seed)
    training = [text for text in texts if text not in held_out][:count]
    rubric = vf.Rubric(funcs=[likeness])
    rubric.add_metric(exact)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows(training)),
        eval_dataset=Dataset.from_list(rows(held_out)),
        rubric=rubric,
        few_shot=solved(examples),
    )
