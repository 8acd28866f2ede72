"""`trainer` with `trainer.backend = "tinker"`: has a service train each batch, and announces the
version made of it.

A start makes a new model at the service, from the state of the newest checkpoint, and trains the
batches after it. So each batch is trained exactly once on the way to every version, whatever dies:
the trainer, the service, or both.
"""

import time
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TypeVar

import tinker

from rl.config.run import RLConfig
from rl.run_dir import spans
from rl.run_dir.checksums import verify_checkpoint
from rl.run_dir.files import CorruptFileError, clean_leftovers
from rl.run_dir.lease import check_fence
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.origin import first_step
from rl.run_dir.paths import numbers
from rl.run_dir.status import Phase, Status
from rl.system import faults
from rl.system.errors import GIVE_UP, RunError
from rl.tinker.client.datums import Prepared, metrics_of, prepare
from rl.tinker.client.places import (
    Place,
    RemoteRetention,
    read_place,
    sound_version,
    write_checkpoint,
    write_version,
)
from rl.tinker.client.service import (
    answered,
    asking,
    base_model,
    main,
    problem_of,
    rest_client,
    url_of,
    wait_for_service,
)
from rl.wire.batch_file import decode_batch
from rl.wire.messages import RunEnded, WeightVersion
from rl.wire.transport import OrchestratorClient, Wait

T = TypeVar("T")
LOOK_S = 5.0
"""Interval at which a service that does not answer is asked whether it is there."""
PAUSE = 20.0
"""With an interval in seconds, the least pause after a checkpoint, as a multiple of its cost."""


class RemoteTrainer:
    """Trains the batches of a run at a service."""

    def __init__(self, config: RLConfig, status: Status):
        self.config, self.status, self.run_dir, self.settings = (
            config,
            status,
            config.run_dir,
            config.trainer,
        )
        self.timeout_s = config.tinker.answer_timeout_s
        self.wait = Wait(self.settings.batch_timeout_s, status.enter)
        self.orchestrator = OrchestratorClient(self.run_dir)
        self.fence = partial(check_fence, self.run_dir.lock("trainer"))
        self.metrics = MetricsLog(self.run_dir.metrics, "trainer", self.fence)
        self.rest = rest_client(url_of(config))
        self.versions, self.checkpoints = (
            RemoteRetention(folder, ("",), kept.keep_last, kept.keep_every)
            for folder, kept in (
                (self.run_dir.weights_dir, self.settings.weights),
                (self.run_dir.checkpoints, self.settings.checkpoint),
            )
        )
        self.versions.rest = self.checkpoints.rest = self.rest
        self.step = self.saved = 0
        """The number of batches trained, and that of the newest checkpoint."""
        self.saved_at, self.cost_s = time.monotonic(), 0.0
        self.calls = (0, 0)
        """The first and last number of the model's calls that trained the newest step."""
        self.keeping: tinker.APIFuture | None = None
        """The request to keep the newest step's weights for sampling, if it is under way."""
        self.model = self._model()

    def _model(self) -> tinker.TrainingClient:
        """Makes a model at the service: from the newest checkpoint, or new adapters of the base
        model."""
        if step := max(numbers(self.run_dir.checkpoints), default=0):
            verify_checkpoint(self.run_dir.checkpoint(step))
        service = tinker.ServiceClient({"run": self.config.name}, base_url=url_of(self.config))
        if step:
            path = read_place(self.run_dir.checkpoint(step)).path
            self.step = self.saved = step
            remedy = "if it is gone there, resume the run at another step: --resume N"
            with asking(self.config, f"load {path} of checkpoint {step}", GIVE_UP, remedy=remedy):
                return answered(
                    service.create_training_client_from_state_with_optimizer(path), self.timeout_s
                )
        rank, name = self.config.tinker.lora_rank, base_model(self.config)
        with asking(self.config, f"make adapters of rank {rank} of {name}", GIVE_UP):
            return answered(
                service.create_lora_training_client(name, rank, self.config.seed), self.timeout_s
            )

    # The loop -------------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until the last step, or until the run has ended."""
        if self.step:
            self.publish(again=True)
        quarantined = {*numbers(self.run_dir.batches, self.run_dir.quarantined(0).suffix)}
        for step in range(self.step + 1, self.config.max_steps + 1):
            began, metrics, tokens, self.calls = time.monotonic(), {"quarantined": 1.0}, 0, (0, 0)
            if step not in quarantined:
                batch = self.receive(step)
                if batch is None:
                    break
                waited, tokens = time.monotonic() - began, batch.num_tokens
                metrics = self.train_batch(step, batch) | {"time/wait_for_batch": waited}
            self.step = step
            metrics |= self.publish() | self.save_if_due()
            metrics["time/step"] = time.monotonic() - began
            if tokens:
                metrics["perf/tokens_per_s"] = tokens / metrics["time/step"]
            self.metrics.write(step, metrics)
        if self.step > self.saved:
            self.save()

    def receive(self, step: int) -> Prepared | None:
        """Returns the batch of `step`, None if the run has ended. Waits for: the orchestrator."""
        with self.wait:
            answer = self.orchestrator.get_batch(step, self.wait)
        if not isinstance(answer, bytes):
            if isinstance(answer, RunEnded):
                print(f"the run has ended: {answer.reason}", flush=True)
            return None
        batch = decode_batch(answer, f"batch {step} from the orchestrator").batch
        if batch.step != step or not batch.num_loss_tokens:
            raise RunError(
                f"batch {step} from the orchestrator is batch {batch.step}, with "
                f"{batch.num_loss_tokens} tokens to train on"
            )
        return prepare(batch, self.config)

    def train_batch(self, step: int, batch: Prepared) -> dict[str, float]:
        """Has the service train one step, and returns its metrics. Waits for: the service."""
        self.status.enter(Phase.TRAINING, step)
        optim, since, first = self.settings.optim, time.monotonic(), self.num_calls + 1
        lr, clip = optim.lr_at(step, self.config.max_steps), optim.max_grad_norm
        adam = tinker.AdamParams(
            learning_rate=lr,
            beta1=optim.betas[0],
            beta2=optim.betas[1],
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            grad_clip_norm=0.0 if clip == float("inf") else clip,
        )
        with self.asking(f"train batch {step}"), spans.span("train_batch", "service", step):
            # All are sent before the first is answered, so that the service need not wait for us
            # between them.
            passes, update = (
                self.model.forward_backward(batch.data, batch.loss_fn, batch.loss_fn_config),
                self.model.optim_step(adam),
            )
            self.calls = (first, self.num_calls)
            self.keeping = self._keep(step)
            output = self.result(passes)
            self.status.advance()
            halfway = time.monotonic()
            answer = self.result(update).metrics or {}
        faults.point("remote.trained")
        found = (
            {"optim/grad_norm": answer["unclipped_grad_l2:mean"]}
            if "unclipped_grad_l2:mean" in answer
            else {}
        )
        found |= {
            "time/forward_backward": halfway - since,
            "time/optimizer": time.monotonic() - halfway,
        }
        return metrics_of(batch, output) | found | {"optim/lr": lr, "optim/steps": 1.0}

    @property
    def num_calls(self) -> int:
        """The number of the model's newest call, which the SDK counts."""
        return getattr(self.model, "_request_id_counter", 0)

    def result(self, request: tinker.APIFuture[T]) -> T:
        """Returns the answer to a request, and shows meanwhile if the service is out of reach.
        Raises TimeoutError at the deadline."""
        phase, step = self.status.current.phase or Phase.TRAINING, self.status.current.step
        deadline = time.monotonic() + self.timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if request.future().done() or left_s <= 0:
                break
            with suppress(TimeoutError):
                request.result(min(LOOK_S, left_s))
                break
            problem = problem_of(url_of(self.config))
            where = (
                (Phase.WAITING_FOR_SERVICE, step, f"{url_of(self.config)} to answer ({problem})")
                if problem
                else (phase, step)
            )
            self.status.enter(*where)
        answer = request.result(0)
        self.status.enter(phase, step)
        return answer

    def asking(self, what: str) -> AbstractContextManager[None]:
        """A context for requests during training. The last status must not say "training" when
        the service is away: the batch would be blamed."""
        return asking(
            self.config,
            what,
            away=lambda text: self.status.enter(Phase.WAITING_FOR_SERVICE, detail=text),
        )

    # Versions and states --------------------------------------------------------------------------

    def publish(self, again: bool = False) -> dict[str, float]:
        """Has the service keep the weights of this step for sampling, and announces them.
        `again`: not if a version of the checkpoint's very state is on disk. Waits for: the
        service, the orchestrator."""
        since, step = time.monotonic(), self.step
        self.status.enter(Phase.PUBLISHING, step)
        if not (again and self._is_there(step)):
            with self.asking(f"keep version {step}"):
                path = self.result(self.keeping or self._keep(step)).path
            self.keeping = None
            write_version(
                self.run_dir, Place(path, step, self.model.model_id, self.calls), self.fence
            )
        with self.wait:
            needed = self.orchestrator.published(
                WeightVersion(step, str(self.run_dir.weights(step).absolute())), self.wait
            )
        took = time.monotonic() - since
        if needed:
            self.versions.delete_old(
                step, {*needed.keep, self.saved, first_step(self.run_dir)}, needed.oldest_needed
            )
        return {"time/publish_weights": took, "time/publish_latency": took}

    def _keep(self, step: int) -> tinker.APIFuture:
        return self.model.save_weights_for_sampler(f"{step:06d}")

    def _is_there(self, step: int) -> bool:
        try:
            return bool(sound_version(self.run_dir.weights(step)).path)
        except CorruptFileError:
            return False

    def save_if_due(self) -> dict[str, float]:
        """Has the service keep the state of this step if a checkpoint is due; returns its
        metrics."""
        settings = self.settings.checkpoint
        pause_s = max(settings.interval_s, PAUSE * self.cost_s)
        due = (
            self.step % settings.interval == 0
            if settings.interval
            else time.monotonic() - self.saved_at >= pause_s
        )
        if not due and self.step < self.config.max_steps:
            return {}
        since = time.monotonic()
        self.save()
        self.saved_at, self.cost_s = time.monotonic(), time.monotonic() - since
        return {"time/checkpoint": self.cost_s, "time/checkpoint_cost": self.cost_s}

    def save(self) -> None:
        """Waits for: the service, the disk."""
        step = self.step
        self.status.enter(Phase.CHECKPOINTING, step)
        with self.asking(f"keep the state of step {step}"):
            path = self.result(self.model.save_state(f"{step:06d}")).path
        write_checkpoint(
            self.run_dir,
            Place(path, step, self.model.model_id),
            base_model(self.config),
            self.fence,
        )
        self.saved = step
        self.checkpoints.delete_old(step, {first_step(self.run_dir)})


def run(config: RLConfig, status: Status) -> None:
    run_dir = config.run_dir
    clean_leftovers(run_dir.weights_dir, run_dir.checkpoints, run_dir.digests_dir, ours="")
    wait_for_service(
        config,
        config.tinker.answer_timeout_s,
        lambda what: status.enter(Phase.WAITING_FOR_SERVICE, detail=what),
    )
    status.enter(Phase.LOADING_MODEL)
    RemoteTrainer(config, status).train()


if __name__ == "__main__":
    main("trainer", run)
