"""NeMo Gym beside a run: makes its virtual environment, rows to train on, and starts it so that it
asks our inference server.

uv run scripts/nemo_gym.py install uv run scripts/nemo_gym.py rows --task chain_sum --shots 3
rows.jsonl uv run scripts/nemo_gym.py start --policy http://127.0.0.1:8000/v1 --model
HuggingFaceTB/SmolLM2-135M-Instruct reasoning_gym uv run scripts/nemo_gym.py call
ng_collect_rollouts +input_jsonl_fpath=$PWD/rows.jsonl +output_jsonl_fpath=$PWD/rollouts.jsonl

It needs nothing but Python and uv, and stays out of our own environment: nemo-gym and verifiers
want different versions of openai.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

PACKAGES = ["nemo-gym==0.4.0", "reasoning-gym==0.1.25"]
MODEL_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
"""The one that hands on token ids and logprobs."""
QUIET_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
"""Ray reports nothing, and does not start its workers by `uv run` because this script was
started by it."""
STOP_S = 40.0
"""NeMo Gym and Ray end in a quarter of a minute on an idle machine."""


def install(args: argparse.Namespace) -> None:
    """Makes the virtual environment, about 1.2 GB."""
    subprocess.run(
        ["uv", "venv", "--allow-existing", "--python", args.python, str(args.venv)], check=True
    )
    python = args.venv.absolute() / "bin/python"
    # In the root folder: within this project uv would hold NeMo Gym to the project's own exact
    # versions.
    subprocess.run(
        ["uv", "pip", "install", "--python", str(python), *PACKAGES], check=True, cwd="/"
    )


def rows(args: argparse.Namespace) -> None:
    """Writes rows of a task; runs itself inside the virtual environment for that."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    inner = [
        "_rows",
        args.task,
        args.config,
        str(args.size),
        str(args.seed),
        str(args.shots),
        str(args.out.absolute()),
    ]
    subprocess.run([str(args.venv / "bin/python"), "-W", "ignore", __file__, *inner], check=True)


COUNTER = "example_session_state_mgmt"
"""A resources server of NeMo Gym, whose tool adds to a counter that it keeps for each episode."""


def additions(number: int, a: int, b: int) -> list[dict]:
    """A task of COUNTER as it is solved: two calls, one after the other, and an answer."""
    items: list[dict] = [{"role": "user", "content": f"add {a}, then add {b}"}]
    for call_id, count in ((f"call_{number}_0", a), (f"call_{number}_1", b)):
        call = {"name": "increment_counter", "arguments": json.dumps({"count": count})}
        items.append({"type": "function_call", "call_id": call_id, **call})
        items.append(
            {"type": "function_call_output", "call_id": call_id, "output": '{"success":true}'}
        )
    return [*items, {"role": "assistant", "content": "done"}]


def counter_row(draw: random.Random, shots: int) -> dict:
    """A row of COUNTER. Several calls at once would be one turn."""
    count = {
        "type": "object",
        "properties": {"count": {"type": "integer"}},
        "required": ["count"],
        "additionalProperties": False,
    }
    tool = {
        "type": "function",
        "name": "increment_counter",
        "description": "Adds to the counter.",
        "parameters": count,
        "strict": True,
    }
    examples = [
        item
        for number in range(shots)
        for item in additions(number, draw.randint(1, 9), draw.randint(1, 9))
    ]
    a, b, start = (draw.randint(1, 9) for _ in range(3))
    asked = [*examples, *additions(0, a, b)[:1]]
    params = {"input": asked, "tools": [tool], "parallel_tool_calls": False}
    return {
        "responses_create_params": params,
        "initial_count": start,
        "expected_count": start + a + b,
    }


def write_rows(args: argparse.Namespace) -> None:
    """The part of `rows` that imports reasoning_gym."""
    size, shots = int(args.size), int(args.shots)
    if args.task == "counter":
        draw = random.Random(int(args.seed))
        Path(args.out).write_text(
            "".join(json.dumps(counter_row(draw, shots)) + "\n" for _ in range(size))
        )
        return print(f"{args.size} rows of {COUNTER} in {args.out}")
    import reasoning_gym

    entries = list(
        reasoning_gym.create_dataset(
            args.task, size=size + shots, seed=int(args.seed), **json.loads(args.config)
        )
    )
    examples = [
        {"role": role, "content": entry[key]}
        for entry in entries[:shots]
        for role, key in (("user", "question"), ("assistant", "answer"))
    ]
    with open(args.out, "w") as file:
        for entry in entries[shots:]:
            row = {
                "responses_create_params": {
                    "input": [*examples, {"role": "user", "content": entry["question"]}]
                },
                "question": entry["question"],
                "answer": entry["answer"],
                "metadata": entry["metadata"],
                "agent_ref": {"type": "responses_api_agents", "name": "reasoning_gym_simple_agent"},
            }
            file.write(json.dumps(row, default=str) + "\n")
    print(f"{args.size} rows of {args.task} in {args.out}")


def link_venvs(packages: Path, venv: Path) -> Path:
    """A folder in which every server's virtual environment is the one we have; otherwise each
    server makes and downloads its own."""
    links = venv / "servers"
    shutil.rmtree(links, ignore_errors=True)
    kinds = ("resources_servers", "responses_api_agents", "responses_api_models")
    for server in (path for kind in kinds for path in (packages / kind).iterdir() if path.is_dir()):
        link = links / server.parent.name / server.name / ".venv"
        link.parent.mkdir(parents=True)
        link.symlink_to(venv)
    return links


def start(args: argparse.Namespace) -> None:
    """Runs ng_run until SIGINT or SIGTERM, and leaves none of its servers behind."""
    if not os.environ.get("RL_TOKEN"):
        raise SystemExit(
            "the policy's server wants a token: `export RL_TOKEN=$(openssl rand -hex 32)`, "
            "here and where the run is started"
        )
    venv = args.venv.absolute()
    packages = next(venv.glob("lib/python3*/site-packages"))
    configs = [
        name if name.endswith(".yaml") else f"resources_servers/{name}/configs/{name}.yaml"
        for name in args.servers
    ]
    command = [
        str(venv / "bin/ng_run"),
        f"+config_paths=[{','.join([MODEL_CONFIG, *configs])}]",
        "+skip_venv_if_present=true",
        f"+uv_venv_dir={link_venvs(packages, venv)}",
        f"+policy_base_url={args.policy}",
        # looked up by NeMo Gym itself: a command line is for all to see
        "+policy_api_key=${oc.env:RL_TOKEN}",
        f"+policy_model_name={args.model}",
        "+head_server.host=127.0.0.1",
        f"+head_server.port={args.head_port}",
    ]
    # both, and before the child: a shell's background jobs ignore SIGINT, and hand that on
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    child = subprocess.Popen(command, env=os.environ | QUIET_RAY, start_new_session=True)
    try:
        child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)
    finally:  # interrupted while its servers come up, ng_run ends without them
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    raise SystemExit(child.wait())


def call(args: argparse.Namespace) -> None:
    """Becomes one of NeMo Gym's own commands."""
    program = args.venv.absolute() / "bin" / args.command
    if not program.is_file():
        raise SystemExit(f"no {program}: run `install` first, or check the name of the command")
    os.execve(program, [str(program), *args.arguments], os.environ | QUIET_RAY)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--venv",
        type=Path,
        default=Path(".venvs/nemo_gym"),
        help="virtual environment of NeMo Gym (.venvs/nemo_gym)",
    )
    commands = parser.add_subparsers(required=True, metavar="{install,rows,start,call}")

    command = commands.add_parser("install", help="make the virtual environment")
    command.add_argument("--python", default="3.12", help="Python 3.12, by version or path")
    command.set_defaults(run=install)

    command = commands.add_parser("rows", help="write rows of a task")
    command.add_argument(
        "--task",
        default="chain_sum",
        help="name of a reasoning_gym task, or counter: two calls of a tool",
    )
    command.add_argument("--config", default="{}", help="settings of the task as JSON")
    command.add_argument("--size", type=int, default=512)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--shots",
        type=int,
        default=0,
        help="solved examples before every question, for a small model",
    )
    command.add_argument("out", type=Path)
    command.set_defaults(run=rows)

    command = commands.add_parser("_rows")
    for name in ("task", "config", "size", "seed", "shots", "out"):
        command.add_argument(name)
    command.set_defaults(run=write_rows)

    command = commands.add_parser("start", help="run NeMo Gym until Ctrl-C")
    command.add_argument(
        "--policy", required=True, help="our inference server: http://HOST:PORT/v1"
    )
    command.add_argument("--model", required=True, help="model.name of the run")
    command.add_argument("--head-port", type=int, default=11000)
    command.add_argument("servers", nargs="+", help="resources servers, by name or by config path")
    command.set_defaults(run=start)

    command = commands.add_parser(
        "call", help="run one of NeMo Gym's own commands; it wants absolute paths"
    )
    command.add_argument("command", help="ng_collect_rollouts, ng_prepare_data, ...")
    command.add_argument("arguments", nargs=argparse.REMAINDER)
    command.set_defaults(run=call)

    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
