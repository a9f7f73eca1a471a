"""A hub on 127.0.0.1 that misbehaves on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "1234567890abcdef1234567890abcdef12345678"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Hub:
    """What is served and how; changed by tests while it runs."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commit: str = COMMIT
    cuts: list[int] = field(
        default_factory=list
    )  # close after so many bytes, once each
    has_ranges: bool = True
    has_etags: bool = True
    status: int | None = None  # answer this to everything
    redirect_to: str | None = None  # where files are really stored
    raw_listing: bytes | None = None
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    endpoint: str = ""

    def fetched(self) -> list[str]:
        """Paths of file requests so far."""
        return [path for path, _ in self.requests if "/resolve/" in path]

    def listing(self, repo: str) -> bytes:
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": digest(data), "size": len(data)}
                if name.endswith((".gguf", ".safetensors"))
                else None,
            }
            for name, data in self.repos[repo].items()
        ]
        answer = {"sha": self.commit, "siblings": siblings}
        return json.dumps(answer | {"cardData": {"license": "mit"}}).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.hub
        hub.requests.append((self.path, dict(self.headers)))
        if hub.status is not None:
            self._answer(hub.status, b"no")
            return
        path = self.path.partition("?")[0].removeprefix("/")
        if path.startswith("api/models/"):
            repo = "/".join(path.split("/")[2:4])
            if repo not in hub.repos:
                self._answer(404, b"{}")
            else:
                self._answer(200, hub.raw_listing or hub.listing(repo))
            return
        org, name, _, _, *rest = path.split("/")
        data = hub.repos.get(f"{org}/{name}", {}).get("/".join(rest))
        if data is None:
            self._answer(404, b"no such file")
        elif hub.redirect_to is not None:
            self._answer(302, b"", {"Location": hub.redirect_to + self.path})
        else:
            self._file(data)

    def _file(self, data: bytes) -> None:
        hub, headers, start = self.hub, {}, 0
        etag = f'"{digest(data)}"'
        if hub.has_etags:
            headers["ETag"] = etag
        wanted = self.headers.get("Range")
        if wanted and hub.has_ranges and self.headers.get("If-Range", etag) == etag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                self._answer(416, b"")
                return
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._answer(206 if start else 200, data[start:], headers)

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status in (200, 206) and "/resolve/" in self.path and self.hub.cuts:
            self.wfile.write(body[: self.hub.cuts.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(body)


@contextmanager
def serve() -> Iterator[Hub]:
    """A running hub; its address is `endpoint`."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
