"""`rl env`: describes an environment, plays a few rollouts, or exports its tasks as JSONL."""

import textwrap
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rl.commands import homes
from rl.commands.options import CONCURRENCY, ENDPOINT, POLICY, POLICY_SPECS, load, usage
from rl.commands.play_session import PlaySession, play_session, run, scratch, write_lines
from rl.commands.policy_spec import resolve
from rl.config.command_line import Spelled, fail, options, take
from rl.config.run import RLConfig
from rl.diagnosis.rollouts import messages_text, plain, rollout_text
from rl.homes.resolve import Homes, homes_of
from rl.launch.children import Children
from rl.system.errors import RunError
from rl.system.terminal import say, visible
from rl.wire.worker_messages import Description

(ARGS,) = options("""
args JSON: arguments of the environment: '{"difficulty": "hard"}', or one at a time as
    --args.difficulty hard
""")
OPTIONS = (
    ARGS,
    *options("""
split train|eval: split whose tasks are shown, played and exported; default: train
rollouts N: play the first N tasks once and print the rollouts in full
"""),
    POLICY,
    *ENDPOINT,
    *options("""
export FILE: write the tasks as JSONL
limit N: tasks to export; default: all
"""),
    CONCURRENCY,
    *options("""
serve-gym N: serve the environment on port N as an agent of NeMo Gym; see docs/nemo_gym.md
head-server URL: with --serve-gym: NeMo Gym's head server; default: http://127.0.0.1:11000
"""),
)
HELP = usage(
    """\
usage: rl env ID [--args JSON] [--split train|eval] [--rollouts N] [--export FILE] [--serve-gym
PORT] [--KEY VALUE] ...

Shows kind, arguments, sizes, an example, reward functions and tools of an environment: owner/name,
pypi:name, ./folder, or a name.
Without an ID, shows the configuration's first environment. No model or server is needed unless
--rollouts is given.

"""
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
    key = "orchestrator.environment"
    rest = [f"--{key}.{word[2:]}" if word.startswith("--args.") else word for word in args]
    env_id = rest.pop(0) if rest and not rest[0].startswith(("-", "@")) else None
    values, rest = take("rl env", rest, (ARGS,))
    table = values["args"] or {}
    if env_id:
        return {key: ([{"id": env_id, "args": table}], "rl env")}, rest
    return {f"{key}.args.{name}": (value, "--args") for name, value in table.items()}, rest


def main(args: list[str], children: Children) -> int:
    if args and args[0] in homes.VERBS:
        return homes.main(args[0], args[1:])
    preset, rest = environment_given(args)
    config, line, values = load(
        "rl env", rest, OPTIONS, HELP, preset=preset, optional=("orchestrator.environment",)
    )
    orchestrator = config.orchestrator
    if not orchestrator.environment:
        fail(
            "rl env",
            "which environment? Give its id (rl env owner/name) or a configuration (@ run.toml)",
        )
    orchestrator.environment, orchestrator.eval = orchestrator.environment[:1], []

    def ready_homes() -> Homes:
        return homes_of(config, say, recorded=bool(line.files))

    if values["serve_gym"]:
        from rl.commands import serve_gym  # takes half a second, which `--help` should not

        return serve_gym.main(config, values, ready_homes, children)
    # before the policy is contacted, and where a signal stops it
    work = show_environment(config, ready_homes(), values, children)
    return run("rl env", children, work)


async def show_environment(
    config: RLConfig, homes: Homes, values: dict[str, Any], children: Children
) -> int:
    """Prints the description of the environment, then exports and plays its tasks if requested."""
    env, source = config.orchestrator.environment[0], None
    env.workers = 1
    if values["rollouts"]:
        source = resolve(values["policy"], config, values["endpoint_model"], values["api_key_var"])
    split = values["split"] or "train"
    with scratch(env.label) as work:
        async with play_session(config, homes, source, work, children) as session:
            sizes = session.sizes(env.label)
            description = await session.describe(env.label, split, 1)
            print_description(env.label, sizes, description, split)
            if values["export"]:
                tasks = await session.tasks(env.label, split, values["limit"])
                if not tasks:
                    raise RunError(f"{env.label} has no {split} tasks")
                rows = [{"split": split, "task": i, **task} for i, task in enumerate(tasks)]
                write_lines(Path(values["export"]).expanduser(), rows)
                print(f"{len(rows)} {split} tasks written to {values['export']}")
            if values["rollouts"]:
                await play(session, env.label, split, sizes[split], values)
    return 0


def print_description(
    label: str, sizes: dict[str, int | None], description: Description, split: str
) -> None:
    """Prints an environment's description, in the order it gives, and its first task."""
    about = dict(description.about)
    counts = [f"{name} {'endless' if size is None else size}" for name, size in sizes.items()]
    print(f"environment {label}\n  kind: {about.pop('kind', 'unknown')}")
    print(f"  tasks: {', '.join(counts)}")
    for key, value in about.items():
        if key not in ("train tasks", "eval tasks"):  # printed above
            print(visible(f"  {key.replace('_', ' ')}:{value_text(value)}"))
    if description.tasks:
        print(f"  the first {split} task:")
        print(textwrap.indent(visible(task_text(description.tasks[0])), "    "))


def value_text(value: Any) -> str:
    """Formats what follows a key and a colon: a short value on the same line, lists and tables
    below."""
    if isinstance(value, dict):
        value = [f"{name}: {plain(item)}" for name, item in value.items()]
    if value in (None, [], ""):
        return " none"
    if isinstance(value, list):
        return "\n" + textwrap.indent("\n".join(map(plain, value)), "    ")
    return f" {plain(value)}"


def task_text(task: dict[str, Any]) -> str:
    """Formats a task: its prompt as a conversation, its other fields as JSON."""
    prompt, others = task.get("prompt"), {key: task[key] for key in task if key != "prompt"}
    lines = [] if prompt is None else [plain(prompt)]
    if isinstance(prompt, list):
        lines = [messages_text(prompt)]
    lines += [
        f"{key}: {plain(value)}" for key, value in others.items() if value not in (None, "", [], {})
    ]
    return "\n".join(
        line if len(line) <= CUT else f"{line[:CUT]}... ({len(line)} characters)" for line in lines
    )


async def play(
    session: PlaySession, label: str, split: str, size: int | None, values: dict[str, Any]
) -> None:
    """Plays the first tasks, repeating them if there are fewer than `rollouts`, and prints every
    rollout."""
    from rl.orchestrator.workers.pool import PlayJob

    if size == 0:
        raise RunError(f"{label} has no {split} tasks; try --split {SPLITS[split == 'train']}")
    sampling = session.config.sampling_of(session.config.orchestrator.environment[0])
    jobs = [
        PlayJob(label, split, i if size is None else i % size, 1, sampling)
        for i in range(values["rollouts"])
    ]
    async with aclosing(session.play(label, jobs, values["concurrency"])) as plays:
        async for job, rollouts in plays:
            for rollout in rollouts:
                row = {"task": job.task, **rollout.as_record(), "messages": rollout.messages}
                print(f"--- {split} " + rollout_text(row))
