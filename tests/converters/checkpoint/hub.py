"""A server on this machine that answers as the Hugging Face hub does, as far as fetching asks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = (".safetensors", ".gguf", ".edgeq")


@dataclass
class Hub:
    """One repository, `owner/model`, with the files of `folder`.

    Weights (WEIGHTS) are held as large files are: by their SHA-256, others by git's digest.

    cut      the first so many requests for weights end in the middle
    token    needed where it is not empty;  pause: seconds that a quarter of a file of weights takes
    digests  what the hub says of a file instead of the truth, by its name
    asked    (method, path, Range) of every request
    """

    folder: Path
    cut: int = 0
    token: str = ""
    pause: float = 0.0
    url: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def environment(self, home: Path) -> dict[str, str]:
        """Variables under which huggingface_hub asks this server and has a cache of its own."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def git_digest(path: Path) -> str:
    """SHA-1 as git gives it to a file."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def digest(path: Path) -> str:
    """By which the hub knows a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix in WEIGHTS else git_digest(path)


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            # A client that was killed.
            with suppress(ConnectionError):
                self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("Range")))
            if not path.startswith(("/api/models/owner/model", "/owner/model/resolve")):
                return self.refuse(404, "RepoNotFound")
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.refuse(401, "GatedRepo")
            if "/tree/" in path:
                return self.send(json.dumps([entry(p) for p in files()]).encode(), body)
            if path.startswith("/api/"):
                if path.rpartition("/revision/")[2] not in ("main", COMMIT, path):
                    return self.refuse(404, "RevisionNotFound")
                siblings = [sibling(p) if "blobs" in parse_qs(urlsplit(self.path).query) else name(p) for p in files()]
                return self.send(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode(), body)
            file = hub.folder / path.rpartition("/")[2]
            if not file.exists():
                return self.refuse(404, "EntryNotFound")
            return self.file(file, body)

        def file(self, file: Path, body: bool) -> None:
            data = file.read_bytes()
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{hub.digests.get(file.name) or digest(file)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(data) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if not body:
                return
            if file.suffix in WEIGHTS and hub.cut:
                hub.cut -= 1
                self.wfile.write(data[start : start + (len(data) - start) // 2])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
            quarter = -(-len(data) // 4)
            for at in range(start, len(data), quarter):
                self.wfile.write(data[at : at + quarter])
                self.wfile.flush()
                if file.suffix in WEIGHTS:
                    threading.Event().wait(hub.pause)

        def send(self, data: bytes, body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", "no")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def files() -> list[Path]:
        return sorted(hub.folder.iterdir())

    def name(path: Path) -> dict[str, Any]:
        return {"rfilename": path.name}

    def sibling(path: Path) -> dict[str, Any]:
        size, found = path.stat().st_size, hub.digests.get(path.name) or digest(path)
        lfs = {"lfs": {"sha256": found, "size": size, "pointerSize": 134}} if path.suffix in WEIGHTS else {}
        return {**name(path), "size": size, "blobId": git_digest(path), **lfs}

    def entry(path: Path) -> dict[str, Any]:
        size, found = path.stat().st_size, hub.digests.get(path.name) or digest(path)
        lfs = {"lfs": {"oid": found, "size": size, "pointerSize": 134}} if path.suffix in WEIGHTS else {}
        return {"type": "file", "path": path.name, "size": size, "oid": git_digest(path), **lfs}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
