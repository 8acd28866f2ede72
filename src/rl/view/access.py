"""Access control of the page: a link that `rl view` printed lets one browser in, which then has
a cookie."""

import secrets
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.run_dir.access_token import derived, is_loopback, link
from rl.wire.serving import CLOSE, HttpGate, header, refusal

NO_ACCESS = (
    "this browser has no access: open the newest link printed by `rl view`, or by a run with "
    "--view. Each link lets one browser "
    "in; once it is used, the next one is printed. `rl view RUN` prints one at any time"
)
NO_ACCESS_PAGE = """<!doctype html><html lang="en">
<meta name="viewport" content="width=device-width"><title>No access · rl view</title>
<link rel="icon" href="data:,"><h1>This browser has no access to this page of rl view</h1> <p>A link
lets one browser in, once: this one may have been used already, here or elsewhere. The runs go on
all the same.</p> <ul><li>In the browser that used it, the tab with the page still works; its
address does, too.</li> <li>For this browser, open the newest link that <code>rl view</code>, or the
run with <code>--view</code>, has printed.</li> <li><code>uv run rl view RUN</code> in a terminal
prints a new one at any time.</li></ul></html>
"""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy: scripts and styles only from files of the page, nothing from
elsewhere."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every response."""


class PageGate(HttpGate):
    """The gate in front of the page and its data: read-only, only under this host's name, only for
    our own page, only with the cookie.

    Browsers send a cookie to every port of its host. Therefore the page is in a folder whose name
    is known only to browsers that were let in, and the cookie is restricted to that folder: other
    servers on this host never receive it.
    """

    def __init__(self, app: ASGIApp, secret: str, host: str, new_link: Callable[[str], None]):
        """new_link: called with the number of each new link, which lets the next browser in; see
        rl.run_dir.access_token.link."""
        self.folder = f"/{derived(secret, 'folder')}"
        super().__init__(
            Starlette(routes=[Mount(self.folder, app)]),
            derived(secret, "cookie"),
            is_loopback(host),
        )
        self.secret, self.new_link = secret, new_link
        self.cookie = f"rl_view_{derived(secret, 'name')[:8]}"
        self.next_link()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with HEADERS."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await super().__call__(scope, receive, send_with_headers)

    def next_link(self) -> None:
        """Makes a new link, which replaces the one before."""
        number = secrets.token_hex(8)
        self.link = link(self.secret, "", number).encode()
        self.new_link(number)

    def refuse(self, scope: Scope) -> Response | None:
        """The response to a request that must not reach the page, or to a link, which sets the
        cookie; None for other requests."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return refusal(405, "read_only", "this page is read-only: send GET", CLOSE)
        if refused := self.foreign_host(scope) or self.foreign_origin(scope):
            return refused
        path, query = scope["path"], b"?" + scope["query_string"]
        is_link = path == "/" and scope["method"] == "GET"
        if is_link and secrets.compare_digest(query, self.link):
            self.next_link()
            return self.let_in()
        cookie = Request(scope).cookies.get(self.cookie, "")
        if path.startswith(f"{self.folder}/") and self.is_token(cookie.encode()):
            return None
        if self.is_for_people(scope):
            return HTMLResponse(NO_ACCESS_PAGE, 401, CLOSE)
        return refusal(401, "unauthorized", NO_ACCESS, CLOSE)

    def is_for_people(self, scope: Scope) -> bool:
        """Whether a request is for the page itself or a link, not for its data."""
        return scope["path"] in ("/", f"{self.folder}/")

    def foreign_origin(self, scope: Scope) -> Response | None:
        """The refusal of a request made by another page, else None."""
        hosts = {value.strip() for value in header(scope, b"host")}
        origins = [value.partition(b"://")[2] for value in header(scope, b"origin")]
        is_own = hosts.issuperset(origins) and b"cross-site" not in header(scope, b"sec-fetch-site")
        is_visit = self.is_for_people(scope) and b"navigate" in header(scope, b"sec-fetch-mode")
        if is_own or is_visit:
            return None
        return refusal(403, "foreign_origin", "this server only answers its own page", CLOSE)

    def let_in(self) -> Response:
        """Sets the cookie and sends the browser to the page, so that the link stays neither in
        the address bar nor in the history."""
        # A page that refreshes, not a redirect: browsers do not send a strict cookie after a
        # redirect from another site's link.
        response = HTMLResponse(
            '<!doctype html><meta http-equiv="refresh" content="0; '
            f'url={self.folder}/"><title>rl view</title>'
            '<link rel="icon" href="data:,">'
        )
        value = derived(self.secret, "cookie")
        response.set_cookie(
            self.cookie, value, httponly=True, samesite="strict", path=f"{self.folder}/"
        )
        return response
