"""A service with the Tinker API, through its SDK: the key, the wait until it answers, its errors as
ours, and its models.

`python -m rl.tinker.client.service RUN/config.toml` checks that the service answers, takes the key,
and has the run's base model.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import tinker

from rl.config.command_line import from_toml, load_config_or_exit
from rl.config.help import PROCESS_USAGE
from rl.config.run import RLConfig
from rl.config.tinker import PUBLIC_SERVICE
from rl.run_dir import spans
from rl.run_dir.lease import ROLE_WAIT_S, hold_role
from rl.run_dir.status import Status
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
        late = (
            f"waited {config.tinker.answer_timeout_s:.0f} s (tinker.answer_timeout_s) for {url} "
            f"to {what}"
        )
        raise RunError(f"{late}: is it up, and not just slow?", RESTART) from None
    except ERRORS as error:
        if isinstance(error, tinker.APIStatusError) and error.status_code in KEY_REFUSED:
            raise RunError(f"{url} does not take the key ({error}): {KEY_REMEDY}") from None
        if KEY in str(error):
            raise RunError(f"there is no key for {url}: {KEY_REMEDY}") from None
        refused = is_refusal(error)
        if not refused:
            away(f"{url} to {what}")
        why = f"{type(error).__name__}: {error}" + f"; {remedy}" * (refused and bool(remedy))
        raise RunError(
            f"{url} does not {what}: {why}", exit_code if refused else RESTART
        ) from error


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


def wait_for_service(config: RLConfig, within_s: float, say: Callable[[str], None]) -> None:
    """Waits until the service answers anything, and says what it waits for. Raises RunError
    after `within_s` seconds."""
    url, since, told = url_of(config), time.monotonic(), False
    while problem := problem_of(url):
        if not told:
            say(f"{url} to answer ({problem})")
            told = True
        if time.monotonic() - since > within_s:
            raise RunError(
                f"{url} does not answer for {within_s:.0f} s ({problem}): start that "
                "service, or give its address (tinker.base_url, or "
                "the environment variable TINKER_BASE_URL)",
                RESTART,
            )
        time.sleep(RETRY_S)


def check(config: RLConfig) -> str:
    """Returns a sentence on the service that a configuration names. Raises RunError if it cannot
    train that model."""
    url, name = url_of(config), base_model(config)
    wait_for_service(config, REACH_S, lambda text: None)
    with asking(config, "tell what it has"):
        client = getattr(tinker, "RestClient", tinker.ServiceClient)(base_url=url)
        offered = answered(client.get_server_capabilities(), REACH_S).supported_models
    trained = {
        model.model_name: model
        for model in offered
        if model.model_name and getattr(model, "trainable", None) is not False
    }
    if (found := trained.get(name)) is None:
        remedy = f"set tinker.base_model to one of these: {', '.join(sorted(trained)) or 'none'}"
        raise RunError(f"{url} does not train {name!r}; {remedy}")
    longest = getattr(found, "max_context_length", None)
    if longest and config.model.max_model_len > longest:
        limit = (
            f"model.max_model_len = {config.model.max_model_len} is more than the {longest} "
            f"tokens of {name}"
        )
        raise RunError(f"{limit} at {url}: set it to at most that")
    return f"{url} trains {name}"


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
