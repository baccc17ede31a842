"""Somebody is told when a workflow has ended, failed or stalled."""

import json
import logging
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.executor import Notifier
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.store import JobFiles


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def notifier(command: str, clock: Clock, **settings: Any) -> Notifier:
    return Notifier(ExecutorSettings(notify_command=command, **settings), logging.getLogger("test"), clock)


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


def test_a_stall_is_told_once_and_again_after_something_has_moved(tmp_path: Path) -> None:
    clock, job = Clock(), JobFiles(tmp_path)
    one = notifier(f'[ "$SUBMITIT_EVENT" ] && (cat; echo) >> {tmp_path}/told', clock, stalled_after_min=30)
    job.output_log.touch()
    os.utime(job.output_log, (2000, 2000))
    for now in (2000 + 29 * 60, 2000 + 31 * 60, 2000 + 40 * 60):
        clock.now = float(now)
        one.look([job], has_moved=False)
    (message,) = told(tmp_path)
    assert (message["event"], message["jobs"]) == ("stalled", 1)
    assert message["text"].endswith(": no change for 31 minutes; 1 jobs are pending or running")
    one.look([job], has_moved=True)
    clock.now += 31 * 60
    one.look([job], has_moved=False)
    assert len(told(tmp_path)) == 2


@pytest.mark.parametrize(
    ("command", "said"), [("exit 3", "exit code 3"), ("sleep 9", "TimeoutExpired"), ("kill -9 $$", "exit code -9")]
)
def test_a_command_that_fails_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, command: str, said: str
) -> None:
    monkeypatch.setattr("snakemake_executor_plugin_submitit.executor.TIMEOUT_S", 0.2)
    notifier(command, Clock()).send("done", "40 jobs done")
    assert caplog.messages == [f"--submitit-notify-command: {said}"]


def test_a_webhook_gets_a_post_and_its_address_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    got: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/secret" else 403)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    def send(url: str) -> None:
        notifier("", Clock(), notify_url=url).send("done", "40 jobs done", done=40)

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        for path in ("secret", "wrong-secret", "impossible secret"):
            send(f"{address}/{path}")
        server.shutdown()
        thread.join()
    send(f"{address}/secret")  # nobody listens any more
    assert got[0] == {"event": "done", "text": f"Snakemake in {os.getcwd()}: 40 jobs done", "done": 40}
    why = ("the server answered 403", "InvalidURL", "URLError")
    assert caplog.messages == [f"--submitit-notify-url: {text}" for text in why]
    with pytest.raises(WorkflowError, match=r"^--submitit-notify-url: not an http or https URL$"):
        send("file:///etc/secret")
