"""Runs a training phase in a forked process for every line on stdin, so that the imports are paid for once.

A line is JSON: {"run_dir": ..., "data": run directory of the data, "keep": steps, "env": {...}}. The answer is one
line: the exit code, or minus the signal that ended the process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.modules["mlflow"] = None  # type: ignore[assignment]  # the tracker has tests of its own

from transformers import Trainer  # noqa: E402, F401  (imported lazily otherwise, in every process)

from implicit_llm.runs.stage import run_stage  # noqa: E402
from implicit_llm.training import stage  # noqa: E402
from tests.unit.training.small_runs import LLAMA, request, train_config  # noqa: E402

STEPS = 5


def run(order: dict[str, Any]) -> int:
    os.environ.update(order["env"])
    config = train_config(LLAMA, phase={"end_step": STEPS, "keep": order["keep"]}, total_steps=STEPS)
    try:
        run_stage(request(Path(order["run_dir"]), config, Path(order["data"]), save_steps=1), stage.run)
    except BaseException as error:
        return int(getattr(error, "exit_code", None) or getattr(error, "code", None) or 1)
    return 0


def main() -> None:
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run(json.loads(line))
            finally:
                os._exit(code)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
