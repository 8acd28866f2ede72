"""Resolves `--policy SPEC`: a model's folder or id, a version of a run, or an endpoint."""

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl.config.run import RLConfig
from rl.config.stored import run_dir_of, stored_config
from rl.launch.prepare import ranges, runs_in
from rl.models.folder import read_json
from rl.run_dir.access_token import authorization, hides_keys
from rl.run_dir.paths import numbered
from rl.system.errors import ConfigError, RunError
from rl.system.terminal import did_you_mean
from rl.wire.worker_messages import Endpoint

if TYPE_CHECKING:
    import httpx

CHECK_TIMEOUT_S = 30.0
DEFAULT_KEY = "OPENAI_API_KEY"
"""Environment variable with an endpoint's key."""


@dataclass(frozen=True)
class Source:
    """A policy to play: a model, an endpoint, or, without either, the inference servers in the
    configuration, already running."""

    label: str
    model: str = ""
    """Folder or hub id of the model that the command serves."""
    adapter: str = ""
    """Folder of peft adapters to serve the model with."""
    policy_version: int | None = None
    """Policy version, if the policy comes from a run."""
    endpoint: Endpoint | None = None

    @property
    def slug(self) -> str:
        """Returns the label in a form that is valid in a file name."""
        return re.sub(r"[^\w.@-]+", "-", self.label).strip("-.") or "policy"


def resolve(
    spec: str | None,
    config: RLConfig,
    model: str | None,
    key_var: str | None,
    evals: tuple[str, ...] = (),
) -> Source:
    """Returns the policy that `spec` names; without `spec`, the configuration's servers or model.
    Raises RunError.

    `model`, `key_var`: an endpoint's model, and the environment variable with its key. `evals`:
    labels of evaluations; `@best` refers to the first of them that the run has.
    """
    if spec is None and (urls := config.orchestrator.inference_urls):
        for url in urls:
            check_server(url)
        return Source(f"{Path(config.model.name).name} at {urls[0]}")
    if spec is None:
        return Source(Path(config.model.name).name, config.model.name)
    if re.match(r"https?://", spec):
        url, _, named = spec.partition("#")
        return check_endpoint(url, model or named or None, key_var)
    if run := split_run(spec):
        return version_of_run(*run, evals)
    check_not_a_run(spec)
    return from_folder(Path(spec).name, spec)


# Runs ---------------------------------------------------------------------------------------------


def split_run(spec: str) -> tuple[Path, str] | None:
    """Returns (run directory, text after the @) of a SPEC that names a run; None for any other
    SPEC."""
    for text, version in ((spec, ""), spec.rpartition("@")[::2]):
        root = Path(text).expanduser()
        if text and (root / "config.toml").is_file() and not (root / "config.json").exists():
            return root, version
    return None


def find_run(spec: str) -> tuple[Path, str]:
    """Returns (run directory, text after the @) of a SPEC that must name a run, by directory or by
    name under the default output_dir.

    Raises ConfigError.
    """
    places = [
        spec,
        *([] if "/" in spec else [str(Path(RLConfig.model_fields["output_dir"].default) / spec)]),
    ]
    for place in places:
        if found := split_run(place):
            return found
    if inside := runs_in(Path(spec).expanduser(), ""):
        raise ConfigError(f"{spec}: not a run of rl; it contains the runs {inside}")
    for place in places:
        check_not_a_run(place)
    raise ConfigError(
        f"{spec}: not a run of rl; give the directory with its config.toml, or the run's "
        "name under outputs/"
    )


def named_run(spec: str) -> Path:
    """Returns the directory of a run given without a version, by directory, name or config.toml.
    Raises ConfigError."""
    path = Path(spec).expanduser()
    if path.name == "config.toml" and path.is_file():
        return path.parent
    root, version = find_run(spec)
    if version:
        raise ConfigError(f"{spec}: give the run without @{version}")
    return root


def check_policy(spec: str) -> None:
    """Raises ConfigError for a SPEC that looks like a run but does not exist."""
    if spec and not re.match(r"https?://", spec) and not split_run(spec):
        check_not_a_run(spec)


def check_not_a_run(spec: str) -> None:
    """Raises ConfigError for a misspelt run. Accepts existing folders, and hub ids, which do not
    start with an existing folder."""
    if Path(spec).expanduser().is_dir():
        return
    path = Path(spec.rpartition("@")[0] or spec).expanduser()
    parent = path.parent
    if (
        spec.startswith(("/", ".", "~"))
        or "@" in spec
        or spec.count("/") > 1
        or (spec.count("/") == 1 and parent.is_dir())
    ):
        runs = runs_in(parent, path.name)
        remedy = (
            f"{parent} contains the runs {runs}"
            if runs
            else "give a model's folder, its id on the hub, or a run"
        )
        raise ConfigError(f"{spec}: no such run or model folder; {remedy}")


def version_of_run(root: Path, version: str, evals: tuple[str, ...]) -> Source:
    """Returns a version of a run's policy: the newest, one by number, or the best in an
    evaluation. Raises RunError."""
    config = stored_config(root)
    weights = run_dir_of(root, config).weights_dir
    there = numbered(weights)
    number = version_number(root, version, there, evals)
    label = f"{root.resolve().name}@{number}"
    if number == 0:
        return Source(label, config.model.name, policy_version=0)
    need_weights(config, root, "sampling needs weights")
    if number not in there:
        raise RunError(
            f"{root}@{version or number}: version {number} is not in {weights}; there are "
            f"{ranges(there)} (and 0, the base model). "
            "trainer.weights.keep_last and keep_every set which ones a run keeps"
        )
    return from_folder(label, str(there[number]), number, config.model.name)


def need_weights(config: RLConfig, root: Path, what: str) -> None:
    """Raises RunError if a service has the weights of a run. `what`: the command, and what it
    does with weights."""
    if config.is_remote:
        raise RunError(
            f"{what}, but those of {root} are at the service that trains it "
            f"({config.tinker.base_url or 'Tinker'}): load them there, "
            f"by the paths in {root}/weights/*/tinker.json, or use version 0, the base model"
        )


def from_folder(
    label: str, model: str, version: int | None = None, base: str | None = None
) -> Source:
    """Returns a model by folder or hub id. A folder of adapters stands for them on their base
    model (`base`, else the one they name)."""
    adapter = Path(model).expanduser() / "adapter_config.json"
    if not adapter.is_file():
        return Source(label, model, policy_version=version)
    base = base or read_json(adapter).get("base_model_name_or_path")
    if not base:
        raise RunError(
            f"{model}: the adapters do not name their base model; set "
            f"base_model_name_or_path in {adapter}"
        )
    return Source(label, base, str(adapter.parent.absolute()), version)


def version_number(root: Path, version: str, there: Collection[int], evals: tuple[str, ...]) -> int:
    """Returns the version number for the text after the @; without one, the newest of `there`.
    Raises RunError."""
    if not version:
        return max(there, default=0)
    if version.startswith("best"):
        return best_version(root, version.removeprefix("best").removeprefix(":"), evals)
    if version.isascii() and version.isdigit():
        return int(version)
    raise RunError(f"{root}@{version}: give a version number, or best")


def best_version(root: Path, name: str, evals: tuple[str, ...]) -> int:
    """Returns the best version in evaluation `name`, else in the first of `evals` that
    evals/best.json has. Raises RunError."""
    path, remedy = root / "evals" / "best.json", f"name a version: {root}@12"
    if not path.exists():
        raise RunError(f"{root}@best: the run has no finished evaluation ({path}); {remedy}")
    entries = {
        name: entry for name, entry in read_json(path, remedy).items() if isinstance(entry, dict)
    }
    best = {
        name: entry["policy_version"]
        for name, entry in entries.items()
        if isinstance(entry.get("policy_version"), int)
    }
    wanted = [name] if name else [label for label in evals if label in best][:1] or list(best)
    if name and name not in best:
        raise RunError(
            f"{root}@best:{name}: the run has no such evaluation; it has {', '.join(best)}"
        )
    versions = {best[label] for label in wanted}
    if not versions:
        raise RunError(f"{path}: names no version; {remedy}")
    if len(versions) > 1:
        raise RunError(
            f"{root}@best: differs between evaluations; name one: "
            f"{', '.join(f'{root}@best:{label}' for label in wanted)}"
        )
    return versions.pop()


# Servers that are already running -----------------------------------------------------------------


def check_server(url: str) -> None:
    """Raises RunError unless an inference server of rl answers at the address, which may end
    with /v1."""
    import httpx  # takes 0.3 s, which `--help` should not

    url = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(
            f"{url}/status", headers=authorization(Path()), timeout=CHECK_TIMEOUT_S
        )
    except httpx.HTTPError as error:
        raise RunError(
            f"orchestrator.inference_urls: no inference server answers at {url} ({error}); "
            "is it running?"
        ) from None
    if response.status_code == 401:
        raise RunError(
            f"orchestrator.inference_urls: {url} requires its run's token: set RL_TOKEN to "
            "it (status/token of that run)"
        )
    if response.status_code != 200:
        raise RunError(
            f"orchestrator.inference_urls: {url} is not an inference server of rl; for other "
            f"servers use --policy {url}/v1"
        )


def check_endpoint(url: str, model: str | None, key_var: str | None) -> Source:
    """Returns an OpenAI-compatible endpoint as a policy, after requesting its models. Raises
    RunError if it cannot be used.

    The key of the default variable is sent only over https or to this machine.
    """
    import httpx

    url = url.rstrip("/")
    key_var = key_var or (DEFAULT_KEY if hides_keys(url) else "")
    key = os.environ.get(key_var)
    try:
        response = httpx.get(
            f"{url}/models",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=CHECK_TIMEOUT_S,
        )
    except httpx.HTTPError as error:
        raise RunError(
            f"{url}: no answer ({type(error).__name__}: {error}); is the server running, and "
            "is this its address?"
        ) from None
    if response.status_code in (401, 403):
        state = (
            f"comes from ${key_var}, which {'was refused' if key else 'is not set'} (see "
            "--api-key-var)"
        )
        if not key_var:
            state = (
                "is not sent over plain http to another machine unless you name its variable: "
                f"--api-key-var {DEFAULT_KEY}"
            )
        raise RunError(f"{url}: answered {response.status_code}; the key {state}")
    return Source(
        model := choose_model(url, response, model),
        endpoint=Endpoint(base_url=url, model=model, api_key_var=key_var),
    )


def choose_model(url: str, response: "httpx.Response", model: str | None) -> str:
    """Returns the model to request: `model` (unchecked if the endpoint lists none), or else its
    only one. Raises RunError."""
    try:
        names = (
            [entry["id"] for entry in response.json()["data"]]
            if response.status_code == 200
            else []
        )
    except (ValueError, KeyError, TypeError):
        names = []
    if not names and not model:
        hint = "" if url.endswith("/v1") else " (most addresses end with /v1)"
        raise RunError(
            f"{url}: does not list its models (status {response.status_code}){hint}; name "
            "one with --endpoint-model"
        )
    if not names or model in names:
        return model or ""
    if model:
        raise RunError(f"{url}: has no model {model}; {did_you_mean(model, names)}")
    if len(names) > 1:
        what = "has several models; choose one with --endpoint-model"
        raise RunError(f"{url}: {what}; {did_you_mean('', names)}")
    return names[0]
