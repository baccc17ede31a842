"""A web server on this machine that knows ranges, and cuts connections when told to."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """files: what there is by path; cuts: by path, after how many bytes the next answers end; requests: each method,
    path and range that was asked for.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.cuts: dict[str, list[int]] = {}
        self.requests: list[tuple[str, str, str]] = []


@contextmanager
def serving() -> Iterator[FileServer]:
    """Serve on a free port of 127.0.0.1 until the block ends."""
    with FileServer() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        state, path = self.server, self.path.partition("?")[0]
        state.requests.append((self.command, path, self.headers.get("Range", "")))
        if path not in state.files:
            self.send_error(404)
            return
        content = state.files[path]
        etag = f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and self.headers.get("If-Range", etag) == etag else 0
        about = {"ETag": etag, "Content-Length": str(len(content) - start), **state.headers.get(path, {})}
        if start:
            about["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_response(206 if start else 200)
        for name, value in about.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            cut = state.cuts[path].pop(0) if state.cuts.get(path) else len(content)
            self.wfile.write(content[start : start + cut])
            self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Says nothing."""
