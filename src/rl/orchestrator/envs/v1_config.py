"""From `args` to a verifiers v1 environment: which argument goes where, what runs locally by default, and the two splits.

An argument is a field of the taskset's config, or else of the environment's: its agents' seats, `timeout`, `retries`,
`max_concurrent_agents`, and its own fields. Where both have a field of a name, and for pairing, the tables `taskset` and `env` say which
is meant: `args = {num = 100, agent = {max_turns = 4}, env = {id = "best-of-n", n = 2}}`. The table `eval` holds fields of the taskset that
differ for evaluation: `args.eval.split = "test"`. "None" stands for no value, as everywhere in verifiers.
"""

import ast
import copy
import difflib
import importlib
import inspect
import itertools
import textwrap
from typing import Any, Literal, get_args, get_origin

import verifiers.v1 as vf
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, taskset_config_type

from rl.orchestrator.env_ids import EnvLoadError, check_installed, comes_with_verifiers, exported, module_name
from rl.orchestrator.envs.v1_harness import HARNESS_ID
from rl.orchestrator.rollouts import EnvSpec

TABLES = ("taskset", "env", "eval")
EVAL_SPLITS = ("eval", "test", "validation", "valid", "val", "dev")
"""Names that a taskset may have for the split that is not trained on, the likeliest first."""


class V1Config:
    """`args`, sorted: `env` is the resolved config, `taskset(split)` the taskset's for a split, `agents` the seats by name."""

    def __init__(self, spec: EnvSpec, endpoint: bool):
        assert spec.id is not None
        self.spec = spec
        args = copy.deepcopy(spec.args)  # verifiers writes into what it validates
        for table in TABLES:
            if not isinstance(args.get(table, {}), dict):
                raise EnvLoadError(f"environment {spec.name}: args.{table} has to be a table")
        tables = {table: args.pop(table, {}) for table in TABLES}
        taskset, env, self.for_eval = tables["taskset"], tables["env"], tables["eval"]
        name_the_parts(spec, taskset, env)
        self.taskset_class: type[vf.TasksetConfig] = taskset_config_type(taskset["id"])
        self.env_class: type[vf.EnvConfig] = env_config_type(taskset["id"], env.get("id", ""))
        self.agents = [name for name, field in self.env_class.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
        for key, value in args.items():
            self._sort(key, value, taskset, env)
        self.split_is_free = "split" in self.taskset_class.model_fields and "split" not in taskset
        if self.split_is_free and "train" in self.split_names():
            taskset["split"] = "train"
        for agent in self.agents:
            self._keep_local(taskset["id"], agent, env)
        self.env = self._validated(self.env_class, {**env, "taskset": taskset})
        self._check_models(endpoint)

    def _sort(self, key: str, value: Any, taskset: dict[str, Any], env: dict[str, Any]) -> None:
        if key in self.taskset_class.model_fields and key != "id":
            taskset[key] = value
        elif key in self.env_class.model_fields and key not in ("id", "taskset"):
            env[key] = {**value, **env[key]} if isinstance(value, dict) and isinstance(env.get(key), dict) else value
        else:
            known = {*self.taskset_class.model_fields, *self.env_class.model_fields, *TABLES} - {"id"}
            raise EnvLoadError(f"environment {self.spec.name} has no argument {key}{did_you_mean(key, known)}")

    def _keep_local(self, taskset_id: str, agent: str, env: dict[str, Any]) -> None:
        """verifiers' defaults are a program per rollout in a remote sandbox. Where neither the user nor the author has said so, the
        seat is played in this process, its tools run on this machine, and the `null` harness is replaced by our equal of it."""
        author = self.env_class.model_fields[agent].default
        seat = env.setdefault(agent, {})
        if not isinstance(seat, dict):
            raise EnvLoadError(f"environment {self.spec.name}: args.{agent} has to be a table; it is the seat of an agent")
        if "runtime" not in seat and "runtime" not in author.model_fields_set:
            seat["runtime"] = {"type": "subprocess"}
        named = author.harness.id if author.harness else default_harness_id(taskset_id)
        unnamed = named == "null" if author.harness else named == "bash"  # bash is what verifiers takes when nothing is said
        harness = seat.get("harness", {})
        if isinstance(harness, dict) and "id" not in harness and (unnamed or harness):
            seat["harness"] = {**harness, "id": HARNESS_ID if unnamed else named}

    def _validated(self, config: type[BaseModel], data: dict[str, Any]) -> Any:
        try:
            return config.model_validate(data)
        except ValidationError as error:
            problems = [self._problem(config, one) for one in error.errors(include_url=False)]
            raise EnvLoadError(f"environment {self.spec.name}: " + "; ".join(problems)) from error

    def _problem(self, config: type[BaseModel], error: Any) -> str:
        path = [str(part) for part in error["loc"]]
        name = ".".join(["args", *(path[1:] if path[:1] == ["taskset"] and len(path) > 1 else path)])
        if error["type"] != "extra_forbidden":
            return f"{name}: {error['msg']}"
        model: Any = config
        for part in path[:-1]:
            model = self.taskset_class if part == "taskset" else getattr(model.model_fields.get(part), "annotation", None)
            if not (isinstance(model, type) and issubclass(model, BaseModel)):
                return f"{name} is not known"
        return f"{name} is not known{did_you_mean(path[-1], set(model.model_fields))}"

    def _check_models(self, endpoint: bool) -> None:
        for agent in self.agents:
            seat = getattr(self.env, agent)
            if seat.model and seat.client is None and not endpoint:
                raise EnvLoadError(
                    f"environment {self.spec.name}: the seat {agent} asks for the model {seat.model}, but the inference servers have the "
                    f'policy only; give its server as args.{agent}.client = {{base_url = "...", api_key_var = "..."}}, or let the policy '
                    f'play it with args.{agent}.model = "None"'
                )

    def split_names(self) -> list[str]:
        """The values that the taskset's field `split` may have: its literals, or, of a field for any text, what is usual."""
        field = self.taskset_class.model_fields["split"]
        if get_origin(field.annotation) is Literal:
            return [name for name in get_args(field.annotation) if isinstance(name, str)]
        return ["train", *EVAL_SPLITS[:3]] if field.annotation is str else []

    def eval_tasksets(self) -> list[vf.TasksetConfig]:
        """Configs to try for evaluation, the first that loads counts; empty: the tasks of training.

        A split that the user has set holds for both, and `args.eval` says everything that is to differ.
        """
        if self.for_eval:
            return [self._taskset(self.for_eval)]
        if not self.split_is_free:
            return []
        names = [name for name in EVAL_SPLITS if name in self.split_names()]
        known = get_origin(self.taskset_class.model_fields["split"].annotation) is Literal
        return [self._taskset({"split": name}) for name in (names[:1] if known else names)]

    def _taskset(self, changes: dict[str, Any]) -> vf.TasksetConfig:
        return self._validated(self.taskset_class, {**self.env.taskset.model_dump(), **changes})

    def arguments(self) -> dict[str, Any]:
        """Every argument with its value, its default and what it is for."""
        own = [name for name in self.env_class.model_fields if name not in vf.EnvConfig.model_fields and name not in self.agents]
        told = {name: told_of(self.taskset_class, name, self.env.taskset) for name in self.taskset_class.model_fields if name != "id"}
        return {name: told_of(self.env_class, name, self.env) for name in own} | told


def name_the_parts(spec: EnvSpec, taskset: dict[str, Any], env: dict[str, Any]) -> None:
    """Fills in the ids: the package is the taskset, with the environment it may bring, or the environment for a taskset in `args`."""
    path = check_installed(spec.id or "")
    module = module_name(path)
    place = f"verifiers.v1.tasksets.{module}" if comes_with_verifiers(module) else module
    try:
        exports = exported(importlib.import_module(place))
    except ModuleNotFoundError as error:
        if error.name != place:
            raise
        exports = ["Env"]  # of verifiers' own, it is an environment then
    if "Taskset" in exports:
        taskset.setdefault("id", path)
        return
    env.setdefault("id", path)
    if not taskset.get("id"):
        raise EnvLoadError(f'environment {spec.name}: {path} plays the tasks of another package; name it with args.taskset.id = "..."')
    check_installed(taskset["id"])


def did_you_mean(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(known))}"


def told_of(config: type[BaseModel], name: str, values: BaseModel) -> dict[str, Any]:
    """One field for a reader."""
    field = config.model_fields[name]
    default = field.get_default(call_default_factory=True)
    told = {"value": getattr(values, name), "default": None if default is PydanticUndefined else default, "about": about(config, name)}
    return {key: plain(value) for key, value in told.items()}


def plain(value: Any) -> Any:
    """JSON of a value that a config may have."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple | set):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def about(config: type[BaseModel], name: str) -> str:
    """What the author says of a field: its description, or the string below it, as verifiers itself writes them."""
    if description := config.model_fields[name].description:
        return description
    for owner in config.__mro__:
        if name not in inspect.get_annotations(owner):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        except (OSError, SyntaxError):  # made at run time
            return ""
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id == name:
                text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
                return inspect.cleandoc(text) if isinstance(text, str) else ""
    return ""
