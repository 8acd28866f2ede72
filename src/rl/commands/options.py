"""What several subcommands share: flags, loading a configuration beside a command's own flags, the
run that a word names, and `--policy SPEC`: a model's folder or id, a version of a run, or an
endpoint.
"""

import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.cluster.submit import tell_model
from rl.config.base import MAX_RUN_NAME
from rl.config.command_line import (
    CommandLine,
    Option,
    fail,
    load_config_or_exit,
    need_names,
    option_lines,
    options,
    take,
    to_toml,
)
from rl.config.faults import Spelled
from rl.config.help import SETTINGS
from rl.config.run import RLConfig
from rl.config.stored import run_dir_of, stored_config
from rl.launch.prepare import ranges, runs_in
from rl.models.folder import read_json
from rl.run_dir.access_token import authorization, hides_keys
from rl.run_dir.paths import RunDir, numbered
from rl.system.errors import ConfigError, RunError
from rl.system.linux import bind
from rl.system.terminal import did_you_mean
from rl.wire.worker_messages import Endpoint

if TYPE_CHECKING:
    import httpx

CHECK_TIMEOUT_S = 30.0
DEFAULT_KEY = "OPENAI_API_KEY"
"""Environment variable with an endpoint's key."""


@dataclass(frozen=True)
class PolicySource:
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
) -> PolicySource:
    """Returns the policy that `spec` names; without `spec`, the configuration's servers or model.
    Raises RunError.

    `model`, `key_var`: an endpoint's model, and the environment variable with its key. `evals`:
    labels of evaluations; `@best` refers to the first of them that the run has.
    """
    model_name, urls = config.model.name, config.orchestrator.inference_urls
    if spec is None:
        for url in urls:
            check_server(url)
        label = Path(model_name).name
        return PolicySource(f"{label} at {urls[0]}") if urls else PolicySource(label, model_name)
    if is_url(spec):
        url, _, named = spec.partition("#")
        return check_endpoint(url.rstrip("/"), model or named or None, key_var)
    if run := split_run(spec):
        return version_of_run(*run, evals)
    check_not_a_run(spec)
    return from_folder(Path(spec).name, spec)


def is_url(spec: str) -> bool:
    return spec.startswith(("http://", "https://"))


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
    by_name = str(Path(RLConfig.model_fields["output_dir"].default) / spec)
    paths = [spec] if "/" in spec else [spec, by_name]
    if run := next(filter(None, map(split_run, paths)), None):
        return run
    if inside := runs_in(Path(spec).expanduser(), ""):
        raise ConfigError(f"{spec}: not a run of rl; it contains the runs {inside}")
    for path in paths:
        check_not_a_run(path)
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
    if spec and not is_url(spec) and not split_run(spec):
        check_not_a_run(spec)


def check_not_a_run(spec: str) -> None:
    """Raises ConfigError for a misspelt run. Accepts existing folders, and hub ids, which do not
    start with an existing folder."""
    path = Path(spec.rpartition("@")[0] or spec).expanduser()
    is_path = spec.startswith(("/", ".", "~")) or "@" in spec or spec.count("/") > 1
    is_in_folder = spec.count("/") == 1 and path.parent.is_dir()
    if Path(spec).expanduser().is_dir() or not (is_path or is_in_folder):
        return
    remedy = "give a model's folder, its id on the hub, or a run"
    if runs := runs_in(path.parent, path.name):
        remedy = f"{path.parent} contains the runs {runs}"
    raise ConfigError(f"{spec}: no such run or model folder; {remedy}")


def version_of_run(root: Path, version: str, evals: tuple[str, ...]) -> PolicySource:
    """Returns a version of a run's policy: the newest, one by number, or the best in an
    evaluation. Raises RunError."""
    config = stored_config(root)
    weights = run_dir_of(root, config).weights_dir
    versions = numbered(weights)
    number = version_number(root, version, versions, evals)
    label = f"{root.resolve().name}@{number}"
    if number == 0:
        return PolicySource(label, config.model.name, policy_version=0)
    need_weights(config, root, "sampling needs weights")
    if number not in versions:
        raise RunError(
            f"{root}@{version or number}: version {number} is not in {weights}; there are "
            f"{ranges(versions)} (and 0, the base model). "
            "trainer.weights.keep_last and keep_every set which ones a run keeps"
        )
    return from_folder(label, str(versions[number]), number, config.model.name)


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
) -> PolicySource:
    """Returns a model by folder or hub id. A folder of adapters stands for them on their base
    model (`base`, else the one they name)."""
    adapter = Path(model).expanduser() / "adapter_config.json"
    if not adapter.is_file():
        return PolicySource(label, model, policy_version=version)
    base = base or read_json(adapter).get("base_model_name_or_path")
    if not base:
        raise RunError(
            f"{model}: the adapters do not name their base model; set "
            f"base_model_name_or_path in {adapter}"
        )
    return PolicySource(label, base, str(adapter.parent.absolute()), version)


def version_number(
    root: Path, version: str, versions: Collection[int], evals: tuple[str, ...]
) -> int:
    """Returns the version number for the text after the @; without one, the newest of `versions`.
    `best` is the best in the evaluation after the colon, else in the first of `evals` that
    evals/best.json has. Raises RunError."""
    if not version:
        return max(versions, default=0)
    if version.isascii() and version.isdigit():
        return int(version)
    best, _, wanted = version.partition(":")
    remedy = f"name a version, {root}@N: there are {ranges(versions)}"
    if best != "best":
        raise RunError(f"{root}@{version}: give a version number, or best")
    path = root / "evals" / "best.json"
    if not path.exists():
        raise RunError(f"{root}@best: the run has no finished evaluation ({path}); {remedy}")
    entries = read_json(path, remedy).items()
    numbers = {
        name: entry["policy_version"]
        for name, entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("policy_version"), int)
    }
    if wanted and wanted not in numbers:
        remedy = did_you_mean(wanted, numbers)
        raise RunError(f"{root}@best:{wanted}: the run has no such evaluation; {remedy}")
    if not numbers:
        raise RunError(f"{path}: names no version; {remedy}")
    names = [wanted] if wanted else [name for name in evals if name in numbers][:1] or [*numbers]
    if len({numbers[name] for name in names}) > 1:
        listed = ", ".join(f"{root}@best:{name}" for name in names)
        raise RunError(f"{root}@best: differs between evaluations; name one: {listed}")
    return numbers[names[0]]


# Servers that are already running -----------------------------------------------------------------


def check_server(url: str) -> None:
    """Raises RunError unless an inference server of rl answers at the address, which may end
    with /v1."""
    import httpx  # takes 0.3 s, which `--help` should not

    url, key = url.rstrip("/").removesuffix("/v1"), "orchestrator.inference_urls"
    try:
        headers = authorization(Path())
        code = httpx.get(f"{url}/status", headers=headers, timeout=CHECK_TIMEOUT_S).status_code
    except httpx.HTTPError as error:
        raise RunError(
            f"{key}: no inference server answers at {url} ({error}); is it running?"
        ) from None
    if code == 401:
        raise RunError(
            f"{key}: {url} requires its run's token: set RL_TOKEN to it (status/token of that run)"
        )
    if code != 200:
        raise RunError(
            f"{key}: {url} is not an inference server of rl; for other servers use --policy "
            f"{url}/v1"
        )


def check_endpoint(url: str, model: str | None, key_var: str | None) -> PolicySource:
    """Returns an OpenAI-compatible endpoint as a policy, after requesting its models. Raises
    RunError if it cannot be used.

    The key of the default variable is sent only over https or to this machine.
    """
    import httpx

    key_var = key_var or (DEFAULT_KEY if hides_keys(url) else "")
    key = os.environ.get(key_var)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}/models", headers=headers, timeout=CHECK_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise RunError(
            f"{url}: no answer ({type(error).__name__}: {error}); is the server running, and "
            "is this its address?"
        ) from None
    if response.status_code in (401, 403):
        why = f"comes from ${key_var}, which {'was refused' if key else 'is not set'}"
        if not key_var:
            why = "is not sent over plain http to another machine unless you name its variable"
        raise RunError(
            f"{url}: answered {response.status_code}; the key {why} (--api-key-var {DEFAULT_KEY})"
        )
    model = choose_model(url, response, model)
    return PolicySource(model, endpoint=Endpoint(base_url=url, model=model, api_key_var=key_var))


def choose_model(url: str, response: "httpx.Response", model: str | None) -> str:
    """Returns the model to request: `model` (unchecked if the endpoint lists none), or else its
    only one. Raises RunError."""
    names, status = list[str](), response.status_code
    with suppress(ValueError, KeyError, TypeError):
        names = [entry["id"] for entry in response.json()["data"]] if status == 200 else []
    if model and (not names or model in names):
        return model
    if len(names) == 1 and not model:
        return names[0]
    if not names:
        hint = "" if url.endswith("/v1") else " (most addresses end with /v1)"
        why = f"does not list its models (status {status}){hint}; name one with --endpoint-model"
    elif model:
        why = f"has no model {model}; {did_you_mean(model, names)}"
    else:
        why = f"has several models; choose one with --endpoint-model; {did_you_mean('', names)}"
    raise RunError(f"{url}: {why}")


(POLICY,) = options("""
policy SPEC: policy to play; default: the model of the configuration
""")
ENDPOINT = options("""
endpoint-model NAME: model to request from an endpoint; default: its only one. Also SPEC =
    URL#NAME
api-key-var VAR: environment variable with the endpoint's key; default, over https:
    OPENAI_API_KEY
""")
(CONCURRENCY,) = options("""
concurrency N: rollouts to play at once; default: 64
""")
POLICY_SPECS = """
SPEC is one of
  name or folder              a model on the Hugging Face hub, or a folder in its format
  outputs/x                   the newest weights of a run; its configuration is used if no other is
                              given
  outputs/x@12                version 12 of that run (0: the base model)
  outputs/x@best              the best version in its evaluations; if they differ, use
                              outputs/x@best:EVAL
  https://host/v1             any OpenAI-compatible endpoint
"""


def name_of_play(
    config: RLConfig,
    line: CommandLine,
    labels: Iterable[str],
    source: PolicySource,
    policy: str | None,
) -> str:
    """Returns the name of what a command plays: the configured name if given or without a
    policy, otherwise environments and policy. The default name contains the configuration's
    model, which `policy` may not be."""
    return (
        config.name
        if "name" in line.settings() or not policy
        else f"{'+'.join(labels)}-{source.slug}"[:MAX_RUN_NAME]
    )


def usage(head: str, options: tuple[Option, ...], tail: str = "") -> str:
    """Returns the part of a command's help above the configuration keys."""
    return f"{head}\n\n{option_lines(options)}\n{tail}\n{SETTINGS}"


def load(
    program: str,
    args: list[str],
    options: tuple[Option, ...],
    text: str,
    *,
    preset: Spelled | None = None,
    optional: Collection[str] = (),
) -> tuple[RLConfig, CommandLine, dict[str, Any]]:
    """Loads a command's configuration and its own flags. Without a file, uses the configuration
    of the run given as policy."""
    values, rest = take(program, args, options)
    policy = values.get("policy") or ""
    run = split_run(policy)
    if run and not any(word.startswith("@") for word in rest):
        rest = ["@", str(run[0] / "config.toml"), *rest]

    def dry_run(config: RLConfig) -> str:
        config.sft = config.recorded = None
        if not is_url(policy) and values.get("rollouts", True):
            config.model.name = ("" if run else policy) or config.model.name
            if config.starts_inference:
                bind(config.inference.host, config.inference.port, "inference.port").close()
            tell_model(config)
        return to_toml(config)

    config, line = load_config_or_exit(
        rest,
        program,
        variables=os.environ,
        usage=text,
        given=preset,
        optional=optional,
        dry_run=dry_run,
        plays=True,
    )
    # these commands play the model, also of a run that has none played
    config.sft = config.recorded = None
    return config, line, values


def check_writable(flag: str, path: Path) -> None:
    """Raises RunError unless a file or folder can be made there."""
    parent = next(filter(Path.exists, path.absolute().parents))
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise RunError(f"{flag} {path}: {parent} is not a folder that can be written; give another")


def runs_given(
    program: str, args: list[str], options: tuple[Option, ...], text: str, count: int = 1
) -> tuple[dict[str, Any], list[Path]]:
    """Splits off a command's own flags. Returns their values by key, and the directories of the
    `count` runs that the other arguments name. Exits with code 2 on a fault."""
    values, rest = take(program, args, options, text)
    which = (
        "which run? Give only its directory" if count == 1 else "which runs? Give two, by directory"
    )
    need_names(
        program, rest, (count,), f"{which} or name, {program} outputs/NAME; {program} --help"
    )
    try:
        return values, [named_run(word) for word in rest]
    except ConfigError as error:
        fail(program, str(error))


def open_run(root: Path) -> tuple[RunDir, RLConfig]:
    """Returns a run's files, and its configuration. Raises RunError."""
    config = stored_config(root)
    return run_dir_of(root, config), config
