"""Environment ids: `name`, `owner/name`, `owner/name@version`. Light, so that a missing one is reported at once."""

import importlib.metadata
import importlib.util


class EnvLoadError(Exception):
    """An environment cannot be used; the message names the remedy."""


def check_installed(env_id: str) -> str:
    """The id without its version, if a module of that name is installed in that version. Raises EnvLoadError with the command otherwise."""
    path, _, version = env_id.partition("@")
    name = path.split("/")[-1]
    install = f"prime env install {env_id}" if "/" in path else f"uv pip install {name}"
    if not name.replace("-", "_").isidentifier() or importlib.util.find_spec(name.replace("-", "_")) is None:
        raise EnvLoadError(f"environment {env_id} is not installed; `{install}`, or `uv pip install FOLDER` for one of your own")
    if version and version != "latest":
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "one without a version"
        if found != version:
            raise EnvLoadError(f"environment {env_id}: {found} is installed; `{install}`")
    return path
