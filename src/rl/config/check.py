"""Faults between settings, which no single section can detect, and warnings."""

import os
from collections.abc import Iterator
from typing import Any

from rl.config.base import MAX_LABEL, MAX_RUN_NAME, Fault, as_ids, name_fault, text_fault
from rl.config.environment_id import requirement_fault
from rl.config.fields import without_none
from rl.config.kinds import LEARNING_RATE
from rl.config.loss import (
    EVERYTHING,
    AnyLossConfig,
    ClipConfig,
    ClippedSettings,
    CrossEntropyConfig,
    CustomConfig,
    GspoConfig,
    PolicyGradientConfig,
)
from rl.config.orchestrator import (
    EnvConfig,
    EnvSource,
    EvalConfig,
    NoCreditConfig,
    OrchestratorConfig,
    SamplingOverrides,
)
from rl.config.plan import cluster_faults
from rl.config.run import LENGTH, TRUNCATIONS, RLConfig
from rl.config.tinker import service_loss
from rl.config.trainer import EXPERTS, OptimConfig
from rl.run_dir.access_token import REMEDY, VARIABLE, given_token, is_loopback, token_file
from rl.system import nixl
from rl.system.credentials import secret_faults, strings
from rl.system.errors import RunError

SERVICE_READS = {
    "trainer": "backend optim loss checkpoint weights token_log batch_timeout_s",
    "trainer.optim": "lr betas eps weight_decay max_grad_norm warmup_steps schedule",
    "trainer.weights": "dir keep_last keep_every",
    "inference": "host port startup_timeout_s",
}
"""Section -> the settings that a service with the Tinker API reads; others must have their
defaults."""
SERVICE_DEVICES = {"trainer.gpus": 0, "inference.gpus": 0}
"""What such a run has here, besides the defaults."""
INSTEAD = {
    "trainer.lora": "the service trains adapters anyway: leave it out, and set tinker.lora_rank",
    "trainer.minibatches": "the service takes one optimizer step for each batch: lower "
    "orchestrator.batch_size instead",
    "trainer.epochs": "the service takes one optimizer step for each batch: leave it out",
}
LOCAL = 'is for trainer.backend = "local"; with "tinker" the service decides: leave it out'
LACKS = "is what the Tinker API does not have: leave it out"


def tinker_faults(config: RLConfig) -> Iterator[tuple[str, str]]:
    """Yields (key, remedy) of a run with a service: settings that it cannot follow, or that only
    concern our own trainer and inference."""
    loss, played = config.trainer.loss, config.orchestrator
    sections = (config.trainer, config.trainer.optim, config.trainer.weights, config.inference)
    for (section, read), settings in zip(SERVICE_READS.items(), sections, strict=True):
        for name, info in type(settings).model_fields.items():
            key, value = f"{section}.{name}", getattr(settings, name)
            is_default = value == info.get_default(call_default_factory=True)
            if name not in read.split() and not is_default and SERVICE_DEVICES.get(key) != value:
                yield key, INSTEAD.get(key, LOCAL)
    for name in ("sft", "recorded", "serve", "cluster"):
        if getattr(config, name):
            yield (
                "trainer.backend",
                f'trains in one ordinary run, but "{name}" asks for another: leave one of them out',
            )
    if played.inference_urls:
        yield (
            "orchestrator.inference_urls",
            "the service samples, so there are no servers: leave it out",
        )
    for name in (*MASKS, "kl_coefficient", "entropy_coefficient"):
        if getattr(loss, name) not in (EVERYTHING, 0.0):
            yield f"trainer.loss.{name}", LACKS
    if service_loss(loss) is None:
        if isinstance(loss, ClipConfig | GspoConfig):
            yield "trainer.loss.delta", LACKS
        elif isinstance(loss, PolicyGradientConfig):
            yield "trainer.loss.importance", "the Tinker API has token and none alone"
        else:
            names = "policy_gradient, clip, cispo, gspo or cross_entropy"
            yield "trainer.loss.type", f"is not among the losses of the Tinker API: {names}"
    for key, entry in played.entries.items():
        if entry.head_server:
            yield (
                f"{key}.head_server",
                "NeMo Gym asks a server of ours for chats: use the local backend",
            )
        if isinstance(entry, EvalConfig):
            if entry.sampling.min_p is not None:
                yield f"{key}.sampling.min_p", LACKS
            continue
        for name, value in config.sampling_of(entry).items():
            prefix = key if name in entry.sampling.model_fields_set else "orchestrator"
            if name in TRUNCATIONS:
                yield (
                    f"{prefix}.sampling.{name}",
                    "truncates what is sampled, but not what is trained: leave it out",
                )
            elif name == "temperature" and value != 1.0:
                yield (
                    f"{prefix}.sampling.temperature",
                    "the Tinker API trains at temperature 1 alone: set it to 1.0",
                )
        if entry.teacher or played.teacher:
            yield f"{key if entry.teacher else 'orchestrator'}.teacher", LACKS


Problem = tuple[str, str]
"""(key of a setting, the remedy or what it does not do)."""
MASKS = ("token_mask", "sequence_mask", "geometric_mask")


def value_of(config: RLConfig, key: str) -> Any:
    """Returns the value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)]
        else:
            value = value[part] if isinstance(value, dict) else getattr(value, part)
    return without_none(value)


def check(config: RLConfig) -> Iterator[Fault]:
    """Yields every fault between settings."""
    try:
        given_token()
    except RunError:
        yield VARIABLE, "(hidden)", REMEDY
    dump = config.model_dump()
    yield from secret_faults(dump)
    for key, text in strings(dump):
        if problem := text_fault(text):
            yield key, text, problem
    service = [tinker_faults] * config.is_remote
    for problems in (check_run, cluster_faults, CHECKS[config.kind], *service, check_trainer):
        for key, remedy in problems(config):
            yield key, value_of(config, key), remedy


def check_run(config: RLConfig) -> Iterator[Problem]:
    """Yields faults of settings that every kind of run has."""
    if problem := name_fault(config.name, MAX_RUN_NAME):
        yield (
            "name",
            f"is used as a directory name: {problem}; use output_dir for the location",
        )
    if not config.output_dir:
        yield "output_dir", "is empty; give a folder, such as outputs"
    for kind in ("sft", "recorded", "serve"):
        if getattr(config, kind) and kind != config.kind:
            yield kind, f"and {config.kind} are two kinds of run: leave one of them out"
    trainer, inference = as_ids(config.trainer.gpus), as_ids(config.inference.gpus)
    if (both := set(trainer) & set(inference)) and max(len(trainer), len(inference)) > 1:
        yield (
            "inference.gpus",
            f"shares {sorted(both)} with trainer.gpus; only a single GPU is shared",
        )


def check_trainer(config: RLConfig) -> Iterator[Problem]:
    """Yields faults of the trainer: of its loss, of minibatches, which need whole groups, and of
    router replay, for which somebody must give routes."""
    trainer, played = config.trainer, config.orchestrator
    yield from check_loss(trainer.loss, trainer.minibatches * trainer.epochs > 1)
    if trainer.lora and trainer.weights.anchor_every > 1:
        yield (
            "trainer.weights.anchor_every",
            "makes deltas of whole models, and trainer.lora publishes adapters, which are small: "
            "leave it out",
        )
    # the file of recorded rollouts has other groups
    sizes = [1] if config.kind == "recorded" else group_sizes(played)
    size, smallest = played.batch_size, min(sizes, default=played.group_size)
    if fake := trainer.data.fake:
        size, smallest = fake.samples, fake.group_size
    if config.kind != "sft" and trainer.minibatches > (groups := -(-size // smallest)):
        yield (
            "trainer.minibatches",
            f"exceeds the {groups} groups of a batch, and a minibatch needs whole groups; lower "
            "it, or raise orchestrator.batch_size",
        )
    if trainer.router_replay == "engine":
        key = "trainer.router_replay"
        samples_here = config.batches_from == "orchestrator" and config.starts_inference
        if config.batches_from in ("examples", "fake"):
            yield key, "replays what inference samples, and nothing is sampled here; leave it out"
        elif any(env.head_server for env in played.environment):
            yield (
                key,
                "cannot work with NeMo Gym (head_server), which passes no routes on; set it to "
                "trainer or off",
            )
        elif samples_here and config.inference.gpus == 0:
            yield (
                key,
                "needs routes, but vLLM gives none on CPUs (inference.gpus = 0); set it to "
                "trainer or off",
            )


def group_sizes(settings: OrchestratorConfig) -> list[int]:
    return [env.group_size or settings.group_size for env in settings.environment]


def check_played(config: RLConfig) -> Iterator[Problem]:
    """Yields faults of sampling: no environment, or sizes of groups and answers that do not fit."""
    settings, max_tokens = config.orchestrator, config.orchestrator.sampling.max_tokens
    if config.batches_from == "fake":
        return
    if not settings.environment:
        yield (
            "orchestrator.environment",
            "name what to train on: --orchestrator.environment.id owner/name",
        )
    largest = max([settings.group_size, *group_sizes(settings)])
    if settings.batch_size < largest:
        yield (
            "orchestrator.batch_size",
            f"is smaller than one group of {largest} rollouts (group_size); raise it or lower that",
        )
    if config.max_lag > settings.max_off_policy_steps:
        yield (
            "max_lag",
            "allows rollouts older than orchestrator.max_off_policy_steps = "
            f"{settings.max_off_policy_steps}; lower it or raise that",
        )
    if max_tokens >= config.model.max_model_len:
        yield (
            "orchestrator.sampling.max_tokens",
            "leaves no room for a prompt in model.max_model_len = "
            f"{config.model.max_model_len}; lower it or raise that",
        )
    labels: set[tuple[type, str]] = set()
    for key, entry in settings.entries.items():
        yield from check_source(key, entry)
        if (type(entry), entry.label) in labels:  # labels name metrics and files
            yield f"{key}.name", f"{entry.label} is already taken; give each entry its own name"
        labels.add((type(entry), entry.label))
        for env in settings.environment if isinstance(entry, EvalConfig) else ():
            if env.label == f"eval-{entry.label}" and env.source != entry.source:
                yield (
                    f"{key}.name",
                    f"names its workers {env.label}, like those of a training environment; "
                    "give it another name",
                )
    yield from check_credit(config)


def check_source(key: str, entry: EnvSource) -> Iterator[Problem]:
    """Yields faults of one entry, which must name a package, rows with a reward function, or
    rows with a NeMo Gym server."""
    if bool(entry.id) == bool(entry.dataset):
        yield (
            f"{key}.id",
            "give either id (an environment's package), or dataset (rows) with reward or "
            "head_server",
        )
    elif entry.dataset and bool(entry.reward) == bool(entry.head_server):
        yield (
            f"{key}.reward",
            "a dataset needs either reward = file.py:function or a NeMo Gym head_server",
        )
    if entry.id and entry.reward and not entry.dataset:
        yield (
            f"{key}.reward",
            "applies only to rows (dataset): a package has reward functions of its own; "
            "leave it out",
        )
    if entry.requirements and (entry.python or entry.head_server):
        yield (
            f"{key}.requirements",
            "are installed where rl makes the virtual environment, which it does not with "
            f"{'head_server' if entry.head_server else 'python'}; leave one out",
        )
    for problem in filter(None, map(requirement_fault, entry.requirements)):
        yield f"{key}.requirements", problem
    if entry.kind and not entry.id:
        yield f"{key}.kind", "applies only to packages; leave it out, or give the package's id"
    for name in ("network", "keys", "read"):
        if entry.isolation == "none" and getattr(entry, name) not in (None, []):
            yield (
                f"{key}.{name}",
                'has an effect only in a sandbox: set isolation = "sandbox", or leave it out',
            )
    if entry.isolation != "none" and entry.head_server:
        yield (
            f"{key}.isolation",
            "applies to workers, but a NeMo Gym environment runs in its own servers; leave it out",
        )
    if problem := name_fault(entry.label, MAX_LABEL):
        yield f"{key}.name", f"{entry.label!r} is part of file names: {problem}"


def check_credit(config: RLConfig) -> Iterator[Problem]:
    """Yields faults of credit, difficulty pools, teachers and temperature, for each environment
    with its own settings."""
    settings, run = config.orchestrator, "orchestrator"
    yield from check_greedy(run, settings.sampling)
    for i, env in enumerate(settings.environment):
        key, teacher = f"{run}.environment.{i}", env.teacher or settings.teacher
        yield from check_greedy(key, env.sampling)
        if isinstance(env.credit or settings.credit, NoCreditConfig) and not teacher:
            yield (
                f"{key if env.credit else run}.credit.type",
                f"leaves environment {env.label} nothing to learn from without a teacher; use "
                "dr_grpo",
            )
        if teacher and config.sampling_of(env)["temperature"] != 1:
            yield (
                f"{run if env.sampling.temperature is None else key}.sampling.temperature",
                f"does not work with a teacher (environment {env.label}): vLLM scores given "
                "tokens only at temperature 1; set it to 1",
            )
        if env.difficulty and env.difficulty.easy_above < env.difficulty.hard_up_to:
            yield (
                f"{key}.difficulty.easy_above",
                f"is below hard_up_to = {env.difficulty.hard_up_to}; a task cannot be both easy "
                "and hard",
            )


GREEDY = {"temperature": (0, "raise"), "top_k": (1, "raise"), "min_p": (1, "lower")}
"""Values of sampling with which the likeliest token is taken, each with its remedy."""


def check_greedy(key: str, sampling: SamplingOverrides) -> Iterator[Problem]:
    for name, (value, remedy) in GREEDY.items():
        if getattr(sampling, name) == value:
            yield (
                f"{key}.sampling.{name}",
                f"is greedy: all rollouts of a group would be identical; {remedy} it",
            )


def check_loss(loss: AnyLossConfig, several_steps: bool = False) -> Iterator[Problem]:
    """Yields faults of a clip, which must leave some ratios unclipped, and whose mask must leave
    some ratios to clip. With several optimizer steps per batch, they act on different ratios."""
    if not isinstance(loss, ClippedSettings):
        return
    if loss.clip_low == 0 and loss.clip_high == 0:
        yield (
            "trainer.loss.clip_high",
            "and trainer.loss.clip_low = 0 leave no ratio unclipped; raise one, or use type = "
            '"policy_gradient", which has no clip',
        )
    # the mask on the ratio that is clipped
    name = "geometric_mask" if isinstance(loss, GspoConfig) else "token_mask"
    (low, high), least, most = getattr(loss, name), 1 - loss.clip_low, 1 + loss.clip_high
    if not several_steps and (low, high) != EVERYTHING and low >= least and high <= most:
        yield (
            f"trainer.loss.{name}",
            f"masks every ratio that would be clipped to [{least:g}, {most:g}] (clip_low, "
            "clip_high); widen it, or leave it out",
        )


def check_sft(config: RLConfig) -> Iterator[Problem]:
    """Yields faults of fine-tuning."""
    loss, sft = config.trainer.loss, config.sft
    assert sft
    if not isinstance(loss, CrossEntropyConfig):
        yield (
            "trainer.loss.type",
            "supervised fine-tuning minimises cross entropy; leave trainer.loss out",
        )
    elif masks := [name for name in MASKS if getattr(loss, name) != EVERYTHING]:
        yield (
            f"trainer.loss.{masks[0]}",
            "compares trainer and sampler, but examples have no sampler: leave it out",
        )
    if sft.validation_fraction and (sft.validation or sft.validation_split):
        yield (
            "sft.validation_fraction",
            "holds out part of the data, but sft.validation or sft.validation_split names other "
            "data: give only one of them",
        )
    if config.trainer.minibatches > 1:
        yield (
            "trainer.minibatches",
            "divides batches of rollouts; for examples, lower sft.batch_size instead",
        )
    if config.trainer.epochs > 1:
        yield (
            "trainer.epochs",
            "counts passes over a batch of rollouts; for passes over examples, set sft.epochs",
        )


def check_recorded(config: RLConfig) -> Iterator[Problem]:
    """Yields faults of a run of recorded rollouts, for which nobody answers."""
    settings, why = config.orchestrator, "rollouts as they are played: leave it out"
    for key, section in sections(settings):
        if section.teacher:
            yield f"{key}.teacher.base_url", f"scores {why}"
    if settings.metrics:
        yield "orchestrator.metrics.function", f"measures {why}"
    yield from check_credit(config)


def sections(settings: OrchestratorConfig) -> Iterator[tuple[str, OrchestratorConfig | EnvConfig]]:
    """Yields the orchestrator and each environment, which may have settings of its own, by key."""
    yield "orchestrator", settings
    for i, env in enumerate(settings.environment):
        yield f"orchestrator.environment.{i}", env


def check_serve(config: RLConfig) -> Iterator[Problem]:
    """Yields faults of a server of the Tinker API, whose trainer is one process with adapters."""
    trainer = config.trainer
    if trainer.lora is None or EXPERTS in trainer.lora.targets:
        yield (
            "trainer.lora" if trainer.lora is None else "trainer.lora.targets",
            "rl serve trains adapters of the same layers for all clients, but not of experts: "
            "name linear layers, or all-linear",
        )
    for key in ("ranks", "context_parallel"):
        if (getattr(trainer, key) or 1) > 1:
            yield f"trainer.{key}", "the trainer of rl serve is one process: leave it out"
    if trainer.data.fake:
        yield "trainer.data.fake", "the data of rl serve come from its clients: leave it out"
    if config.orchestrator.inference_urls:
        yield (
            "orchestrator.inference_urls",
            "rl serve starts its own inference: leave it out",
        )


CHECKS = {
    "rl": check_played,
    "sft": check_sft,
    "recorded": check_recorded,
    "serve": check_serve,
}


def unused(config: RLConfig) -> Iterator[Problem]:
    """Yields valid settings without effect."""
    trainer, loss, settings = config.trainer, config.trainer.loss, config.orchestrator
    several_steps = trainer.minibatches * trainer.epochs > 1
    if loss.constant_length is not None and loss.aggregation != "constant":
        yield (
            "trainer.loss.constant_length",
            'has an effect only with trainer.loss.aggregation = "constant"',
        )
    if loss.kl_reference is not None and not loss.kl_coefficient:
        yield "trainer.loss.kl_reference", "has no effect while trainer.loss.kl_coefficient is 0"
    if isinstance(loss, ClippedSettings | PolicyGradientConfig):
        needs = (
            "with several optimizer steps per batch (trainer.minibatches, trainer.epochs)"
            if isinstance(loss, ClippedSettings)
            else "with trainer.loss.importance"
        )
        is_used = several_steps if isinstance(loss, ClippedSettings) else loss.importance != "none"
        if loss.truncate != type(loss)().truncate and not is_used:
            yield "trainer.loss.truncate", f"has an effect only {needs}"
    compares = several_steps and isinstance(loss, ClippedSettings | CustomConfig)
    if trainer.router_replay == "trainer" and not compares:
        yield (
            "trainer.router_replay",
            "has an effect only where a clipped loss compares several optimizer steps with one "
            "policy (trainer.epochs or minibatches)",
        )
    if trainer.optim.offload and trainer.gpus == 0:
        yield "trainer.optim.offload", "has no effect: trainer.gpus = 0 already trains on the CPU"
    for key, section in sections(settings):
        if section.teacher and loss.teacher_coefficient == 0:
            yield (
                f"{key}.teacher.base_url",
                "has no effect because trainer.loss.teacher_coefficient is 0",
            )
    if not config.is_remote and config.tinker != type(config.tinker)():
        yield "tinker", 'has an effect only with trainer.backend = "tinker"'
    for key in ("optim", "loss", "minibatches", "epochs") if config.kind == "serve" else ():
        if getattr(trainer, key) != type(trainer).model_fields[key].default:
            yield f"trainer.{key}", "has no effect: rl serve takes it from each call of its clients"
    for key in ("wandb", "tensorboard", "prometheus", "cost") if config.kind == "serve" else ():
        if getattr(config, key) != type(config).model_fields[key].default:
            yield key, "has no effect: the numbers of rl serve are those of its clients' models"
    if config.kind == "recorded" and settings.eval:
        yield (
            "orchestrator.eval",
            "is not played by a run of recorded rollouts; `rl eval --policy RUN@STEP` evaluates "
            "its versions",
        )


def warnings_of(config: RLConfig) -> Iterator[tuple[str, str]]:
    """Yields the keys of valid settings whose effect the user should know, and that effect."""
    yield from unused(config)
    default, enough = OptimConfig().lr, "ten to a hundred times that (1e-5 to 1e-4)"
    if config.kind == "sft":
        default, enough = LEARNING_RATE, "ten times that (2e-4)"
    adapts = config.is_remote or (config.trainer.lora and config.kind != "serve")
    if adapts and config.trainer.optim.lr == default:
        yield (
            "trainer.optim.lr",
            "is the default for training the whole model; adapters start at zero and need about "
            f"{enough} to learn as fast",
        )
    if "max_model_len" not in config.model.model_fields_set and config.model.max_model_len < LENGTH:
        yield "model.max_model_len", "is the longest sequence of this model"
    passes = config.sft and config.sft.epochs
    if config.trainer.optim.warmup_steps > config.max_steps and not passes:
        yield (
            "trainer.optim.warmup_steps",
            f"is longer than the run (max_steps = {config.max_steps}): it never reaches "
            "trainer.optim.lr",
        )
    truncated = {
        f"{'orchestrator' if getattr(env.sampling, name) is None else key}.sampling.{name}"
        for key, env in sections(config.orchestrator)
        if isinstance(env, EnvConfig) and not config.replays_sampling(env)
        for name in config.sampling_of(env)
        if name in TRUNCATIONS
    }
    for key in sorted(truncated):
        yield (
            key,
            "truncates what inference samples, but the trainer does not know which tokens are left "
            "(trainer.max_kept = 0, or NeMo Gym): importance ratios come out below 1 and "
            "mismatch_kl above 0 even on-policy. A value that leaves all tokens does no harm",
        )
    most = config.trainer.max_kept
    for key, env in sections(config.orchestrator):
        if isinstance(env, EnvConfig) and config.sampling_of(env).get("top_k", 0) > most > 0:
            yield (
                f"{'orchestrator' if env.sampling.top_k is None else key}.sampling.top_k",
                f"is above trainer.max_kept = {most}: a token of which more ids are kept, but not "
                "the whole vocabulary, is not trained",
            )


def exposure(config: RLConfig) -> list[str]:
    """Returns one sentence per exposed process: what other machines can reach, and what protects
    it."""
    guard = (
        f"the token in ${VARIABLE}"
        if os.environ.get(VARIABLE)
        else f"the token in {token_file(config.run_dir.status_dir)}"
    )
    plain = "traffic is not encrypted, so use it only on a network that you trust"
    effects = {
        "inference": f"other machines that send {guard} can use every endpoint of the inference "
        f"server; {plain}",
        "orchestrator": f"the orchestrator answers other machines that have {guard} (CURVE, "
        "encrypted)",
        "serve": "other machines that send the key which `rl serve` prints can train and sample; "
        f"{plain}",
        "prometheus": f"other machines that send {guard} can read the metrics; {plain}",
    }
    read = ["prometheus"] if config.kind == "sft" else [*effects]
    hosts = {key: getattr(config, key) for key in read}
    sentences = [
        f"{key}.host = {process.host}: {effects[key]}"
        for key, process in hosts.items()
        if process and not is_loopback(process.host)
    ]
    if config.trainer.weights.transport == "nixl" and not nixl.is_local():
        sentences.append(
            f"UCX_NET_DEVICES = {os.environ['UCX_NET_DEVICES']}: whoever reaches the ports of the "
            "trainer's ranks can read and write their memory, without a token; use it only on a "
            "network that you trust"
        )
    return sentences
