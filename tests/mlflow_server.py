"""A real `mlflow server` on this machine, for tests that talk to it over HTTP or look at its pages."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path


class MlflowServer:
    """One worker on a free port of the loopback, with the SQLite store `store`; `start` after `stop` keeps the port."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._port = int(listener.getsockname()[1])

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Returns when the server answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._store}"]
        command += ["--default-artifact-root", (self._store.parent / "artifacts").as_uri()]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        log = self._store.with_suffix(".log")
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, cwd=self._store.parent, start_new_session=True
            )
        end = time.monotonic() + 240
        while not self._is_up():
            assert self._process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, f"the server does not answer: {log.read_text()[-2000:]}"
            time.sleep(0.1)

    def stop(self) -> None:
        """The server and its worker, if they run."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _is_up(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
            return answer.status == 200
        return False
