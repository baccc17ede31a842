"""Notify the user by a command or a webhook that a workflow has ended, failed or stalled."""

import json
import logging
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Literal

from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.store import JobFiles

Event = Literal["done", "failed", "stalled"]
TIMEOUT_S = 20
LOOK_EVERY_S = 60


class Notifier:
    """`clock` in seconds since the epoch, for tests. The webhook's URL may be a secret and is never shown."""

    def __init__(self, settings: ExecutorSettings, log: logging.Logger, clock: Callable[[], float] = time.time) -> None:
        if not (settings.notify_url or "https://").startswith(("https://", "http://")):
            raise WorkflowError("--submitit-notify-url: not an http or https URL")
        self._settings, self._log, self._clock = settings, log, clock
        self._moved = self._looked = clock()
        self._is_stalled = False

    def send(self, event: Event, text: str, **facts: Any) -> None:
        """Run the command with SUBMITIT_EVENT and SUBMITIT_TEXT in its environment, and JSON on its standard input.
        Send the same JSON to the webhook."""
        text = f"Snakemake in {os.getcwd()}: {text}"
        message = json.dumps({"event": event, "text": text, **facts})
        if command := self._settings.notify_command:
            env = {**os.environ, "SUBMITIT_EVENT": event, "SUBMITIT_TEXT": text}
            words = ["bash", "-c", command]
            try:
                subprocess.run(words, input=message, text=True, env=env, timeout=TIMEOUT_S, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                code = getattr(error, "returncode", None)
                self._log.warning(f"--submitit-notify-command: {f'exit code {code}' if code else type(error).__name__}")
        if url := self._settings.notify_url:
            try:
                request = urllib.request.Request(url, message.encode(), {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
            except urllib.error.HTTPError as error:
                self._log.warning(f"--submitit-notify-url: the server answered {error.code}")
            except Exception as error:  # an impossible URL raises one of many, with the URL in its text
                self._log.warning(f"--submitit-notify-url: {type(error).__name__}")

    def look(self, jobs: Sequence[JobFiles], has_moved: bool) -> None:
        """Notify once if for a while no job was submitted, ended, printed or made progress."""
        now = self._clock()
        if has_moved:
            self._moved, self._is_stalled = now, False
        limit_s = 60 * self._settings.stalled_after_min
        if not limit_s or self._is_stalled or now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        self._moved = max([self._moved, *(files.last_change() for files in jobs)])
        if now - self._moved >= limit_s:
            self._is_stalled = True
            text = f"no change for {(now - self._moved) / 60:.0f} minutes; {len(jobs)} jobs are pending or running"
            self._log.warning(text)
            self.send("stalled", text, jobs=len(jobs))
