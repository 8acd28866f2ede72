"""`rl export`: writes a run's weights in the formats that transformers, vLLM and peft load."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl.commands.options import check_writable, find_run, need_weights, version_number
from rl.config.command_line import (
    fail,
    load_config_or_exit,
    need_names,
    option_lines,
    options,
    take,
)
from rl.config.stored import run_dir_of
from rl.launch.children import Children
from rl.launch.prepare import ranges
from rl.models.folder import resolve_model
from rl.models.hub import TIMEOUT_S, hub_fault
from rl.run_dir.files import CorruptFileError, clean_leftovers, restore
from rl.run_dir.paths import RunDir, numbered
from rl.system.errors import RunError
from rl.system.functions import Blame
from rl.system.terminal import say, size

SILENCE_S = 60.0
"""Longest silence of the hub during an upload; the total time is not limited."""
MODEL_FILES = ["*.safetensors", "*.bin", "*.index.json", "config.json", "adapter_config.json"]
"""Files that are deleted when another model is uploaded in place of one."""

OPTIONS = options("""
to DIR: directory for the model; must not exist yet
push OWNER/NAME: also push the model to this repository on the Hugging Face hub; without --to,
    only push it
public: with --push: make the repository public; by default a new repository is private
merge: for a run with trainer.lora: export the base model with the adapters merged, not the
    adapters alone
dtype bfloat16|float32: default: model.dtype of the run
overwrite: replace an existing model
""")
HELP = f"""usage: rl export RUN[@STEP] --to DIR [--push OWNER/NAME] [--merge] [--dtype TYPE]
                 [--overwrite] [--KEY VALUE] ...

Writes the weights of a run after batch STEP: outputs/x is the newest, outputs/x@12 step 12,
outputs/x@best the best in its evaluations. It reads the step's checkpoint, which has the float32
master weights, or if there is none the published version in model.dtype. The result is a folder in
Hugging Face format, or a peft adapter for a run with trainer.lora. Neither ranks nor a GPU are
needed.

{option_lines(OPTIONS)}
  --model.name FOLDER         location of the run's base model, if it was moved; any other
                              configuration key works likewise
"""


def main(args: list[str], children: Children) -> int:
    values, rest = take("rl export", args, OPTIONS, HELP)
    which = "which run? Give its directory first: rl export outputs/NAME --to DIR"
    need_names("rl export", rest[:1], (1,), which)
    if not (values["to"] or values["push"]):
        fail(
            "rl export",
            f"where to? Give a directory: rl export {rest[0]} --to DIR, or a repository: "
            "--push OWNER/NAME",
        )
    if values["public"] and not values["push"]:
        fail("rl export", "--public: needs a repository; name it with --push OWNER/NAME")
    with tempfile.TemporaryDirectory(prefix="rl-export-") as scratch:
        return run(rest[0], rest[1:], values, Path(scratch))


def run(spec: str, flags: list[str], values: dict[str, Any], scratch: Path) -> int:
    """Exports the weights of a run, via `scratch` if they are only pushed to the hub. Checks
    everything before importing torch."""
    root, version = find_run(spec)
    words = ["@", str(root / "config.toml"), *flags]
    config, _ = load_config_or_exit(words, "rl export", usage=HELP)
    repo, public, overwrite = values["push"], bool(values["public"]), bool(values["overwrite"])
    target = Path(values["to"] or scratch / "model").expanduser().resolve()
    clean_leftovers(target.parent)
    if (old := target.with_name(f".{target.name}.replaced")).exists():
        restore(old)
    check_target(target, overwrite, root)
    merge, model, lora = bool(values["merge"]), config.model, config.trainer.lora
    if merge and not lora:
        raise RunError(
            f"--merge: {root} trained the whole model and has no adapters; leave --merge out"
        )
    need_weights(config, root, "rl export writes weights")
    step, checkpoint, published = weights_of(run_dir_of(root, config), version)
    base = resolve_model(model, needs_template=False)
    if target.is_dir() and target in [Path(m).expanduser().resolve() for m in (base, model.name)]:
        raise RunError(f"--to {target}: is the base model of the run; give another directory")
    if repo:
        check_push(repo, public=public, overwrite=overwrite)
    say(f"step {step} of {root}: reading {checkpoint or published}")
    from rl.trainer.export import Origin, export

    trust = model.trust_remote_code
    origin = Origin(Path(base), lora, checkpoint, published, trust, model.name)
    try:
        export(origin, target, merge, values["dtype"] or model.dtype)
    except CorruptFileError as error:
        none = "" if published else " no version of this step was kept either;"
        raise RunError(f"{error};{none} give another step, RUN@STEP") from None
    kind = "adapters" if lora and not merge else "model"
    num_bytes = sum(file.stat().st_size for file in target.iterdir())
    if values["to"]:
        print(f"{target}: the {kind} of step {step}, {size(num_bytes)}")
    if repo:
        say(f"pushing {size(num_bytes)} to {repo}")
        title = f"Step {step} of {root.resolve().name}"
        url, visibility = push(target, repo, title, public=public, overwrite=overwrite)
        print(f"{url}: the {kind} of step {step}, {visibility}")
    return 0


def check_target(target: Path, overwrite: bool, root: Path) -> None:
    """Raises RunError unless `target`, a resolved path, may be written: outside the run, and new
    or, with `overwrite`, a model alone."""
    is_model = any((target / name).is_file() for name in ("config.json", "adapter_config.json"))
    folders = sorted(path.name for path in target.iterdir() if path.is_dir()) if is_model else []
    if root.resolve() in (target, *target.parents):
        why = "is inside the run's own directory; give one outside of it"
    elif not target.exists():
        return check_writable("--to", target)
    elif not is_model:
        why = "exists and is not a model; give a directory that does not exist"
    elif not overwrite:
        why = "a model exists there; give another directory, or --overwrite"
    elif folders:
        beside = ", ".join(folders)
        why = f"--overwrite would delete {beside} beside the model; give another directory"
    else:
        return
    raise RunError(f"--to {target}: {why}")


def weights_of(run_dir: RunDir, version: str) -> tuple[int, Path | None, Path | None]:
    """Returns (step, its checkpoint, its published version); one path may be None. Raises
    RunError that lists the existing steps."""
    checkpoints, versions = numbered(run_dir.checkpoints), numbered(run_dir.weights_dir)
    step = version_number(run_dir.root, version, {*checkpoints, *versions}, ())
    if step in checkpoints or step in versions:
        return step, checkpoints.get(step), versions.get(step)
    if step == 0:
        raise RunError(
            f"{run_dir.root}@0: is the base model (model.name of the run); there is nothing to "
            "export before the first step"
        )
    raise RunError(
        f"{run_dir.root}@{step}: step {step} has neither a checkpoint nor a published version; "
        f"there are checkpoints {ranges(checkpoints)} and versions {ranges(versions)}. Which ones "
        "a run keeps is set by trainer.checkpoint and trainer.weights"
    )


def check_push(repo: str, *, public: bool, overwrite: bool) -> None:
    """Raises RunError unless a model may be pushed to `owner/name`, which need not exist: a
    token is required, replacing another model needs `overwrite`, and a public repository needs
    `public`."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    what = f"--push {repo}"
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise RunError(f"{what}: not a valid repository name ({error}); give owner/name") from None
    if repo.count("/") != 1:
        raise RunError(
            f"{what}: give owner/name, where the owner is you or one of your organisations"
        )
    if fault := hub_fault():
        raise RunError(f"{what}: {fault}; check the network, or export with --to alone")
    if not get_token():
        raise RunError(
            f"{what}: there is no token for {constants.ENDPOINT}; `hf auth login`, or set "
            "HF_TOKEN to one that may write"
        )
    with asking(what):
        try:
            info = HfApi(endpoint=constants.ENDPOINT).model_info(repo, timeout=TIMEOUT_S)
        # also the answer for somebody else's private one, whose creation the hub then refuses
        except RepositoryNotFoundError:
            return
    files = [file.rfilename for file in info.siblings or []]
    if not overwrite and any(name.endswith((".safetensors", ".bin")) for name in files):
        raise RunError(f"{what}: there is a model already; give another name, or --overwrite")
    if not info.private and not public:
        raise RunError(
            f"{what}: this repository is public; give --public if the model may be public, "
            "or another name"
        )


def push(
    folder: Path, repo: str, message: str, *, public: bool, overwrite: bool
) -> tuple[str, str]:
    """Uploads a model's folder in one commit. A new repository is private, or public with
    `public`. Returns its address and visibility. Raises RunError."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import get_session

    api = HfApi(endpoint=constants.ENDPOINT)
    get_session().timeout = SILENCE_S  # by default the client has none
    with asking(f"--push {repo}"):
        url = api.create_repo(repo, private=not public, exist_ok=True)
        stale = MODEL_FILES if overwrite else None
        api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=stale
        )
        private = api.model_info(repo, timeout=TIMEOUT_S).private
    return str(url), "private" if private else "seen by everybody"


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Turns the exceptions of the hub's client into RunError."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    with Blame(what, f"check the network and {constants.ENDPOINT}, then try again"):
        try:
            yield
        except HfHubHTTPError as error:
            status = error.response.status_code
            remedy = (
                "your token may not write there: `hf auth login` with one that may"
                if status in (401, 403)
                else "try again later"
            )
            raise RunError(
                f"{what}: the hub answered {status} "
                f"({error.server_message or 'without a reason'}); {remedy}"
            ) from None
