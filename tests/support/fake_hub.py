"""A server on this machine that implements the part of the Hub's HTTP API that downloads need.

with FakeHub() as hub:
    hub.add("org/model", {"config.json": b"{}"}, commit="1" * 40)
    ...  # with HF_ENDPOINT=hub.url
"""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

FIRST, SECOND = "1" * 40, "2" * 40


@dataclass
class Repo:
    """`commits` has the files of each commit, `revisions` the names of commits. A `locked` repository answers
    401 or 403."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    locked: tuple[int, str] | None = None


class FakeHub:
    """`asked` has every request. `cuts` says after how many bytes the next answers for a path break off.
    `moved` has the new names of repositories, `sizes` false sizes of their files. While it is `silent`, it
    does not answer."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.cuts: dict[str, list[int]] = {}
        self.moved: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.silent = False
        self.closed = threading.Event()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, name: str, files: dict[str, bytes], commit: str = FIRST, revision: str = "main") -> Repo:
        """Add a commit to a repository, which is created if it is new."""
        repo = self.repos.setdefault(name, Repo())
        repo.commits[commit] = files
        repo.revisions[revision] = commit
        return repo

    def paths(self, *methods: str) -> list[str]:
        """The file names in such requests."""
        return [
            path.rpartition("/")[2]
            for method, path, _ in self.asked
            if method in methods and "/resolve/" in path
        ]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder and its sub-folders, by path."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/agent-harnesses":  # the library requests this once a day, for its user agent
            return self._json({})
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        if self.hub.silent:
            self.hub.closed.wait()
            self.close_connection = True
            return None
        for name, moved in self.hub.moved.items():
            if f"/{name}" in path:
                return self._redirect(path.replace(name, moved))
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = info or file
        repo = self.hub.repos.get(found[1]) if found else None
        if found is None or repo is None:
            return self._refuse(401, "RepoNotFound")
        if repo.locked is not None and (file or repo.locked[1] != "GatedRepo"):
            return self._refuse(*repo.locked)
        revision = (info[3] if info else file[2]) or "main"
        commit = repo.revisions.get(revision.replace("%2F", "/"), revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repo.commits[commit]
        if file is not None:
            return self._send_file(file[3], files.get(file[3]), commit)
        if info[2] == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self._json(entries)
        size = self.hub.sizes.get(info[1])
        siblings = [
            {"rfilename": name, "size": len(data) if size is None else size} for name, data in files.items()
        ]
        return self._json({"id": info[1], "modelId": info[1], "sha": commit, "siblings": siblings})

    def _send_file(self, name: str, data: bytes | None, commit: str) -> None:
        if data is None:
            self._refuse(404, "EntryNotFound")
            return
        start = 0
        if (asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")) is not None:
            start = int(asked[1])
        body = data[start:]
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            cuts = self.hub.cuts.get(name)
            if cuts:
                self.wfile.write(body[: cuts.pop(0)])
                self.close_connection = True
            else:
                self.wfile.write(body)

    def _redirect(self, path: str) -> None:
        self.send_response(307)
        self.send_header("Location", path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
