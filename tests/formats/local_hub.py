"""A stand-in for Hugging Face on this machine, for the real client to talk to."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "0123456789abcdef0123456789abcdef01234567"


class LocalHub:
    """Serves the files of one repository as the hub does: a list, and files with ranges."""

    def __init__(self, repo: str, files: Mapping[str, bytes], token: str = "") -> None:
        self.repo, self.files, self.token = repo, dict(files), token
        self.sent: dict[str, int] = {}  # bytes of each file that were sent
        self.break_after: int | None = None  # bytes after which the next download breaks off
        self.corrupt = ""  # a file of which other bytes of the same length are sent
        self.url = ""

    def info(self) -> bytes:
        """Return the answer to the question which files there are."""
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": _sha256(data), "size": len(data), "pointerSize": 130},
            }
            for name, data in self.files.items()
        ]
        return json.dumps(
            {"id": self.repo, "modelId": self.repo, "sha": REVISION, "private": False,
             "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}
        ).encode()  # fmt: skip


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def local_hub(hub: LocalHub) -> Iterator[LocalHub]:
    """Serve a repository on the loopback interface while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._send(401, b"", {"X-Error-Code": "RepoNotFound"}, body=body)
            elif path.startswith(f"/api/models/{hub.repo}"):
                self._send(200, hub.info(), {"Content-Type": "application/json"}, body=body)
            elif path.startswith(f"/{hub.repo}/resolve/"):
                self._send_file(path.split("/", 5)[5], body=body)
            else:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body=body)

        def _send_file(self, name: str, *, body: bool) -> None:
            if name not in hub.files:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
                return
            data = hub.files[name]
            facts = {"X-Repo-Commit": REVISION, "ETag": f'"{_sha256(data)}"'}
            facts |= {"X-Linked-ETag": facts["ETag"], "X-Linked-Size": str(len(data))}
            if name == hub.corrupt:
                data = bytes(255 - byte for byte in data)
            start, status = 0, 200
            if (asked := self.headers.get("Range", "")).startswith("bytes="):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, end = int(first), int(last or len(data) - 1)
                facts["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
                data, status = data[start : end + 1], 206
            if body:
                hub.sent[name] = hub.sent.get(name, 0) + len(data)
            self._send(status, data, facts | {"Accept-Ranges": "bytes"}, body=body)

        def _send(self, status: int, data: bytes, facts: dict[str, str], *, body: bool) -> None:
            self.send_response(status)
            for key, value in facts.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not body:
                return
            if hub.break_after is not None and status in (200, 206) and len(data) > hub.break_after:
                data, hub.break_after = data[: hub.break_after], None
                self.close_connection = True
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
