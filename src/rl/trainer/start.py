"""Builds the live objects of a rank from its configuration, and the newest checkpoint."""

from functools import partial
from pathlib import Path

import torch

from rl.config.loss import CustomConfig
from rl.config.run import RLConfig
from rl.models.folder import weights_digest
from rl.run_dir.lease import check_fence
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.origin import read_origin
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, Status
from rl.system.errors import RunError
from rl.trainer import determinism
from rl.trainer.data.batch_sources import (
    BatchSource,
    FromLog,
    FromOrchestrator,
    quarantined_steps,
)
from rl.trainer.data.fake import FakeBatches
from rl.trainer.data.prefetch import Prefetch, prepare
from rl.trainer.departure import Departure
from rl.trainer.loss.losses import custom_function
from rl.trainer.measure.parity import ParityWatch
from rl.trainer.measure.performance import work_of
from rl.trainer.measure.tokens import TokenFiles
from rl.trainer.model.dither import dither
from rl.trainer.model.head import mode_of
from rl.trainer.model.policy import DTYPES, load_policy
from rl.trainer.model.reference import load_reference
from rl.trainer.optim import make_optimizer
from rl.trainer.parallel.world import World
from rl.trainer.replay import Comparer, StateComparer
from rl.trainer.sft.source import FromExamples
from rl.trainer.sft.tokens import prepare_data
from rl.trainer.store import checkpoint
from rl.trainer.store.publisher import Publisher
from rl.trainer.store.saver import Saver
from rl.trainer.store.versions import say_what_is_left_out
from rl.trainer.train import WRITING, TrainContext, Trainer
from rl.wire.parity import RUN_LIMITS
from rl.wire.transport import OrchestratorClient, Wait


def start(
    config: RLConfig,
    world: World,
    base: str,
    status: Status,
    departure: Departure | None = None,
) -> Trainer:
    """Loads the model, and the newest checkpoint if there is one. `departure`: by default one that
    never begins."""
    departure, batches_from = departure or Departure(), config.batches_from
    settings, run_dir, replay = config.trainer, config.run_dir, config.trainer.data.replay
    # the run whose checkpoints and batches are read
    trained = RunDir(Path(replay.run), Path(replay.weights)) if replay else run_dir
    source: BatchSource | None = None
    if config.kind == "sft" and batches_from != "fake":
        if world.is_main and not replay:
            prepare_data(config, base, status.enter)
        world.barrier()
        source = FromExamples(config, trained.data)
        config = config.model_copy(update={"max_steps": source.num_steps})
    status.enter(Phase.LOADING_MODEL, max_steps=config.max_steps)

    newest, patience_s = first_checkpoint(config, trained, world), settings.patience_s
    context = load_context(config, world, base, newest is None)
    context.status = status
    model, step, digest = context.model, 0, ""
    if settings.lora or (settings.loss.kl_coefficient and not settings.loss.kl_reference):
        digest = weights_digest(Path(base))
    if newest:
        group = world.new_group(patience_s)
        step = checkpoint.load(newest, model, context.optimizer, world, group, patience_s, digest)

    text_config = model.config.get_text_config()
    fetching, publishing = (Wait(settings.batch_timeout_s, status.enter) for _ in range(2))
    client = None
    if batches_from == "orchestrator":
        if world.is_main:
            client = OrchestratorClient(run_dir, departure.asked.is_set)
        strict = settings.strict_parity
        if strict is None and config.truncates(text_config.vocab_size):
            strict = False
        limit = RUN_LIMITS[config.model.dtype]
        context.parity = ParityWatch(limit, strict, client, bool(settings.lora))
        source = FromOrchestrator(client, fetching, world)
        if settings.token_log.max_gib:
            context.token_files = TokenFiles(run_dir, settings.token_log, status.enter)
    elif settings.data.fake:
        source = FakeBatches(settings.data.fake, text_config.vocab_size, config.seed)
    packing = partial(
        prepare,
        config=config,
        world=world,
        hidden_size=text_config.hidden_size,
        minibatches=settings.minibatches,
        mode=mode_of(*filter(None, (model, context.reference))),
        routers=model.get_output_embeddings().forward.routers,
    )
    quarantined = quarantined_steps(trained, world)
    source = source or FromLog(trained)
    batches = Prefetch(source, packing, fetching, patience_s, quarantined)

    if replay:
        publisher: Publisher = Comparer(run_dir, settings.weights, publishing, world, trained)
        saver: Saver = StateComparer(run_dir, settings, world, step, trained)
    else:
        publisher = Publisher(run_dir, settings.weights, client, publishing, status.warn, world)
        saver = Saver(run_dir, settings, world, step, digest, status.enter)
    metrics = None
    if world.is_main:
        fence = partial(check_fence, run_dir.lock("trainer"))
        metrics = MetricsLog(run_dir.metrics, "trainer", fence)
    work, folder = work_of(model), Path(base)
    return Trainer(
        config, folder, context, step, batches, publisher, saver, work, metrics, status, departure
    )


def load_context(config: RLConfig, world: World, base: str, is_new: bool) -> TrainContext:
    """Loads the base model. `is_new`: no checkpoint takes the place of its weights."""
    settings, dtype = config.trainer, config.model.dtype
    determinism.apply(settings, world.device)
    if isinstance(settings.loss, CustomConfig):
        custom_function(settings.loss.function)  # fails here, before the model is loaded
    torch.manual_seed(config.seed)
    model = load_policy(base, config.model, settings, world)
    # masters of a checkpoint have it
    if is_new and dtype == "bfloat16" and not settings.lora:
        dither(model, config.seed)
    reference = load_reference(config, base, model, world)
    optimizer = make_optimizer(model, settings.optim)
    if world.is_main and config.batches_from in WRITING:
        say_what_is_left_out(Path(base))
    if world.device.type == "cuda" and config.batches_from in WRITING:
        checkpoint.require_host_memory(model, optimizer, DTYPES[dtype], world)
    return TrainContext(model, optimizer, settings, world, reference)


def first_checkpoint(config: RLConfig, run_dir: RunDir, world: World) -> Path | None:
    """Returns the checkpoint that training starts from, None for the base model. A replay starts
    from the one that its settings name. Raises RunError if a branch has lost its first one."""
    if replay := config.trainer.data.replay:
        return run_dir.checkpoint(replay.start) if replay.start else None
    newest = checkpoint.newest(run_dir.checkpoints, world)
    if newest is None and (parent := read_origin(run_dir)):
        raise RunError(
            f"{run_dir.checkpoints} is empty, but this run starts at step {parent.step} "
            f"({parent}): branch it again"
        )
    return newest
