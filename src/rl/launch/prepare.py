"""Prepares the run directory for a start: new, emptied (--clean) or continued (--resume). One `rl`
at a time owns it.

The location of a run is that of its config.toml: it may be moved and renamed. A directory in which
nothing was made yet is reused.
"""

import contextlib
import fnmatch
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.command_line import write_config
from rl.config.fields import changed_keys, leaves, without_none
from rl.config.outside import argument_fault
from rl.config.run import LENGTH, RLConfig, default_length
from rl.config.stored import as_written
from rl.config.trainer import TrainerConfig
from rl.diagnosis.run_outcome import early_end
from rl.launch.repair import repair
from rl.models.folder import weights_digest
from rl.run_dir.files import append_file, clean_leftovers, move, write_file
from rl.run_dir.lease import ROLE_WAIT_S, Lease, forget_dead_servers, hold_role
from rl.run_dir.metrics import cut_metrics, sources_dir
from rl.run_dir.paths import RunDir, is_run, numbered, numbers, read_origin
from rl.run_dir.safetensors import digest_of_file
from rl.run_dir.status import RunEnd, archive_status, read_json, server_files
from rl.system.errors import CANNOT_WRITE, RunError
from rl.system.terminal import nearest

MAY_CHANGE = [
    pattern
    for line in (
        "name, output_dir, max_steps, wandb, tensorboard, prometheus, cost, trainer.gpus",
        "trainer.cpus",
        "trainer.ranks, trainer.micro_batch_tokens, trainer.dp_replicate",
        "trainer.context_parallel, trainer.expert_parallel, trainer.activation_checkpointing",
        "trainer.attention, trainer.compile, trainer.strict_parity, trainer.checkpoint",
        "trainer.token_log, trainer.weights.keep_last, trainer.weights.keep_every",
        "trainer.weights.anchor_every, trainer.weights.transport, sft.validation_interval",
        "orchestrator.eval, orchestrator.metrics, orchestrator.batches, orchestrator.rollouts",
        "orchestrator.environment.*.reward (content of *), orchestrator.environment.*.workers",
        "orchestrator.environment.*.max_generating, orchestrator.environment.*.max_scoring",
        "orchestrator.inference_urls, orchestrator.*teacher.base_url",
        "orchestrator.*teacher.api_key_var, orchestrator.*teacher.timeout_s",
        "orchestrator.*teacher.least_gain, orchestrator.host",
        "orchestrator.port, orchestrator.rollout_retries, orchestrator.show_rollout_every",
        "orchestrator.worker_memory_gib, inference, supervisor, serve, tinker.base_url, cluster",
        "*.function (content of *), *_timeout_s",
    )
    for pattern in line.split(", ")
]
"""Settings and whole sections that a resume may change: they affect duration, place and speed, not
what is learned. Another machine, other timeouts or more steps continue the same experiment;
another model, data or loss would be a new one."""


REMEDY = "continue that run with --resume, delete it with --clean, or choose another --name"
MAX_LISTED = 10
"""Maximum number of runs listed in an error."""


@dataclass
class Prepared:
    """A run directory that this process owns."""

    run_dir: RunDir
    notes: list[str]
    """Findings and actions, for the console."""
    lease: Lease
    """The role `rl`, which this process holds while it lives."""
    why_over: str = ""
    """Why nothing is left to do: a complete run was resumed with unchanged settings. Otherwise
    empty."""


def prepare(config: RLConfig, *, resume: int | None, clean: bool) -> Prepared:
    """Takes the run directory of a resolved configuration and writes config.toml.

    resume: None without --resume; -1: newest step; else the step. Raises RunError or OSError.
    """
    run_dir = config.run_dir
    root = run_dir.root
    if clean and resume is not None:
        raise RunError("--clean deletes the run and --resume continues it: give only one of them")
    exists = is_run_or_free(root)
    if resume is not None and not exists:
        runs = runs_in(root.parent, root.name)
        others = f"; in {root.parent} there are {runs}" if runs else ""
        raise RunError(
            f"--resume: there is no run in {root}{others}. Leave it out to start one, or give "
            f"another run: {config.kind.program} @ RUN/config.toml --resume"
        )
    make_root(root)
    lease, over = hold_role(run_dir.lock("rl")), ""
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(lease.close)
        wait_for_survivors(run_dir, all_servers=clean)
        clean_leftovers(*{*run_dir.folders} - {run_dir.status_dir}, ours="")
        # not all: further servers on other hosts may be writing there
        clean_leftovers(run_dir.status_dir, ours="" if clean else None)
        has_work = run_dir.anything_made()
        if resume is not None:
            keep_choices(config, as_written(root))
        continues = resume is not None and (
            has_work or resume > 0 or not refusals(as_written(root), config)
        )
        if continues:
            same = not changed_keys(as_written(root), config)
            notes = continue_run(config, run_dir, resume)
            over = why_over(config, run_dir) if same and resume < 0 else ""
        else:
            notes = begin_run(run_dir, lease, clean) if exists or clean else []
            if versions := numbered(run_dir.weights_dir):
                raise RunError(
                    f"{run_dir.weights_dir} holds versions {min(versions)} to {max(versions)} of "
                    "another run; delete them with --clean"
                )
        write_config(run_dir.config, config)
        write_file(run_dir.named_files, json.dumps(contents(config)).encode())
        if not over:  # a start that fails must not leave the end of an earlier one
            run_dir.run_end.unlink(missing_ok=True)
        run_dir.stop_request.unlink(missing_ok=True)
        forget_dead_servers(run_dir.status_dir)
        kept = {*server_files(run_dir.status_dir)} - {run_dir.status("inference")}
        for path in {*run_dir.status_dir.glob("*.json")} - kept:
            archive_status(path, run_dir.spans)
        on_failure.pop_all()
    return Prepared(run_dir, notes, lease, over)


def begin_run(run_dir: RunDir, lease: Lease, clean: bool) -> list[str]:
    """Empties the directory of an earlier run: with --clean, or if it has made nothing, as after a
    failed start; then logs and events stay. Returns notes for the console. Raises RunError."""
    root, has_work, exists = run_dir.root, run_dir.anything_made(), is_run(run_dir.root)
    if clean:
        origin = read_origin(run_dir)
        clean_run(run_dir, lease, run_dir.cleaned if has_work else None)
        base = f", a {origin}: the new run begins at the base model" if origin else ""
        until = (
            " as soon as this one has finished a group or a step; until then it is in "
            f"{run_dir.cleaned}"
        )
        text = f"deletes the run in {root}{until}" if has_work else f"deleted the run in {root}"
        return [text + base] if exists else []
    if has_work:
        raise RunError(f"{root} exists: {REMEDY}")
    for name in ("batches", "rollouts_dir", "digests_dir", "tokens_dir", "spans", "evals", "data"):
        shutil.rmtree(getattr(run_dir, name), ignore_errors=True)
    for path in (run_dir.environments, sources_dir(run_dir.metrics)):
        shutil.rmtree(path, ignore_errors=True)
    for path in (run_dir.metrics, run_dir.changes, run_dir.wandb, run_dir.curves, run_dir.run_end):
        path.unlink(missing_ok=True)
    return [f"reusing {root}: the run in it had made nothing yet"]


def why_over(config: RLConfig, run_dir: RunDir) -> str:
    """Returns why a complete RL run has nothing left to do, and the remedy: it has ended well, its
    last step is evaluated, and the files of that step exist. Otherwise empty."""
    end, last = read_json(run_dir.run_end, RunEnd), run_dir.newest_batch()
    if not (
        config.kind.has_rollouts
        and end
        and last in numbers(run_dir.checkpoints)
        and last in numbered(run_dir.weights_dir)
        and (not config.orchestrator.eval or last in numbered(run_dir.evals))
        and not edits(run_dir, config)
    ):
        return ""
    if end.kind == "early" and config.plays:  # a recording may have grown
        remedy = "; raise orchestrator.eval.target to continue" if "target" in end.reason else ""
        return f"{early_end(end, last, config.max_steps)}{remedy}"
    is_last = end.kind == "done" and last == config.max_steps
    return f"all {last} steps are done; raise --max_steps to continue" if is_last else ""


def runs_in(folder: Path, name: str) -> str:
    """Lists runs in a folder for a message: the one with the name closest to `name`, or else the
    first ones. Empty if there is none."""
    runs = sorted(path.parent.name for path in folder.glob("*/config.toml"))
    return nearest(name, runs) or ", ".join(runs[:MAX_LISTED])


def is_run_or_free(root: Path) -> bool:
    """Returns whether there is a run; False if there is nothing, or only leftovers of a start
    interrupted before it wrote config.toml.

    Raises RunError for anything else, which belongs to the user. Call it before a lock makes the
    directory look like a run.
    """
    if is_run(root):
        return True
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    # machines of a cluster log before anything is prepared
    ours = {"status", "logs"} if "status" in names else {"status"}
    if foreign := [name for name in names if name not in ours and name[0] != "."]:
        raise RunError(
            f"{root} is not a run directory, and has {', '.join(foreign[:3])}; choose another "
            "--name"
        )
    return False


def make_root(root: Path) -> None:
    """Makes a run directory. Raises RunError if its path is wrong, and OSError if the disk is
    full or not writable."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in CANNOT_WRITE:
            raise
        raise RunError(
            f"{root} cannot be made, {error.filename}: {error.strerror}; choose another "
            "output_dir or --name"
        ) from None


def wait_for_survivors(run_dir: RunDir, *, all_servers: bool) -> None:
    """Waits until no process of an earlier `rl` holds its role: after a SIGKILL of `rl` they need a
    moment to end. Those on other hosts, where only time shows whether they are alive, are watched
    in parallel; one wrongly declared dead finds its role taken.

    Inference servers not started by `rl` may keep running, unless `all_servers` is set.
    """
    further = set() if all_servers else {*run_dir.status_dir.glob("inference-*.lock")}
    locks = sorted({*run_dir.status_dir.glob("*.lock")} - {run_dir.lock("rl")} - further)
    with ThreadPoolExecutor(len(locks) or 1, "survivors") as threads:
        list(threads.map(lambda path: hold_role(path, ROLE_WAIT_S).close(), locks))


def clean_run(run_dir: RunDir, lease: Lease, away: Path | None) -> None:
    """Empties the run directory except for our lock and lease: moves everything to `away`, or
    deletes it without `away`. Weights that lie elsewhere are deleted: they can be rebuilt from
    the rest. config.toml goes last, so that an interrupted call can be repeated."""
    stored = None
    # no or incompatible configuration: then only the weights of the new one are known
    with contextlib.suppress(RunError):
        stored = as_written(run_dir.root)
    if stored and stored.trainer.weights.dir and not copied_from(stored.run_dir, run_dir):
        delete_weights(stored.run_dir.weights_dir)
    if not (away and run_dir.weights_dir.is_relative_to(run_dir.root)):
        delete_weights(run_dir.weights_dir)
    if away and away.exists():
        shutil.rmtree(away)
    kept = {run_dir.config, run_dir.status_dir, run_dir.lock("rl"), lease.path, run_dir.cleaned}
    paths = {*run_dir.root.iterdir(), *run_dir.status_dir.iterdir()} - kept
    for path in [*paths, *filter(Path.exists, [run_dir.config])]:
        if away:
            move(path, away / path.relative_to(run_dir.root))
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def delete_weights(weights_dir: Path) -> None:
    """Deletes only the versions, finished or not, from a weights directory, which may lie
    outside the run."""
    for path in list(weights_dir.iterdir()) if weights_dir.is_dir() else []:
        if re.fullmatch(r"\d{6,}|\.\d{6,}\..*", path.name):
            shutil.rmtree(path)
    with contextlib.suppress(OSError):
        weights_dir.rmdir()


def continue_run(config: RLConfig, run_dir: RunDir, step: int) -> list[str]:
    """Checks that the run may continue with this configuration, cuts it to `step` (-1: no cut) and
    records changed settings.

    Returns notes for the console. Raises RunError.
    """
    root, stored, logged = run_dir.root, as_written(run_dir.root), config.kind.has_rollouts
    if refused := refusals(stored, config):
        differ = f"{len(refused)} settings differ" if len(refused) > 1 else "1 setting differs"
        branch = (
            f"continue with them in a new run: rl branch {root} --name NEW and the same settings; "
        )
        raise RunError(
            "\n".join(
                [
                    f"{root} was made with another configuration, {differ}:",
                    *refused,
                    f"  {branch * stored.kind.has_rollouts}start one with a new --name;",
                    "  or delete this one with --clean. docs/settings.md ends with what a resume "
                    "may change",
                ]
            )
        )
    newest = max([run_dir.newest_batch(), *numbers(run_dir.checkpoints)])
    reached = newest if step < 0 else min(newest, step)
    if reached > config.max_steps and not (config.sft and config.sft.epochs):
        back = f", or go back with --resume {config.max_steps}" if step < 0 else ""
        raise RunError(
            f"max_steps = {config.max_steps}: {root} already has {reached} steps; give at least "
            f"that{back}"
        )
    rates = new_rate(stored, config, reached)
    if rates and step < 0:
        raise RunError(
            f"max_steps: {stored.max_steps} -> {config.max_steps}: {rates}. To accept that, "
            f"name the step: --resume {newest}"
        )
    notes = [rates] * bool(rates)
    bring_weights(stored, config)
    if copied_from(stored.run_dir, run_dir):
        run_dir.wandb.unlink(missing_ok=True)  # the W&B run is the original's
    changes = changed_keys(stored, config) + edits(run_dir, config)
    if step >= 0:
        notes += cut_to(run_dir, step, logged=logged)
    notes += [f"repaired: {remark}" for remark in repair(run_dir, thorough=False, logged=logged)]
    if logged:
        # left by a kill in the middle of a cut or a repair
        cut_metrics(run_dir.metrics, run_dir.newest_batch())
    newest = max(numbers(run_dir.checkpoints), default=0)
    if changes:
        notes += [f"changed: {key}: {old!r} -> {new!r}" for key, old, new in changes]
        record = {"time": round(time.time(), 3), "step": newest}
        lines = [
            record | {"key": key, "old": in_json(old), "new": in_json(new)}
            for key, old, new in changes
        ]
        text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
        append_file(run_dir.changes, text.encode())
    batch = f", newest batch {run_dir.newest_batch() or 'none'}" if logged else ""
    return [f"resuming {root}: checkpoint {newest or 'none'}{batch}", *notes]


def new_rate(stored: RLConfig, config: RLConfig, step: int) -> str:
    """Returns the learning rates of a step by the stored and by the new settings; empty if they
    are equal, so that the rate goes on."""
    old, new = (run.trainer.optim.lr_at(max(step, 1), run.max_steps) for run in (stored, config))
    if old == new or (config.sft and config.sft.epochs):  # epochs end the schedule, not max_steps
        return ""
    return (
        f"learning rate of step {step}: {old:.3g} before, {new:.3g} with these settings, which "
        "go on from there"
    )


def in_json(value: Any) -> Any:
    """Returns a setting's value, as text if JSON has no such value, as inf."""
    return str(value) if argument_fault(value) else value


def bring_weights(stored: RLConfig, config: RLConfig) -> None:
    """Moves the versions of a renamed run if they lie outside of it, because their directory has
    the run's name."""
    before, now = stored.run_dir, config.run_dir
    if (
        config.trainer.weights.dir
        and not copied_from(before, now)
        and before.weights_dir != now.weights_dir
        and before.weights_dir.exists()
    ):
        if versions := numbered(now.weights_dir):
            raise RunError(
                f"{now.weights_dir} holds versions {ranges(versions)} of another run; choose "
                f"another name for {now.root}"
            )
        move(before.weights_dir, now.weights_dir)


def copied_from(before: RunDir, now: RunDir) -> bool:
    """Returns whether this run is a copy, its original still existing. Raises RunError if both
    would share a weights directory."""
    if not before.config.exists() or before.root.samefile(now.root):
        return False
    if before.weights_dir == now.weights_dir:
        raise RunError(
            f"{now.weights_dir} holds the versions of {before.root}, of which {now.root} is "
            "a copy: rename that directory"
        )
    return True


def cut_to(run_dir: RunDir, step: int, *, logged: bool) -> list[str]:
    """Moves everything later than `step` to `discarded/`. Raises RunError if the run cannot be
    rebuilt at `step` from what remains.

    The trainer starts at the newest remaining checkpoint, or at the base model, and trains the
    batches after it again: `logged` ones, or in supervised fine-tuning batches rebuilt from data
    and seed.
    """
    if (origin := read_origin(run_dir)) and step < origin.step:
        raise RunError(
            f"--resume {step}: {run_dir.root} begins at step {origin.step}, as a {origin}; "
            "give at least that"
        )
    batches, checkpoints = set(numbers(run_dir.batches, ".batch")), numbers(run_dir.checkpoints)
    base = max((number for number in checkpoints if number <= step), default=0)
    needed = range(min(base + 1, step), step + 1) if step and logged else range(0)
    if missing := {*needed} - batches:
        raise RunError(
            f"--resume {step}: needs batches {needed[0]} to {step} of {run_dir.root}, "
            f"{ranges(missing)} missing; there are batches {ranges(batches)} and checkpoints "
            f"{ranges(checkpoints)}"
        )
    away = run_dir.discard_after(step)
    if away and run_dir.wandb.exists():
        # a new W&B run starts: the old one would show both versions of the later steps
        move(run_dir.wandb, away / run_dir.wandb.name)
    return [f"moved everything after step {step} to {away}"] if away else []


def ranges(numbers: Iterable[int]) -> str:
    """Formats [1, 2, 3, 4, 7] as `1-4, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return (
        ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
        or "none"
    )


def refusals(stored: RLConfig, config: RLConfig) -> list[str]:
    """Returns the settings that differ although a resume may not change them, one per line."""
    return [
        f"  {key}: {old!r} -> {new!r}"
        for key, old, new in changed_keys(stored, config) + edits(config.run_dir, config)
        if not may_change(key) and not moved(config.run_dir, key, old, new)
    ]


def keep_choices(config: RLConfig, stored: RLConfig) -> None:
    """Takes from the stored configuration what an earlier start has chosen: the length, if it has
    shortened the one that is asked for to what the model has, see rl.models.folder; and to train
    over all ids, as older versions did, unless another trainer.max_kept is asked for."""
    asked, shortened = config.model, stored.model.max_model_len
    if asked.max_model_len == LENGTH and shortened == default_length({"name": asked.name}):
        asked.max_model_len = shortened
    if not stored.trainer.max_kept and config.trainer.max_kept == TrainerConfig().max_kept:
        config.trainer.max_kept = 0


def edits(run_dir: RunDir, config: RLConfig) -> list[tuple[str, Any, Any]]:
    """Returns the changes of `contents` since the last start, as `changed_keys` does those of
    settings."""
    before = read_json(run_dir.named_files, dict[str, str]) or {}
    now = contents(config)
    return [(key, before[key], now[key]) for key in now if before.get(key, now[key]) != now[key]]


def contents(config: RLConfig) -> dict[str, str]:
    """Returns a digest of each file, and of the weights in each model's folder, that a setting
    names."""
    digests = {}
    for key, value in leaves(without_none(config)).items():
        path = Path(str(value).rsplit(":", 1)[0])  # FILE.py:function
        if not key.endswith(".python") and (digest := content(path)):
            digests[f"{key} (content of {path.name})"] = digest
    return digests


def content(path: Path) -> str:
    """Returns a digest of a file, or of the weights in a model's folder; empty for others."""
    if os.path.isfile(path / "config.json"):
        return weights_digest(path)[:12]
    return digest_of_file(path)[:12] if os.path.isfile(path) else ""


def moved(run_dir: RunDir, key: str, old: Any, new: Any) -> bool:
    """Returns whether two values of a setting are absolute paths with the same `:function`, if
    any, and the same content; of a path that is gone, the same name is enough."""
    before, _, function = str(old).partition(":")
    after, _, new_function = str(new).partition(":")
    if not (before[:1] == after[:1] == "/" and function == new_function and os.path.exists(after)):
        return False
    if Path(before).name == Path(after).name and not os.path.exists(before):
        return True
    known = read_json(run_dir.named_files, dict[str, str]) or {}
    return known.get(f"{key} (content of {Path(before).name})") == content(Path(after))


def may_change(key: str) -> bool:
    return any(
        fnmatch.fnmatchcase(key, pattern) or fnmatch.fnmatchcase(key, f"{pattern}.*")
        for pattern in MAY_CHANGE
    )
