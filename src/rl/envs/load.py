"""Loads an environment of any kind; the only place that chooses its class."""

import importlib
import importlib.util
from importlib.metadata import version
from pathlib import Path

from rl.config.environment_id import check_installed, comes_with_verifiers, module_name
from rl.envs.environment import Environment, v1_exports
from rl.envs.policy import Policy
from rl.homes.needs import VERIFIERS, Api
from rl.system.errors import RunError
from rl.system.functions import Blame
from rl.wire.worker_messages import EnvSpec, WorkerSetup


def load_policy(setup: WorkerSetup) -> Policy:
    """Returns the policy that a worker's episodes ask."""
    if setup.policy.head_server:
        from rl.envs.nemo_gym.serving import GymPolicy

        return GymPolicy(setup.policy, setup.env.name)
    return Policy(setup.policy, setup.env.timeout_s)


def load(spec: EnvSpec, policy: Policy) -> Environment:
    """Loads an environment. Raises RunError with the remedy."""
    if spec.head_server:
        from rl.envs.nemo_gym.environment import NemoGymEnvironment

        return NemoGymEnvironment(spec, policy)
    api: Api = (
        "v1"
        if spec.id and (spec.kind == "v1" or (spec.kind is None and is_v1(spec.id)))
        else "classic"
    )
    try:
        if api == "v1":
            from rl.envs.v1.environment import V1Environment as Adapter
        else:
            from rl.envs.classic.environment import ClassicEnvironment as Adapter
    except (ImportError, AttributeError) as error:
        needs = f"environment {spec.name} is {api}, which needs {VERIFIERS[api]} and datasets"
        have = f"this interpreter has verifiers {version('verifiers')}"
        raise RunError(
            f'{needs}; {have}: {error}; install that, or in a home set its kind = "{api}"'
        ) from None
    return Adapter(spec, policy)


def library(spec: EnvSpec) -> str:
    """Guesses the adapter module that an environment needs from its package's source text, without
    importing the package; `load` imports it later."""
    if spec.head_server:
        return "rl.envs.nemo_gym.environment"
    is_v1 = spec.kind == "v1"
    if spec.id and spec.kind is None:
        module = module_name(check_installed(spec.id))
        spot = importlib.util.find_spec(module)
        text = Path(spot.origin).read_text(errors="replace") if spot and spot.origin else ""
        is_v1 = comes_with_verifiers(module) or "verifiers.v1" in text or "Taskset" in text
    return f"rl.envs.{'v1' if is_v1 else 'classic'}.environment"


def is_v1(env_id: str) -> bool:
    """Whether an environment is a verifiers v1 package, which has a v1 Taskset or Env in `__all__`.
    Otherwise it is classic.

    A package that is both counts as v1: exporting the class is as deliberate as writing
    `load_environment`, and verifiers 0.4 no longer has the classic API. Imports the package. Raises
    RunError if it is not installed, fails to import, or is neither.
    """
    module = module_name(check_installed(env_id))
    if comes_with_verifiers(module):
        return True
    remedy = (
        "fix it, or declare what it lacks: packages in orchestrator.environment.requirements "
        "and, in a sandbox, files beside it in "
        "`read`; after changing the environment itself, run `rl env install` again"
    )
    with Blame(f"environment {env_id}: importing {module}", remedy):
        package = importlib.import_module(module)
    if v1_exports(package):
        return True
    if not hasattr(package, "load_environment"):
        lacks = (
            "has no function load_environment, and no v1 Taskset or Env in `__all__`: check the "
            "name, or add one"
        )
        raise RunError(f"environment {env_id}: {package.__file__} {lacks}")
    return False
