"""A service with the Tinker API, through its SDK: the key, the wait until it answers, its errors as
ours, and its models.

`python -m rl.tinker.client.service RUN/config.toml` checks that the service answers, takes the key,
and has the run's base model.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import msgspec
import tinker

from rl.config.command_line import from_toml, load_config_or_exit
from rl.config.help import PROCESS_USAGE
from rl.config.run import RLConfig
from rl.config.tinker import PUBLIC_SERVICE
from rl.run_dir import spans
from rl.run_dir.checksums import DIGESTS, MANIFEST, REMOTE, checksum, verify_version
from rl.run_dir.files import CorruptFileError, write_directory, write_file
from rl.run_dir.lease import ROLE_WAIT_S, hold_role
from rl.run_dir.paths import Retention, RunDir
from rl.run_dir.safetensors import HASH, digest
from rl.run_dir.status import Phase, Status
from rl.system.errors import RESTART, RunError, exit_code_of
from rl.system.linux import die_with_parent
from rl.wire.http import RETRY_S

KEY = "TINKER_API_KEY"
KEY_REFUSED = (401, 402)
"""Unknown, and without means to pay."""
REACH_S = 20.0
"""Seconds in which a service must answer before a run is started."""
KEY_REMEDY = f"set {KEY} (`rl serve` prints that of its own), or write it into .env: {KEY}=tml-..."
ERRORS = (tinker.TinkerError, httpx.HTTPError, OSError, ValueError, RuntimeError, AssertionError)
"""What the SDK raises. TimeoutError is an OSError."""


def url_of(config: RLConfig) -> str:
    return (config.tinker.base_url or PUBLIC_SERVICE).rstrip("/")


def base_model(config: RLConfig) -> str:
    """Returns the name of the run's base model at the service."""
    return config.tinker.base_model or config.model.name


def take_key(folder: Path) -> None:
    """Sets the key's variable from the file `.env` of a folder, unless the environment has it;
    logs then have its name in its place."""
    if not os.environ.get(KEY) and (folder / ".env").is_file():
        from dotenv import dotenv_values

        if key := dotenv_values(folder / ".env").get(KEY):
            os.environ[KEY] = key


def is_refusal(error: Exception) -> bool:
    """Returns whether a request itself is at fault, so that the same would fail again."""
    if isinstance(error, tinker.RequestFailedError):
        return error.category == tinker.types.RequestErrorCategory.User
    return isinstance(error, tinker.BadRequestError | tinker.UnprocessableEntityError)


@contextmanager
def asking(
    config: RLConfig,
    what: str,
    exit_code: int = RESTART,
    away: Callable[[str], None] = lambda text: None,
    remedy: str = "",
) -> Iterator[None]:
    """Turns the SDK's errors into RunError. `what`: the request. `exit_code`, `remedy`: of a
    request that is refused; all others may be repeated. `away`: called with the sentence if the
    request is not at fault."""
    url = url_of(config)
    try:
        yield
    except TimeoutError:
        away(f"{url} to {what}")
        raise RunError(
            f"waited {config.tinker.answer_timeout_s:.0f} s (tinker.answer_timeout_s) for {url} "
            f"to {what}: is it up, and not just slow?",
            RESTART,
        ) from None
    except ERRORS as error:
        if isinstance(error, tinker.APIStatusError) and error.status_code in KEY_REFUSED:
            raise RunError(f"{url} does not take the key ({error}): {KEY_REMEDY}") from None
        if KEY in str(error):
            raise RunError(f"there is no key for {url}: {KEY_REMEDY}") from None
        text = f"{url} does not {what}: {type(error).__name__}: {error}"
        if is_refusal(error):
            raise RunError(text + (remedy and f"; {remedy}"), exit_code) from error
        away(f"{url} to {what}")
        raise RunError(text, RESTART) from error


def answered(request: Any, timeout_s: float) -> Any:
    """Returns what a method of the SDK answers: older SDKs, which older services need, return
    some of it themselves, newer ones a future. Raises TimeoutError, but where an older SDK has
    waited already. Waits for: the service."""
    return request.result(timeout_s) if hasattr(request, "result") else request


def rest_client(url: str) -> Any:
    """Returns the SDK's client for all that a key has at the service."""
    return (
        tinker.RestClient(base_url=url)
        if hasattr(tinker, "RestClient")
        else tinker.ServiceClient(base_url=url).create_rest_client()
    )


def problem_of(url: str) -> str:
    """Returns why a service does not answer anything; empty if it does."""
    try:
        status = httpx.get(f"{url}/api/v1/healthz", timeout=REACH_S / 2).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return f"it answers {status}" if status in (502, 503, 504) else ""


def wait_for_service(config: RLConfig, status: Status | None = None) -> None:
    """Waits until the service answers anything, and shows what it waits for. Raises RunError
    after the time for an answer, without a status after REACH_S."""
    url, since, problem = url_of(config), time.monotonic(), ""
    within_s = config.tinker.answer_timeout_s if status else REACH_S
    while latest := problem_of(url):
        if status and not problem:
            status.enter(Phase.WAITING_FOR_SERVICE, detail=f"{url} to answer ({latest})")
        problem = latest
        if time.monotonic() - since > within_s:
            raise RunError(
                f"{url} does not answer for {within_s:.0f} s ({problem}): start that service, or "
                "give its address (tinker.base_url, or the environment variable TINKER_BASE_URL)",
                RESTART,
            )
        time.sleep(RETRY_S)


def check(config: RLConfig) -> str:
    """Returns a sentence on the service that a configuration names. Raises RunError if it cannot
    train that model."""
    url, name = url_of(config), base_model(config)
    wait_for_service(config)
    with asking(config, "tell what it has"):
        client = getattr(tinker, "RestClient", tinker.ServiceClient)(base_url=url)
        offered = answered(client.get_server_capabilities(), REACH_S).supported_models
    trained = {
        model.model_name: model
        for model in offered
        if model.model_name and getattr(model, "trainable", None) is not False
    }
    if name not in trained:
        known = ", ".join(sorted(trained)) or "none"
        raise RunError(
            f"{url} does not train {name!r}; set tinker.base_model to one of these: {known}"
        )
    longest = getattr(trained[name], "max_context_length", None)
    if longest and config.model.max_model_len > longest:
        raise RunError(
            f"model.max_model_len = {config.model.max_model_len} is more than the {longest} tokens "
            f"of {name} at {url}: set it to at most that"
        )
    return f"{url} trains {name}"


# What a run has there ---------------------------------------------------------------------------


class Remote(msgspec.Struct, frozen=True):
    """Weights or a state at the service: the content of `tinker.json` in the folders of `weights/`
    and `checkpoints/`, which have checksums as every version and checkpoint has them.

    The versions after a state are of the same model of the service until the trainer starts again,
    which makes a new model from that state.
    """

    path: str
    """`tinker://...`"""
    step: int
    """Number of batches that it was trained on."""
    model_id: str = ""
    calls: tuple[int, int] = (0, 0)
    """The first and the last number (`seq_id`) of the model's calls that trained this step; 0:
    none."""


def read_remote(folder: Path) -> Remote:
    """Raises CorruptFileError."""
    try:
        return msgspec.json.decode((folder / REMOTE).read_bytes(), type=Remote)
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptFileError(f"{folder / REMOTE}: missing or damaged ({error})") from None


def sound_version(folder: Path) -> Remote:
    """Returns where a version is whose files are intact. Raises CorruptFileError."""
    verify_version(folder)
    return read_remote(folder)


def write_version(run_dir: RunDir, remote: Remote, fence: Callable[[], None]) -> None:
    """Writes the folder of a version, in place of an older one, and the record by which versions
    with the same number differ."""
    text, step = msgspec.json.encode(remote), remote.step
    content = {"hash": HASH, "tensors": {"path": digest(remote.path.encode())}}

    def fill(folder: Path) -> None:
        (folder / REMOTE).write_bytes(text)
        (folder / DIGESTS).write_text(json.dumps(content | {"files": {REMOTE: digest(text)}}))

    write_file(run_dir.digests(step), json.dumps(content).encode(), fence=fence)
    write_directory(run_dir.weights(step), fill, fence=fence)


def write_checkpoint(
    run_dir: RunDir, remote: Remote, model: str, fence: Callable[[], None]
) -> None:
    """Writes the folder of a checkpoint."""

    def fill(folder: Path) -> None:
        (folder / REMOTE).write_bytes(msgspec.json.encode(remote))
        files = {REMOTE: checksum(folder / REMOTE)}
        manifest = {"step": remote.step, "world_size": 1, "model": model, "files": files}
        (folder / MANIFEST).write_text(json.dumps(manifest))

    write_directory(run_dir.checkpoint(remote.step), fill, fence=fence)


class RemoteRetention(Retention):
    """Deletes old entries at the service, too, which need not succeed: what is left over there
    costs only its room."""

    rest: Any

    def _delete(self, number: int) -> None:
        try:
            path = read_remote(self.directory / f"{number:06d}").path
            request = self.rest.delete_checkpoint_from_tinker_path(path)
            # an older SDK returns the future itself
            getattr(request, "future", lambda: request)().add_done_callback(tell_failure)
        except (CorruptFileError, *ERRORS) as error:
            print(f"not deleted at the service: {error}", file=sys.stderr, flush=True)
        super()._delete(number)


def tell_failure(future: Any) -> None:
    """Logs why the service has not deleted something."""
    if not future.cancelled() and (error := future.exception()):
        print(f"not deleted at the service: {error}", file=sys.stderr, flush=True)


def main(role: str, run: Callable[[RLConfig, Status], None]) -> NoReturn:
    """Runs the process of a role. Its exit code is 0 at a good end, otherwise that of the error.
    SIGTERM may end it at any moment: every write is atomic."""
    die_with_parent()
    config, _ = load_config_or_exit(sys.argv[1:], role, usage=PROCESS_USAGE)
    take_key(Path.cwd())
    code = 0
    try:
        lease = hold_role(config.run_dir.lock(role), ROLE_WAIT_S)
        spans.start(config.run_dir.spans, role)
        status = Status(config.run_dir.status(role), role)
        run(config, status)
        status.close()
        lease.close()
    except (RunError, OSError) as error:
        print(f"{role}: {error}", file=sys.stderr)
        code = exit_code_of(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is written; the SDK's threads are not waited for


if __name__ == "__main__":
    take_key(Path.cwd())
    try:
        print(check(from_toml(Path(sys.argv[1]))), flush=True)
    except RunError as fault:
        print(fault, flush=True)
        os._exit(1)
    os._exit(0)
