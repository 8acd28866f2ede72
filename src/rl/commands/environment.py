"""`rl env`: what an environment is, a few rollouts of it, or its tasks as JSONL."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rl.cli import ConfigError, Spelled, fail
from rl.commands.options import CONCURRENCY, ENDPOINT, POLICY, POLICY_SPECS, Option, load, usage
from rl.config import RLConfig
from rl.processes import Children

OPTIONS = (
    Option("args", "JSON", 'arguments of the environment: \'{"difficulty": "hard"}\', or each one as --args.difficulty hard'),
    Option("split", "train|eval", "whose tasks are shown, played and exported; default: train"),
    Option("rollouts", "N", "play the first N tasks once and print the rollouts in full"),
    POLICY,
    *ENDPOINT,
    Option("export", "FILE", "write the tasks as JSONL"),
    Option("limit", "N", "tasks to export; default: all"),
    CONCURRENCY,
)
HELP = usage(
    "usage: rl env ID [--args JSON] [--split train|eval] [--rollouts N] [--export FILE] [--KEY VALUE] ...\n\n"
    "Shows kind, arguments, sizes, an example, reward functions and tools of an environment: name, owner/name, or ./folder.\n"
    "Without an ID the first environment of the configuration. Neither model nor server is needed unless rollouts are asked for.",
    OPTIONS,
    POLICY_SPECS,
)
SPLITS = ("train", "eval")
CUT = 2000
"""Characters of an example that are shown."""


def environment_given(args: list[str]) -> tuple[Spelled, list[str]]:
    """The environment that ID, --args and --args.key name, as a setting; and the other arguments. Raises ConfigError."""
    rest = [f"--orchestrator.environment.args.{word[7:]}" if word.startswith("--args.") else word for word in args]
    entry: dict[str, Any] = {}
    if rest and not rest[0].startswith(("-", "@")):
        entry["id"] = rest.pop(0)
    for i, word in enumerate(rest):
        if word == "--args" or word.startswith("--args="):
            text = word[7:] if "=" in word else (rest[i + 1] if i + 1 < len(rest) else "")
            del rest[i : i + (1 if "=" in word else 2)]
            try:
                entry["args"] = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"--args {text}: not JSON ({error}); give '{{\"key\": value}}', or --args.key value") from None
            if not isinstance(entry["args"], dict):
                raise ConfigError(f"--args {text}: give an object, '{{\"key\": value}}'")
            break
    if "id" in entry:
        return {"orchestrator.environment": ([entry], "rl env")}, rest
    return {f"orchestrator.environment.args.{key}": (value, "--args") for key, value in entry.get("args", {}).items()}, rest


def main(args: list[str], children: Children) -> int:
    """The command."""
    try:
        given, rest = environment_given(args)
    except ConfigError as error:
        fail("rl env", str(error))
    config, _, values = load("rl env", rest, OPTIONS, HELP, given=given, optional=("orchestrator.environment",))
    if not config.orchestrator.environment:
        fail("rl env", "which environment? Give its id (rl env owner/name) or a configuration (@ run.toml)")
    values["split"] = values["split"] or "train"
    if values["split"] not in SPLITS:
        fail("rl env", f"--split {values['split']}: give train or eval")
    config = config.model_copy(deep=True)
    config.orchestrator.environment, config.orchestrator.eval = config.orchestrator.environment[:1], []
    from rl.commands.playing import run

    return run("rl env", children, look(config, values, children))


async def look(config: RLConfig, values: dict[str, Any], children: Children) -> int:
    """Describes; then exports and plays, as asked."""
    from rl.commands.playing import arena, check_environments
    from rl.commands.policy import resolve
    from rl.orchestrator.rollouts import Endpoint, PolicySpec

    env = config.orchestrator.environment[0]
    env.workers = 1
    check_environments([env])
    source: Any = PolicySpec(endpoint=Endpoint(base_url="http://127.0.0.1:9/v1", model="none"))  # never asked
    if values["rollouts"]:
        source = resolve(values["policy"], config, values["endpoint_model"], values["api_key_var"])
    split, timeout_s = values["split"], config.orchestrator.worker_timeout_s
    work = Path(tempfile.mkdtemp(prefix=f"rl-env-{env.label}-"))  # what fails names a log in it; else nobody needs it
    async with arena(config, source, work, children) as place:
        ready = place.ready[env.label]
        description = await place.pool.describe(env.label, split, 1, timeout_s)
        print_description(env.label, {"train": ready.num_train, "eval": ready.num_eval}, description, split)
        size = ready.num_train if split == "train" else ready.num_eval
        if values["export"]:
            await export(place, env.label, split, size, Path(values["export"]), values["limit"], timeout_s)
        if values["rollouts"]:
            await play(place, env.label, split, size, values)
    shutil.rmtree(work, ignore_errors=True)
    return 0


def size_text(size: int | None) -> str:
    return "endless" if size is None else str(size)


def print_description(label: str, sizes: dict[str, int | None], description: Any, split: str) -> None:
    """What the environment says of itself, in its own order; then one task."""
    print(f"environment {label}")
    about = dict(description.about)
    print(f"  kind: {about.pop('kind', 'unknown')}")
    print("  tasks: " + ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items()))
    for name in SPLITS:
        about.pop(f"{name} tasks", None)  # some say it themselves
    for key, value in about.items():
        print_value(key.replace("_", " "), value)
    if description.tasks:
        print(f"  the first {split} task:")
        print(indented(task_text(description.tasks[0]), "    "))


def print_value(key: str, value: Any) -> None:
    """A fact: short ones on its line, lists and tables below it."""
    if isinstance(value, dict) and value:
        print(f"  {key}:")
        for name, item in value.items():
            print(f"    {name}: {plain(item)}")
    elif isinstance(value, list) and value:
        print(f"  {key}:")
        for item in value:
            print(indented(plain(item), "    "))
    else:
        print(f"  {key}: {plain(value) if value not in (None, [], {}, '') else 'none'}")


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def task_text(task: dict[str, Any]) -> str:
    """A task: its prompt as a conversation, the rest as JSON."""
    prompt = task.get("prompt")
    lines = [messages_text(prompt)] if isinstance(prompt, list) else [plain(prompt)] if prompt is not None else []
    lines += [f"{key}: {plain(value)}" for key, value in task.items() if key != "prompt" and value not in (None, "", [], {})]
    return "\n".join(line if len(line) <= CUT else f"{line[:CUT]}... ({len(line)} characters)" for line in lines)


def messages_text(messages: list[dict[str, Any]]) -> str:
    """A conversation in full, tool calls included."""
    lines = []
    for message in messages:
        parts = [f"(thinks) {message['reasoning_content']}"] if message.get("reasoning_content") else []
        parts += [plain(message["content"])] if message.get("content") else []
        parts += [f"calls {call['function']['name']}({plain(call['function']['arguments'])})" for call in message.get("tool_calls") or []]
        lines.append(f"{message['role']}: " + "\n".join(parts).replace("\n", "\n    "))
    return "\n".join(lines)


def indented(text: str, by: str) -> str:
    return by + text.replace("\n", f"\n{by}")


async def export(place: Any, label: str, split: str, size: int | None, path: Path, limit: int | None, timeout_s: float) -> None:
    """Writes tasks, a line each."""
    import msgspec

    from rl.commands.playing import PlayError
    from rl.files import write_file

    if size is None and not limit:
        raise PlayError(f"{label}: its {split} tasks are endless; say how many with --limit")
    description = await place.pool.describe(label, split, limit or -1, timeout_s)
    lines = [msgspec.json.encode({"split": split, "task": i, **task}) + b"\n" for i, task in enumerate(description.tasks)]
    if not lines:
        raise PlayError(f"{label} has no {split} tasks")
    write_file(path.expanduser(), b"".join(lines))
    print(f"{len(lines)} {split} tasks written to {path}")


async def play(place: Any, label: str, split: str, size: int | None, values: dict[str, Any]) -> None:
    """Plays the first tasks, over again where there are fewer, and prints every rollout."""
    from rl.commands.playing import Job, PlayError, Progress

    if size == 0:
        raise PlayError(f"{label} has no {split} tasks; try --split {SPLITS[split == 'train']}")
    entry, wanted = place.config.orchestrator.environment[0], values["rollouts"]
    sampling = place.config.sampling_of(entry)
    jobs = [Job(label, split, i if size is None else i % size, 1, sampling) for i in range(wanted)]
    progress = Progress(label, wanted)

    def on_done(job: Job, rollouts: list) -> None:
        progress.advance(1)
        for rollout in rollouts:
            agent = "" if len(rollouts) == 1 else f", agent {rollout.agent}"
            metrics = "".join(f", {key} {value:g}" for key, value in rollout.metrics.items())
            print(f"--- {split} task {job.task}{agent}: reward {rollout.reward:g}{metrics}; {rollout.outcome}, stop: {rollout.stop}")
            print(messages_text(rollout.messages))
            if rollout.error:
                print(f"error: {rollout.error}")

    try:
        await place.play(jobs, values["concurrency"], on_done)
    finally:
        progress.close()
