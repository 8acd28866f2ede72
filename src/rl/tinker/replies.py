"""The answers of the server of the Tinker API, as its SDK reads them: an error's status decides
its class, 408 means "ask again"."""

from typing import Any

import msgspec
from starlette.responses import Response

from rl.tinker.log import Answer

PROTOBUF = "application/x-protobuf"


def reply(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Returns an error: 400 BadRequestError, 401 AuthenticationError, 403 PermissionDeniedError,
    404 NotFoundError."""
    return Response(
        msgspec.json.encode({"detail": message}), status, headers, media_type="application/json"
    )


def future(request_id: str, **more: Any) -> Response:
    """Returns the promise of an answer, which the client asks for by its id."""
    return reply({"request_id": request_id, **more})


def try_again(request_id: str) -> Response:
    return reply({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)


def answered(answer: Answer) -> Response:
    """Returns the answer to a call; that of a failed one becomes the SDK's RequestFailedError."""
    return Response(answer.body, 200, media_type="application/json" if answer.is_json else PROTOBUF)
