"""A package index and an Environments Hub on this machine, with wheels that are written by hand: uv
installs them as it would real ones."""

import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from aiohttp import web

from tests.web import WebServer

CLASSIC = "import verifiers as vf\n\ndef load_environment():\n    return vf.SingleTurnEnv()\n"
V1 = "import verifiers.v1 as vf\n\nclass Words(vf.Taskset):\n    pass\n\n__all__ = ['Words']\n"
VERIFIERS = {
    "0.3.1": {
        "verifiers/__init__.py": "",
        "verifiers/v1/__init__.py": "",
        "verifiers/legacy/__init__.py": "",
    },
    "0.4.0": {
        "verifiers/__init__.py": "",
        "verifiers/v1/__init__.py": "",
        "verifiers/v1/streams.py": "",
    },
}


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    requires: Iterable[str] = (),
    python: str = "",
) -> Path:
    """Writes a wheel; `name` is the distribution's."""
    part = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {needed}\n" for needed in requires)
    metadata += f"Requires-Python: {python}\n" if python else ""
    info = f"{part}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "".join(f"{key},,\n" for key in (*files, f"{info}/METADATA")),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for key, text in content.items():
            archive.writestr(key, text)
    return path


BACKEND = """
import pathlib, zipfile
NAME, REQUIRES = {name!r}, {requires!r}

def build_wheel(folder, settings=None, metadata=None, editable=False):
    info, wheel = f"{{NAME}}-1.0.dist-info", f"{{NAME}}-1.0-py3-none-any.whl"
    here = pathlib.Path.cwd()
    sources = [path for path in here.glob("*.py") if path.name != "backend.py"]
    files = {{path.name: path.read_text() for path in sources}}
    files = {{f"{{NAME}}.pth": str(here)}} if editable else files
    lines = ["Metadata-Version: 2.1", f"Name: {{NAME}}", "Version: 1.0"]
    lines += [f"Requires-Dist: {{needed}}" for needed in REQUIRES]
    files[f"{{info}}/METADATA"] = "\\n".join(lines) + "\\n"
    files[f"{{info}}/WHEEL"] = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[f"{{info}}/RECORD"] = ""
    files[f"{{info}}/RECORD"] = "".join(f"{{name}},,\\n" for name in files)
    with zipfile.ZipFile(pathlib.Path(folder, wheel), "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel

def build_editable(folder, settings=None, metadata=None):
    return build_wheel(folder, editable=True)
"""


def make_source(folder: Path, code: str, requires: Iterable[str] = (), more: str = "") -> Path:
    """Writes a package that is built without any other: its module and it are called like the
    folder. `more`: of its pyproject.toml."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{folder.name}.py").write_text(code)
    (folder / "backend.py").write_text(BACKEND.format(name=folder.name, requires=[*requires]))
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    project = f'[project]\nname = "{folder.name}"\nversion = "1.0"\ndependencies = {[*requires]}\n'
    (folder / "pyproject.toml").write_text(project + system + more)
    return folder


class Index(WebServer):
    """`<url>/simple/` is the package index, of the wheels in `<folder>/simple`; `<url>/hub` the
    Hub, with an index for each owner, of the wheels in `<folder>/<owner>`. `up = False`: it answers
    503."""

    def __init__(self, folder: Path):
        super().__init__(
            web.get("/simple/{name}/", self.versions),
            web.get("/files/{owner}/{file}", self.file),
            web.get("/hub/{owner}/{name}/@{version}", self.details),
            web.get("/{owner}/simple/{name}/", self.versions),
        )
        self.folder, self.up, self.asked = folder, True, list[str]()
        self.private: set[str] = set()

    def publish(self, package, code, version="1.0", requires=("verifiers",), python=""):
        """Adds a package of one module to the index `simple`, or to that of an owner."""
        owner, name = package.split("/")
        files = {f"{name.replace('-', '_')}.py": code}
        make_wheel(self.folder / owner, name, version, files, requires, python)

    async def versions(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if not self.up:
            return web.Response(status=503)
        owner, name = (
            request.match_info.get("owner", "simple"),
            request.match_info["name"].replace("-", "_"),
        )
        files = sorted((self.folder / owner).glob(f"{name}-*.whl"))
        if not files:
            return web.Response(status=404)
        links = []
        for path in files:
            checksum = hashlib.sha256(path.read_bytes()).hexdigest()
            href = f"/files/{owner}/{path.name}#sha256={checksum}"
            links.append(f'<a href="{href}">{path.name}</a>')
        return web.Response(
            text=f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>",
            content_type="text/html",
        )

    async def file(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
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
        return web.json_response(
            {"data": {"simple_index_url": f"{self.url}/{owner}/simple/", "visibility": "PUBLIC"}}
        )
