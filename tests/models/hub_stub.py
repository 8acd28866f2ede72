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
        api = "/api/models/{owner}/{name}"
        super().__init__(
            web.head("/", self.answer),
            web.get(api, self.info),
            web.get(f"{api}/revision/{{revision}}", self.info),
            web.get(f"{api}/tree/{{revision}}", self.tree),
            web.post("/api/repos/create", self.create),
            web.post(f"{api}/preupload/{{revision}}", self.preupload),
            web.post(f"{api}/commit/{{revision}}", self.commit),
        )
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        return web.Response()

    def repo(self, request: web.Request) -> str:
        return f"{request.match_info['owner']}/{request.match_info['name']}"

    def refusal(self, request: web.Request, repo: str) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid credentials"}, status=401)
        if repo not in self.files:
            return web.json_response(
                {"error": "Repository not found"},
                status=404,
                headers={"X-Error-Code": "RepoNotFound"},
            )
        return None

    async def info(self, request: web.Request) -> web.Response:
        repo = self.repo(request)
        siblings = [{"rfilename": name} for name in self.files.get(repo, {})]
        found = {
            "id": repo,
            "private": self.private.get(repo),
            "siblings": siblings,
            "sha": "0" * 40,
        }
        return self.refusal(request, repo) or web.json_response(found)

    async def tree(self, request: web.Request) -> web.Response:
        files = self.files.get(self.repo(request), {})
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
            for name, data in files.items()
        ]
        return self.refusal(request, self.repo(request)) or web.json_response(entries)

    async def create(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        repo = (
            f"{body['organization']}/{body['name']}" if body.get("organization") else body["name"]
        )
        if repo in self.files:
            return web.json_response({"url": f"{self.url}/{repo}", "error": "exists"}, status=409)
        self.files[repo], self.private[repo] = (
            {},
            bool(body.get("private") or body.get("visibility") == "private"),
        )
        return web.json_response({"url": f"{self.url}/{repo}"})

    async def preupload(self, request: web.Request) -> web.Response:
        files = (await request.json())["files"]
        modes = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files
        ]
        return self.refusal(request, self.repo(request)) or web.json_response({"files": modes})

    async def commit(self, request: web.Request) -> web.Response:
        repo = self.repo(request)
        for line in (await request.read()).splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.commits.append(entry["value"]["summary"])
            elif entry["key"] == "deletedFile":
                self.files[repo].pop(entry["value"]["path"])
            else:
                self.files[repo][entry["value"]["path"]] = base64.b64decode(
                    entry["value"]["content"]
                )
        return web.json_response(
            {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1" * 40, "success": True}
        )
