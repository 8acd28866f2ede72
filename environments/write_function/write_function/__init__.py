"""Write a tiny Python function. The reward runs it against test cases in a sandboxed process,
see `sandbox.py`."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import verifiers as vf
from datasets import Dataset

from write_function.sandbox import Ended, Sandbox

HELD_OUT_EVERY = 5
NUM_CASES = 6
CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
EXAMPLES = (
    ("x minus 100", "x - 100"),
    ("the second character of the string x", "x[1]"),
    ("twice the sum of the list x", "2 * sum(x)"),
)

Spec = tuple[str, str, Callable[[Any], Any]]
"""In words, the type of x, and a right solution."""


def question(what: str) -> str:
    return f"Write a Python function f(x) that returns {what}."


def examples() -> list[dict[str, str]]:
    """Solved tasks as turns of the prompt."""
    turns = [
        (("user", question(what)), ("assistant", f"```python\ndef f(x):\n    return {code}\n```"))
        for what, code in EXAMPLES
    ]
    return [{"role": role, "content": content} for turn in turns for role, content in turn]


def number_specs() -> list[Spec]:
    specs: list[Spec] = [
        ("the square of x", "int", lambda x: x * x),
        ("x negated", "int", lambda x: -x),
    ]
    specs += [
        ("the absolute value of x", "int", abs),
        ("True if x is even, else False", "int", lambda x: x % 2 == 0),
    ]
    for k in range(2, 12):
        specs.append((f"x plus {k}", "int", lambda x, k=k: x + k))
        specs.append((f"x times {k}", "int", lambda x, k=k: x * k))
        specs.append((f"{k} minus x", "int", lambda x, k=k: k - x))
        specs.append((f"the remainder of x divided by {k}", "int", lambda x, k=k: x % k))
        specs.append((f"the square of x, plus {k}", "int", lambda x, k=k: x * x + k))
        specs.append((f"the larger of x and {k}", "int", lambda x, k=k: max(x, k)))
    return specs


def text_specs() -> list[Spec]:
    specs: list[Spec] = [
        ("the length of the string x", "str", len),
        ("the string x in upper case", "str", str.upper),
    ]
    specs += [
        ("the string x reversed", "str", lambda x: x[::-1]),
        ("the first character of the string x", "str", lambda x: x[0]),
    ]
    specs += [("the last character of the string x", "str", lambda x: x[-1])]
    for k in range(2, 5):
        specs.append((f"the string x repeated {k} times", "str", lambda x, k=k: x * k))
        specs.append((f"the first {k} characters of the string x", "str", lambda x, k=k: x[:k]))
        specs.append((f"the last {k} characters of the string x", "str", lambda x, k=k: x[-k:]))
        specs.append((f"the length of the string x plus {k}", "str", lambda x, k=k: len(x) + k))
    for letter in "aeiou":
        specs.append(
            (
                f"how often the letter '{letter}' is in the string x",
                "str",
                lambda x, c=letter: x.count(c),
            )
        )
        specs.append((f"the string x with '{letter}' at the end", "str", lambda x, c=letter: x + c))
    return specs


def list_specs() -> list[Spec]:
    specs: list[Spec] = [
        ("the sum of the list x", "list", sum),
        ("the largest number in the list x", "list", max),
    ]
    specs += [
        ("the smallest number in the list x", "list", min),
        ("the list x sorted", "list", sorted),
    ]
    specs += [
        ("the list x reversed", "list", lambda x: x[::-1]),
        ("the number of items in the list x", "list", len),
    ]
    for k in range(2, 6):
        specs.append(
            (
                f"the list x with every number multiplied by {k}",
                "list",
                lambda x, k=k: [item * k for item in x],
            )
        )
        specs.append(
            (
                f"the list x with {k} added to every number",
                "list",
                lambda x, k=k: [item + k for item in x],
            )
        )
    return specs


SPECS = {"number": number_specs, "text": text_specs, "list": list_specs}


def random_input(kind: str, rng: random.Random) -> Any:
    if kind == "int":
        return rng.randint(-20, 40)
    if kind == "str":
        return "".join(rng.choice("aaeeiioubcdlmnrst") for _ in range(rng.randint(4, 9)))
    return [rng.randint(-9, 30) for _ in range(rng.randint(3, 6))]


def rows(kinds: list[str], seed: int, held_out: bool) -> list[dict]:
    """One task for each specification; every fifth, after a shuffle, is held out."""
    rng = random.Random(seed)
    specs = [spec for kind in kinds for spec in SPECS[kind]()]
    rng.shuffle(specs)
    found = []
    for i, (what, kind, solution) in enumerate(specs):
        inputs = [random_input(kind, rng) for _ in range(NUM_CASES)]
        if kind == "int":
            inputs[:2] = [3, 4]  # an even and an odd one, always
        cases = [{"input": x, "output": solution(x)} for x in inputs]
        if (i % HELD_OUT_EVERY == 0) == held_out:
            found.append({"question": question(what), "info": json.dumps({"cases": cases})})
    return found


def code_of(completion: list) -> str:
    """The reply up to the first fence if it begins with a function; else its last code block,
    closed or not; else nothing."""
    text = (completion[-1]["content"] or "") if completion else ""
    if text.lstrip().startswith("def "):
        return text.partition("```")[0]
    blocks = CODE_BLOCK.findall(text)
    return blocks[-1] if blocks else ""


def share_right(ended: Ended, cases: list[dict]) -> float:
    """The share of cases answered with the value and the type expected."""
    if ended.results is None:
        return 0.0
    right = [
        returned and json.dumps(value) == json.dumps(case["output"])
        for (returned, value), case in zip(ended.results, cases, strict=True)
    ]
    return sum(right) / len(cases)


def has_code(completion: list) -> float:
    """1.0 if the reply has something to run."""
    return float("def f(" in code_of(completion))


def solved(state: vf.State) -> float:
    """1.0 if every case was right. Runs after `tests_passed`, in the order of the rubric."""
    return float(state.get("tests_passed") == 1.0)


def load_environment(
    kinds: str = "number,text,list",
    seed: int = 0,
    max_processes: int = 2,
    cpu_s: int = 2,
    wall_s: int = 20,
    memory_mib: int = 256,
) -> vf.Environment:
    """Write f(x); reward `tests_passed` (share of six cases), metrics `solved` (all of them) and
    `has_code`.

    Args:
        kinds: which functions are asked for, comma-separated: number, text, list.
        seed: another seed holds out other functions for evaluation (every fifth) and gives other inputs.
        max_processes: so many answers are run at once.
        cpu_s: CPU seconds for all cases of an answer together.
        wall_s: seconds for all cases of an answer, with starting the process (0.1 s on a free core).
        memory_mib: address space of the process.
    """
    chosen = [kind.strip() for kind in kinds.split(",")]
    if set(chosen) - set(SPECS):
        raise ValueError(f"kinds = {kinds!r}; use some of {','.join(SPECS)}, separated by commas")
    sandbox = Sandbox(max_processes, cpu_s, wall_s, memory_mib)

    async def tests_passed(completion: list, info: dict, state: vf.State) -> float:
        code = code_of(completion)
        if not code:
            return 0.0
        cases = info["cases"]
        state["tests_passed"] = share_right(
            await sandbox.run(code, "f", [[case["input"]] for case in cases]), cases
        )
        return state["tests_passed"]

    rubric = vf.Rubric(funcs=[tests_passed])
    rubric.add_metric(solved)
    rubric.add_metric(has_code)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows(chosen, seed, held_out=False)),
        eval_dataset=Dataset.from_list(rows(chosen, seed, held_out=True)),
        rubric=rubric,
        few_shot=examples(),
    )
