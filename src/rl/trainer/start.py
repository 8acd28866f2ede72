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
from rl.trainer.data.batch_sources import BatchSource, FromOrchestrator, quarantined_steps
from rl.trainer.data.fake import FakeBatches
from rl.trainer.data.prefetch import Prefetch, prepare
from rl.trainer.departure import Departure
from rl.trainer.loss.losses import custom_function
from rl.trainer.measure.parity import ParityWatch
from rl.trainer.measure.performance import work_of
from rl.trainer.model.dither import dither
from rl.trainer.model.head import mode_of
from rl.trainer.model.policy import DTYPES, load_policy
from rl.trainer.model.reference import load_reference
from rl.trainer.optim import make_optimizer
from rl.trainer.parallel.world import World
from rl.trainer.replay import Comparer, StateComparer, origin
from rl.trainer.store import checkpoint
from rl.trainer.store.publisher import Publisher
from rl.trainer.store.saver import Saver
from rl.trainer.store.token_files import TokenFiles
from rl.trainer.trainer import TrainContext, Trainer
from rl.wire.parity import RUN_LIMITS
from rl.wire.transport import OrchestratorClient, Wait


def start(
    config: RLConfig,
    world: World,
    base: str,
    status: Status,
    source: BatchSource | None = None,
    departure: Departure | None = None,
) -> Trainer:
    """Loads the model, and the newest checkpoint if there is one. Batches come from `source`, by
    default the orchestrator.

    `departure`: by default one that never begins.
    """
    departure = departure or Departure()
    settings, run_dir = config.trainer, config.run_dir
    replay = settings.data.replay
    determinism.apply(settings, world.device)
    if isinstance(settings.loss, CustomConfig):
        custom_function(settings.loss.function)  # fails here, before the model is loaded
    # the run whose checkpoints and batches are read
    trained = origin(replay) if replay else run_dir
    newest = newest_checkpoint(config, trained, world)
    torch.manual_seed(config.seed)
    model = load_policy(base, config.model, settings, world)
    # masters of a checkpoint have it
    if newest is None and config.model.dtype == "bfloat16" and not settings.lora:
        dither(model, config.seed)
    reference = load_reference(config, base, model, world)
    optimizer = make_optimizer(model, settings.optim)
    patience_s = settings.patience_s
    if world.device.type == "cuda" and not (settings.data.fake or replay):
        checkpoint.require_host_memory(model, optimizer, DTYPES[config.model.dtype], world)
    needs_base = settings.lora or (settings.loss.kl_coefficient and not settings.loss.kl_reference)
    held = weights_digest(Path(base)) if needs_base else ""
    step = (
        checkpoint.load(
            *newest, model, optimizer, world, world.new_group(patience_s), patience_s, held
        )
        if newest
        else 0
    )
    vocab_size = model.config.get_text_config().vocab_size
    if settings.data.fake:
        source = FakeBatches(settings.data.fake, vocab_size, config.seed)
    waits = [Wait(settings.batch_timeout_s, status.enter) for _ in range(2)]
    asks = world.is_main and not source
    client = OrchestratorClient(run_dir, departure.asked.is_set) if asks else None
    strict = (
        False
        if settings.strict_parity is None and config.truncates(vocab_size)
        else settings.strict_parity
    )
    parity = (
        None
        if source
        else ParityWatch(RUN_LIMITS[config.model.dtype], strict, client, bool(settings.lora))
    )
    source = source or FromOrchestrator(client, waits[0], world, settings.rank_timeout_s)
    hidden_size, minibatches = model.config.get_text_config().hidden_size, settings.minibatches
    mode = mode_of(*(each for each in (model, reference) if each))
    routers = model.get_output_embeddings().forward.routers
    packing = partial(
        prepare,
        config=config,
        world=world,
        hidden_size=hidden_size,
        minibatches=minibatches,
        mode=mode,
        routers=routers,
    )
    batches = Prefetch(source, packing, waits[0], patience_s, quarantined_steps(trained, world))
    if replay:
        publisher: Publisher = Comparer(run_dir, settings.weights, waits[1], world, trained)
        saver: Saver = StateComparer(run_dir, settings, world, step, trained)
    else:
        publisher = Publisher(run_dir, settings.weights, client, waits[1], status.warn, world)
        saver = Saver(run_dir, settings, world, step, held)
    # The last status must not say "training" when one of these threads fails: readers would blame
    # the batch.
    for thread in (publisher.thread, publisher.disk):
        thread.on_error = lambda: status.enter(Phase.PUBLISHING, publisher.newest_started)
    saver.thread.on_error = lambda: status.enter(Phase.CHECKPOINTING, saver.newest_started)
    metrics = (
        MetricsLog(run_dir.metrics, "trainer", partial(check_fence, run_dir.lock("trainer")))
        if world.is_main
        else None
    )
    none = replay or config.sft or settings.data.fake or not settings.token_log.max_gib
    token_files = None if none else TokenFiles(run_dir, settings.token_log)
    if token_files:
        token_files.thread.on_error = lambda: status.enter(
            Phase.WRITING_TOKEN_LOG, token_files.newest_started
        )
    context = TrainContext(
        model, optimizer, settings, world, reference, parity, status, token_files
    )
    return Trainer(
        config,
        Path(base),
        context,
        step,
        batches,
        publisher,
        saver,
        work_of(model),
        metrics,
        status,
        departure=departure,
    )


def newest_checkpoint(config: RLConfig, run_dir: RunDir, world: World) -> tuple[Path, dict] | None:
    """Returns the checkpoint that training starts from, None for the base model. A replay starts
    from the one that its settings name.

    Raises CorruptFileError as `checkpoint.newest`, RunError if a branch has lost its first
    checkpoint.
    """
    replay = config.trainer.data.replay
    if replay:
        at = f"{replay.start:06d}"
        return (
            (run_dir.checkpoints / at, checkpoint.read_manifest(run_dir.checkpoints / at))
            if replay.start
            else None
        )
    newest = checkpoint.newest(run_dir.checkpoints, world, config.trainer.patience_s)
    if newest is None and (parent := read_origin(run_dir)):
        raise RunError(
            f"{run_dir.checkpoints} is empty, but this run starts at step {parent.step} "
            f"({parent}): branch it again"
        )
    return newest
