"""Builds an environment from rows (a JSONL file or a Hugging Face dataset) and a reward
function, without a package."""

import inspect
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from typing import Any, get_origin

import datasets
import verifiers as vf
from verifiers.utils.env_utils import import_env_module

from rl.config.environment_id import check_installed
from rl.config.fields import without_none
from rl.config.outside import GROUP_PARAMETERS, not_a_column, not_given, rows_fault
from rl.config.rows import TABLES, info_of, prompt_of, task_rows
from rl.envs.classic.client import chat_message, chat_tool
from rl.models.hub import hub_or_cache, load_table
from rl.system.errors import RunError
from rl.system.functions import Blame, load_function
from rl.system.terminal import did_you_mean
from rl.wire.rollouts import Split
from rl.wire.worker_messages import EnvSpec


@contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restores the signal handlers that every verifiers environment replaces in its constructor."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def load_package(spec: EnvSpec, what: str) -> vf.Environment:
    """Loads an environment that `load.is_v1` has imported and classified as classic. Raises
    RunError."""
    assert spec.id
    path = check_installed(spec.id)
    module = import_env_module(path)
    remedy = "check orchestrator.environment.args and the environment itself"
    if takes := ", ".join(load_arguments(spec.id)):
        remedy += f"; its arguments are {takes}"
    file = Path(module.__file__ or "")
    with Blame(
        f"{what}: its load_environment",
        remedy,
        file.parent if hasattr(module, "__path__") else file,
    ):
        # not vf.load_environment, which hides the original exception in its own
        env = module.load_environment(**spec.args)
    if not isinstance(env, vf.Environment):
        raise RunError(
            f"{what}: its load_environment returned a {type(env).__name__}, not a "
            "vf.Environment of verifiers 0.3"
        )
    env.env_id, env.env_args = env.env_id or path, env.env_args or spec.args
    return env


def load_arguments(env_id: str, values: dict[str, Any] | None = None) -> dict[str, str]:
    """The arguments of load_environment: name -> `type = default`, or `type = value (default:
    ...)` for those in `values`."""
    arguments, values = {}, dict(values or {})
    for name, parameter in inspect.signature(
        import_env_module(check_installed(env_id)).load_environment
    ).parameters.items():
        kind = (
            ""
            if parameter.annotation is parameter.empty
            else inspect.formatannotation(parameter.annotation)
        )
        default = "required" if parameter.default is parameter.empty else f"{parameter.default!r}"
        if name in values:
            default = (
                f"{values.pop(name)!r} "
                f"({default if default == 'required' else f'default: {default}'})"
            )
        arguments[f"**{name}" if parameter.kind is parameter.VAR_KEYWORD else name] = (
            f"{kind} = {default}" if kind else default
        )
    return arguments | {name: repr(value) for name, value in values.items()}  # passed in **kwargs


def members(env: vf.Environment, path: str) -> Iterator[tuple[str, vf.Environment]]:
    """The environments that play, with their paths: the members of an EnvGroup and its nested
    groups, or the environment itself."""
    if isinstance(env, vf.EnvGroup):
        for name, member in env.env_map.items():
            yield from members(member, f"{path}{name}/")
    else:
        yield path, env


def share_rubrics(env: vf.Environment, added: list[vf.Rubric]) -> None:
    """Gives the rubrics that were added to a group to its members, whose rubrics score their
    rows."""
    if isinstance(env, vf.EnvGroup):
        added = added + getattr(env.rubric, "rubrics", [])[1:]
        for member in set(env.envs):
            share_rubrics(member, added)
    elif added:
        env.rubric = vf.RubricGroup([env.rubric, *added])


def settable(env: vf.Environment) -> set[str]:
    """The names that set_kwargs accepts: those with a setter, and data attributes."""
    setters = {
        name.removeprefix("set_")
        for name in dir(type(env))
        if name.startswith("set_") and name != "set_kwargs"
    }
    return setters | {name for name in vars(env) if not name.startswith("_")}


def set_attributes(env: vf.Environment, leaves: list[vf.Environment], spec: EnvSpec) -> None:
    """Applies `set_kwargs` to the environment and, if it is a group, to every member that has
    the attribute. Raises RunError."""
    targets = list(dict.fromkeys([env, *leaves]))
    for name, value in spec.set_kwargs.items():
        takers = [target for target in targets if name in settable(target)]
        if not takers:
            known = sorted(set().union(*map(settable, targets)))
            raise RunError(
                f"environment {spec.name}: set_kwargs has {name}, but {type(env).__name__} "
                f"has no such attribute; {did_you_mean(name, known)}"
            )
        for target in takers:
            with Blame(
                f"environment {spec.name}: set_kwargs.{name} = {value!r}",
                "give a value that the environment accepts",
            ):
                target.set_kwargs(**{name: value})


def describe_one(env: vf.Environment) -> dict[str, Any]:
    """A human-readable description of an environment that is not a group."""
    functions = dict(
        zip(env.rubric._get_reward_func_names(), env.rubric._get_reward_weights(), strict=True)
    )
    about: dict[str, Any] = {
        "style": env.message_type,
        "system prompt": env.system_prompt,
        "reward functions": {name: weight for name, weight in functions.items() if weight},
        "metrics": [name for name, weight in functions.items() if not weight],
        "tools": [chat_tool(tool)["function"] for tool in env.tool_defs or []],
        "max turns": getattr(env, "max_turns", None),
        "own timeout_seconds": getattr(env, "timeout_seconds", None),
        "parser": type(env.parser).__name__,
        "scored": env.score_rollouts,
    }
    return {name: value for name, value in about.items() if value not in (None, [], {})}


COLUMNS = "rl_columns"
"""The key under which a row has its columns as the user wrote them: verifiers has other uses for
some of their names."""
SHADOWED = {"prompts", "completions", "state", "states"}
"""What a reward function gets from verifiers whatever columns there are. `prompt` and
`completion` are what a user expects."""


class Rows(Sequence[dict[str, Any]]):
    """The tasks of a data set, as verifiers plays them. A row is made anew at each access, so
    that no play changes it."""

    def __init__(
        self,
        stored: Sequence[Any],
        read: Callable[[Any], dict[str, Any]],
        system_prompt: str | None,
    ):
        self.stored, self.read, self.system_prompt = stored, read, system_prompt

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        columns = self.read(self.stored[index])
        row = f"row {index}"
        info = info_of(columns, row)
        prompt = [chat_message(message) for message in prompt_of(columns, row)]
        if self.system_prompt and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": self.system_prompt}, *prompt]
        columns = columns | {"info": info} if info else columns
        plain = {key: value for key, value in columns.items() if key not in ("task", "info")}
        return {
            "example_id": index,
            "answer": "",
            **plain,
            "info": info,
            "prompt": prompt,
            COLUMNS: columns,
        }


def load_rows(spec: EnvSpec) -> tuple[vf.SingleTurnEnv, dict[Split, Any]]:
    """Builds the environment of `dataset`, `eval_dataset`, `reward` and `system_prompt`, and its
    tasks. Raises RunError."""
    if not spec.dataset:
        raise RunError(f"environment {spec.name} has neither id nor dataset; give one of them")
    if not spec.reward:
        raise RunError(
            f"dataset {spec.dataset} needs a reward function; give reward = file.py:function "
            "or module:function"
        )
    if spec.args:
        raise RunError(
            f"dataset {spec.dataset}: args are for environments with an id; leave out "
            f"{', '.join(spec.args)}"
        )
    reward = Reward(spec.reward)
    train = read(spec.dataset, reward, spec.system_prompt)
    held_out = read(spec.eval_dataset, reward, spec.system_prompt) if spec.eval_dataset else []
    with Blame(f"dataset {spec.dataset}: building its environment", "check its rows"):
        # verifiers asks for a data set; the rows never pass through it.
        unused = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}])
        rubric = vf.Rubric(funcs=[reward.as_verifiers_calls_it()])
        env = vf.SingleTurnEnv(dataset=unused, system_prompt=spec.system_prompt, rubric=rubric)
    return env, {"train": train, "eval": held_out}


def read(source: str, reward: "Reward", system_prompt: str | None = None) -> Rows:
    """The tasks of a JSONL file, of a table, or of a Hugging Face dataset `owner/name` or
    `owner/name:split`. Raises RunError for a row that is no task, or lacks a column that the
    reward function asks for."""
    path = Path(source).expanduser()
    if path.is_file() and path.suffix not in TABLES:
        # As text: a typed table would give all rows the keys and the types of each other.
        return Rows(
            [json.dumps(row) for _, row in reward.checked(task_rows(path), source)],
            json.loads,
            system_prompt,
        )
    if fault := rows_fault(source):
        raise RunError(f"dataset {source} {fault}")
    name, _, split = (source, "", "") if path.is_file() else source.partition(":")
    with hub_or_cache(name) as unreachable:
        remedy = (
            f"{unreachable}: check the network, or give a JSONL file"
            if unreachable
            else "check name and split (owner/name:split)"
        )
        remedy += f"; {path.absolute()} is not a file either"
        with Blame(f"dataset {source}", "check the file" if path.is_file() else remedy):
            data = load_table(name, split or "train")
    as_written = dict if isinstance(data, list) else nested
    rows = ((f"{source} row {number}", as_written(row)) for number, row in enumerate(data))
    for where, row in reward.checked(rows, source):
        prompt_of(row, where)
        info_of(row, where)
    return Rows(data, as_written, system_prompt)


def nested(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a typed table, whose objects have the keys of all rows: those without a value are
    left out."""
    return {column: without_none(value) for column, value in row.items()}


class Reward:
    """A reward function of the user, which gets what its parameters name: columns of the row, and
    what verifiers knows of the rollout.

    It scores one rollout, or, if it asks for `completions`, `states` or the like or returns a list,
    all rollouts of a group at once. Then columns are lists, as for the reward functions of TRL
    (https://huggingface.co/docs/trl/main/en/grpo_trainer).
    """

    def __init__(self, name: str):
        """Imports it. Raises RunError."""
        self.name, self.function = name, load_function("reward", name)
        signature = inspect.signature(self.function)
        parameters = signature.parameters.values()
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        named = [parameter for parameter in parameters if parameter.kind in kinds]
        self.names = {parameter.name for parameter in named}
        self.required = [
            parameter.name for parameter in named if parameter.default is Parameter.empty
        ]
        self.takes_all = any(parameter.kind == Parameter.VAR_KEYWORD for parameter in parameters)
        returns = signature.return_annotation
        self.returns_list = (get_origin(returns) or returns) is list or str(returns).startswith(
            ("list[", "List[")
        )
        self.columns: set[str] = set()

    @property
    def of_group(self) -> bool:
        """Whether it scores all rollouts of a group at once."""
        return self.returns_list or bool(self.names & (GROUP_PARAMETERS - self.columns))

    def checked(
        self, rows: Iterable[tuple[str, dict[str, Any]]], source: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """The rows with their places, as they come. Raises RunError if the function asks for
        what a row lacks, or verifiers shadows."""
        for where, row in rows:
            if self.columns != set(row):
                self.columns |= set(row)
                if shadowed := sorted(
                    SHADOWED & (set(row) if self.takes_all else self.names & set(row))
                ):
                    raise RunError(
                        f"{where}: reward functions get verifiers' own `{shadowed[0]}`; give "
                        "that column another name"
                    )
                if asked := not_given(self.required, set(row), self.of_group):
                    reward = (
                        f"reward {self.name} "
                        f"({inspect.getsourcefile(inspect.unwrap(self.function))})"
                    )
                    raise RunError(
                        f"{where}: {reward} "
                        f"{not_a_column(asked[0], source, set(row), self.of_group)}"
                    )
            yield where, row

    def as_verifiers_calls_it(self) -> Callable[..., Any]:
        """The function with the one parameter by which verifiers tells what it scores, and gives
        all that is known."""

        def of_one(state: Any) -> Any:
            return self.function(**self._chosen(self._known(state)))

        def all_of_group(states: Any) -> Any:
            known = [self._known(state) for state in states]
            lists = {key: [values.get(key) for values in known] for key in known[0]}
            plural = {
                f"{key}s": lists[key]
                for key in ("prompt", "completion", "answer", "state", "info", "task")
                if key in lists
            }
            parser = {"parser": known[0]["parser"]}
            return self.function(
                **self._chosen(
                    lists
                    | plural
                    | {key: lists[key] for key in self.columns & lists.keys()}
                    | parser
                )
            )

        call = all_of_group if self.of_group else of_one
        call.__name__ = getattr(self.function, "__name__", type(self.function).__name__)
        return call

    def _known(self, state: Any) -> dict[str, Any]:
        """What a function may ask for of one rollout."""
        row = state["input"][COLUMNS]
        played = {"prompt": state["prompt"], "completion": state["completion"], "state": state}
        return {"parser": vf.Parser(), "task": row, "answer": "", "info": {}} | row | played

    def _chosen(self, known: dict[str, Any]) -> dict[str, Any]:
        return (
            known
            if self.takes_all
            else {key: value for key, value in known.items() if key in self.names}
        )
