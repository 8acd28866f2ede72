"""A package index and an Environments Hub on this machine, with wheels that are written by hand: uv installs them as it would real ones."""

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from aiohttp import web

from tests.web import WebServer

CLASSIC = "import verifiers as vf\n\ndef load_environment():\n    return vf.SingleTurnEnv()\n"
V1 = "import verifiers.v1 as vf\n\nclass Words(vf.Taskset):\n    pass\n\n__all__ = ['Words']\n"
VERIFIERS = {
    "0.3.1": {"verifiers/__init__.py": "", "verifiers/v1/__init__.py": "", "verifiers/legacy/__init__.py": ""},
    "0.4.0": {"verifiers/__init__.py": "", "verifiers/v1/__init__.py": "", "verifiers/v1/streams.py": ""},
}


def make_wheel(folder: Path, name: str, version: str, files: Mapping[str, str], requires: Iterable[str] = (), python: str = "") -> Path:
    """Writes a wheel; `name` is the distribution's."""
    part = f"{name.replace('-', '_')}-{version}"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    metadata += [f"Requires-Python: {python}"] if python else []
    info = {"METADATA": "\n".join(metadata) + "\n", "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    content = {**files, **{f"{part}.dist-info/{key}": text for key, text in info.items()}}
    record = f"{part}.dist-info/RECORD"
    lines = [f"{key},sha256={digest(text.encode())},{len(text.encode())}" for key, text in content.items()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for key, text in content.items():
            archive.writestr(key, text)
        archive.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    return path


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class Index(WebServer):
    """`<url>/simple/` is the package index, of the wheels in `<folder>/simple`; `<url>/hub` the Hub, with an index for each owner, of the
    wheels in `<folder>/<owner>`. `up = False`: it answers 503."""

    def __init__(self, folder: Path):
        super().__init__(
            web.get("/simple/{name}/", self.versions),
            web.get("/files/{owner}/{file}", self.file),
            web.get("/hub/{owner}/{name}/@{version}", self.details),
            web.get("/{owner}/simple/{name}/", self.versions),
        )
        self.folder, self.up, self.asked = folder, True, list[str]()
        self.private: set[str] = set()

    async def versions(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if not self.up:
            return web.Response(status=503)
        owner, name = request.match_info.get("owner", "simple"), request.match_info["name"].replace("-", "_")
        files = sorted((self.folder / owner).glob(f"{name}-*.whl"))
        if not files:
            return web.Response(status=404)
        lines = [
            f'<a href="/files/{owner}/{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>' for path in files
        ]
        return web.Response(text=f"<!DOCTYPE html><html><body>{''.join(lines)}</body></html>", content_type="text/html")

    async def file(self, request: web.Request) -> web.StreamResponse:
        path = self.folder / request.match_info["owner"] / request.match_info["file"]
        return web.FileResponse(path) if path.is_file() else web.Response(status=404)

    async def details(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if not self.up:
            return web.Response(status=503)
        owner, name, version = (request.match_info[key] for key in ("owner", "name", "version"))
        if f"{owner}/{name}" in self.private:
            return web.json_response({"data": {"visibility": "PRIVATE"}})
        pattern = f"{name.replace('-', '_')}-{'*' if version == 'latest' else version}-*.whl"
        if not list((self.folder / owner).glob(pattern)):
            return web.json_response({"error": "not found"}, status=404)
        return web.json_response({"data": {"simple_index_url": f"{self.url}/{owner}/simple/", "visibility": "PUBLIC"}})
