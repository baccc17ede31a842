"""A web server on this machine that knows ranges, and cuts connections when told to."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FileServer:
    """files: what there is by path; cuts: by path, after how many bytes the next answers end; requests: each method,
    path and range that was asked for.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)


@contextmanager
def serving() -> Iterator[FileServer]:
    """Serve on a free port of 127.0.0.1 until the block ends."""
    state = FileServer()

    class Handler(_Handler):
        server_state = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_state: FileServer

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        state, path = self.server_state, self.path.partition("?")[0]
        state.requests.append((self.command, path, self.headers.get("Range", "")))
        content = state.files.get(path)
        if content is None:
            self.send_error(404)
            return
        etag = f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
        start = self._start(etag)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        for name, value in {"ETag": etag, **state.headers.get(path, {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if has_body:
            cut = state.cuts[path].pop(0) if state.cuts.get(path) else len(content)
            self.wfile.write(content[start : start + cut])
            self.close_connection = True

    def _start(self, etag: str) -> int:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        is_same = self.headers.get("If-Range", etag) == etag
        return int(asked[1]) if asked and is_same else 0

    def log_message(self, *_: object) -> None:
        """Says nothing."""
