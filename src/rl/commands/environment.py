"""`rl env`: describes an environment, plays a few rollouts, or exports its tasks as JSONL; `rl env
install | list | remove | freeze` manages the homes of environments, and shows the packages that a
run used.
"""

import re
import textwrap
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rl.commands.options import (
    CONCURRENCY,
    ENDPOINT,
    POLICY,
    POLICY_SPECS,
    load,
    named_run,
    resolve,
    usage,
)
from rl.commands.play_session import PlaySession, play_session, run, scratch, write_lines
from rl.config.command_line import Option, Spelled, fail, need_names, options, take
from rl.config.environment_id import fetched, homes_root, module_name, read_id, requirement_fault
from rl.config.run import RLConfig
from rl.diagnosis.rollouts import messages_text, plain, rollout_text
from rl.homes.home import delete, read, read_record, read_records, text_of
from rl.homes.make import ensure, install_record
from rl.homes.request import Request
from rl.homes.resolve import Homes, homes_of
from rl.launch.children import Children
from rl.system.errors import RunError
from rl.system.terminal import did_you_mean, say, size, visible
from rl.wire.worker_messages import Description

VERB_OPTIONS: dict[str, tuple[Option, ...]] = dict.fromkeys(("list", "remove", "freeze"), ())
VERB_OPTIONS["install"] = options("""
kind classic|v1: the API to use for a package that has both
requirements A,B: further packages, as in orchestrator.environment.requirements
dry-run: print what would be installed, without installing it
""")
EARLIER = "earlier"
VERBS = {
    "install": "rl env install ID|FILE.txt   makes an environment's home: owner/name@1.0 of the "
    "Environments Hub, pypi:name, ./folder; or\n"
    "                             remakes it with the newest packages. FILE.txt: with "
    "exactly the packages that a run used",
    "list": "rl env list                  lists the existing homes",
    "remove": "rl env remove ID|NAME|FOLDER deletes homes; `earlier`: those that newer ones have "
    "replaced",
    "freeze": "rl env freeze RUN [NAME]     prints the packages that an environment of a run used",
}


def manage(verb: str, args: list[str]) -> int:
    """Runs one of VERBS. Raises RunError."""
    flags = VERB_OPTIONS[verb]
    values, rest = take(f"rl env {verb}", args, flags, usage(f"usage: {VERBS[verb]}", flags))
    numbers = {"list": (0,), "freeze": (1, 2)}.get(verb, (1,))
    need_names(
        f"rl env {verb}", rest, numbers, f"usage: {VERBS[verb].splitlines()[0].split('   ')[0]}"
    )
    if verb == "list":
        return show()
    if verb == "remove":
        return remove(rest[0])
    if verb == "freeze":
        return freeze(rest[0], "".join(rest[1:]))
    if values["dry_run"]:
        print(
            "\n".join(fetched([rest[0]]))
            or f"{rest[0]}: {read_id(rest[0]).text} would get a home in {homes_root()}, unless "
            "it exists"
        )
        return 0
    return install(rest[0], values["kind"], several(values["requirements"] or ""))


def several(text: str) -> tuple[str, ...]:
    """Splits comma-separated requirements. Versions may contain commas: `sympy>=1.13,<2, nltk`
    has two requirements. Raises RunError for one that is not valid."""
    texts = re.split(r",(?![^\[]*\])(?!\s*[=<>!~])", text)
    requirements = tuple(part.strip() for part in texts if part.strip())
    for fault in filter(None, map(requirement_fault, requirements)):
        raise RunError(f"--requirements: {fault}")
    return requirements


def install(env_id: str, kind: str | None, requirements: tuple[str, ...]) -> int:
    """Makes a home and prints a summary of it."""
    path = Path(env_id)
    if path.suffix == ".txt" and path.is_file():
        record = read_record(path)
        if not record:
            raise RunError(
                f"{path}: not an environment record; a run has one file per environment in "
                "environments/"
            )
        home = install_record(record, say)
    else:
        request = Request(env_id, read_id(env_id), kind, requirements)  # type: ignore[arg-type]
        home = ensure(request, say, fresh=True)
    print(f"{home.summary} ({len(home.packages)} packages in {home.place})")
    return 0


def links() -> list[Path]:
    """The links to the newest homes, one for each request."""
    return sorted(homes_root().glob("requests/*/home"))


def earlier() -> list[Path]:
    """The homes to which no link leads because a newer one took their place. Runs that used them
    still name them."""
    newest = {link.resolve() for link in links()}
    folders = {path.parent.resolve() for path in homes_root().glob("[!.]*/pyvenv.cfg")}
    return sorted(folders - newest)


def show() -> int:
    """Prints the homes, one line for each id that a home was made for."""
    for link in links():
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(link.lstat().st_mtime))
        print(line_of(date, link.resolve()))
    for folder in earlier():
        print(line_of(EARLIER, folder))
    return 0


def line_of(date: str, folder: Path) -> str:
    """Describes a home; its size is that of its files."""
    home = read(folder)
    text = home.summary if home else "damaged, or made by another version of rl"
    num_bytes = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
    return f"{date:<16}  {text}  {folder} ({size(num_bytes)})"


def meant(name: str) -> list[Path]:
    """Returns the links that an id, a folder's name or a name matches. Raises RunError if there are
    none or the name is ambiguous."""
    ids = {link: home.id if (home := read(link)) else link.parent.name for link in links()}
    is_path = name.startswith((".", "/", "~"))
    text = str(Path(name).expanduser().resolve()) if is_path else name
    if matches := [link for link in ids if text in (ids[link], link.resolve().name)]:
        return matches
    start = f"{module_name(name).lower()}-"
    matches = [link for link in ids if "/" not in name and link.parent.name.startswith(start)]
    meanings = sorted({ids[link] for link in matches})
    if len(meanings) > 1:
        raise RunError(
            f"{name} is ambiguous: {' or '.join(meanings)}; give the full id, or the folder"
        )
    if not matches:
        remedy = did_you_mean(name, sorted(set(ids.values())))
        raise RunError(f"{name}: no such home in {homes_root()}; {remedy}")
    return matches


def remove(name: str) -> int:
    """Deletes the matching links, and the homes to which no other link leads. Raises RunError for a
    home in use."""
    old = earlier()
    if name == EARLIER or name in [folder.name for folder in old]:
        for folder in old:
            if name in (EARLIER, folder.name):
                delete(folder)
                print(f"removed {folder.name}")
        return 0
    doomed = meant(name)
    kept = {link.resolve() for link in links() if link not in doomed}
    for link in doomed:
        home, folder = read(link), link.resolve()
        if folder not in kept:
            delete(folder)
        link.unlink(missing_ok=True)
        print(f"removed {home.id if home else folder.name}")
    return 0


def freeze(run: str, name: str) -> int:
    """Prints the record of a run's environment as requirements for uv and pip. Without a name,
    the run must have only one. Raises RunError if there is no such record, or several."""
    folder = named_run(run).absolute() / "environments"
    records = read_records(folder)
    if not records:
        raise RunError(
            f"{run}: {folder} has no records: its environments use `python`, or run elsewhere"
        )
    if name not in records and (name or len(records) > 1):
        raise RunError(
            f"{run}: which environment? rl env freeze {run} NAME, one of {', '.join(records)}"
        )
    name = name or next(iter(records))
    print(text_of(name, records[name]), end="")
    return 0


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
    + "\n".join(f"  {line}" for verb in VERBS.values() for line in verb.splitlines()),
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
    if args and args[0] in VERBS:
        return manage(args[0], args[1:])
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
