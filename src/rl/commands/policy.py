"""Whom a command plays: from `--policy SPEC` to a model folder, a version of a run, or an endpoint that answers."""

import difflib
import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rl.access import authorization
from rl.cli import ConfigError, from_toml
from rl.config import RLConfig
from rl.orchestrator.rollouts import Endpoint
from rl.run_dir import RunDir, numbered

CHECK_TIMEOUT_S = 30.0
BEST = "policy_version"
SHOWN = 10
"""Names of alternatives in an error."""


class PolicyError(Exception):
    """The policy cannot be played; the message names the remedy."""


@dataclass(frozen=True)
class Source:
    """A policy that can be played. One of model, endpoint and urls is set."""

    label: str
    model: str = ""
    """A folder, or an id on the hub, to be served by us."""
    adapter: str = ""
    """A folder with adapters (peft) that the model is served with."""
    policy_version: int | None = None
    """Of a run's version."""
    endpoint: Endpoint | None = None
    urls: tuple[str, ...] = ()
    """Inference servers of ours that run already."""

    @property
    def slug(self) -> str:
        """The label as part of a file name."""
        return re.sub(r"[^\w.@-]+", "-", self.label).strip("-.") or "policy"


def resolve(spec: str | None, config: RLConfig, model: str | None, key_var: str | None, evals: tuple[str, ...] = ()) -> Source:
    """The policy that a SPEC names. Raises PolicyError.

    model, key_var: an endpoint's model and the variable with its key. evals: labels that `@best` may mean, the first that is known.
    """
    if spec is None and config.orchestrator.inference_urls:
        urls = tuple(config.orchestrator.inference_urls)
        return Source(f"{Path(config.model.name).name} at {urls[0]}", urls=tuple(check_server(url) for url in urls))
    if spec is None:
        return Source(Path(config.model.name).name, config.model.name)
    if re.match(r"https?://", spec):
        url, _, named = spec.partition("#")
        return check_endpoint(url, model or named or None, key_var or "OPENAI_API_KEY")
    run = split_run(spec)
    if run:
        return version_of_run(*run, evals)
    if not Path(spec).expanduser().is_dir():
        check_not_a_run(spec)
    return from_folder(Path(spec).name, spec)


# Runs -------------------------------------------------------------------------------------------------------------------


def split_run(spec: str) -> tuple[Path, str] | None:
    """(run directory, what stands behind the @) of a SPEC that names a run; None if it does not."""
    for text, version in ((spec, ""), spec.rpartition("@")[::2]):
        root = Path(text).expanduser()
        if text and (root / "config.toml").is_file() and not (root / "config.json").exists():
            return root, version
    return None


def check_not_a_run(spec: str) -> None:
    """Tells a misspelt run from an id on the hub: an id does not start with a folder that exists."""
    path = Path(spec.rpartition("@")[0] or spec).expanduser()
    parent = path.parent
    if spec.startswith(("/", ".", "~")) or spec.count("/") > 1 or (spec.count("/") == 1 and parent.is_dir()):
        runs = sorted(found.parent.name for found in parent.glob("*/config.toml")) if parent.is_dir() else []
        close = difflib.get_close_matches(path.name, runs, n=1) or runs[:SHOWN]
        remedy = f"in {parent} there are the runs {', '.join(close)}" if close else "give a model's folder, its id on the hub, or a run"
        raise PolicyError(f"{spec}: there is no such run and no such model folder; {remedy}")


def version_of_run(root: Path, version: str, evals: tuple[str, ...]) -> Source:
    """A version of a run's policy: the newest, one by its number, or the best in an evaluation."""
    try:
        config = from_toml(root / "config.toml")
    except ConfigError as error:
        raise PolicyError(f"{root / 'config.toml'} was not written by this version of rl:\n{error}") from None
    weights = place_of(root, config).weights_dir
    there = numbered(weights)
    number = version_number(root, version, there, evals)
    label = f"{root.resolve().name}@{number}"
    if number == 0:
        return Source(label, config.model.name, policy_version=0)
    if number not in there:
        kept = ", ".join(map(str, list(there)[-SHOWN:])) or "none"
        raise PolicyError(
            f"{root}@{version or number}: version {number} is not in {weights}; there are {kept} (and 0, the base model). "
            "Which ones a run keeps is set by trainer.weights.keep_last and keep_every"
        )
    return from_folder(label, str(there[number]), number, config.model.name)


def from_folder(label: str, model: str, version: int | None = None, base: str | None = None) -> Source:
    """A model's folder or its id on the hub; a folder of adapters stands for its base (`base`, or the one that it names) with them."""
    adapter = Path(model).expanduser() / "adapter_config.json"
    if not adapter.is_file():
        return Source(label, model, policy_version=version)
    base = base or read_json(adapter).get("base_model_name_or_path")
    if not base:
        raise PolicyError(f"{model}: are adapters that do not name their base model; set base_model_name_or_path in {adapter}")
    return Source(label, base, str(adapter.parent.absolute()), version)


def place_of(root: Path, config: RLConfig) -> RunDir:
    """A run's directory where it lies now: it may have been moved since its configuration was written."""
    return RunDir(root, config.run_dir.weights_dir if config.trainer.weights.dir else root / "weights")


def version_number(root: Path, version: str, there: Collection[int], evals: tuple[str, ...]) -> int:
    """The version that is meant by what stands behind the @: nothing is the newest of those that are there. Raises PolicyError."""
    if not version:
        return max(there, default=0)
    if version.startswith("best"):
        return best_version(root, version.removeprefix("best").removeprefix(":"), evals)
    if version.isascii() and version.isdigit():
        return int(version)
    raise PolicyError(f"{root}@{version}: give a version's number, or best")


def read_json(path: Path) -> dict[str, Any]:
    """A file with a table. Raises PolicyError."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise PolicyError(f"{path}: is no table but a {type(content).__name__}")
    return content


def best_version(root: Path, name: str, evals: tuple[str, ...]) -> int:
    """The best version by evals/best.json."""
    path = root / "evals" / "best.json"
    if not path.exists():
        raise PolicyError(f"{root}@best: the run has no finished evaluation ({path}); name a version: {root}@12")
    best = {name: entry for name, entry in read_json(path).items() if isinstance(entry, dict) and isinstance(entry.get(BEST), int)}
    wanted = [name] if name else [label for label in evals if label in best][:1] or list(best)
    if name and name not in best:
        raise PolicyError(f"{root}@best:{name}: the run has no such evaluation; it has {', '.join(best)}")
    versions = {best[label][BEST] for label in wanted}
    if not versions:
        raise PolicyError(f"{path}: names no version; name one: {root}@12")
    if len(versions) > 1:
        raise PolicyError(f"{root}@best: the evaluations differ in it; name one: {', '.join(f'{root}@best:{label}' for label in wanted)}")
    return versions.pop()


# Servers that run already -----------------------------------------------------------------------------------------------


def check_server(url: str) -> str:
    """The address of an inference server of ours, if it answers."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(f"{url}/status", headers=authorization(Path()), timeout=CHECK_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise PolicyError(f"orchestrator.inference_urls: no inference server answers at {url} ({error}); is it running?") from None
    if response.status_code == 401:
        raise PolicyError(f"orchestrator.inference_urls: {url} wants its run's token: set RL_TOKEN to it (status/token of that run)")
    if response.status_code != 200:
        raise PolicyError(f"orchestrator.inference_urls: {url} is no inference server of rl; for another one give --policy {url}/v1")
    return url


def check_endpoint(url: str, model: str | None, key_var: str) -> Source:
    """Asks an endpoint for its models before anything is started. Raises PolicyError when it cannot be used."""
    url = url.rstrip("/")
    key = os.environ.get(key_var)
    try:
        response = httpx.get(f"{url}/models", headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=CHECK_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise PolicyError(
            f"{url}: nobody answers ({type(error).__name__}: {error}); is the server running, and is this its address?"
        ) from None
    if response.status_code in (401, 403):
        state = "is refused" if key else "is not set"
        raise PolicyError(f"{url}: answered {response.status_code}; its key is taken from ${key_var}, which {state} (see --api-key-var)")
    return Source(model := chosen_model(url, response, model), endpoint=Endpoint(base_url=url, model=model, api_key_var=key_var))


def chosen_model(url: str, response: httpx.Response, model: str | None) -> str:
    """The model to ask for. An endpoint that lists no models is believed to have the one that is named."""
    try:
        names = [entry["id"] for entry in response.json()["data"]] if response.status_code == 200 else []
    except (ValueError, KeyError, TypeError):
        names = []
    if not names and not model:
        hint = "" if url.endswith("/v1") else " (most addresses end with /v1)"
        raise PolicyError(f"{url}: does not say which models it has (answer {response.status_code}){hint}; name one with --endpoint-model")
    if not names or model in names:
        return model or ""
    listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    if model:
        close = difflib.get_close_matches(model, names, n=1)
        raise PolicyError(f"{url}: has no model {model}; " + (f"did you mean {close[0]}?" if close else f"it has {listed}"))
    if len(names) > 1:
        raise PolicyError(f"{url}: has several models; choose one with --endpoint-model: {listed}")
    return names[0]
