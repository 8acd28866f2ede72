"""Grade-school problems in words (https://arxiv.org/abs/2110.14168). One turn; the reward is 1.0
for the right number in \\boxed{}."""

import json
import random
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset, load_dataset

SYSTEM_PROMPT = "Think step by step, and end with the number that is asked for, alone in \\boxed{}."
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
IGNORED = re.compile(r"[\s,$\\{}]")
"""What may stand in and around a number: `\\$1{,}000`."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)", re.ASCII)


def number(text: str) -> Decimal | None:
    """The number that a text is, None if it is anything else. 18.0 equals 18."""
    digits = IGNORED.sub("", text)
    return Decimal(digits) if NUMBER.fullmatch(digits) else None


def boxed(completion: list) -> Decimal | None:
    """The number in the last box of the reply."""
    boxes = BOXED.findall((completion[-1]["content"] or "") if completion else "")
    return number(boxes[-1]) if boxes else None


def correct(completion: list, answer: str) -> float:
    return float(boxed(completion) == number(answer))


def has_answer(completion: list) -> float:
    """1.0 if there is a number in the last box, right or wrong."""
    return float(boxed(completion) is not None)


def read(dataset: str, split: str) -> Iterable[dict[str, Any]]:
    """The rows of a split, of a folder or of the hub. Raises ValueError."""
    folder = Path(dataset).expanduser()
    try:
        if not folder.is_dir():
            return load_dataset(dataset, "main", split=split)
        with (folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"dataset = {dataset!r}, {split}: {error}. Check the name and the network; "
            "without a network give a folder with train.jsonl "
            "and test.jsonl, such as grade_school_math/data of "
            "https://github.com/openai/grade-school-math"
        ) from error


def problems(dataset: str, split: str) -> list[dict[str, str]]:
    """The problems of a split, each with the number behind #### as its answer. Raises
    ValueError."""
    rows = []
    for row in read(dataset, split):
        _, mark, answer = str(row.get("answer")).rpartition("####")
        if not mark or number(answer) is None or not row.get("question"):
            raise ValueError(
                f"dataset = {dataset!r}, {split}: needs a `question`, and an `answer` with "
                f"its number behind ####, not {row}"
            )
        rows.append({"question": row["question"], "answer": answer.strip()})
    return rows


def load_environment(
    dataset: str = "openai/gsm8k", eval_count: int = 200, seed: int = 0
) -> vf.Environment:
    """Solve a problem in words; reward `correct` (0 or 1), metric `has_answer`.

    Args:
        dataset: a data set of the hub with a configuration `main`, or a folder with train.jsonl and test.jsonl.
        eval_count: number of problems of the test split held out for evaluation; 1,319 are all of openai/gsm8k.
        seed: another seed chooses others of them.
    """
    test = problems(dataset, "test")
    if eval_count > len(test):
        raise ValueError(
            f"eval_count = {eval_count}; the test split of {dataset} has {len(test)} problems"
        )
    rubric = vf.Rubric(funcs=[correct])
    rubric.add_metric(has_answer)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(problems(dataset, "train")),
        eval_dataset=Dataset.from_list(random.Random(seed).sample(test, eval_count)),
        system_prompt=SYSTEM_PROMPT,
        rubric=rubric,
    )
