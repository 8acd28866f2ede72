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

from rl.config.environment_id import check_installed, comes_with_verifiers, module_name
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
        self.name = f"environment {spec.name}"
        args = copy.deepcopy(spec.args)  # verifiers modifies what it validates
        taskset, env, self.for_eval = (self._table(args.pop(name, {}), name) for name in TABLES)
        self._set_ids(spec.id, taskset, env)
        self.taskset_class: type[vf.TasksetConfig] = taskset_config_type(taskset["id"])
        self.env_class: type[vf.EnvConfig] = env_config_type(taskset["id"], env.get("id", ""))
        of_taskset, of_env = self.taskset_class.model_fields, self.env_class.model_fields
        self.agents = [
            name for name, field in of_env.items() if isinstance(field.default, vf.AgentConfig)
        ]
        for key, value in args.items():
            if key in of_taskset and key != "id":
                taskset[key] = value
            elif key in of_env and key not in ("id", "taskset"):
                both = isinstance(value, dict) and isinstance(env.get(key), dict)
                env[key] = {**value, **env[key]} if both else value
            else:
                hint = did_you_mean(key, {*of_taskset, *of_env, *TABLES} - {"id"})
                raise RunError(f"{self.name} has no argument {key}; {hint}")
        self.split_is_free = "split" in of_taskset and "split" not in taskset
        if self.split_is_free and "train" in self.split_names():
            taskset["split"] = "train"
        for agent in self.agents:
            env[agent] = self._local(taskset["id"], agent, env.get(agent, {}))
        self.env = self._validated(self.env_class, {**env, "taskset": taskset})
        for agent in [] if endpoint else self.agents:
            config = getattr(self.env, agent)
            if config.model and config.client is None:
                raise RunError(
                    f"{self.name}: agent {agent} asks for the model {config.model}, but the "
                    "inference servers have the policy only; set its server as "
                    f'args.{agent}.client = {{base_url = "...", api_key_var = "..."}}, or let '
                    f'the policy play it with args.{agent}.model = "None"'
                )

    def _table(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise RunError(f"{self.name}: args.{name} must be a table")
        return value

    def _set_ids(self, env_id: str, taskset: dict[str, Any], env: dict[str, Any]) -> None:
        """Fills in the ids: the package is the taskset (and may bring its environment), or the
        environment for a taskset in `args`."""
        path = check_installed(env_id)
        module = module_name(path)
        if comes_with_verifiers(module):
            module = f"verifiers.v1.tasksets.{module}"
        # A module of verifiers that is not a taskset is an environment.
        if importlib.util.find_spec(module) and "Taskset" in v1_exports(
            importlib.import_module(module)
        ):
            taskset.setdefault("id", path)
            return
        env.setdefault("id", path)
        if not taskset.get("id"):
            raise RunError(
                f"{self.name}: {path} plays the tasks of another package; name it with "
                'args.taskset.id = "..."'
            )
        check_installed(taskset["id"])

    def _local(self, taskset_id: str, agent: str, config: Any) -> dict[str, Any]:
        """Replaces verifiers' defaults, which run a program per rollout in a remote sandbox.
        Unless the user or the author chose otherwise, the agent runs in this process, its tools
        on this machine, and our equivalent replaces the `null` harness."""
        author = self.env_class.model_fields[agent].default
        config = self._table(config, agent)
        if "runtime" not in author.model_fields_set:
            config.setdefault("runtime", {"type": "subprocess"})
        named = author.harness.id if author.harness else default_harness_id(taskset_id)
        # bash is verifiers' default
        unnamed = named == ("null" if author.harness else "bash")
        harness = config.get("harness", {})
        if isinstance(harness, dict) and "id" not in harness and (unnamed or harness):
            config["harness"] = {**harness, "id": HARNESS_ID if unnamed else named}
        return config

    def _validated(self, config: type[BaseModel], data: dict[str, Any]) -> Any:
        try:
            return config.model_validate(data)
        except ValidationError as error:
            faults = [self._fault(config, fault) for fault in error.errors(include_url=False)]
            raise RunError(f"{self.name}: {'; '.join(faults)}") from error

    def _fault(self, config: type[BaseModel], fault: Any) -> str:
        path = [str(part) for part in fault["loc"]]
        model: Any = config
        for part in path[:-1]:
            field = getattr(model, "model_fields", {}).get(part)
            model = self.taskset_class if part == "taskset" else field and field.annotation
        if path[0] == "taskset" and len(path) > 1:
            del path[0]
        name = ".".join(["args", *path])
        if fault["type"] != "extra_forbidden":
            return f"{name}: {fault['msg']}"
        known = getattr(model, "model_fields", {})
        return f"{name} is not known{(known and '; ' + did_you_mean(path[-1], known)) or ''}"

    def split_names(self) -> list[str]:
        """Possible values of the taskset's field `split`: its literals, or the common names if
        it is a free text."""
        kind = self.taskset_class.model_fields["split"].annotation
        if get_origin(kind) is Literal:
            return [name for name in get_args(kind) if isinstance(name, str)]
        return ["train", *EVAL_SPLITS[:3]] if kind is str else []

    def eval_tasksets(self) -> list[vf.TasksetConfig]:
        """Configs to try for evaluation, of which the first that loads is used; empty means the
        training tasks.

        A split that the user set applies to both, and `args.eval` has everything that differs.
        """
        if self.for_eval or not self.split_is_free:
            changes = [self.for_eval] if self.for_eval else []
        else:
            names = self.split_names()
            changes = [{"split": name} for name in EVAL_SPLITS if name in names]
            if get_origin(self.taskset_class.model_fields["split"].annotation) is Literal:
                del changes[1:]
        train = self.env.taskset.model_dump()
        return [self._validated(self.taskset_class, {**train, **change}) for change in changes]

    def arguments(self) -> dict[str, Any]:
        """Every argument with its value, default and description, or docstring, as in verifiers'
        own help."""
        arguments = {}
        hidden = {*vf.EnvConfig.model_fields, *self.agents, "id"}
        for values in (self.env, self.env.taskset):
            docs = _extract_field_docstrings(type(values))
            for name, field in type(values).model_fields.items():
                if name == "id" or (values is self.env and name in hidden):
                    continue
                default = field.get_default(call_default_factory=True)
                facts = {
                    "value": getattr(values, name),
                    "default": None if default is PydanticUndefined else default,
                }
                about = inspect.cleandoc(field.description or docs.get(name, ""))
                arguments[name] = {**to_jsonable_python(facts, fallback=str), "about": about}
        return arguments
