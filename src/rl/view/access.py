"""Who may see the page: the browser that opened the printed address. The address has the token, which then becomes a cookie."""

from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.run_dir.token import is_loopback
from rl.wire.gate import CLOSE, HttpGate, header, host_name, refusal

PARAMETER = "token"
POLICY = "; ".join(
    [
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'", "base-uri 'none'",
        "form-action 'none'", "frame-ancestors 'none'",
    ]
)  # fmt: skip
"""The content security policy: scripts and styles from files of the page alone, nothing from elsewhere."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer."""


class PageGate(HttpGate):
    """The gate in front of the page and its data: reading alone, this host's name, no other page's requests, the token's cookie."""

    def __init__(self, app: ASGIApp, token: str, host: str, port: int):
        super().__init__(with_headers(app), token, is_loopback(host))
        self.token, self.cookie = token, f"rl_view_{port}"
        """Cookies know no ports, so that two pages of one machine need two names."""

    def refuse(self, scope: Scope) -> Response | None:
        """The answer to a request that must not reach the page: also that to the printed address, which sets the cookie; else None."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return refusal(405, "read_only", "this page only shows: send GET", CLOSE | HEADERS)
        if (refused := self.foreign_host(scope)) or (refused := self.foreign_origin(scope)):
            return refused
        given = parse_qs(scope["query_string"].decode("latin-1")).get(PARAMETER)
        if given and scope["path"] == "/":
            return self.let_in(given[0])
        if any(self.is_token(value.encode("latin-1", "replace")) for value in self.cookies(scope)):
            return None
        message = "open the address that `rl view` printed: it has the token, and this browser has not shown it yet"
        if scope["path"] == "/":  # a person with a link of a colleague's
            return HTMLResponse(f"<!doctype html><title>rl view</title><p>Please {message}.</p>", 401, CLOSE | HEADERS)
        return refusal(401, "unauthorized", message, CLOSE | HEADERS)

    def foreign_origin(self, scope: Scope) -> Response | None:
        """The answer to a request that another page makes."""
        own = {host_name(value) + port_of(value) for value in header(scope, b"host")}
        origins = [urlsplit(value.decode("latin-1")) for value in header(scope, b"origin")]
        foreign = any(origin.netloc not in own for origin in origins) or b"cross-site" in header(scope, b"sec-fetch-site")
        if foreign and not (scope["path"] == "/" and b"navigate" in header(scope, b"sec-fetch-mode")):
            return refusal(403, "foreign_origin", "this server answers its own page, not another one", CLOSE | HEADERS)
        return None

    def cookies(self, scope: Scope) -> list[str]:
        """The values of our cookie."""
        found = []
        for value in header(scope, b"cookie"):
            try:
                jar = SimpleCookie(value.decode("latin-1"))
            except CookieError:
                continue
            found += [jar[self.cookie].value] if self.cookie in jar else []
        return found

    def let_in(self, given: str) -> Response:
        """Sets the cookie, and has the browser go to the page, so that the token is neither in its address nor in what it remembers."""
        if not self.is_token(given.encode("utf-8", "replace")):
            return refusal(401, "unauthorized", "this is not the token that `rl view` printed when it was last started", CLOSE | HEADERS)
        # A page that leads on, no redirect: a strict cookie is not sent where a link of another site led to a redirect.
        response = HTMLResponse(
            '<!doctype html><meta http-equiv="refresh" content="0; url=/"><title>rl view</title><link rel="icon" href="data:,">',
            headers=HEADERS,
        )
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
        return response


def port_of(host: bytes) -> str:
    """`:8411` of a Host header; empty without a port."""
    return host.decode("latin-1").strip()[len(host_name(host)) :]


def with_headers(app: ASGIApp) -> ASGIApp:
    """The app, with HEADERS in each of its answers."""
    added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0].decode() not in HEADERS or pair[0] == b"cache-control"]
                there = {name for name, _ in kept}
                message["headers"] = [*kept, *(pair for pair in added if pair[0] not in there)]
            await send(message)

        await app(scope, receive, send_with_headers)

    return answering
