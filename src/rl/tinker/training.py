"""Models that clients train: each is a log of calls, and adapters in the trainer that have seen a
part of it.

Calls of a model are executed in the order of their numbers, which its client gives; calls of
different models take turns. After a restart a model is loaded from the newest copy of its state,
and the calls after that are executed again: with the same data, seeds and software they give the
same bits. Answers that were written before are not written again.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.config.trainer import LoraConfig
from rl.run_dir.files import CorruptFileError, remove_directory, write_file
from rl.run_dir.metrics import Merger, MetricsLog
from rl.run_dir.paths import numbered
from rl.system import faults
from rl.system.errors import RESTART, RunError
from rl.tinker import codec
from rl.tinker.requests import (
    CreateModel,
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    decode,
)
from rl.tinker.storage import (
    EXTERNAL,
    SAMPLER,
    TRAINING,
    CallAnswer,
    CallLog,
    ClientCall,
    Storage,
    new_saved,
    tinker_path,
    write_json,
)
from rl.wire.training_calls import CallError, Learner, NoRoomError, Step

T = TypeVar("T")
KEPT_STATES = 2
IDLE_S = 3600.0
"""Seconds without a call after which a model leaves the trainer's memory if another one needs
it."""
MAKING = {"create_model", "load_weights"}
CHANGING = MAKING | {"optim_step"}
"""Calls after which a model has no gradient, so that its state may be copied."""
FAILED, NOT_EXECUTED = b'{"error"', b'{"error": "not executed: '
"""How the answer begins to a call that has failed, and to one that was not executed at all."""
Content = dict[str, Any] | bytes
"""Of an answer: JSON, or Protobuf."""


class Model:
    """A client's model. `applied` is the number of the newest call that its adapters in the
    trainer have seen; -1: they are not there."""

    def __init__(self, model_id: str, storage: Storage):
        self.id, self.run_dir = model_id, storage.model(model_id)
        self._log: CallLog | None = None
        self.attempts = self.run_dir.root / "attempts"
        """The number of the call that is being executed, and how often that was begun."""
        self.applied, self.version, self.saved_at, self.used = -1, 0, 0.0, time.time()
        self.loss = (0.0, 0)
        """Sum of the losses since the last step, and their number of targets."""
        self.changed = asyncio.Event()
        """Set, and replaced, when a call is answered."""
        self.queued = False

    @property
    def log(self) -> CallLog:
        """The calls, which are read at their first use: a server may have made thousands of
        models."""
        self._log = self._log or CallLog(self.run_dir.root / "calls.log")
        return self._log

    @property
    def next(self) -> int | None:
        """The first call without an answer, if it has come; those before it are all there."""
        number = len(self.log.answers)
        return number if number in self.log.calls else None

    @property
    def settings(self) -> dict[str, Any]:
        """What the model was made with: base_model, lora_rank, user_metadata."""
        path = self.run_dir.root / "made.json"
        return json.loads(path.read_bytes()) if path.exists() else {}


class Training:
    """The models, and the one thread in which the trainer computes."""

    def __init__(self, config: RLConfig, storage: Storage, learner: Learner):
        assert config.serve
        self.config, self.serve, self.storage = config, config.serve, storage
        self.learner, self.name = learner, config.serve.alias or config.model.name
        self.models = {model_id: Model(model_id, storage) for model_id in storage.model_ids()}
        self.ready: asyncio.Queue[Model] = asyncio.Queue()
        self.thread = ThreadPoolExecutor(1, "trainer")
        self.actions: dict[str, Callable[[Model, ClientCall, bool], Content]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
        }
        self.mergers: dict[str, Merger] = {}
        self.sampled: Callable[[str], set[int]] = lambda model_id: set()
        """Returns the versions of a model that sessions sample from."""

    # What clients ask -----------------------------------------------------------------------------

    def find(self, model_id: str) -> Model:
        if model_id not in self.models:
            raise KeyError(f"model {model_id} does not exist on this server")
        return self.models[model_id]

    async def add(self, model_id: str, number: int, kind: str, body: bytes) -> None:
        """Writes a call and has it executed after those before it."""
        if number == 0 and model_id not in self.models:
            self.models[model_id] = Model(model_id, self.storage)
        model = self.find(model_id)
        model.used = time.time()
        await model.log.add(ClientCall(number, kind, body))
        self._queue(model)

    async def answer(self, model_id: str, number: int, wait_s: float) -> CallAnswer | None:
        """Returns the answer to a call; None if it does not come in time. Raises KeyError for an
        unknown call."""
        model = self.find(model_id)
        if number not in model.log.calls:
            raise KeyError(f"model {model_id} has no call {number}")
        # a call without an answer at a restart waits for its client, who may be gone
        self._queue(model)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while number not in model.log.answers:
                    await model.changed.wait()
        return model.log.answer_of(number) if number in model.log.answers else None

    async def unload(self, prefix: str) -> None:
        """Takes models whose id begins so out of the trainer's memory."""

        def forget() -> None:
            for model in self._loaded():
                if model.id.startswith(prefix):
                    self._forget(model)

        await asyncio.get_running_loop().run_in_executor(self.thread, forget)

    def _loaded(self) -> list[Model]:
        """Returns the models in the trainer's memory; new ones may come meanwhile."""
        return [model for model in list(self.models.values()) if model.applied >= 0]

    def _forget(self, model: Model) -> None:
        self.learner.forget(model.id)
        model.applied, model.loss = -1, (0.0, 0)

    # The thread -----------------------------------------------------------------------------------

    def _queue(self, model: Model) -> None:
        if not model.queued and model.next is not None:
            model.queued = True
            self.ready.put_nowait(model)

    async def run(self) -> None:
        """Executes calls until it is cancelled. Raises OSError and RunError of the trainer,
        which end the process."""
        loop = asyncio.get_running_loop()
        while True:
            model = await self.ready.get()
            await loop.run_in_executor(self.thread, self._execute_next, model)
            model.changed.set()
            model.changed = asyncio.Event()
            model.queued = False
            self._queue(model)

    def _execute_next(self, model: Model) -> None:
        number = model.next
        assert number is not None
        try:
            self._catch_up(model, number)
        except NoRoomError as error:  # a later call may find room
            self._forget(model)
            model.log.answer(failed(number, f"not executed: {error}; then send this call again"))
            return
        call, copied = model.log.call_of(number), False
        try:
            self._count_attempt(model, number)
            content = self.actions[call.kind](model, call, True)
            answer = CallAnswer(number, encoded(content), isinstance(content, dict))
            old_s = time.monotonic() - model.saved_at
            copied = call.kind in CHANGING and old_s > self.serve.checkpoint_s
        except CallError as error:
            answer = failed(number, str(error))
        model.applied = number
        faults.point("calls.executed")
        model.log.answer(answer)
        model.attempts.unlink(missing_ok=True)
        if copied:
            self._save_state(model)

    def _count_attempt(self, model: Model, number: int) -> None:
        """Counts the attempts to execute a call in a file, which outlives this process. Raises
        CallError for a call that has ended the process too often: the clients of all models
        would wait for it."""
        attempts, limit = 1, self.config.supervisor.quarantine_after
        with suppress(OSError, ValueError):  # there is none, or a power cut has left a part of it
            last, before = map(int, model.attempts.read_text().split())
            attempts = before + 1 if last == number else 1
        if attempts > limit:
            raise CallError(
                f"not executed: the trainer has died {limit} times during this call; send it "
                "again with fewer tokens at once if memory was short (see the log), or raise "
                "supervisor.quarantine_after"
            )
        write_file(model.attempts, f"{number} {attempts}".encode(), durable=False)

    def _catch_up(self, model: Model, number: int) -> None:
        """Brings a model's adapters to where they were before call `number`: from its newest
        sound state, by the calls after that. Raises NoRoomError."""
        if model.applied < 0 < number:
            model.version = 0
            for step, folder in reversed(numbered(model.run_dir.root / "state").items()):
                try:
                    notes = self.learner.notes(folder)
                except CorruptFileError:
                    remove_directory(folder)
                    continue
                self._with_room(model, partial(self.learner.load, model.id, folder, optimizer=True))
                model.applied, model.version = step, notes["policy_version"]
                break
        for old in range(model.applied + 1, number):
            call, answer = model.log.call_of(old), model.log.answer_of(old).body
            try:
                if not was_left_out(call, answer):
                    self._with_room(model, partial(self.actions[call.kind], model, call, False))
            except CallError as error:
                if isinstance(error, NoRoomError):
                    raise
                if not answer.startswith(FAILED):
                    raise RunError(
                        f"call {old} of {model.id} cannot be executed again: {error}", RESTART
                    ) from None
            model.applied = old

    def _with_room(self, model: Model, execute: Callable[[], T], idle_s: float = 0.0) -> T:
        """Executes what may need memory for a model. Where that is short, other models leave it,
        the one that was not asked for longest first, as far as nobody has asked for them for
        `idle_s`; their calls load them again. Raises CallError."""
        others = sorted(self._loaded(), key=lambda other: other.used)
        while True:
            try:
                return execute()
            except NoRoomError:
                last = time.time() - idle_s
                others = [other for other in others if other is not model and other.used <= last]
                if not others:
                    raise
                self._forget(others.pop(0))

    def _save_state(self, model: Model) -> None:
        """Copies a model's state, after which its older calls need not be executed again."""
        model.log.sync()
        folder = model.run_dir.root / "state" / f"{model.applied:06d}"
        self.learner.save(model.id, folder, {"policy_version": model.version})
        for old in list(numbered(folder.parent).values())[:-KEPT_STATES]:
            remove_directory(old)
        model.saved_at = time.monotonic()

    # The calls: each returns the content of its answer. `first`: not executed again ---------------

    def _create(self, model: Model, call: ClientCall, first: bool) -> Content:
        request = decode(call.body, CreateModel)
        lora = request.lora_config
        self._check_base(request.base_model)
        seed = request.model_seq_id if lora.seed is None else lora.seed
        create = partial(self.learner.create, model.id, lora.rank, seed % 2**63)
        self._with_room(model, create, IDLE_S)
        answer = {"model_id": model.id, "type": "create_model"}
        return answer | {"made": self._make(model, lora.rank, request.user_metadata)}

    def _load(self, model: Model, call: ClientCall, first: bool) -> Content:
        request = decode(call.body, LoadWeights)
        name, _ = self.storage.find(request.path, TRAINING)
        if call.number == 0:
            self._check_base(request.base_model or self.name)
        folder = self.storage.saved(name)
        rank, of_model = self._notes(folder)["rank"], model.settings.get("lora_rank")
        if call.number and rank != of_model:
            raise CallError(f"{request.path} has rank {rank}, this model {of_model}")
        load = partial(self.learner.load, model.id, folder, request.optimizer)
        self._with_room(model, load, IDLE_S)
        model.version += 1
        model.saved_at = -1e9  # its source may be deleted: the next copy of the state must not wait
        answer = {"path": request.path, "model_id": model.id, "type": "load_weights"}
        if call.number:
            return answer
        return answer | {"made": self._make(model, rank, request.user_metadata)}

    def _notes(self, folder: Path) -> dict[str, Any]:
        """Returns the notes of a saved state. Raises CallError if it is damaged."""
        try:
            return self.learner.notes(folder)
        except CorruptFileError as error:
            raise CallError(f"{error}; save the state again, or load another one") from None

    def _check_base(self, base_model: str) -> None:
        if base_model not in (self.name, self.config.model.name):
            raise wrong_base(base_model, self.name)

    def _make(self, model: Model, rank: int, metadata: dict[str, Any] | None) -> dict[str, Any]:
        """Makes the model's run directory, and returns what the model was made with."""
        root, config = model.run_dir.root, self.config.model_copy(deep=True)
        lora = config.trainer.lora or LoraConfig()
        config.trainer.lora = lora.model_copy(update={"rank": rank})
        config.output_dir, config.name = str(root.parent), root.name
        config.trainer.weights.dir = None
        write_config(model.run_dir.config, config)
        model.run_dir.status_dir.mkdir(exist_ok=True)
        settings = {"base_model": self.name, "lora_rank": rank, "user_metadata": metadata}
        settings["time"] = time.time()
        write_json(root / "made.json", settings)
        return settings

    def _forward_backward(self, model: Model, call: ClientCall, first: bool) -> Content:
        request = codec.parse_call(call.body)
        loss = codec.loss_call(request)
        examples = codec.examples(request, self.learner.vocab_size, self.config.model.max_model_len)
        if not first and request.forward_only:
            return b""
        scored = self.learner.forward_backward(model.id, examples, loss, not request.forward_only)
        if not request.forward_only:
            total, count = model.loss
            total += float(sum(losses.sum() for losses in scored.losses))
            count += sum(int((example.advantages != 0).sum()) for example in examples)
            model.loss = (total, count)
        return codec.scored_message(request, scored)

    def _optim_step(self, model: Model, call: ClientCall, first: bool) -> Content:
        adam = decode(call.body, OptimStep).adam_params
        betas = (adam.beta1, adam.beta2)
        step = Step(adam.learning_rate, betas, adam.eps, adam.weight_decay, adam.grad_clip_norm)
        norm = self.learner.optimizer_step(model.id, step)
        model.version += 1
        total, count = model.loss
        model.loss = (0.0, 0)
        if first:
            metrics = {"loss/mean": total / max(1, count), "optim/grad_norm": norm}
            self._note_step(model, metrics | {"optim/lr": step.lr})
        return {"metrics": {"unclipped_grad_l2:mean": norm, "policy_version:max": model.version}}

    def _note_step(self, model: Model, metrics: dict[str, float]) -> None:
        log = MetricsLog(model.run_dir.metrics, "trainer")
        log.write(model.version, metrics)
        os.close(log.file)
        self.mergers.setdefault(model.id, Merger(model.run_dir.metrics)).merge()

    def _save(self, model: Model, call: ClientCall, first: bool) -> Content:
        request = decode(call.body, SaveWeights)
        name = (model.id, TRAINING, request.path)
        if first:
            folder = self.storage.saved(name)
            taken = self.storage.read_saved(name) and not request.overwrite
            if taken and self._notes(folder).get("number") != call.number:
                raise CallError(
                    f"{tinker_path(name)} exists: choose another name, or overwrite=True"
                )
            notes = {"policy_version": model.version, "number": call.number}
            self.learner.save(model.id, folder, notes)
            saved = new_saved(model.version, request.ttl_seconds, request.user_metadata)
            self.storage.write_saved(name, saved)
        return {"path": tinker_path(name), "type": "save_weights"}

    def _save_for_sampler(self, model: Model, call: ClientCall, first: bool) -> Content:
        request = decode(call.body, SaveWeightsForSampler)
        folder = model.run_dir.weights(model.version)
        if first and model.version and not folder.exists():
            self.learner.publish(model.id, folder, model.run_dir.digests(model.version))
            self._delete_old(model)
        answer = {"type": "save_weights_for_sampler", "policy_version": model.version}
        if request.path is not None:
            name = (model.id, SAMPLER, request.path)
            if first:
                saved = new_saved(model.version, request.ttl_seconds, request.user_metadata)
                self.storage.write_saved(name, saved)
            return answer | {"path": tinker_path(name)}
        if request.sampling_session_seq_id is None:
            raise CallError("give a path, or sampling_session_seq_id")
        session = model.id.partition(":train:")[0]
        sampling_id = f"{session}:sample:{request.sampling_session_seq_id}"
        return answer | {"sampling_session_id": sampling_id}

    def _save_external(self, model: Model, call: ClientCall, first: bool) -> Content:
        request = decode(call.body, SaveWeightsExternal)
        name = (model.id, EXTERNAL, request.path)
        if first:
            saved = self.storage.read_saved(name)
            if saved and saved.policy_version != model.version:
                raise CallError(f"{tinker_path(name)} exists: choose another name, or delete it")
            self.learner.publish(model.id, self.storage.saved(name), None)
            self.storage.write_saved(name, new_saved(model.version, request.ttl_seconds))
        return {"path": tinker_path(name), "type": "save_weights_external"}

    def _delete_old(self, model: Model) -> None:
        """Deletes versions that are neither among the newest, nor named, nor sampled from."""
        saved = self.storage.all_saved(model.id)
        named = {record.policy_version for name, record in saved if name[1] == SAMPLER}
        versions = numbered(model.run_dir.weights_dir)
        newest = sorted(versions)[-self.config.trainer.weights.keep_last :]
        for version in versions.keys() - named - self.sampled(model.id) - {*newest}:
            remove_directory(versions[version])


def encoded(content: Content) -> bytes:
    return json.dumps(content).encode() if isinstance(content, dict) else content


def wrong_base(base_model: str | None, name: str) -> CallError:
    return CallError(
        f"base_model {base_model!r}: this server has {name}; start it with "
        f"--serve.alias {base_model}"
    )


def failed(number: int, message: str) -> CallAnswer:
    """Returns the answer to a call that has failed."""
    return CallAnswer(number, encoded({"error": message, "category": "user"}))


def was_left_out(call: ClientCall, answer: bytes) -> bool:
    """Returns whether a call that was answered so had no effect, and might have one today: then
    there was no memory, or no such path."""
    return answer.startswith(NOT_EXECUTED) or (call.kind in MAKING and answer.startswith(FAILED))
