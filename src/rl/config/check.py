"""Faults between settings, which no single section can detect."""

import os
import re
from collections.abc import Iterator

from rl.config.base import MAX_LABEL, MAX_RUN_NAME, Fault, as_ids, name_fault, text_fault
from rl.config.environment_id import requirement_fault
from rl.config.loss import (
    EVERYTHING,
    AnyLossConfig,
    ClippedSettings,
    CrossEntropyConfig,
    CustomConfig,
    GspoConfig,
    PolicyGradientConfig,
)
from rl.config.orchestrator import EnvSource, NoCreditConfig
from rl.config.plan import cluster_faults
from rl.config.run import LENGTH, TRUNCATIONS, RLConfig
from rl.config.sft import LEARNING_RATE, SftConfig
from rl.config.tinker_faults import tinker_faults
from rl.config.trainer import EXPERTS, OptimConfig
from rl.run_dir.access_token import REMEDY, VARIABLE, given_token, is_loopback, token_file
from rl.system import nixl
from rl.system.credentials import secret_faults, strings
from rl.system.errors import RunError

MASKS = ("token_mask", "sequence_mask", "geometric_mask")


def hosts(config: RLConfig) -> dict[str, str]:
    """Returns the addresses that processes of the run bind, by setting key."""
    own = {"inference.host": config.inference.host, "orchestrator.host": config.orchestrator.host}
    return own | ({"serve.host": config.serve.host} if config.serve else {})


def exposure(config: RLConfig) -> list[str]:
    """Returns one sentence per exposed process: what other machines can reach, and what protects
    it."""
    guard = (
        f"the token in ${VARIABLE}"
        if os.environ.get(VARIABLE)
        else f"the token in {token_file(config.run_dir.status_dir)}"
    )
    effects = {
        "inference.host": f"other machines that send {guard} can use every endpoint of the "
        "inference server; "
        "traffic is not "
        "encrypted, so use it only on a network that you trust",
        "serve.host": "other machines that send the key which `rl serve` prints can train and "
        "sample; "
        "traffic is not encrypted, so use it "
        "only on a network that you trust",
        "orchestrator.host": f"the orchestrator answers other machines that have {guard} (CURVE, "
        "encrypted)",
    }
    wider = (
        {}
        if config.sft
        else {key: host for key, host in hosts(config).items() if not is_loopback(host)}
    )
    found = [f"{key} = {host}: {effects[key]}" for key, host in wider.items()]
    if config.trainer.weights.transport == "nixl" and not nixl.is_local():
        who = (
            "whoever reaches the ports of the trainer's ranks can read and write their memory, "
            "without a token; use it only on a network"
        )
        found.append(f"UCX_NET_DEVICES = {os.environ['UCX_NET_DEVICES']}: {who} that you trust")
    return found


def access_faults(config: RLConfig) -> Iterator[Fault]:
    """Yields faults of hosts, addresses and the token, but never the token's value."""
    for key, host in hosts(config).items():
        if not re.fullmatch(r"[\w.:%-]+", host):
            yield (
                key,
                host,
                "is not a valid address; give 127.0.0.1, an address or name of this machine, "
                "or 0.0.0.0 for all interfaces",
            )
    for url in config.orchestrator.inference_urls:
        if not re.match(r"https?://[^/]", url):
            yield "orchestrator.inference_urls", url, "give addresses like http://host:8000"
    try:
        given_token()
    except RunError:
        yield VARIABLE, "(hidden)", REMEDY


def check(config: RLConfig) -> Iterator[Fault]:
    """Yields every fault between settings."""
    if fault := name_fault(config.name, MAX_RUN_NAME):
        yield (
            "name",
            config.name,
            f"is used as a directory name: {fault}; use output_dir for the location",
        )
    if not config.output_dir:
        yield "output_dir", "", "is empty; give a folder, such as outputs"
    dump = config.model_dump()
    for key, text in strings(dump):
        if fault := text_fault(text):
            yield key, text, fault
    yield from secret_faults(dump)
    if config.sft and config.recorded:
        yield (
            "recorded.rollouts",
            config.recorded.rollouts,
            "and sft are two kinds of run: leave one of them out",
        )
    yield from access_faults(config)
    yield from cluster_faults(config)
    if config.serve:
        yield from check_serve(config)
    elif config.sft:
        yield from check_sft(config.sft, config.trainer.loss)
    elif config.recorded:
        yield from check_recorded(config)
    elif not config.trainer.data.fake:
        yield from check_sampling(config)
    if config.is_remote:
        yield from tinker_faults(config)
    elif config.tinker != type(config.tinker)():
        yield (
            "tinker",
            config.tinker.model_dump(exclude_defaults=True),
            'has an effect only with trainer.backend = "tinker": set that',
        )
    yield from check_loss(
        config.trainer.loss, several_steps=config.trainer.minibatches * config.trainer.epochs > 1
    )
    yield from check_minibatches(config)
    yield from check_router_replay(config)
    if config.trainer.lora and not config.trainer.lora.targets:
        yield (
            "trainer.lora.targets",
            [],
            'names no layer; give some ("q_proj", "v_proj"), or all-linear',
        )
    if config.trainer.lora and config.trainer.weights.anchor_every > 1:
        remedy = (
            "makes deltas of whole models, and trainer.lora publishes adapters, which are small: "
            "leave it out"
        )
        yield "trainer.weights.anchor_every", config.trainer.weights.anchor_every, remedy
    if config.trainer.optim.lr > 1:
        remedy = (
            "would destroy the model in the first step; usual values are 1e-7 to 1e-3, and no "
            "model needs more than 1: give less"
        )
        yield "trainer.optim.lr", config.trainer.optim.lr, remedy
    if config.trainer.optim.offload and config.trainer.gpus == 0:
        remedy = (
            "moves optimizer state from GPU to CPU memory, but trainer.gpus = 0 already trains "
            "on the CPU: leave it out"
        )
        yield "trainer.optim.offload", True, remedy
    trainer, inference = as_ids(config.trainer.gpus), as_ids(config.inference.gpus)
    if (both := set(trainer) & set(inference)) and max(len(trainer), len(inference)) > 1:
        yield (
            "inference.gpus",
            inference,
            f"shares {sorted(both)} with trainer.gpus; only a single GPU is shared",
        )


def check_sampling(config: RLConfig) -> Iterator[Fault]:
    """Yields faults of sampling: no environment, or sizes of groups and answers that do not fit."""
    settings, max_tokens = config.orchestrator, config.orchestrator.sampling.max_tokens
    if not settings.environment:
        yield (
            "orchestrator.environment",
            [],
            "name what to train on: --orchestrator.environment.id owner/name",
        )
    group_size = max([settings.group_size, *(env.group_size or 0 for env in settings.environment)])
    if settings.batch_size < group_size:
        remedy = (
            f"is smaller than one group of {group_size} rollouts (group_size); raise it or lower "
            "that"
        )
        yield "orchestrator.batch_size", settings.batch_size, remedy
    if config.max_lag > settings.max_off_policy_steps:
        limit = f"orchestrator.max_off_policy_steps = {settings.max_off_policy_steps}"
        yield (
            "max_lag",
            config.max_lag,
            f"allows rollouts older than {limit}; lower it or raise that",
        )
    if max_tokens >= config.model.max_model_len:
        remedy = (
            f"leaves no room for a prompt in model.max_model_len = {config.model.max_model_len}; "
            "lower it or raise that"
        )
        yield "orchestrator.sampling.max_tokens", max_tokens, remedy
    for kind, entries in (("environment", settings.environment), ("eval", settings.eval)):
        labels = [entry.label for entry in entries]
        for i, entry in enumerate(entries):
            yield from check_source(f"orchestrator.{kind}.{i}", entry)
            if entry.label in labels[:i]:  # labels name metrics and files
                yield (
                    f"orchestrator.{kind}.{i}.name",
                    entry.label,
                    "is already taken; give each entry its own name",
                )
    for i, entry in enumerate(settings.eval):
        same = [
            env.label
            for env in settings.environment
            if env.label == f"eval-{entry.label}" and env.source != entry.source
        ]
        if same:  # both would share worker names
            remedy = (
                f"names its workers {same[0]}, like those of a training environment; give it "
                "another name"
            )
            yield f"orchestrator.eval.{i}.name", entry.label, remedy
    yield from check_credit(config)


def check_source(key: str, entry: EnvSource) -> Iterator[Fault]:
    """Yields faults of one entry, which must name a package, rows with a reward function, or
    rows with a NeMo Gym server."""
    if bool(entry.id) == bool(entry.dataset):
        remedy = (
            "give either id (an environment's package), or dataset (rows) with reward or "
            "head_server"
        )
        yield f"{key}.id", entry.id or "", remedy
    elif entry.dataset and bool(entry.reward) == bool(entry.head_server):
        yield (
            f"{key}.reward",
            entry.reward,
            "a dataset needs either reward = file.py:function or a NeMo Gym head_server",
        )
    if entry.id and entry.reward and not entry.dataset:
        yield (
            f"{key}.reward",
            entry.reward,
            "applies only to rows (dataset): a package has reward functions of its own; "
            "leave it out",
        )
    if entry.requirements and (entry.python or entry.head_server):
        other = (
            "head_server has none"
            if entry.head_server
            else "python names an interpreter that you manage"
        )
        yield (
            f"{key}.requirements",
            entry.requirements,
            f"are installed where rl makes the virtual environment, but {other}; leave one out",
        )
    for fault in filter(None, map(requirement_fault, entry.requirements)):
        yield f"{key}.requirements", entry.requirements, fault
    if entry.kind and not entry.id:
        yield (
            f"{key}.kind",
            entry.kind,
            "applies only to packages; leave it out, or give the package's id",
        )
    if entry.isolation == "none":
        for name, value in (("network", entry.network), ("keys", entry.keys), ("read", entry.read)):
            if value is not None and value != []:
                yield (
                    f"{key}.{name}",
                    value,
                    'has an effect only in a sandbox: set isolation = "sandbox", or leave it out',
                )
    elif entry.head_server:
        yield (
            f"{key}.isolation",
            entry.isolation,
            "applies to workers, but a NeMo Gym environment runs in its own servers; leave it out",
        )
    if fault := name_fault(entry.label, MAX_LABEL):
        yield f"{key}.name", entry.label, f"is part of file names: {fault}"


def warnings_of(config: RLConfig) -> Iterator[str]:
    """Yields warnings about valid settings whose effect the user should know."""
    default, enough = OptimConfig().lr, "ten to a hundred times that (1e-5 to 1e-4)"
    if config.sft:
        default, enough = LEARNING_RATE, "ten times that (2e-4)"
    if (
        config.is_remote or (config.trainer.lora and not config.serve)
    ) and config.trainer.optim.lr == default:
        yield (
            f"trainer.optim.lr = {default:g} is the default for training the whole model; "
            f"adapters start at zero and need about {enough} "
            "to learn as fast"
        )
    if "max_model_len" not in config.model.model_fields_set and config.model.max_model_len < LENGTH:
        yield (
            f"model.max_model_len = {config.model.max_model_len}, the longest sequence of this "
            "model"
        )
    passes = config.sft and config.sft.epochs
    if config.trainer.optim.warmup_steps > config.max_steps and not passes:
        yield (
            f"trainer.optim.warmup_steps = {config.trainer.optim.warmup_steps} is longer than the "
            f"run (max_steps = {config.max_steps}): it never reaches trainer.optim.lr"
        )
    yield from exposure(config)
    if config.recorded and config.orchestrator.eval:
        yield (
            "orchestrator.eval is not played by a run of recorded rollouts; `rl eval --policy "
            "RUN@STEP` evaluates its versions"
        )
    truncated = {}
    for i, env in enumerate(config.orchestrator.environment):
        for key, value in config.sampling_of(env).items():
            if key in TRUNCATIONS:
                place = (
                    "orchestrator"
                    if getattr(env.sampling, key) is None
                    else f"orchestrator.environment.{i}"
                )
                truncated[f"{place}.sampling.{key}"] = value
    for key, value in truncated.items():
        yield (
            f"{key} = {value}: unless no token of the model is left out, inference samples "
            "from a truncated, renormalised distribution "
            "that the trainer does not model; importance ratios come out below 1 and "
            "mismatch_kl above 0 even on-policy"
        )


def check_credit(config: RLConfig) -> Iterator[Fault]:
    """Yields faults of credit, difficulty pools, teachers and temperature, for each environment
    with its own settings."""
    settings = config.orchestrator
    environments = {
        f"orchestrator.environment.{i}": env for i, env in enumerate(settings.environment)
    }
    for key, place in {"orchestrator": settings, **environments}.items():
        if place.teacher and not place.teacher.base_url.startswith(("http://", "https://")):
            yield (
                f"{key}.teacher.base_url",
                place.teacher.base_url,
                "give an address like http://host:8000/v1",
            )
        if place.teacher and config.trainer.loss.teacher_coefficient == 0:
            remedy = (
                "has no effect because trainer.loss.teacher_coefficient is 0: raise that, or "
                "leave the teacher out"
            )
            yield f"{key}.teacher.base_url", place.teacher.base_url, remedy
        if place.sampling.temperature == 0:
            yield (
                f"{key}.sampling.temperature",
                0,
                "is greedy: all rollouts of a group would be identical; raise it",
            )
    for key, env in environments.items():
        teacher, temperature = (
            env.teacher or settings.teacher,
            config.sampling_of(env)["temperature"],
        )
        if isinstance(env.credit or settings.credit, NoCreditConfig) and not teacher:
            remedy = (
                f"leaves environment {env.label} nothing to learn from without a teacher; use "
                "dr_grpo"
            )
            yield f"{key if env.credit else 'orchestrator'}.credit.type", "none", remedy
        if teacher and temperature != 1:
            where = "orchestrator" if env.sampling.temperature is None else key
            remedy = (
                f"does not work with a teacher (environment {env.label}): vLLM scores given "
                "tokens only at temperature 1; set it to 1"
            )
            yield f"{where}.sampling.temperature", temperature, remedy
        if env.difficulty and env.difficulty.easy_above < env.difficulty.hard_up_to:
            remedy = (
                f"is below hard_up_to = {env.difficulty.hard_up_to}; a task cannot be both easy "
                "and hard"
            )
            yield f"{key}.difficulty.easy_above", env.difficulty.easy_above, remedy


def check_loss(loss: AnyLossConfig, several_steps: bool = False) -> Iterator[Fault]:
    """Yields combinations of loss settings that make no sense. `several_steps`: there are
    several optimizer steps per batch."""
    for name in MASKS:
        low, high = getattr(loss, name)
        if not low <= 1 <= high:
            remedy = (
                "excludes r = 1, where trainer and sampler agree; give a lowest and a highest "
                "value around 1: [0.5, 2.0]"
            )
            yield f"trainer.loss.{name}", [low, high], remedy
    if loss.constant_length is not None and loss.aggregation != "constant":
        remedy = (
            'has an effect only with trainer.loss.aggregation = "constant" (it is '
            f'"{loss.aggregation}"): set that, or leave this out'
        )
        yield "trainer.loss.constant_length", loss.constant_length, remedy
    if loss.kl_reference is not None and not loss.kl_coefficient:
        remedy = "has no effect while trainer.loss.kl_coefficient is 0: set that, or leave this out"
        yield "trainer.loss.kl_reference", loss.kl_reference, remedy
    if isinstance(loss, ClippedSettings):
        yield from check_clip(loss, several_steps)
    if (
        isinstance(loss, PolicyGradientConfig)
        and loss.importance == "none"
        and loss.truncate != PolicyGradientConfig().truncate
    ):
        remedy = (
            'has no weight to truncate with trainer.loss.importance = "none": set that to '
            '"token", or leave this out'
        )
        yield "trainer.loss.truncate", loss.truncate, remedy


def check_minibatches(config: RLConfig) -> Iterator[Fault]:
    """Yields faults of several optimizer steps per batch: fine-tuning has other settings, and a
    minibatch needs whole groups."""
    settings, played, fake = config.trainer, config.orchestrator, config.trainer.data.fake
    if config.sft:
        if settings.minibatches > 1:
            yield (
                "trainer.minibatches",
                settings.minibatches,
                "divides batches of rollouts; for examples, lower sft.batch_size instead",
            )
        if settings.epochs > 1:
            yield (
                "trainer.epochs",
                settings.epochs,
                "counts passes over a batch of rollouts; for passes over examples, set sft.epochs",
            )
        return
    size, group_sizes = (
        played.batch_size,
        [env.group_size or played.group_size for env in played.environment],
    )
    if fake:
        size, group_sizes = fake.samples, [fake.group_size]
    elif config.recorded:
        group_sizes = [1]  # the file has others
    groups = -(-size // min(group_sizes, default=played.group_size))
    if settings.minibatches > groups:
        remedy = (
            f"exceeds the {groups} groups of a batch, and a minibatch needs whole groups; lower "
            "it, or raise orchestrator.batch_size"
        )
        yield "trainer.minibatches", settings.minibatches, remedy


def check_router_replay(config: RLConfig) -> Iterator[Fault]:
    """Yields faults of router replay: nothing to replay, or nobody who gives routes."""
    settings, key = config.trainer, "trainer.router_replay"
    compares = (
        isinstance(settings.loss, ClippedSettings | CustomConfig)
        and settings.minibatches * settings.epochs > 1
    )
    if settings.router_replay == "trainer" and not compares:
        remedy = (
            "has an effect only where a clipped loss compares several optimizer steps with one "
            "policy: set trainer.epochs or minibatches"
        )
        yield key, "trainer", remedy
    if settings.router_replay == "engine" and (config.sft or settings.data.fake):
        yield (
            key,
            "engine",
            "replays what inference samples, and nothing is sampled here; leave it out",
        )
    elif settings.router_replay == "engine" and any(
        env.head_server for env in config.orchestrator.environment
    ):
        yield (
            key,
            "engine",
            "cannot work with NeMo Gym (head_server), which passes no routes on; set it to "
            "trainer or off",
        )
    elif settings.router_replay == "engine" and config.inference.gpus == 0:
        yield (
            key,
            "engine",
            "needs routes, but vLLM gives none on CPUs (inference.gpus = 0); set "
            "trainer.router_replay to trainer or off",
        )


def check_clip(loss: ClippedSettings, several_steps: bool) -> Iterator[Fault]:
    """Yields faults of a clip, which must leave some ratios unclipped, and whose mask must leave
    some ratios to clip.

    With several optimizer steps, clip and masks act on different ratios, and `truncate` has an
    effect.
    """
    if loss.clip_low == 0 and loss.clip_high == 0:
        remedy = (
            "and trainer.loss.clip_low = 0 leave no ratio unclipped; raise one, or use type = "
            '"policy_gradient", which has no clip'
        )
        yield "trainer.loss.clip_high", 0.0, remedy
    if several_steps:
        return
    if loss.truncate != type(loss)().truncate:
        remedy = (
            "has an effect only with several optimizer steps per batch: set trainer.minibatches "
            "or trainer.epochs, or leave this out"
        )
        yield "trainer.loss.truncate", loss.truncate, remedy
    # the mask on the ratio that is clipped
    name = "geometric_mask" if isinstance(loss, GspoConfig) else "token_mask"
    low, high = getattr(loss, name)
    if (low, high) != EVERYTHING and low >= 1 - loss.clip_low and high <= 1 + loss.clip_high:
        clip = f"[{1 - loss.clip_low:g}, {1 + loss.clip_high:g}]"
        yield (
            f"trainer.loss.{name}",
            [low, high],
            f"masks every ratio that would be clipped to {clip} (clip_low, clip_high); widen "
            "it, or leave it out",
        )


def check_sft(config: SftConfig, loss: AnyLossConfig) -> Iterator[Fault]:
    """Yields faults between the settings of fine-tuning."""
    if not isinstance(loss, CrossEntropyConfig):
        yield (
            "trainer.loss.type",
            loss.type,
            "supervised fine-tuning minimises cross entropy; leave trainer.loss out",
        )
    for key in MASKS if isinstance(loss, CrossEntropyConfig) else ():
        if getattr(loss, key) != EVERYTHING:
            remedy = "compares trainer and sampler, but examples have no sampler: leave it out"
            yield f"trainer.loss.{key}", list(getattr(loss, key)), remedy
    if config.validation_fraction and (config.validation or config.validation_split):
        remedy = (
            "holds out part of the data, but sft.validation or sft.validation_split names other "
            "data: give only one of them"
        )
        yield "sft.validation_fraction", config.validation_fraction, remedy


def check_recorded(config: RLConfig) -> Iterator[Fault]:
    """Yields faults of a run of recorded rollouts, for which nobody answers."""
    settings = config.orchestrator
    key = (
        "orchestrator.teacher.base_url"
        if settings.teacher
        else "orchestrator.environment.teacher.base_url"
    )
    for teacher in filter(None, (settings.teacher, *(env.teacher for env in settings.environment))):
        yield (
            key,
            teacher.base_url,
            "scores rollouts as they are played, and recorded ones are not: leave it out",
        )
    if settings.metrics:
        remedy = "is called as rollouts are played, and recorded ones are not: leave it out"
        yield "orchestrator.metrics.function", settings.metrics.function, remedy
    yield from check_credit(config)


OF_CLIENTS = ("optim", "loss", "minibatches", "epochs")
"""Settings of the trainer that the calls of a Tinker client carry, or that have no counterpart
there."""


def check_serve(config: RLConfig) -> Iterator[Fault]:
    """Yields faults of a server of the Tinker API, whose trainer is one process with adapters."""
    trainer = config.trainer
    for kind in ("sft", "recorded"):
        if getattr(config, kind):
            yield (
                kind,
                True,
                "is another kind of run: leave it out, clients of `rl serve` send their own "
                "examples",
            )
    if trainer.lora is None or EXPERTS in trainer.lora.targets:
        remedy = (
            "rl serve trains adapters of the same layers for all clients, but not of experts: "
            "name linear layers, or all-linear"
        )
        yield "trainer.lora.targets", trainer.lora and trainer.lora.targets, remedy
    for key in ("ranks", "context_parallel"):
        if ((value := getattr(trainer, key)) or 1) > 1:
            yield f"trainer.{key}", value, "the trainer of rl serve is one process: leave it out"
    if trainer.data.fake:
        yield "trainer.data.fake", True, "the data of rl serve come from its clients: leave it out"
    of_calls = "rl serve takes it from each call of its clients: leave it out"
    for key in OF_CLIENTS:
        if (value := getattr(trainer, key)) != type(trainer).model_fields[key].default:
            yield f"trainer.{key}", value, of_calls
    if config.orchestrator.inference_urls:
        yield (
            "orchestrator.inference_urls",
            config.orchestrator.inference_urls,
            "rl serve starts its own inference: leave it out",
        )
