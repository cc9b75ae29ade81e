"""A stand-in of the Hugging Face hub: a server on loopback that answers what its client asks, from memory.

It speaks what downloads and uploads need: revisions, trees, files with their headers and ranges, the creation of
repositories, and commits whose large files come by the LFS protocol.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"
LARGE = 2000
"""Bytes from which on a file is uploaded by LFS."""

Files = dict[str, bytes]


@dataclass
class Repository:
    """`commits` are whole trees by their hash, oldest first; `refs` name some of them."""

    private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files) -> str:
        """Add files to the newest tree; the hash of the commit, which `main` then names."""
        tree = {**self.commits.get(self.refs.get("main", ""), {}), **files}
        sha = hashlib.sha1(repr((len(self.commits), sorted(tree))).encode()).hexdigest()
        self.commits[sha] = tree
        self.refs["main"] = sha
        return sha


class Hub:
    """The server while it serves. `asked` are the requests, as "GET /path"."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.uploads: dict[str, bytes] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def add(self, kind: str, name: str, files: Files, *, private: bool = False) -> str:
        """Commit files to a repository, which is made where there is none; the commit's hash."""
        return self.repositories.setdefault((kind, name), Repository(private)).commit(files)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        self._get(body=True)

    def _get(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/revision/(.+)", path):
            if (place := self._find(found[1][:-1], found[2], found[3])) is not None:
                self._json({"id": found[2], "sha": place[1], "siblings": [{"rfilename": name} for name in place[2]]})
        elif found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)", path):
            if (place := self._find(found[1][:-1], found[2], found[3])) is not None:
                self._json([_entry(name, content) for name, content in place[2].items()])
        elif found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            place = self._find("dataset" if found[1] else "model", found[2], found[3])
            if place is not None:
                self._file(place, found[4], body)
        else:
            self._json({"error": "no such page"}, 404)

    def _find(self, kind: str, name: str, revision: str) -> tuple[Repository, str, Files] | None:
        """The tree of a revision; where there is none, the reply says so as the hub does."""
        repository = self.hub.repositories.get((kind, name))
        if repository is None or (repository.private and not self._authorized()):
            self._json({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
            return None
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repository, sha, repository.commits[sha]

    def _file(self, place: tuple[Repository, str, Files], name: str, body: bool) -> None:
        _, sha, tree = place
        if name not in tree:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        content = tree[name]
        digest = hashlib.sha256(content).hexdigest()
        start = int(found[1]) if (found := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        self.send_response(206 if start else 200)
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": sha, "X-Linked-Size": str(len(content))}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if body:
            self.wfile.write(content[start:])

    def do_PUT(self) -> None:
        digest = self.path.removeprefix("/upload/")
        content = self._body()
        self.hub.asked.append("PUT /upload")
        assert hashlib.sha256(content).hexdigest() == digest
        self.hub.uploads[digest] = content
        self._json({})

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        self.hub.asked.append(f"POST {path}")
        if not self._authorized():
            self._json({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = [_mode(item) for item in json.loads(body)["files"]]
            self._json({"files": files} if ("model", found[1]) in self.hub.repositories else {}, 200)
        elif re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            self._json({"transfer": "basic", "objects": [self._upload(item) for item in json.loads(body)["objects"]]})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._json({"error": f"no such page {path}"}, 404)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if ("model", name) in self.hub.repositories:
            self._json({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
            return
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.hub.repositories["model", name] = Repository(private)
        self._json({"url": f"{self.hub.url}/{name}", "name": name})

    def _upload(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "actions": {"upload": {"href": f"{self.hub.url}/upload/{item['oid']}"}}}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files: Files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
        sha = self.hub.repositories["model", name].commit(files)
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha, "success": True})

    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for header, text in (headers or {}).items():
            self.send_header(header, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if len(content) >= LARGE:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


def _mode(item: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if item["size"] >= LARGE else "regular"
    return {"path": item["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}
