"""`rl env`: describes an environment, plays a few rollouts, or exports its tasks as JSONL."""

import textwrap
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from rl.commands import homes
from rl.commands.options import CONCURRENCY, ENDPOINT, POLICY, POLICY_SPECS, load, usage
from rl.commands.play_session import PlaySession, play_session, run, scratch
from rl.commands.policy_spec import resolve
from rl.config.command_line import Spelled, fail
from rl.config.options import Option, take
from rl.config.run import RLConfig
from rl.diagnosis.rollouts import messages_text, plain, rollout_text
from rl.homes.resolve import Homes, homes_of
from rl.launch.children import Children
from rl.run_dir.files import write_file
from rl.system.errors import RunError
from rl.system.terminal import say, visible
from rl.wire.worker_messages import Description

ARGS = Option(
    "args",
    "JSON",
    'arguments of the environment: \'{"difficulty": "hard"}\', or one at a time as '
    "--args.difficulty hard",
)
OPTIONS = (
    ARGS,
    Option(
        "split", "train|eval", "split whose tasks are shown, played and exported; default: train"
    ),
    Option("rollouts", "N", "play the first N tasks once and print the rollouts in full"),
    POLICY,
    *ENDPOINT,
    Option("export", "FILE", "write the tasks as JSONL"),
    Option("limit", "N", "tasks to export; default: all"),
    CONCURRENCY,
    Option(
        "serve-gym",
        "N",
        "serve the environment on port N as an agent of NeMo Gym; see docs/nemo_gym.md",
    ),
    Option(
        "head-server",
        "URL",
        "with --serve-gym: NeMo Gym's head server; default: http://127.0.0.1:11000",
    ),
)
HELP = usage(
    "usage: rl env ID [--args JSON] [--split train|eval] [--rollouts N] [--export FILE] "
    "[--serve-gym PORT] [--KEY VALUE] ...\n\n"
    "Shows kind, arguments, sizes, an example, reward functions and tools of an environment: "
    "owner/name, pypi:name, ./folder, or a name.\n"
    "Without an ID, shows the configuration's first environment. No model or server is "
    "needed unless --rollouts is given.\n\n"
    + "\n".join(f"  {line}" for verb in homes.VERBS.values() for line in verb.splitlines()),
    OPTIONS,
    POLICY_SPECS,
)
SPLITS = ("train", "eval")
CUT = 2000
"""Most characters printed of each line of an example."""


def environment_given(args: list[str]) -> tuple[Spelled, list[str]]:
    """Returns the settings given by ID, --args and --args.key, and the other arguments. Exits
    with code 2 on a fault."""
    rest = [
        f"--orchestrator.environment.args.{word[7:]}" if word.startswith("--args.") else word
        for word in args
    ]
    env_id = rest.pop(0) if rest and not rest[0].startswith(("-", "@")) else None
    values, rest = take("rl env", rest, (ARGS,))
    if env_id:
        return {
            "orchestrator.environment": ([{"id": env_id, "args": values["args"] or {}}], "rl env")
        }, rest
    return {
        f"orchestrator.environment.args.{key}": (value, "--args")
        for key, value in (values["args"] or {}).items()
    }, rest


def main(args: list[str], children: Children) -> int:
    if args and args[0] in homes.VERBS:
        return homes.main(args[0], args[1:])
    given, rest = environment_given(args)
    config, line, values = load(
        "rl env", rest, OPTIONS, HELP, given=given, optional=("orchestrator.environment",)
    )
    if not config.orchestrator.environment:
        fail(
            "rl env",
            "which environment? Give its id (rl env owner/name) or a configuration (@ run.toml)",
        )
    values["split"] = values["split"] or "train"
    config.orchestrator.environment, config.orchestrator.eval = (
        config.orchestrator.environment[:1],
        [],
    )
    if values["serve_gym"]:
        from rl.commands import serve_gym  # takes half a second, which `--help` should not

        return serve_gym.main(
            config, values, lambda: homes_of(config, say, recorded=bool(line.files)), children
        )
    # before the policy is contacted, and where a signal stops it
    made = homes_of(config, say, recorded=bool(line.files))
    return run("rl env", children, show_environment(config, made, values, children))


async def show_environment(
    config: RLConfig, homes: Homes, values: dict[str, Any], children: Children
) -> int:
    """Prints the description of the environment, then exports and plays its tasks if requested."""
    env = config.orchestrator.environment[0]
    env.workers = 1
    source = (
        resolve(values["policy"], config, values["endpoint_model"], values["api_key_var"])
        if values["rollouts"]
        else None
    )
    split, timeout_s = values["split"], config.orchestrator.worker_timeout_s
    with scratch(env.label) as work:
        async with play_session(config, homes, source, work, children) as place:
            ready = place.ready[env.label]
            description = await place.pool.describe(env.label, split, 1, timeout_s)
            sizes = {"train": ready.num_train, "eval": ready.num_eval}
            print_description(env.label, sizes, description, split)
            if values["export"]:
                await export(
                    place,
                    env.label,
                    split,
                    sizes[split],
                    Path(values["export"]),
                    values["limit"],
                    timeout_s,
                )
            if values["rollouts"]:
                await play(place, env.label, split, sizes[split], values)
    return 0


def print_description(
    label: str, sizes: dict[str, int | None], description: Description, split: str
) -> None:
    """Prints an environment's description, in the order it gives, and its first task."""
    print(f"environment {label}")
    about = dict(description.about)
    print(f"  kind: {about.pop('kind', 'unknown')}")
    print(
        "  tasks: "
        + ", ".join(f"{name} {'endless' if size is None else size}" for name, size in sizes.items())
    )
    for name in SPLITS:
        about.pop(f"{name} tasks", None)  # printed above; some environments report them as well
    for key, value in about.items():
        print(visible(f"  {key.replace('_', ' ')}:{value_text(value)}"))
    if description.tasks:
        print(f"  the first {split} task:")
        print(textwrap.indent(visible(task_text(description.tasks[0])), "    "))


def value_text(value: Any) -> str:
    """Formats what follows a key and a colon: a short value on the same line, lists and tables
    below."""
    lines = (
        [f"{name}: {plain(item)}" for name, item in value.items()]
        if isinstance(value, dict)
        else []
    )
    lines = [plain(item) for item in value] if isinstance(value, list) else lines
    if lines:
        return "\n" + textwrap.indent("\n".join(lines), "    ")
    return f" {plain(value) if value not in (None, [], {}, '') else 'none'}"


def task_text(task: dict[str, Any]) -> str:
    """Formats a task: its prompt as a conversation, its other fields as JSON."""
    prompt = task.get("prompt")
    lines = (
        [messages_text(prompt)]
        if isinstance(prompt, list)
        else [plain(prompt)]
        if prompt is not None
        else []
    )
    lines += [
        f"{key}: {plain(value)}"
        for key, value in task.items()
        if key != "prompt" and value not in (None, "", [], {})
    ]
    return "\n".join(
        line if len(line) <= CUT else f"{line[:CUT]}... ({len(line)} characters)" for line in lines
    )


async def export(
    place: PlaySession,
    label: str,
    split: str,
    size: int | None,
    path: Path,
    limit: int | None,
    timeout_s: float,
) -> None:
    """Writes `limit` tasks of a split, or all, as JSONL. `size`: tasks of the split, None if
    endless. Raises RunError if it has none."""
    if size is None and not limit:
        raise RunError(f"{label}: its {split} tasks are endless; give a number with --limit")
    lines = list[bytes]()
    while tasks := (
        await place.pool.describe(
            label, split, limit - len(lines) if limit else -1, timeout_s, len(lines)
        )
    ).tasks:
        lines += [
            msgspec.json.encode({"split": split, "task": i, **task}) + b"\n"
            for i, task in enumerate(tasks, len(lines))
        ]
    if not lines:
        raise RunError(f"{label} has no {split} tasks")
    write_file(path.expanduser(), b"".join(lines))
    print(f"{len(lines)} {split} tasks written to {path}")


async def play(
    place: PlaySession, label: str, split: str, size: int | None, values: dict[str, Any]
) -> None:
    """Plays the first tasks, repeating them if there are fewer than `rollouts`, and prints every
    rollout."""
    if size == 0:
        raise RunError(f"{label} has no {split} tasks; try --split {SPLITS[split == 'train']}")
    sampling = place.config.sampling_of(place.config.orchestrator.environment[0])
    jobs = [
        PlayJob(label, split, i if size is None else i % size, 1, sampling)
        for i in range(values["rollouts"])
    ]
    async with aclosing(place.play(label, jobs, values["concurrency"])) as played:
        async for job, rollouts in played:
            for rollout in rollouts:
                record = {"task": job.task, **rollout.as_record(), "messages": rollout.messages}
                print(f"--- {split} " + rollout_text(record))
