"""What a service with the Tinker API cannot do for a run."""

from collections.abc import Iterator

from rl.config.base import Fault
from rl.config.loss import EVERYTHING, AnyLossConfig, ClipConfig, GspoConfig, PolicyGradientConfig
from rl.config.run import TRUNCATIONS, RLConfig
from rl.config.tinker import service_loss

OURS = {
    "trainer": (
        "backend",
        "optim",
        "loss",
        "checkpoint",
        "weights",
        "token_log",
        "batch_timeout_s",
    ),
    "trainer.optim": (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "max_grad_norm",
        "warmup_steps",
        "schedule",
    ),
    "trainer.weights": ("dir", "keep_last", "keep_every"),
    "inference": ("host", "port", "startup_timeout_s"),
}
"""Section -> the settings that have an effect; others must have their defaults."""
WRITTEN = {"trainer.gpus": 0, "trainer.ranks": 1, "inference.gpus": 0}
"""Values that a run's config.toml has besides the defaults."""
INSTEAD = {
    "trainer.lora": "the service trains adapters anyway: leave it out, and set tinker.lora_rank",
    "trainer.minibatches": "the service takes one optimizer step for each batch: lower "
    "orchestrator.batch_size "
    "instead",
    "trainer.epochs": "the service takes one optimizer step for each batch: leave it out",
}
LOCAL = 'is for trainer.backend = "local"; with "tinker" the service decides: leave it out'


def tinker_faults(config: RLConfig) -> Iterator[Fault]:
    """Yields faults of a run with a service: settings that it cannot follow, or that only
    concern our own trainer and inference."""
    for section, ours in OURS.items():
        place = config
        for name in section.split("."):
            place = getattr(place, name)
        for name, info in type(place).model_fields.items():
            value, default = getattr(place, name), info.get_default(call_default_factory=True)
            if name not in ours and value != default and WRITTEN.get(f"{section}.{name}") != value:
                yield f"{section}.{name}", value, INSTEAD.get(f"{section}.{name}", LOCAL)
    for name in ("sft", "recorded", "serve", "cluster"):
        if getattr(config, name):
            yield (
                "trainer.backend",
                "tinker",
                f'trains in one ordinary run, but "{name}" asks for another: leave one of them out',
            )
    if config.orchestrator.inference_urls:
        yield (
            "orchestrator.inference_urls",
            config.orchestrator.inference_urls,
            "the service samples, so there are no servers: leave it out",
        )
    yield from loss_faults(config.trainer.loss)
    yield from sampling_faults(config)


def loss_faults(loss: AnyLossConfig) -> Iterator[Fault]:
    """Yields what of the loss the Tinker API does not have."""
    key = "trainer.loss"
    for mask in ("token_mask", "sequence_mask", "geometric_mask"):
        if getattr(loss, mask) != EVERYTHING:
            yield (
                f"{key}.{mask}",
                list(getattr(loss, mask)),
                "masks what the service trains, and the Tinker API has no masks: leave it out",
            )
    for name in ("kl_coefficient", "entropy_coefficient"):
        if getattr(loss, name):
            yield (
                f"{key}.{name}",
                getattr(loss, name),
                "is a term that the losses of the Tinker API do not have: leave it out",
            )
    if service_loss(loss) is None and isinstance(loss, ClipConfig | GspoConfig):
        yield (
            f"{key}.delta",
            loss.delta,
            "is a dual clip, which the Tinker API does not have: leave it out",
        )
    elif service_loss(loss) is None and isinstance(loss, PolicyGradientConfig):
        yield (
            f"{key}.importance",
            loss.importance,
            "is not among the losses of the Tinker API: token or none",
        )
    elif service_loss(loss) is None:
        yield (
            f"{key}.type",
            loss.type,
            "is not among the losses of the Tinker API: policy_gradient, clip, cispo, gspo "
            "or cross_entropy",
        )


def sampling_faults(config: RLConfig) -> Iterator[Fault]:
    """Yields settings of sampling whose log-probabilities the service's training would not
    reproduce, or that it does not take."""
    settings = config.orchestrator
    for i, env in enumerate(settings.environment):
        sampling = config.sampling_of(env)
        where = {
            name: f"orchestrator.environment.{i}"
            if name in env.sampling.model_fields_set
            else "orchestrator"
            for name in sampling
        }
        if sampling["temperature"] != 1.0:
            key = f"{where['temperature']}.sampling.temperature"
            yield (
                key,
                sampling["temperature"],
                "the Tinker API trains at temperature 1 alone, so sample at it: set it to 1.0",
            )
        for name in TRUNCATIONS:
            if name in sampling:
                yield (
                    f"{where[name]}.sampling.{name}",
                    sampling[name],
                    "truncates what is sampled, but not what is trained: leave it out",
                )
        if env.teacher or settings.teacher:
            place = f"orchestrator.environment.{i}" if env.teacher else "orchestrator"
            yield (
                f"{place}.teacher",
                True,
                "adds a term that the losses of the Tinker API do not have: leave the teacher out",
            )
    for kind, entries in (("environment", settings.environment), ("eval", settings.eval)):
        for i, entry in enumerate(entries):
            if entry.head_server:
                yield (
                    f"orchestrator.{kind}.{i}.head_server",
                    entry.head_server,
                    "NeMo Gym asks a server of ours for chats: use the local backend",
                )
    for i, entry in enumerate(settings.eval):
        if entry.sampling.min_p is not None:
            yield (
                f"orchestrator.eval.{i}.sampling.min_p",
                entry.sampling.min_p,
                "the Tinker API does not take it: leave it out",
            )
