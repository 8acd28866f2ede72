"""`rl export`: a run's weights as files that transformers, vLLM and peft load."""

import sys
from pathlib import Path
from typing import Any

from rl.cli import ConfigError, fail, load_config
from rl.commands.options import WIDTH, Option, take
from rl.commands.policy import SHOWN, PolicyError, check_not_a_run, place_of, split_run, version_number
from rl.config import RLConfig
from rl.files import CorruptFileError
from rl.models import ModelError, resolve_model
from rl.processes import Children
from rl.run_dir import RunDir, numbered

DTYPES = ("bfloat16", "float32")
OPTIONS = (
    Option("to", "DIR", "where the model goes; must not be there yet"),
    Option("merge", "", "of a run with trainer.lora: the base model with the adapters added to its weights, not the adapters alone"),
    Option("dtype", "TYPE", f"{' or '.join(DTYPES)}; default: model.dtype of the run"),
    Option("overwrite", "", "replace a model that is at DIR"),
)
HELP = """usage: rl export RUN[@STEP] --to DIR [--merge] [--dtype TYPE] [--overwrite] [--KEY VALUE] ...

Writes the weights of a run after STEP optimizer steps: outputs/x is the newest, outputs/x@12 step 12, outputs/x@best the best in its
evaluations. A checkpoint holds the float32 masters and is taken where there is one, else the published version, which has model.dtype.
The result is a folder in Hugging Face format, or of a run with trainer.lora a peft adapter. Neither ranks nor a GPU are needed.

{options}
  --model.name FOLDER         where the run's base model lies, if it has been moved; likewise any other key of the configuration
"""


def main(args: list[str], children: Children) -> int:
    """The command."""
    if {"-h", "--help"} & set(args):
        print(HELP.replace("{options}", "\n".join(f"  {f'--{o.name} {o.value}'.strip():<{WIDTH}} {o.help}" for o in OPTIONS)))
        return 0
    values, rest = take("rl export", args, OPTIONS)
    if not rest or rest[0].startswith(("-", "@")):
        fail("rl export", "which run? Give its directory first: rl export outputs/NAME --to DIR")
    if not values["to"]:
        fail("rl export", f"where to? Give a directory: rl export {rest[0]} --to DIR")
    if values["dtype"] not in (None, *DTYPES):
        fail("rl export", f"--dtype {values['dtype']}: give {' or '.join(DTYPES)}")
    try:
        return run(rest[0], rest[1:], values)
    except (ConfigError, ModelError, PolicyError) as error:
        print(f"rl export: {error}", file=sys.stderr)
        return 1


def run(spec: str, flags: list[str], values: dict[str, Any]) -> int:
    """From the run to the folder. Everything that can be wrong is found before torch is imported."""
    found = split_run(spec)
    if not found:
        if not Path(spec).expanduser().is_dir():
            check_not_a_run(spec)
        raise PolicyError(f"{spec}: is no run of rl; give the directory with its config.toml")
    root, version = found
    config, _ = load_config(["@", str(root / "config.toml"), *flags], "rl export", usage=HELP)
    target = Path(values["to"]).expanduser().absolute()
    check_target(target, values["overwrite"], root)
    if values["merge"] and not config.trainer.lora:
        raise PolicyError(f"--merge: {root} trained the whole model, it has no adapters; leave it out")
    place = place_of(root, config)
    step, checkpoint, published = origin_of(root, version, place)
    base = resolve_model(config.model, needs_template=False)
    if target == Path(base):
        raise PolicyError(f"--to {target}: is the base model of the run; give another directory")
    print(f"step {step} of {root}: reading {checkpoint or published}", file=sys.stderr, flush=True)
    write(config, base, checkpoint, published, target, bool(values["merge"]), values["dtype"] or config.model.dtype)
    kind = "adapters" if config.trainer.lora and not values["merge"] else "model"
    size = sum(file.stat().st_size for file in target.iterdir()) / 2**20
    print(f"{target}: the {kind} of step {step}, {size:.1f} MiB")
    return 0


def check_target(target: Path, overwrite: bool | None, root: Path) -> None:
    """Raises PolicyError unless something may be written there. Only a model is ever replaced, and nothing of the run."""
    if root.resolve() in (target.resolve(), *target.resolve().parents):
        raise PolicyError(f"--to {target}: lies in the run's own directory; give one outside of it")
    if not target.exists():
        return
    is_model = any((target / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not is_model:
        raise PolicyError(f"--to {target}: is there already and is no model; give a directory that does not exist")
    if not overwrite:
        raise PolicyError(f"--to {target}: there is a model already; give another directory, or --overwrite")


def origin_of(root: Path, version: str, place: RunDir) -> tuple[int, Path | None, Path | None]:
    """(step, its checkpoint, its published version), of which one may be missing. Raises PolicyError listing what there is."""
    checkpoints, versions = numbered(place.checkpoints), numbered(place.weights_dir)
    step = version_number(root, version, {*checkpoints, *versions}, ())
    if step in checkpoints or step in versions:
        return step, checkpoints.get(step), versions.get(step)
    if step == 0:
        raise PolicyError(f"{root}@0: is the base model, model.name of the run; there is nothing to export before the first step")

    def listed(numbers: dict[int, Path]) -> str:
        return ", ".join(map(str, list(numbers)[-SHOWN:])) or "none"

    raise PolicyError(
        f"{root}@{step}: step {step} has neither a checkpoint nor a published version; there are checkpoints of {listed(checkpoints)} "
        f"and versions {listed(versions)}. Which ones a run keeps is set by trainer.checkpoint and trainer.weights"
    )


def write(config: RLConfig, base: str, checkpoint: Path | None, version: Path | None, target: Path, merge: bool, dtype: str) -> None:
    """Does it. Raises PolicyError for a checkpoint that cannot be used."""
    from rl.trainer.checkpoint import CheckpointMismatchError
    from rl.trainer.export import Origin, export

    origin = Origin(Path(base), config.trainer.lora, checkpoint, version, config.model.trust_remote_code)
    try:
        export(origin, target, merge, dtype)
    except CheckpointMismatchError as error:
        raise PolicyError(str(error)) from None
    except CorruptFileError as error:
        raise PolicyError(f"{error}; no version of this step was kept, either: give another step, RUN@STEP") from None
