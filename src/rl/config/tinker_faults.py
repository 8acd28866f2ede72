"""What a service with the Tinker API cannot do for a run."""

from collections.abc import Iterator

from rl.config.loss import EVERYTHING, ClipConfig, GspoConfig, PolicyGradientConfig
from rl.config.run import TRUNCATIONS, RLConfig
from rl.config.tinker import service_loss

READ = {
    "trainer": "backend optim loss checkpoint weights token_log batch_timeout_s",
    "trainer.optim": "lr betas eps weight_decay max_grad_norm warmup_steps schedule",
    "trainer.weights": "dir keep_last keep_every",
    "inference": "host port startup_timeout_s",
}
"""Section -> the settings that have an effect; others must have their defaults."""
WRITTEN = {"trainer.gpus": 0, "inference.gpus": 0}
"""Values that a run's config.toml has besides the defaults."""
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
    for (section, read), settings in zip(READ.items(), sections, strict=True):
        for name, info in type(settings).model_fields.items():
            key, value = f"{section}.{name}", getattr(settings, name)
            is_default = value == info.get_default(call_default_factory=True)
            if name not in read.split() and not is_default and WRITTEN.get(key) != value:
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
    for name in ("token_mask", "sequence_mask", "geometric_mask"):
        if getattr(loss, name) != EVERYTHING:
            yield f"trainer.loss.{name}", LACKS
    for name in ("kl_coefficient", "entropy_coefficient"):
        if getattr(loss, name):
            yield f"trainer.loss.{name}", LACKS
    if service_loss(loss) is None:
        if isinstance(loss, ClipConfig | GspoConfig):
            yield "trainer.loss.delta", LACKS
        elif isinstance(loss, PolicyGradientConfig):
            yield "trainer.loss.importance", "the Tinker API has token and none alone"
        else:
            names = "policy_gradient, clip, cispo, gspo or cross_entropy"
            yield "trainer.loss.type", f"is not among the losses of the Tinker API: {names}"
    for i, env in enumerate(played.environment):
        key = f"orchestrator.environment.{i}"
        for name, value in config.sampling_of(env).items():
            prefix = key if name in env.sampling.model_fields_set else "orchestrator"
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
        if env.teacher or played.teacher:
            yield f"{key if env.teacher else 'orchestrator'}.teacher", LACKS
    for kind, entries in (("environment", played.environment), ("eval", played.eval)):
        for i, entry in enumerate(entries):
            key = f"orchestrator.{kind}.{i}"
            if entry.head_server:
                yield (
                    f"{key}.head_server",
                    "NeMo Gym asks a server of ours for chats: use the local backend",
                )
            if kind == "eval" and entry.sampling.min_p is not None:
                yield f"{key}.sampling.min_p", LACKS
