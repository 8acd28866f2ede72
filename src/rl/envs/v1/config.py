"""Builds the config of a verifiers v1 environment from `args`: the place of each argument, local
defaults, and the two splits.

An argument is a field of the taskset's config, or else of the environment's: its agents, `timeout`,
`retries`, `max_concurrent_agents`, and its own fields. The tables `taskset` and `env` resolve a
name that both have, and pair a taskset with an environment: `args = {num = 100, agent = {max_turns
= 4}, env = {id = "best-of-n", n = 2}}`. The table `eval` holds taskset fields that differ for
evaluation: `args.eval.split = "test"`. "None" means no value, as everywhere in verifiers.
"""

import copy
import importlib.util
import inspect
from typing import Any, Literal, get_args, get_origin

import verifiers.v1 as vf
from pydantic import BaseModel, ValidationError
from pydantic_config.cli import _extract_field_docstrings
from pydantic_core import PydanticUndefined, to_jsonable_python
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, taskset_config_type

from rl.config.environment_id import module_name
from rl.config.installed import check_installed, comes_with_verifiers
from rl.envs.environment import v1_exports
from rl.envs.v1.harness import HARNESS_ID
from rl.system.errors import RunError
from rl.system.terminal import did_you_mean
from rl.wire.worker_messages import EnvSpec

TABLES = ("taskset", "env", "eval")
EVAL_SPLITS = ("eval", "test", "validation", "valid", "val", "dev")
"""Common names of splits that are not trained on, the most common first."""


class V1Config:
    """The resolved `args`: `env` is the environment's config, `eval_tasksets()` those of
    evaluation, `agents` the agents' names."""

    def __init__(self, spec: EnvSpec, endpoint: bool):
        assert spec.id is not None
        self.spec = spec
        args = copy.deepcopy(spec.args)  # verifiers modifies what it validates
        for table in TABLES:
            if not isinstance(args.setdefault(table, {}), dict):
                raise RunError(f"environment {spec.name}: args.{table} must be a table")
        taskset, env, self.for_eval = (args.pop(table) for table in TABLES)
        set_ids(spec, taskset, env)
        self.taskset_class: type[vf.TasksetConfig] = taskset_config_type(taskset["id"])
        self.env_class: type[vf.EnvConfig] = env_config_type(taskset["id"], env.get("id", ""))
        self.agents = [
            name
            for name, field in self.env_class.model_fields.items()
            if isinstance(field.default, vf.AgentConfig)
        ]
        for key, value in args.items():
            self._sort(key, value, taskset, env)
        self.split_is_free = "split" in self.taskset_class.model_fields and "split" not in taskset
        if self.split_is_free and "train" in self.split_names():
            taskset["split"] = "train"
        for agent in self.agents:
            self._keep_local(taskset["id"], agent, env)
        self.env = self._validated(self.env_class, {**env, "taskset": taskset})
        for agent in [] if endpoint else self.agents:
            self._check_model(agent)

    def _sort(self, key: str, value: Any, taskset: dict[str, Any], env: dict[str, Any]) -> None:
        if key in self.taskset_class.model_fields and key != "id":
            taskset[key] = value
        elif key in self.env_class.model_fields and key not in ("id", "taskset"):
            env[key] = (
                {**value, **env[key]}
                if isinstance(value, dict) and isinstance(env.get(key), dict)
                else value
            )
        else:
            known = {*self.taskset_class.model_fields, *self.env_class.model_fields, *TABLES} - {
                "id"
            }
            raise RunError(
                f"environment {self.spec.name} has no argument {key}; {did_you_mean(key, known)}"
            )

    def _keep_local(self, taskset_id: str, agent: str, env: dict[str, Any]) -> None:
        """Replaces verifiers' defaults, which run a program per rollout in a remote sandbox.
        Unless the user or the author chose otherwise, the agent runs in this process, its tools
        on this machine, and our equivalent replaces the `null` harness."""
        author = self.env_class.model_fields[agent].default
        config = env.setdefault(agent, {})
        if not isinstance(config, dict):
            raise RunError(
                f"environment {self.spec.name}: args.{agent} must be a table; it configures "
                "an agent"
            )
        if "runtime" not in config and "runtime" not in author.model_fields_set:
            config["runtime"] = {"type": "subprocess"}
        named = author.harness.id if author.harness else default_harness_id(taskset_id)
        # bash is verifiers' default
        unnamed = named == "null" if author.harness else named == "bash"
        harness = config.get("harness", {})
        if isinstance(harness, dict) and "id" not in harness and (unnamed or harness):
            config["harness"] = {**harness, "id": HARNESS_ID if unnamed else named}

    def _validated(self, config: type[BaseModel], data: dict[str, Any]) -> Any:
        try:
            return config.model_validate(data)
        except ValidationError as error:
            problems = [self._problem(config, one) for one in error.errors(include_url=False)]
            raise RunError(f"environment {self.spec.name}: " + "; ".join(problems)) from error

    def _problem(self, config: type[BaseModel], error: Any) -> str:
        path = [str(part) for part in error["loc"]]
        name = ".".join(
            ["args", *(path[1:] if path[:1] == ["taskset"] and len(path) > 1 else path)]
        )
        if error["type"] != "extra_forbidden":
            return f"{name}: {error['msg']}"
        model: Any = config
        for part in path[:-1]:
            model = (
                self.taskset_class
                if part == "taskset"
                else getattr(model.model_fields.get(part), "annotation", None)
            )
            if not (isinstance(model, type) and issubclass(model, BaseModel)):
                return f"{name} is not known"
        return f"{name} is not known; {did_you_mean(path[-1], model.model_fields)}"

    def _check_model(self, agent: str) -> None:
        config = getattr(self.env, agent)
        if config.model and config.client is None:
            raise RunError(
                f"environment {self.spec.name}: agent {agent} asks for the model "
                f"{config.model}, but the inference servers have the "
                f'policy only; set its server as args.{agent}.client = {{base_url = "...", '
                f'api_key_var = "..."}}, or let the policy '
                f'play it with args.{agent}.model = "None"'
            )

    def split_names(self) -> list[str]:
        """Possible values of the taskset's field `split`: its literals, or the common names if
        it is a free text."""
        field = self.taskset_class.model_fields["split"]
        if get_origin(field.annotation) is Literal:
            return [name for name in get_args(field.annotation) if isinstance(name, str)]
        return ["train", *EVAL_SPLITS[:3]] if field.annotation is str else []

    def eval_tasksets(self) -> list[vf.TasksetConfig]:
        """Configs to try for evaluation, of which the first that loads is used; empty means the
        training tasks.

        A split that the user set applies to both, and `args.eval` has everything that differs.
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
        """Every argument with its value, default and description."""
        own = [
            name
            for name in self.env_class.model_fields
            if name not in vf.EnvConfig.model_fields and name not in self.agents
        ]
        names = [name for name in self.taskset_class.model_fields if name != "id"]
        return describe_fields(self.env_class, own, self.env) | describe_fields(
            self.taskset_class, names, self.env.taskset
        )


def set_ids(spec: EnvSpec, taskset: dict[str, Any], env: dict[str, Any]) -> None:
    """Fills in the ids: the package is the taskset (and may bring its environment), or the
    environment for a taskset in `args`."""
    path = check_installed(spec.id or "")
    module = module_name(path)
    place = f"verifiers.v1.tasksets.{module}" if comes_with_verifiers(module) else module
    # A module of verifiers that is not a taskset is an environment.
    if importlib.util.find_spec(place) and "Taskset" in v1_exports(importlib.import_module(place)):
        taskset.setdefault("id", path)
        return
    env.setdefault("id", path)
    if not taskset.get("id"):
        raise RunError(
            f"environment {spec.name}: {path} plays the tasks of another package; name it "
            'with args.taskset.id = "..."'
        )
    check_installed(taskset["id"])


def describe_fields(config: type[BaseModel], names: list[str], values: BaseModel) -> dict[str, Any]:
    """A human-readable description of fields: value, default, and description or docstring, as
    in verifiers' own help."""
    docs = _extract_field_docstrings(config)
    described = {}
    for name in names:
        field = config.model_fields[name]
        default = field.get_default(call_default_factory=True)
        facts = {
            "value": getattr(values, name),
            "default": None if default is PydanticUndefined else default,
        }
        about = inspect.cleandoc(field.description or docs.get(name, ""))
        described[name] = {**to_jsonable_python(facts, fallback=str), "about": about}
    return described
