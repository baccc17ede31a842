"""A server that does every order in a forked process of its own, so that imports are paid for once.

An order is a line of JSON on its stdin; the answer is a line with the exit code, or minus the signal that ended the
process. `env` of an order is the environment that is added for it.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "implicit_llm"
CONTRACTS, DATA, JOBS = (ROOT / "workflow" / "lib" / f"implicit_llm_{name}" for name in ("contracts", "data", "jobs"))


class Server:
    """The client's side; `module` calls `serve`."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, order: dict[str, Any], **env: str) -> int:
        """Exit code of what the server does, or minus the signal that ended it."""
        self._process.stdin.write(json.dumps({**order, "env": env}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def serve(run: Callable[[dict[str, Any]], object]) -> None:
    """The server's side, to the end of the orders: exit codes are those that the console gives."""
    gc.collect()
    gc.freeze()  # so that the forks do not copy every page at their first collection
    for line in sys.stdin:
        sys.stdout.write(f"{_answer(run, json.loads(line))}\n")
        sys.stdout.flush()
    os._exit(0)


def exit_code_of(run: Callable[[dict[str, Any]], object], order: dict[str, Any]) -> int:
    """Do one order in this process."""
    os.environ.update(order["env"])
    try:
        run(order)
    except BaseException as error:
        return int(getattr(error, "exit_code", None) or getattr(error, "code", None) or 1)
    return 0


def _answer(run: Callable[[dict[str, Any]], object], order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = exit_code_of(run, order)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
