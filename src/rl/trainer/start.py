"""From the configuration to the live objects of a rank: model, optimizer, the newest checkpoint's state, and where batches come from."""

import time
from functools import partial
from pathlib import Path

import torch

from rl.config import RLConfig
from rl.files import move
from rl.metrics import MetricsLog
from rl.parity import run_limit
from rl.run_dir import RunDir
from rl.status import Status
from rl.trainer import checkpoint, determinism
from rl.trainer.data import BatchSource, FromOrchestrator, quarantined_steps
from rl.trainer.distributed import World
from rl.trainer.fake import FakeBatches
from rl.trainer.loss import custom_function
from rl.trainer.loss_config import CustomConfig
from rl.trainer.model import load_policy
from rl.trainer.optim import make_optimizer
from rl.trainer.parity import ParityWatch
from rl.trainer.performance import work_of
from rl.trainer.prefetch import Prefetch
from rl.trainer.publisher import Publisher
from rl.trainer.reference import load_reference
from rl.trainer.replay import Comparer, StateComparer, origin
from rl.trainer.saver import Saver
from rl.trainer.train import Learner, Trainer, prepare
from rl.transport import OrchestratorClient, Wait


def start(
    config: RLConfig, world: World, base: str, status: Status, source: BatchSource | None = None, found: checkpoint.Found | None = None
) -> Trainer:
    """Loads the model, and the newest intact checkpoint if there is one. Batches come from `source`, by default the orchestrator.

    `found`: what rank 0 knows of the checkpoints already.
    """
    settings, run_dir = config.trainer, config.run_dir
    replay = settings.data.replay
    determinism.apply(settings, world.device)
    if isinstance(settings.loss, CustomConfig):
        custom_function(settings.loss.function)  # what is wrong with it is said before a model is loaded
    torch.manual_seed(config.seed)
    model = load_policy(base, config.model, settings, world)
    reference = load_reference(config, base, model, world)
    optimizer = make_optimizer(model, settings.optim)
    log = origin(replay) if replay else run_dir
    sound = newest_checkpoint(config, log, world, found)
    step = checkpoint.load(*sound, model, optimizer, world) if sound else 0
    if settings.data.fake:
        source = FakeBatches(settings.data.fake, model.config.get_text_config().vocab_size, config.seed)
    waits = [Wait(settings.batch_timeout_s, status.doing) for _ in range(2)]
    asks = world.is_main and not source
    client = OrchestratorClient(run_dir.status("orchestrator"), settings.batch_timeout_s, status.doing) if asks else None
    parity = None if source else ParityWatch(run_limit(config.model.dtype), settings.strict_parity, client)
    source = source or FromOrchestrator(client, waits[0], world)
    packing = partial(prepare, config=config, world=world, hidden_size=model.config.get_text_config().hidden_size)
    batches = Prefetch(source, packing, waits[0], settings.rank_timeout_s, quarantined_steps(log, world))
    publisher, saver = Publisher(run_dir, settings.weights, client, waits[1]), Saver(run_dir, settings, world, step)
    if replay:
        publisher, saver = Comparer(run_dir, settings.weights, waits[1], log), StateComparer(run_dir, settings, world, step, log)
    metrics = MetricsLog(run_dir.metrics, "trainer") if world.is_main else None
    learner = Learner(model, optimizer, settings, world, reference, parity, status)
    return Trainer(config, Path(base), learner, step, batches, publisher, saver, work_of(model), metrics, status)


def newest_checkpoint(config: RLConfig, log: RunDir, world: World, found: checkpoint.Found | None) -> tuple[Path, dict] | None:
    """Where training starts. A replay starts at the checkpoint that it was told, in the run that it replays.

    Damaged checkpoints are moved away, so that retention does not count them, unless there is no other: then rl repairs the run.
    """
    replay = config.trainer.data.replay
    if replay:
        at = f"{replay.start:06d}"
        return (log.checkpoints / at, checkpoint.read_manifest(log.checkpoints / at)) if replay.start else None
    sound = checkpoint.newest_sound(log.checkpoints, world, found)
    if world.is_main and found and sound:
        for step in found[1]:
            away = log.discarded / time.strftime("%Y%m%d-%H%M%S") / "checkpoints" / f"{step:06d}"
            move(log.checkpoint(step), away)
    return sound
