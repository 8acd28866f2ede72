"""The part of the Hugging Face hub's API that pushing a model takes, on this machine."""

import base64
import json
from typing import Any

from aiohttp import web

from tests.web import WebServer

TOKEN = "hf_of_the_test_0123456789"


class HubStub(WebServer):
    """Repositories by name: whether each is private, and its files. A token other than TOKEN may
    do nothing."""

    def __init__(self) -> None:
        super().__init__(web.route("*", "/{path:.*}", self.answer))
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        path, data = request.path.split("/")[2:], await request.read()
        if path == ["repos", "create"]:
            return self.create(**json.loads(data))
        if not path:
            return web.Response()
        _, owner, name, *what = path
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid credentials"}, status=401)
        if (repo := f"{owner}/{name}") not in self.files:
            headers = {"X-Error-Code": "RepoNotFound"}
            return web.json_response({"error": "Not found"}, status=404, headers=headers)
        return web.json_response(self.reply(repo, what, data))

    def create(self, name: str, organization: str = "", **how: Any) -> web.Response:
        repo = f"{organization}/{name}" if organization else name
        known = repo in self.files
        if not known:
            self.files[repo] = {}
            self.private[repo] = bool(how.get("private") or how.get("visibility") == "private")
        return web.json_response({"url": f"{self.url}/{repo}"}, status=409 if known else 200)

    def reply(self, repo: str, what: list[str], data: bytes) -> Any:
        files = self.files[repo]
        if what[:1] == ["tree"]:
            return [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in files.items()
            ]
        if what[:1] == ["preupload"]:
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [mode | {"path": one["path"]} for one in json.loads(data)["files"]]}
        if what[:1] == ["commit"]:
            for key, value in (json.loads(line).values() for line in data.splitlines()):
                if key == "header":
                    self.commits.append(value["summary"])
                elif key == "deletedFile":
                    files.pop(value["path"])
                else:
                    files[value["path"]] = base64.b64decode(value["content"])
            return {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1" * 40}
        siblings = [{"rfilename": name} for name in files]
        return {"id": repo, "private": self.private[repo], "siblings": siblings, "sha": "0" * 40}
