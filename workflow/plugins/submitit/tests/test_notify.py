"""Somebody is told when a workflow has ended, failed or stalled."""

from __future__ import annotations

import json
import logging
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_submitit.notify import Notifier
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.store import JobFiles

LOG = logging.getLogger("test")


def told(folder: Path) -> list[dict[str, object]]:
    path = folder / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def notifier(folder: Path, clock: Clock, **settings: Any) -> Notifier:
    command = f'cat >> {folder}/told; echo >> {folder}/told; [ "$SUBMITIT_EVENT" ]'
    return Notifier(ExecutorSettings(notify_command=command, **settings), LOG, clock)


def test_the_command_gets_the_event_as_json(tmp_path: Path) -> None:
    notifier(tmp_path, Clock()).send("failed", "1 jobs done, 2 failed", failed=2)
    (message,) = told(tmp_path)
    assert (message["event"], message["failed"]) == ("failed", 2)
    assert str(message["text"]).endswith(": 1 jobs done, 2 failed")


def test_a_stall_is_told_once_and_again_after_something_has_moved(tmp_path: Path) -> None:
    clock = Clock()
    one, job = notifier(tmp_path, clock, stalled_after_min=30), JobFiles(tmp_path)
    job.output_log.touch()
    os.utime(job.output_log, (2000, 2000))
    for now in (2000 + 29 * 60, 2000 + 31 * 60, 2000 + 40 * 60):
        clock.now = float(now)
        one.look([job], has_moved=False)
    assert [message["event"] for message in told(tmp_path)] == ["stalled"]
    one.look([job], has_moved=True)
    clock.now += 31 * 60
    one.look([job], has_moved=False)
    assert len(told(tmp_path)) == 2


def test_a_webhook_gets_a_post_and_its_address_is_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    got: list[bytes] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if self.path == "/secret" else 403)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        for url in (f"{address}/secret", f"{address}/wrong-secret", "file:///etc/secret"):
            Notifier(ExecutorSettings(notify_url=url), LOG).send("done", "40 jobs done", done=40)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert json.loads(got[0])["done"] == 40
    assert "the server answered 403" in caplog.text
    assert "not an http or https URL" in caplog.text
    assert "secret" not in caplog.text
