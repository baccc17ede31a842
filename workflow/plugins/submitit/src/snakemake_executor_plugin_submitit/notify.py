"""Notify the user by a command or a webhook that a workflow has ended, failed or stalled."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Literal

from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.store import JobFiles

Event = Literal["done", "failed", "stalled"]
TIMEOUT_S = 20
LOOK_EVERY_S = 60


class Notifier:
    """`clock` in seconds since the epoch, for tests. The webhook's URL may be a secret and is never shown."""

    def __init__(self, settings: ExecutorSettings, log: logging.Logger, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._log, self._clock = settings, log, clock
        self._moved = self._looked = clock()
        self._is_stalled = False

    def send(self, event: Event, text: str, **facts: Any) -> None:
        """Run the command with SUBMITIT_EVENT and SUBMITIT_TEXT in its environment, and post to the webhook."""
        message = {"event": event, "text": f"Snakemake in {os.getcwd()}: {text}", **facts}
        if self._settings.notify_command:
            self._run(self._settings.notify_command, message)
        if self._settings.notify_url:
            self._post(self._settings.notify_url, message)

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

    def _run(self, command: str, message: dict[str, Any]) -> None:
        env = {**os.environ, "SUBMITIT_EVENT": message["event"], "SUBMITIT_TEXT": message["text"]}
        try:
            done = subprocess.run(
                ["bash", "-c", command], input=json.dumps(message), text=True, env=env, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._log.warning(f"--submitit-notify-command: {type(error).__name__}")
            return
        if done.returncode:
            self._log.warning(f"--submitit-notify-command: exit code {done.returncode}")

    def _post(self, url: str, message: dict[str, Any]) -> None:
        if not url.startswith(("https://", "http://")):
            self._log.warning("--submitit-notify-url: not an http or https URL")
            return
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(url, json.dumps(message).encode(), headers)
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            code = getattr(error, "code", None)
            why = f"the server answered {code}" if code else type(error).__name__
            self._log.warning(f"--submitit-notify-url: {why}")
