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
from rl.run_dir.paths import first_step, numbers
from rl.run_dir.status import Phase, Status
from rl.system import faults
from rl.system.errors import GIVE_UP
from rl.tinker.client.datums import ServiceBatch, metrics_of, prepare
from rl.tinker.client.service import (
    Remote,
    RemoteRetention,
    answered,
    asking,
    base_model,
    main,
    problem_of,
    read_remote,
    rest_client,
    sound_version,
    url_of,
    wait_for_service,
    write_checkpoint,
    write_version,
)
from rl.wire.batch_file import batch_of
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
        self.config, self.status, self.settings = config, status, config.trainer
        self.run_dir, self.url = config.run_dir, url_of(config)
        self.timeout_s = config.tinker.answer_timeout_s
        self.wait = Wait(self.settings.batch_timeout_s, status.enter)
        self.orchestrator = OrchestratorClient(self.run_dir)
        self.fence = partial(check_fence, self.run_dir.lock("trainer"))
        self.metrics = MetricsLog(self.run_dir.metrics, "trainer", self.fence)
        weights, checkpoint = self.settings.weights, self.settings.checkpoint
        self.versions = RemoteRetention(
            self.run_dir.weights_dir, ("",), weights.keep_last, weights.keep_every
        )
        self.checkpoints = RemoteRetention(
            self.run_dir.checkpoints, ("",), checkpoint.keep_last, checkpoint.keep_every
        )
        self.rest = self.versions.rest = self.checkpoints.rest = rest_client(self.url)
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
        step = self.step = self.saved = max(numbers(self.run_dir.checkpoints), default=0)
        folder = self.run_dir.checkpoint(step)
        if step:
            verify_checkpoint(folder)
        service = tinker.ServiceClient({"run": self.config.name}, base_url=self.url)
        if step:
            path = read_remote(folder).path
            remedy = "if it is gone there, resume the run at another step: --resume N"
            request = partial(service.create_training_client_from_state_with_optimizer, path)
            what = f"load {path} of checkpoint {step}"
        else:
            rank, name, remedy = self.config.tinker.lora_rank, base_model(self.config), ""
            request = partial(service.create_lora_training_client, name, rank, self.config.seed)
            what = f"make adapters of rank {rank} of {name}"
        with asking(self.config, what, GIVE_UP, remedy=remedy):
            return answered(request(), self.timeout_s)

    # The loop -------------------------------------------------------------------------------------

    def train(self) -> None:
        """Trains until the last step, or until the run has ended."""
        if self.step:
            self.publish(again=True)
        quarantined = {*numbers(self.run_dir.batches, self.run_dir.quarantined(0).suffix)}
        for step in range(self.step + 1, self.config.max_steps + 1):
            began, metrics, tokens, self.calls = time.monotonic(), {"quarantined": 1.0}, 0, (0, 0)
            if step not in quarantined:
                if (batch := self.receive(step)) is None:
                    break
                waited, tokens = time.monotonic() - began, batch.num_tokens
                metrics = self.train_batch(step, batch) | {"time/wait_for_batch": waited}
            self.step = step
            metrics |= self.publish() | self.save_if_due()
            took = metrics["time/step"] = time.monotonic() - began
            if tokens:
                metrics["tokens/batch"] = tokens
                metrics["perf/tokens_per_s"] = tokens / took
            self.metrics.write(step, metrics)
        if self.step > self.saved:
            self.save()

    def receive(self, step: int) -> ServiceBatch | None:
        """Returns the batch of `step`, None if the run has ended. Waits for: the orchestrator."""
        with self.wait:
            answer = self.orchestrator.get_batch(step, self.wait)
        if not isinstance(answer, bytes):
            if isinstance(answer, RunEnded):
                print(f"the run has ended: {answer.reason}", flush=True)
            return None
        return prepare(batch_of(step, answer, f"batch {step} from the orchestrator"), self.config)

    def train_batch(self, step: int, batch: ServiceBatch) -> dict[str, float]:
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
            passes = self.model.forward_backward(batch.data, batch.loss_fn, batch.loss_fn_config)
            update = self.model.optim_step(adam)
            self.calls = (first, self.num_calls)
            self.keeping = self._keep(step)
            output = self.result(passes)
            self.status.advance()
            halfway = time.monotonic()
            answer = self.result(update).metrics or {}
        faults.point("remote.trained")
        metrics = metrics_of(batch, output) | {
            "time/forward_backward": halfway - since,
            "time/optimizer": time.monotonic() - halfway,
            "tokens/trained": len(batch.logprobs),
            "optim/lr": lr,
            "optim/steps": 1.0,
        }
        if "unclipped_grad_l2:mean" in answer:
            metrics["optim/grad_norm"] = answer["unclipped_grad_l2:mean"]
        return metrics

    @property
    def num_calls(self) -> int:
        """The number of the model's newest call, which the SDK counts."""
        return getattr(self.model, "_request_id_counter", 0)

    def result(self, request: tinker.APIFuture[T]) -> T:
        """Returns the answer to a request, and shows meanwhile if the service is out of reach.
        Raises TimeoutError at the deadline."""
        phase, step = self.status.current.phase or Phase.TRAINING, self.status.current.step
        deadline = time.monotonic() + self.timeout_s
        while not request.future().done() and (left_s := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                request.result(min(LOOK_S, left_s))
                break
            if problem := problem_of(self.url):
                away = f"{self.url} to answer ({problem})"
                self.status.enter(Phase.WAITING_FOR_SERVICE, step, away)
            else:
                self.status.enter(phase, step)
        answer = request.result(0)
        self.status.enter(phase, step)
        return answer

    def asking(self, what: str) -> AbstractContextManager[None]:
        """A context for requests during training. The last status must not say "training" when
        the service is away: the batch would be blamed."""
        away = partial(self.status.enter, Phase.WAITING_FOR_SERVICE, None)
        return asking(self.config, what, away=away)

    # Versions and states --------------------------------------------------------------------------

    def publish(self, again: bool = False) -> dict[str, float]:
        """Has the service keep the weights of this step for sampling, and announces them.
        `again`: not if a version of the checkpoint's very state is on disk. Waits for: the
        service, the orchestrator."""
        since, step = time.monotonic(), self.step
        folder = self.run_dir.weights(step)
        self.status.enter(Phase.PUBLISHING, step)
        if not (again and self._is_sound(step)):
            with self.asking(f"keep version {step}"):
                path = self.result(self.keeping or self._keep(step)).path
            self.keeping = None
            remote = Remote(path, step, self.model.model_id, self.calls)
            write_version(self.run_dir, remote, self.fence)
        with self.wait:
            version = WeightVersion(step, str(folder.absolute()))
            needed = self.orchestrator.published(version, self.wait)
        took = time.monotonic() - since
        if needed:
            keep = {*needed.keep, self.saved, first_step(self.run_dir)}
            self.versions.delete_old(step, keep, needed.oldest_needed)
        return {"time/publish_weights": took, "time/publish_latency": took}

    def _keep(self, step: int) -> tinker.APIFuture:
        return self.model.save_weights_for_sampler(f"{step:06d}")

    def _is_sound(self, step: int) -> bool:
        with suppress(CorruptFileError):
            return bool(sound_version(self.run_dir.weights(step)).path)
        return False

    def save_if_due(self) -> dict[str, float]:
        """Has the service keep the state of this step if a checkpoint is due; returns its
        metrics."""
        settings, since = self.settings.checkpoint, time.monotonic()
        if settings.interval:
            due = self.step % settings.interval == 0
        else:
            due = since - self.saved_at >= max(settings.interval_s, PAUSE * self.cost_s)
        if not due and self.step < self.config.max_steps:
            return {}
        self.save()
        self.saved_at = time.monotonic()
        self.cost_s = self.saved_at - since
        return {"time/checkpoint": self.cost_s, "time/checkpoint_cost": self.cost_s}

    def save(self) -> None:
        """Waits for: the service, the disk."""
        step = self.step
        self.status.enter(Phase.CHECKPOINTING, step)
        with self.asking(f"keep the state of step {step}"):
            path = self.result(self.model.save_state(f"{step:06d}")).path
        remote = Remote(path, step, self.model.model_id)
        write_checkpoint(self.run_dir, remote, base_model(self.config), self.fence)
        self.saved = step
        self.checkpoints.delete_old(step, {first_step(self.run_dir)})


def run(config: RLConfig, status: Status) -> None:
    run_dir = config.run_dir
    clean_leftovers(run_dir.weights_dir, run_dir.checkpoints, run_dir.digests_dir, ours="")
    wait_for_service(config, status)
    status.enter(Phase.LOADING_MODEL)
    RemoteTrainer(config, status).train()


if __name__ == "__main__":
    main("trainer", run)
