"""Arithmetic with one tool: the model calls `calculate`, reads the result, and answers. Graded,
so that a small model gets a foothold."""

import ast
import json
import operator
import random
import re
from collections.abc import Callable

import verifiers as vf
from datasets import Dataset

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_EXPRESSION = 100
"""Characters of an expression; without powers, so short an expression cannot cost much."""
SYSTEM_PROMPT = """Use the tool calculate(expression) for every question. Then answer with the result only.
To call it, write:
<tool_call>
{"name": "calculate", "arguments": {"expression": "12 * 7"}}
</tool_call>"""


def evaluate(node: ast.AST) -> int | float:
    """The value of a parsed expression of numbers and + - * / // %. Raises ValueError for
    anything else."""
    if isinstance(node, ast.Expression):
        return evaluate(node.body)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.operand))
    raise ValueError("only numbers, + - * / // % and brackets are allowed")


def value_of(expression: str) -> int | float:
    """The value of an expression; a whole number as an int. Raises ValueError for what is not
    arithmetic."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"longer than {MAX_EXPRESSION} characters")
    try:
        value = evaluate(ast.parse(expression.strip(), mode="eval"))
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot be calculated: {type(error).__name__}") from error
    return int(value) if isinstance(value, float) and value.is_integer() else value


def calculate(expression: str) -> str:
    """Calculate an arithmetic expression.

    Args:
        expression: for example "12 * 7"
    """
    return str(value_of(expression))


def expressions_called(completion: list) -> list[str]:
    """The expression of every call of `calculate` that is well formed and can be calculated."""
    found = []
    for message in completion:
        for call in message.get("tool_calls") or []:
            try:
                arguments = json.loads(call["arguments"])
                if call["name"] == "calculate" and set(arguments) == {"expression"}:
                    value_of(arguments["expression"])
                    found.append(arguments["expression"])
            except (ValueError, TypeError, AttributeError):
                continue
    return found


def valid_call(completion: list) -> float:
    """1.0 if the tool was called with something that can be calculated."""
    return float(bool(expressions_called(completion)))


def right_expression(completion: list, answer: str) -> float:
    """1.0 if a call was about the question: it has an operator and its value is the answer."""
    return float(
        any(
            re.search(r"\d\s*[-+*/%]", called) and str(value_of(called)) == answer
            for called in expressions_called(completion)
        )
    )


def right_answer(completion: list, answer: str) -> float:
    """1.0 if the tool was used and the last number of the last reply, one without a call, is the
    answer."""
    last = completion[-1] if completion else None
    if (
        last is None
        or last["role"] != "assistant"
        or last.get("tool_calls")
        or not expressions_called(completion)
    ):
        return 0.0
    numbers = re.findall(r"-?\d+(?:\.\d+)?", last["content"] or "")
    return float(bool(numbers) and numbers[-1] == answer)


def question(expression: str) -> str:
    return f"What is {expression}?"


def solved(expression: str, call_id: str) -> list[dict]:
    """A question played to its end, as messages: question, call, result, answer."""
    call = {"id": call_id, "name": "calculate", "arguments": json.dumps({"expression": expression})}
    result = str(value_of(expression))
    return [
        {"role": "user", "content": question(expression)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
        {"role": "assistant", "content": result},
    ]


def random_expression(
    operators: str, min_operand: int, max_operand: int, terms: int, rng: random.Random
) -> str:
    expression = str(rng.randint(min_operand, max_operand))
    for _ in range(terms - 1):
        expression += f" {rng.choice(operators)} {rng.randint(min_operand, max_operand)}"
    return expression


def distinct_expressions(number: int, draw: Callable[[], str]) -> list[str]:
    """So many different expressions, in the order drawn."""
    found: dict[str, None] = {}
    for _ in range(50 * number):
        found[draw()] = None
        if len(found) == number:
            return list(found)
    raise ValueError(
        f"only {len(found)} of {number} different questions were found; lower count or "
        "eval_count, or raise max_operand"
    )


def load_environment(
    operators: str = "+-*",
    min_operand: int = 2,
    max_operand: int = 50,
    terms: int = 2,
    examples: int = 3,
    count: int = 160,
    eval_count: int = 40,
    seed: int = 0,
) -> vf.Environment:
    """Arithmetic with the tool `calculate`; reward = 0.2 valid_call + 0.3 right_expression + 0.5
    right_answer.

    Easiest for a small model: operators="+", max_operand=20, examples=4. Harder: larger numbers,
    more terms, fewer examples.

    Args:
        operators: the operators that occur, of + - *.
        min_operand: smallest number in a question.
        max_operand: largest number in a question.
        terms: numbers in a question, at least 2.
        examples: solved questions with their tool calls put before the real one, as turns of the prompt; 0 leaves the system prompt's.
        count: number of questions to train on.
        eval_count: number of questions held out for evaluation; the same ones whatever `count` is.
        seed: another seed gives other questions.
    """
    if not operators or set(operators) - set("+-*"):
        raise ValueError(f"operators = {operators!r}; use some of + - *")
    rng = random.Random(seed)
    drawn = distinct_expressions(
        examples + eval_count + count,
        lambda: random_expression(operators, min_operand, max_operand, terms, rng),
    )
    shown = [
        message
        for i, expression in enumerate(drawn[:examples])
        for message in solved(expression, f"example_{i}")
    ]
    tasks = [
        {"question": question(expression), "answer": str(value_of(expression))}
        for expression in drawn[examples:]
    ]
    return vf.ToolEnv(
        tools=[calculate],
        max_turns=3,
        dataset=Dataset.from_list(tasks[eval_count:]),
        eval_dataset=Dataset.from_list(tasks[:eval_count]),
        rubric=vf.Rubric(
            funcs=[valid_call, right_expression, right_answer], weights=[0.2, 0.3, 0.5]
        ),
        system_prompt=SYSTEM_PROMPT,
        few_shot=shown or None,
    )
