"""Adapters that clients download: `save_weights_external` writes one, and each of its files has
an address that is signed for a while."""

import time
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from rl.run_dir.checksums import DIGESTS
from rl.tinker.gate import DOWNLOADS, signature
from rl.tinker.listing import when
from rl.tinker.places import EXTERNAL, Places, tinker_path
from rl.tinker.replies import reply

SIGNED_S = 3600
"""How long an address can be used."""


class Downloads:
    """The endpoints."""

    def __init__(self, places: Places, secret: str):
        self.places, self.secret = places, secret

    def _files(self, request: Request) -> dict[str, Path]:
        """Returns the files of what a request names. Raises KeyError."""
        model_id, name = request.path_params["model_id"], request.path_params["name"]
        if self.places.read_saved(model_id, EXTERNAL, name) is None:
            raise KeyError(
                f"{tinker_path(model_id, EXTERNAL, name)} does not exist on this server; it "
                "may have expired or been deleted"
            )
        return {
            path.name: path
            for path in sorted(self.places.saved(model_id, EXTERNAL, name).iterdir())
            if path.name != DIGESTS
        }

    async def addresses(self, request: Request) -> Response:
        expires, base = int(time.time()) + SIGNED_S, str(request.base_url).rstrip("/")
        urls = {}
        for name in self._files(request):
            path = (
                f"{DOWNLOADS}{request.path_params['model_id']}/{request.path_params['name']}/{name}"
            )
            urls[name] = (
                f"{base}{quote(path)}?expires={expires}"
                f"&signature={signature(self.secret, path, expires)}"
            )
        return reply({"urls": urls, "expires": when(expires)})

    async def file(self, request: Request) -> Response:
        files, name = self._files(request), request.path_params["file"]
        if name not in files:
            raise KeyError(f"there is no file {name}, only {', '.join(files)}")
        return FileResponse(files[name])
